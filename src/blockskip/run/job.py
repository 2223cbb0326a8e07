"""The phases of one run, in order; each holds only its own weights, and each can be repeated or skipped."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from blockskip.adapters.lora import add_lora
from blockskip.data.noise import noise, sigmas
from blockskip.encoding.pixels import store_pixels
from blockskip.encoding.text import store_prompts
from blockskip.errors import OutOfMemory, RunError
from blockskip.families import Text, stack_text
from blockskip.features.precompute import FeaturesArgument, Input, features_key, precompute
from blockskip.loading.streaming import stream_blocks
from blockskip.loading.transformer import load_transformer
from blockskip.loading.weights import Weights
from blockskip.measure import Peaks, PhaseRecord
from blockskip.memory import is_out_of_memory, release
from blockskip.method.skipping import SkippedModel
from blockskip.precision import denormals_flushed
from blockskip.progress import Progress, progress, say
from blockskip.report.content import Overrun
from blockskip.run.adapter import adapter_name, save_adapter
from blockskip.run.advice import advice
from blockskip.run.folder import only_run, open_output
from blockskip.run.out_of_memory import run_failed
from blockskip.run.planned import budget_of, hold_memory, peaks_of, plan_run
from blockskip.run.prepare import Prepared
from blockskip.run.previews import previews
from blockskip.run.records import Records
from blockskip.run.watch import Watch
from blockskip.seeds import derive_seed
from blockskip.settings import to_toml
from blockskip.store.files import write_atomically
from blockskip.store.groups import GroupStore, StoreError
from blockskip.training.batches import micro_batches
from blockskip.training.checkpoints import Checkpoint, latest_checkpoint
from blockskip.training.lisa import LisaBlocks
from blockskip.training.loop import Trainer, read_metrics
from blockskip.training.step import MicroBatch
from blockskip.training.stretches import stretches


@dataclass(frozen=True)
class RunResult:
    """What a run gave.

    Args:
        adapter: the LoRA file, or with LISA that of the changed weights.
        losses: one for each optimiser step.
        records: memory and seconds by phase.
        disk_bytes: the largest the cache has been.
        samples: previews by prompt and seed, drawn at the end.
        baseline_bytes: of the process before the run; the records' host figures are above it.
        planned: peaks by phase as they were planned before the run; empty if it could not be planned.
        overruns: what took more than its budget by more than a twentieth.
    """

    prepared: Prepared
    adapter: Path
    losses: list[float]
    records: list[PhaseRecord]
    disk_bytes: int
    samples: list[list[Image.Image]] = field(default_factory=list)
    baseline_bytes: int = 0
    planned: dict[str, Peaks] = field(default_factory=dict)
    overruns: list[Overrun] = field(default_factory=list)

    @property
    def output(self) -> Path:
        """The run's folder."""
        return self.prepared.output


@denormals_flushed()
def run(prepared: Prepared) -> RunResult:
    """Do a run, or what is left of it.

    Raises:
        UserError: the output folder holds a run with other settings, or another process runs in it.
        RunError: the run cannot go on; checkpoints are whole.
        OutOfMemory: there is no memory left; checkpoints are whole.
    """
    with only_run(prepared.output):
        return _Job(prepared).run()


class _Job:
    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.config, self.source = prepared, prepared.config, prepared.source
        self.output = prepared.output
        cache = Path(self.config.features.cache).expanduser() if self.config.features.cache else self.output / "cache"
        self.cache = cache
        self._told = False
        self.source.import_classes()
        hold_memory(self.config, prepared.device)
        self.plan = plan_run(prepared)  # before the baseline: what it imports is no phase's
        advise = functools.partial(advice, prepared, self.plan)
        self.watch = Watch(peaks_of(self.plan), budget_of(self.config, prepared.device), advise)
        self.records = Records(self.output / "phases.json", prepared.device, self.watch)
        self.meter = self.records.meter
        parts = ("transformer", "vae", *(encoder for _, encoder in self.source.text_parts))
        identities = [Weights(self.source.part_folder(part)).identity() for part in parts]
        self.base = identities[0]
        self.fingerprint = prepared.fingerprint() | {"base model": " ".join(identities)}

    def run(self) -> RunResult:
        steps = self.config.train.steps
        checkpoint = open_output(self.output, self.fingerprint, steps)
        self.records.restore()
        document = to_toml(self.config)
        write_atomically(self.output / "config.toml", lambda path: path.write_text(document, encoding="utf-8"))
        done = checkpoint.step if checkpoint else 0
        adapter = self.output / "adapter" / adapter_name(self.config)
        if done >= steps and adapter.is_file():
            say(f"{adapter} is finished ({done} steps).")
        else:
            self._guarded_phases(checkpoint)
        if not self.config.features.cache and not self.config.features.keep:
            shutil.rmtree(self.cache, ignore_errors=True)
        samples = self._preview(steps)
        self.records.save()
        for overrun in self.records.overruns:
            say(f"WARNING: {overrun}")
        losses = [entry["loss"] for entry in read_metrics(self.output / "metrics.jsonl") if entry["loss"] is not None]
        return RunResult(
            self.prepared,
            adapter,
            losses,
            self.records.phases,
            self.records.cache_bytes,
            samples,
            self.records.baseline_bytes,
            self.watch.planned,
            self.records.overruns,
        )

    # -- the phases -------------------------------------------------------------------------------------------------

    def _guarded_phases(self, checkpoint: Checkpoint | None) -> None:
        """The phases, with what the machine may lack turned into one sentence."""
        try:
            self._phases(checkpoint)
        except StoreError as error:
            for store in (self.text_store, self.pixel_store, self.feature_store):
                store.discard(error.key)
            raise RunError(f"{error} (It has been removed already.)") from None
        except (MemoryError, RuntimeError, OSError) as error:
            if is_out_of_memory(error):
                raise self._out_of_memory(error) from error
            if isinstance(error, OSError):
                raise RunError(
                    f'A file cannot be read or written ({error}); the last checkpoint in "{self.output}" is whole.'
                ) from error
            raise

    def _out_of_memory(self, error: BaseException) -> OutOfMemory:
        return run_failed(error, self.prepared, self.meter, self.watch.planned, self.plan)

    def _phases(self, checkpoint: Checkpoint | None) -> None:
        prepared, device, dtype = self.prepared, self.prepared.device, self.prepared.dtype
        groups = prepared.schedule.groups
        self.text_store, self.pixel_store, self.feature_store = (
            GroupStore(self.cache / name) for name in ("text", "pixels", "features")
        )
        self._found = self._cache_size() if self.config.features.cache else 0  # of other runs
        with self.meter.phase("encode text"):
            captions = prepared.schedule.captions()
            self.text_keys = store_prompts(
                self.source, captions, prepared.text_length, dtype, device, self.text_store,
                self.config.model.stream_text_encoders,
            )  # fmt: skip
        with self.meter.phase("encode pictures"):
            self.pixel_keys = store_pixels(self.source, prepared.schedule, groups, dtype, device, self.pixel_store)
        self._count_disk()
        self.records.save()
        self.texts: dict[str, Text] = {caption: self.text_store.read(key) for caption, key in self.text_keys.items()}
        self.places = prepared.places
        self.feature_keys = self._feature_keys()
        done = checkpoint.step if checkpoint else 0
        every = self.config.preview.every if self.config.preview.prompts else 0
        if every and 0 < done < self.config.train.steps and done % every == 0:
            self._preview(done, checkpoint)  # this may be where the run was interrupted; nothing is drawn twice
        with progress(self.config.train.steps, "train", start=done) as bar:
            for stretch in stretches(
                done, self.config.train.steps, self.config.train.gradient_accumulation_steps, len(groups), every,
                self._groups_on_disk, prepared.disk_bytes is not None,
            ):  # fmt: skip
                self._precompute(stretch.groups)
                with self.meter.phase("train"):
                    checkpoint = self._train(checkpoint, stretch.until, bar)
                self._count_disk()
                self.records.save()
                if every and stretch.until % every == 0 and stretch.until < self.config.train.steps:
                    self._preview(stretch.until, checkpoint)

    def _feature_keys(self) -> list[str]:
        prepared = self.prepared
        return [
            features_key(FeaturesArgument(
                self.base, prepared.adapters.identity(), prepared.stored.front, prepared.stored.tail,
                prepared.stored.inner, prepared.rule_identity,
                tuple(self.text_keys[sample.caption] for sample in group.samples), pixels,
                tuple(sample.sigma for sample in group.samples), tuple(sample.noise_seed for sample in group.samples),
                prepared.guidance, self.source.family.name,
                f"{prepared.dtype} on {prepared.device.type}", self.config.features.dtype,
                () if places is None else tuple(map(tuple, places.tolist())),
            ))
            for group, pixels, places in zip(prepared.schedule.groups, self.pixel_keys, self.places, strict=True)
        ]  # fmt: skip

    @property
    def _needs_features(self) -> bool:
        return self.prepared.rule.stores(self.prepared.stored)

    def _input(self, index: int) -> Input:
        group = self.prepared.schedule.groups[index]
        latents = self.pixel_store.read(self.pixel_keys[index])["latents"]
        text = stack_text([self.texts[sample.caption] for sample in group.samples])
        drawn = (noise(group.samples, latents.shape[1:]), sigmas(group.samples))
        return Input(self.feature_keys[index], latents, *drawn, text, self.places[index])

    def _groups_on_disk(self) -> int | None:
        """How many groups' features the disk budget allows; None while no group tells how large one is."""
        if not self._needs_features or self.prepared.disk_bytes is None:
            return len(self.feature_keys)
        store = self.feature_store
        sizes = [store.path(key).stat().st_size for key in dict.fromkeys(self.feature_keys) if store.has(key)]
        if not sizes:
            return None
        others = store.size() - sum(sizes)  # of other runs, where the folder is shared
        fits = (self.prepared.disk_bytes - others) // max(sizes)
        least = self.config.train.gradient_accumulation_steps
        if fits < least and not self._told:
            self._told = True
            say(f"Warning: features.disk is exceeded: one step needs {least * max(sizes) + others} bytes.")
        return max(1, fits)

    def _precompute(self, groups: list[int]) -> None:
        if not self._needs_features:
            return
        prepared = self.prepared
        keys = [self.feature_keys[index] for index in groups]
        if prepared.disk_bytes is not None and (self._groups_on_disk() or 0) < len(self.feature_keys):
            wanted = set(keys)
            self.feature_store.delete([key for key in self.feature_keys if key not in wanted])
        on_disk = self.config.features.window_on == "disk"
        with self.meter.phase("precompute"):
            waited = precompute(
                self.source, prepared.stored, prepared.rule, keys, lambda place: self._input(groups[place]),
                self.feature_store, window_bytes=prepared.window_bytes, dtype=prepared.dtype, device=prepared.device,
                guidance=prepared.guidance, adapters=prepared.adapters, int8=self.config.features.dtype == "int8",
                waiting_folder=self.cache / "waiting" if on_disk else None, read_ahead=self.config.model.read_ahead,
            )  # fmt: skip
        self._count_disk(waited)
        self.records.save()

    def _cache_size(self) -> int:
        return sum(store.size() for store in (self.text_store, self.pixel_store, self.feature_store))

    def _count_disk(self, waited: int = 0) -> None:
        self.records.written(self._cache_size() + waited, self._found, self.cache)

    def _train(self, checkpoint: Checkpoint | None, until: int, bar: Progress) -> Checkpoint:
        prepared, lora = self.prepared, self.config.lora
        absent = sorted({*range(prepared.num_blocks)} - {*prepared.resident})
        placed = (prepared.dtype, prepared.device, prepared.adapters)
        model = load_transformer(self.source, absent, *placed, self.config.model.quantization)
        if prepared.streamed:
            read_ahead = self.config.model.read_ahead
            stream_blocks(model, self.source, prepared.streamed, *placed, read_ahead=read_ahead)
        stubbed = SkippedModel(model, self.source.family.layout, prepared.stored, prepared.rule)
        assert lora.lora_alpha is not None
        seed = derive_seed(self.config.train.seed, "adapter")
        train, blocks, parameters = self.config.train, None, []
        if train.lisa_blocks:
            layout = self.source.family.layout
            blocks = LisaBlocks(model, layout, train.lisa_blocks, train.lisa_period, train.seed)
        else:
            shape = (lora.rank, lora.lora_alpha, lora.dropout)
            parameters = add_lora(model, prepared.targets, *shape, seed, lora.freeze_a)
        if self.config.train.gradient_checkpointing:
            self.source.family.enable_checkpointing(model)
        trainer = Trainer(
            stubbed, parameters, self.source.family, self.source.config("transformer"), self.config.train,
            lora.dropout, prepared.guidance, prepared.dtype, prepared.device, self.output, self.fingerprint,
            blocks=blocks,
        )  # fmt: skip
        if checkpoint is not None:
            trainer.restore(checkpoint)
        if trainer.step < until:
            trainer.train(self._batches(trainer.step, until), until, bar)
        if until >= self.config.train.steps:
            save_adapter(self.output / "adapter", prepared, self.base, trainer.state())
            if trainer.skipped_steps:
                count = "1 step was" if trainer.skipped_steps == 1 else f"{trainer.skipped_steps} steps were"
                say(f"{count} left out because the loss or its gradient was not finite.")
        del trainer, stubbed, parameters, blocks, model
        release()
        found = latest_checkpoint(self.output / "checkpoints")
        if found is None or found.step < until:
            raise RunError(f'The checkpoint of step {until} in "{self.output}" cannot be read back; is the disk full?')
        return found

    def _batches(self, start: int, until: int) -> Iterator[MicroBatch]:
        accumulation = self.config.train.gradient_accumulation_steps
        schedule = self.prepared.schedule
        order = [schedule.group_of(micro) for micro in range(start * accumulation, until * accumulation)]
        features = (self.feature_store, self.feature_keys) if self._needs_features else None
        pixels = (self.pixel_store, self.pixel_keys)
        return micro_batches(order, schedule.groups, self.texts, pixels, features, self.places)

    # -- what comes out ---------------------------------------------------------------------------------------------

    def _preview(self, step: int, checkpoint: Checkpoint | None = None) -> list[list[Image.Image]]:
        """The previews of a step, drawn unless they lie there; a failure is told and does not end the run."""
        if not self.config.preview.prompts:
            return []
        lora, passing = self.output / "adapter" / adapter_name(self.config), self.output / "samples" / "adapter"
        try:
            if checkpoint is not None:
                lora = save_adapter(passing, self.prepared, self.base, checkpoint.adapter)
            return previews(self.prepared, lora, step, self.meter)
        except Exception as error:  # whatever it is: what was trained must not be lost for a picture
            reason = " ".join(str(error).split()) or type(error).__name__
            say(f"Warning: the preview at step {step} failed ({reason}); training is not affected.")
            if is_out_of_memory(error):
                say(str(self._out_of_memory(error)))
            return []
        finally:
            shutil.rmtree(passing, ignore_errors=True)
            release()
