"""What a run will take, told before it: its own kernels run on fake tensors at the model's true size."""

from blockskip.planner.make import make_plan
from blockskip.planner.named import named_models, open_for_plan
from blockskip.planner.plan import PHASES, PhasePlan, Plan
from blockskip.planner.setting import Setting, make_setting

__all__ = ["PHASES", "PhasePlan", "Plan", "Setting", "make_plan", "make_setting", "named_models", "open_for_plan"]
