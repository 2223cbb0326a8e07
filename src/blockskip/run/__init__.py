"""One run, from pictures to an adapter: the phases in order, and the functions that Python programs call."""

from blockskip.run.adapter import adapter_kind
from blockskip.run.api import configured, generate, plan, train
from blockskip.run.job import RunResult, run
from blockskip.run.prepare import Prepared, prepare

__all__ = ["Prepared", "RunResult", "adapter_kind", "configured", "generate", "plan", "prepare", "run", "train"]
