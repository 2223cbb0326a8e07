"""A run's result as a report shows it, and the report of a single run."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from blockskip.data.pixels import open_picture
from blockskip.evaluation.fidelity import Fidelity
from blockskip.report.content import Column, Report, RunFacts
from blockskip.report.html import write_report
from blockskip.run.job import RunResult
from blockskip.settings import to_toml
from blockskip.training.loop import read_metrics


def facts(result: RunResult) -> RunFacts:
    """What a run was and took."""
    prepared, config = result.prepared, result.prepared.config
    assert config.data.resolution is not None and config.data.full_resolution is not None
    return RunFacts(
        skipped_parameters=prepared.counts.skipped,
        kept_parameters=prepared.counts.kept,
        trained_parameters=prepared.counts.trained,
        phases=result.records,
        disk_bytes=result.disk_bytes,
        steps=config.train.steps,
        seconds_total=sum(record.seconds for record in result.records),
        split=(prepared.split.front, prepared.split.tail),
        num_blocks=prepared.num_blocks,
        resolution=config.data.resolution,
        full_resolution=config.data.full_resolution,
        config_toml=to_toml(config),
        baseline_bytes=result.baseline_bytes,
        front="kept" if config.skip.front_mode == "keep" else "skipped",
        tail={"residual": "skipped", "stream": "streamed", "keep": "kept"}[config.skip.tail_mode],  # type: ignore[arg-type]
        inner=prepared.split.inner,
        planned=result.planned,
        overruns=result.overruns,
    )


def column(
    name: str, result: RunResult, images: list[list[Image.Image]] | None = None, fidelity: Fidelity | None = None
) -> Column:
    """A run beside others.

    Args:
        images: by prompt and seed; None takes the run's own previews.
    """
    losses = [
        (int(entry["step"]), float(entry["loss"]))
        for entry in read_metrics(result.output / "metrics.jsonl")
        if entry["loss"] is not None
    ]
    return Column(name, result.samples if images is None else images, losses, facts(result), fidelity)


def write_run_report(result: RunResult) -> Path:
    """Write ``report.html`` into the run's folder."""
    config = result.prepared.config
    prompts = list(config.preview.prompts) if result.samples else []
    pictures = [item for item in result.prepared.schedule.pictures if not item.is_class][:8]
    report = Report(
        title=config.data.prompt or "Personalised model",
        subtitle=f"{Path(config.model.path).name}, {config.train.steps} steps",
        subject_pictures=[open_picture(item.path) for item in pictures],
        prompts=prompts,
        columns=[column(_way(result), result)],
    )
    path = result.output / "report.html"
    write_report(report, path)
    return path


def _way(result: RunResult) -> str:
    """What the run's way of training is called."""
    if result.prepared.config.train.lisa_blocks:
        return "LISA"
    return "DiT-BlockSkip" if facts(result).skipped_blocks else "LoRA"
