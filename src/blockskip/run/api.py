"""What Python programs call: ``blockskip.train``, ``blockskip.plan`` and ``blockskip.generate``."""

from __future__ import annotations

import functools
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.config import Config
from blockskip.encoding.text import encode_prompts
from blockskip.errors import UserError
from blockskip.loading.source import open_model
from blockskip.loading.transformer import empty_transformer
from blockskip.measure import Meter
from blockskip.memory import is_out_of_memory
from blockskip.planner.fitting import config_of, given_keys
from blockskip.planner.plan import Plan
from blockskip.planner.request import make_request
from blockskip.precision import check_dtype, denormals_flushed, resolve_device, resolve_dtype
from blockskip.presets import unmeasured
from blockskip.preview.draw import Drawing, draw
from blockskip.progress import say
from blockskip.run.job import RunResult, run
from blockskip.run.large import check_drawing
from blockskip.run.out_of_memory import drawing_failed
from blockskip.run.prepare import prepare
from blockskip.run.summary import write_run_report
from blockskip.settings import SHORT, leaves


def train(config: Config | None = None, **settings: Any) -> RunResult:
    """Personalise a model; an interrupted run continues when called again.

    Args:
        config: a whole config, or None to build one from the settings.
        settings: ``model``, ``images``, ``prompt``, ``output``, or any key with its dot written as two underscores
            (``train__steps=200``).

    Raises:
        UserError: the settings, the model or the pictures cannot be used; nothing was loaded.
        RunError: the run cannot go on; its checkpoints are whole.
    """
    prepared = prepare(_config(config, settings))
    if prepared.split_source is None:
        family = prepared.source.family
        say(unmeasured(prepared.split, family.name, family.layout.counts(empty_transformer(prepared.source))))
    result = run(prepared)
    try:
        write_run_report(result)
    except Exception as error:  # the adapter is whole: what describes it must not make the run a failure
        say(f"Warning: the report could not be written ({type(error).__name__}: {error}).")
    return result


def plan(config: Config | None = None, **settings: Any) -> Plan:
    """What a run would take, phase by phase: device and host memory, disk, work. Nothing is loaded or trained.

    Args:
        config, settings: as of ``train``; neither pictures nor an output folder are needed, and ``model`` may also be a
            transformer's ``config.json``. With ``device="auto"`` the plan is for CUDA where there is no accelerator.

    Raises:
        UserError: the settings, the model or the pictures cannot be used.
    """
    return make_request(_config(config, settings, planned=True)).plan()


@denormals_flushed()
def generate(
    prompt: str | list[str] | tuple[str, ...],
    lora: str | Path | None = None,
    *,
    model: str | Path | None = None,
    transformer: str | Path | None = None,
    images: int = 1,
    seed: int = 0,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    lora_scale: float = 1.0,
    stream: bool = False,
    batch_size: int = 1,
    device: str = "auto",
    dtype: str = "auto",
) -> list[Image.Image]:
    """Pictures of prompts, drawn by the unchanged model with a LoRA; bit for bit those of the run's previews.

    Its text length, and where it names one its dtype, are those of the run in ``lora``.

    Args:
        prompt: one prompt or several; the result holds all pictures of the first, then of the second, ...
        lora: a run's output folder, its adapter folder or a LoRA file; None draws with the base.
        model: default: the base that the run in ``lora`` was trained on, else ``builtin``.
        transformer: a file to take the transformer's weights from; default: with that base, the run's.
        images: pictures of each prompt, with seeds ``seed``, ``seed + 1``, ...
        stream: load one block, and one layer of a text encoder, at a time.
        batch_size: pictures that go through the transformer together.

    Raises:
        UserError: the model or the LoRA cannot be used.
        OutOfMemory: there is no memory left; the message says what to try.
    """
    if images < 1:
        raise UserError(f"images = {images} is too small; it must be at least 1.")
    prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt)
    base, revision, adapters = None if model is None else str(model), None, []
    single = None if transformer is None else str(transformer)
    text_length, dtypes = None, leaves()["model.dtype"][0].__args__
    if lora is not None:
        saved = _saved_settings(Path(lora).expanduser())
        if base is None:
            base, revision = saved.get("model.path"), saved.get("model.revision")
            single = single or saved.get("model.transformer")
        adapters = list(saved.get("model.base_adapters", ()))
        text_length = length if type(length := saved.get("data.text_length")) is int and length > 0 else None
        dtype = saved["model.dtype"] if dtype == "auto" and saved.get("model.dtype") in dtypes else dtype
    source = open_model(base or "builtin", revision, single)
    frozen = FrozenAdapters(adapters)
    given = FrozenAdapters([str(lora)] if lora is not None else [], lora_scale, "lora")
    empty = empty_transformer(source)
    frozen.check(empty)
    given.check(empty, "lora")
    where = resolve_device(device, "device")
    if dtype not in dtypes:
        raise UserError(f'dtype = "{dtype}" is not one of auto, float32, bfloat16, float16.')
    check_dtype(resolve_dtype(dtype, where), where, "dtype")
    drawing = Drawing(
        prompts, tuple(seed + index for index in range(images)), height, width, num_inference_steps, guidance_scale,
        text_length, stream, batch_size,
    )  # fmt: skip
    encode = functools.partial(encode_prompts, stream=stream)
    meter, kind = Meter(where), resolve_dtype(dtype, where)
    check_drawing(source, drawing, kind, where)
    try:
        with meter.phase("generate"):
            rows = draw(source, drawing, encode, kind, where, Both(frozen, given))
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise drawing_failed(error, source, drawing, kind, where, meter) from error
    return [image for row in rows for image in row]


class Both:
    """Two sets of adapters that act together."""

    def __init__(self, *sets: FrozenAdapters) -> None:
        self.sets = sets

    def attach(self, module: Any, prefix: str = "", device: Any = None) -> None:
        """Let each act on the layers below ``module``."""
        for adapters in self.sets:
            adapters.attach(module, prefix, device)


def _saved_settings(folder: Path) -> dict[str, Any]:
    """Settings of the run that a LoRA lies in the folder of, by dotted keys; none where there is no such run."""
    for path in (folder / "config.toml", folder.parent / "config.toml", folder.parent.parent / "config.toml"):
        if path.is_file():
            try:
                tables = tomllib.loads(path.read_text(encoding="utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError):
                return {}
            return {
                f"{name}.{key}": value for name, table in tables.items() if isinstance(table, dict)
                for key, value in table.items()
            }  # fmt: skip
    return {}


def configured(values: Mapping[str, Any], *, planned: bool = False, origins: Mapping[str, str] | None = None) -> Config:
    """The config of dotted keys; where they name a budget (``memory.*``), what was chosen for it is told.

    Args:
        planned: for a plan, whose device need not be there.
        origins: of ``config_of``.

    Raises:
        UserError: a value cannot be used, or nothing fits the budget.
    """
    here = not planned and any(name.startswith("memory.") for name in values)
    device = resolve_device(str(values.get("train.device", "auto"))) if here else None
    config, chosen = config_of(values, device, origins)
    for line in chosen:
        if planned:
            print(line, file=sys.stderr)  # the plan alone is on standard output
        else:
            say(line)
    return config


def _config(config: Config | None, settings: dict[str, Any], planned: bool = False) -> Config:
    if config is not None and settings:
        raise UserError("Give either a config or settings, not both.")
    if config is not None:
        values = given_keys(config)
    else:
        values = {SHORT.get(name, name.replace("__", ".")): _plain(value) for name, value in settings.items()}
    return configured(values, planned=planned)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
