"""What features of a byte a value cost: their own error, and what it does to the loss and its gradient.

    python -m benchmarks.int8_features                   both built-in models, half a minute of one core
    python -m benchmarks.int8_features --markdown --models builtin

Pictures of the built-in development subjects at the training resolution and three noise levels, half of the blocks
skipped, a bfloat16 base, LoRA whose B is random. Each sample's loss and gradient are those of the training kernel, with
the features as the blocks returned them and with the same through ``features.dtype = "int8"``.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

import torch
from torch import nn

from benchmarks.paper_memory import table
from blockskip import builtin
from blockskip.adapters.lora import add_lora, target_names
from blockskip.config import Config
from blockskip.loading.resolved import split_of
from blockskip.loading.source import open_model
from blockskip.loading.transformer import load_transformer
from blockskip.method.capture import capture
from blockskip.method.skipping import ConstantResidual, SkippedModel
from blockskip.precision import compute
from blockskip.run.fixed import FixedSamples, fixed_samples
from blockskip.seeds import derive_seed, gaussian
from blockskip.store.int8 import quantize_tokens, relative_error
from blockskip.training.step import MicroBatch, training_loss

SIGMAS = (0.2, 0.5, 0.8)
SIDE = 64
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
RANK, DEVIATION = 16, 0.02
HEADINGS = ("model", "tensor or figure", "mean", "largest")


def measured(model: str, pictures: int) -> dict[str, list[float]]:
    """Relative errors by what they are of, one for each sample; ``gradient, mean of all`` is one figure.

    Args:
        model: of the built-in ones.
        pictures: how many, of one subject each.
    """
    source = open_model(model)
    family, config, rule = source.family, source.config("transformer"), ConstantResidual()
    names = builtin.subjects()[:pictures]
    paths = [sorted((builtin.subject_path(name) / "train").iterdir())[0] for name in names]
    samples = fixed_samples(source, paths, [f"a photo of sks {name}" for name in names], (SIDE, SIDE), DTYPE, CPU)
    full, layout = load_transformer(source, [], DTYPE, CPU), family.layout
    split = split_of(Config(), family, full)[0]
    middle = split.middle(layout.count(full))
    batches = [_batch(samples, row, sigma) for sigma in SIGMAS for row in range(len(samples))]
    stored = []
    for batch in batches:
        drawn = (batch.latents, batch.noise, batch.sigma, batch.text)
        with torch.no_grad(), compute(CPU, DTYPE):
            inputs = family.noisy_inputs(config, *drawn, 1.0, DTYPE)
            stored.append(capture(full, layout, split, rule, inputs)[1])
    parameters = add_lora(full, target_names(full, layout, middle, family.lora_targets, each=False), RANK, RANK, 0.0, 0)
    for number, parameter in enumerate(parameters):
        if not parameter.any():  # B
            parameter.data = DEVIATION * gaussian(tuple(parameter.shape), derive_seed(0, "int8", number))
    stubbed = SkippedModel(full, layout, split, rule)
    found: dict[str, list[float]] = defaultdict(list)
    sums = [torch.zeros(()), torch.zeros(())]
    for batch, features in zip(batches, stored, strict=True):
        packed, results = quantize_tokens(features), []
        for name, error in relative_error(features, packed).items():
            found[name].append(error)
        for kind, given in enumerate((features, packed)):
            batch.features = given
            with compute(CPU, DTYPE):
                loss = training_loss(stubbed, family, config, batch, 1.0, DTYPE)
            loss.backward()
            results.append((float(loss.detach()), _gradient(parameters)))
            sums[kind] = sums[kind] + results[-1][1]
        (exact, gradient), (other, moved) = results
        found["loss"].append(abs(other - exact) / exact)
        found["gradient"].append(float((moved - gradient).norm() / gradient.norm()))
    found["gradient, mean of all"].append(float((sums[1] - sums[0]).norm() / sums[0].norm()))
    return dict(found)


def _batch(samples: FixedSamples, row: int, sigma: float) -> MicroBatch:
    rows = slice(row, row + 1)
    level, one = torch.full((1,), sigma), torch.ones(1)
    return MicroBatch(samples.latents[rows], samples.noise[rows], level, one, dict(samples.texts[row]), {})


def _gradient(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """All gradients as one vector; none are left."""
    found = [value.grad.flatten() for value in parameters if value.grad is not None]
    for value in parameters:
        value.grad = None
    return torch.cat(found)


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Print the table; returns what it is made of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(builtin.MODELS), choices=list(builtin.MODELS))
    parser.add_argument("--pictures", type=int, default=12, help="one for each of the first development subjects")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/memory.md")
    options = parser.parse_args(arguments)
    found = {model: measured(model, options.pictures) for model in options.models}
    rows = [
        (model, name, f"{mean(values):.2%}", f"{max(values):.2%}")
        for model, figures in found.items()
        for name, values in figures.items()
    ]
    print(table(HEADINGS, rows, options.markdown))
    return found


if __name__ == "__main__":
    main()
