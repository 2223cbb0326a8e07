"""Errors for the person who reads them: what was found, where, what to do."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """Something the user gave cannot be used. The command line prints every problem and exits with 2.

    Args:
        problems: one sentence, or several; each names the file or key and what to do.
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class RunError(Exception):
    """A run that started well cannot go on (disk full, numbers not finite). Exits with 1; checkpoints are whole."""

    exit_code = 1


class OutOfMemory(RunError):
    """The device or the host ran out of memory; the message names the phase and what to try. Exits with 3."""

    exit_code = 3
