"""Muon for matrices and convolution kernels: momentum, made orthogonal by five Newton-Schulz steps.

After Jordan et al., "Muon: an optimizer for hidden layers in neural networks". `torch.optim.Muon` takes matrices only,
one at a time; here weights of one shape are orthogonalised together, which is faster for many small ones.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly; shape (count, rows, columns), bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Steps of RMS about `0.2 * lr`, so that AdamW's learning rates and weight decays apply (Moonshot's scaling)."""

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.flatten(1).shape].append(weight)
            for shape, weights in by_shape.items():
                updates = []
                for weight in weights:
                    state = self.state[weight]
                    if not state:
                        state["momentum"] = torch.zeros_like(weight)
                    state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                    updates.append(weight.grad.lerp(state["momentum"], group["momentum"]).flatten(1))
                scale = 0.2 * max(shape) ** 0.5 * group["lr"]
                for weight, update in zip(weights, orthogonal(torch.stack(updates)), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update.view(weight.shape).to(weight.dtype), alpha=-scale)
