"""Groups of random tensors with their keys."""

import torch


def group(seed: int, rows: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, 8, generator=generator)
    return {
        "front": features.bfloat16(),
        "residual": features + 1,
        "ids": torch.arange(rows),
        "mask": features[:, 0] > 0,
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


KEYS = [f"{number:032x}" for number in range(8)]
