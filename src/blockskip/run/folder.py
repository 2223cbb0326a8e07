"""The output folder as a run finds it: empty, or with checkpoints of the same settings, from which it goes on.

While a run is in it, ``run.lock`` and ``run.pid`` lie there and keep other processes out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from blockskip.adapters.files import DIFFERENCE_NAME, FILE_NAME
from blockskip.config import Config
from blockskip.errors import UserError
from blockskip.locks import Locked, locked
from blockskip.progress import say
from blockskip.settings import to_flat
from blockskip.store.files import remove_stale_temporaries
from blockskip.training.checkpoints import Checkpoint, latest_checkpoint


@contextlib.contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Keep other runs out of an output folder, which is there from now on.

    Raises:
        UserError: one is in it.
    """
    output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(output / "run.lock"))
        except Locked as error:
            raise UserError(
                f'"{output}" is in use: {error.holder} trains in it; wait for its end, or take another output folder.'
            ) from None
        yield


def open_output(output: Path, fingerprint: Mapping[str, str], steps: int) -> Checkpoint | None:
    """The checkpoint to go on from, in a folder that is there from now on; None: the run begins.

    Args:
        fingerprint: of the settings that a continued run must share.
        steps: optimiser steps of the whole run.

    Raises:
        UserError: the folder holds a run with other settings, or an adapter without checkpoints.
    """
    for folder in (output, output / "adapter", output / "samples"):
        if folder.is_dir():
            remove_stale_temporaries(folder)
    output.mkdir(parents=True, exist_ok=True)
    checkpoint = latest_checkpoint(output / "checkpoints")
    if checkpoint is not None:
        # A setting that the run did not know yet had the effect that is now its default.
        before = {name: repr(value) for name, value in to_flat(Config()).items()} | dict(checkpoint.fingerprint)
        changed = [name for name in fingerprint if fingerprint[name] != before.get(name)]
        if changed:
            raise UserError(
                f'"{output}" holds a run of {checkpoint.step} steps with another {name}; '
                "use the same value, or another output folder."
                for name in changed
            )
        if checkpoint.step < steps:
            say(f"Continuing after step {checkpoint.step}.")
    elif any((output / "adapter" / name).is_file() for name in (FILE_NAME, DIFFERENCE_NAME)):
        raise UserError(f'"{output}" holds a finished adapter without checkpoints; use another output folder.')
    else:
        (output / "metrics.jsonl").unlink(missing_ok=True)
    return checkpoint
