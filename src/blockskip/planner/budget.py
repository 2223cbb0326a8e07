"""Settings fitted to a budget: changes are made in a fixed order until the plan fits.

What costs no quality comes first, then what costs little, then the skip ratio, then time:

    preview.stream                                 the preview alone, for the time to read the blocks
    model.read_ahead                               a second block on the device, for waiting until one is there
    preview size                                   the preview alone
    model.stream_text_encoders                     text, for the time to read the layers
    features.window                                host memory, for reading the weights more often
    features.window_on                             host memory, for disk space and its reading and writing
    features.disk                                  disk, for alternating precompute and training
    train.gradient_checkpointing                   a third more work in training
    data.text_length 256, 128                      only if the captions are short enough
    data.resolution                                half of what it was, 256 px at least
    model.quantization int8, nf4                   the resident blocks alone
    skip.ratio 0.4, 0.5                            from the 0.3 that a device budget starts with
    train.stream_middle                            trained blocks visit the device one by one

A change is made only where a phase that it makes smaller is over the budget, and taken back where a later one made it
needless. A key that the user set stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from blockskip.config import Config
from blockskip.errors import UserError
from blockskip.planner.plan import PhasePlan, Plan
from blockskip.settings import from_flat, to_flat
from blockskip.units import size

#: The skip ratio that a budget of device memory starts with, if the user set none: the mildest of the paper's three.
#: Where device and host are one memory, the default stays.
FIRST_RATIO = 0.3
#: Those that follow.
RATIOS = (0.4, 0.5)
#: Windows of precompute, below the default.
WINDOWS = ("512MiB", "256MiB", "128MiB", "64MiB", "16MiB", "4MiB")
#: The smallest that is tried in memory before one on disk is.
SMALLEST_BEFORE_DISK = "64MiB"
ON_DISK = {"features.window_on": "disk", "features.window": "1GiB"}
#: Pixels of which half a resolution is a multiple, as every family's tokens are.
STRIDE = 32
#: Pixels below which the training resolution is not lowered.
LOWEST_RESOLUTION = 256


@dataclass(frozen=True)
class Budget:
    """Bytes that a run may take; None is unlimited. Host memory counts above the process after its imports."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None

    def misses(self, plan: Plan) -> list[str]:
        """What of a plan is over the budget, one sentence each."""
        found = []
        for name, phase in plan.used().items():
            if self.device is not None and phase.device_peak_bytes > self.device:
                found.append(f"{name} takes {size(phase.device_peak_bytes)} of device memory of {size(self.device)}")
            if self.host is not None and phase.host_peak_bytes > self.host:
                found.append(f"{name} takes {size(phase.host_peak_bytes)} of host memory of {size(self.host)}")
        if self.disk is not None and plan.disk_bytes > self.disk:
            found.append(f"the run writes {size(plan.disk_bytes)} of disk space of {size(self.disk)}")
        return found

    def over(self, plan: Plan) -> dict[str, PhasePlan]:
        """The phases that need more device or host memory than there is."""
        device, host = self.device or 2**62, self.host or 2**62
        return {
            name: phase
            for name, phase in plan.used().items()
            if phase.device_peak_bytes > device or phase.host_peak_bytes > host
        }

    def over_disk(self, plan: Plan) -> bool:
        """Whether the run writes more than it may."""
        return self.disk is not None and plan.disk_bytes > self.disk


@dataclass(frozen=True)
class Choice:
    """One change that was made to fit.

    Args:
        key: the setting.
        value: what it became.
        reason: what did not fit before.
    """

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Fitted:
    """What fitting found.

    Args:
        config: with the changes, those of the smallest plan if nothing fits.
        plan: of that config.
        choices: the changes in their order.
        misses: what is over the budget even so; empty when it fits.
        in_the_way: keys the user set without which more would have been changed.
        untried: why changes could not even be planned, one sentence each.
        began: the skip ratio that it began with, where that is not the default.
    """

    config: Config
    plan: Plan
    choices: tuple[Choice, ...]
    misses: tuple[str, ...]
    in_the_way: tuple[str, ...]
    untried: tuple[str, ...] = ()
    began: float | None = None


@dataclass(frozen=True)
class _Step:
    """A change, and which phases it may make smaller; ``disk``: whether it makes the files smaller."""

    values: dict[str, Any]
    phases: frozenset[str]
    disk: bool = False


def fit(
    config: Config, fixed: Collection[str], budget: Budget, plan: Callable[[Config], Plan], longest_caption: int = 128
) -> Fitted:
    """The first config in the fixed order whose plan is within the budget.

    Args:
        config: what the user gave, the rest at its defaults.
        fixed: dotted keys that the user set.
        plan: counts a config; ``make_plan`` of its setting.
        longest_caption: tokens below which the text length is not cut.
    """
    held_by = _held_by(config, fixed)
    began = FIRST_RATIO if "skip.ratio" not in held_by and budget.device is not None else None
    if began is not None:
        config = _with(config, {"skip.ratio": began})
    start, now = config, plan(config)
    choices: list[Choice] = []
    in_the_way: dict[str, None] = {}
    untried: dict[str, None] = {}
    for step in _ladder(now, longest_caption):
        over = budget.over(now)
        if not (over.keys() & step.phases) and not (step.disk and budget.over_disk(now)):
            continue
        flat = to_flat(config)
        values = {key: value for key, value in step.values.items() if flat[key] != value}
        if not values or ("model.quantization" in values and config.train.stream_middle):
            continue  # it is so already, or would end what needs less
        held = [key for key in values if key in held_by]
        if held:
            in_the_way |= dict.fromkeys(own for key in held for own in held_by[key])
            continue
        changed = _with(config, values)
        try:
            after = plan(changed)
        except UserError as error:
            untried |= dict.fromkeys(error.problems)
            continue
        if _smaller(after, now, budget, step) and not (budget.over_disk(after) and not budget.over_disk(now)):
            reason = budget.misses(now)[0]
            choices = [choice for choice in choices if choice.key not in values]
            choices += [Choice(key, value, reason) for key, value in values.items() if value != "none"]
            config, now = changed, after
    if not budget.misses(now):
        config, now, choices = _undone(config, start, budget, plan, now, choices)
    misses = tuple(budget.misses(now))
    way = tuple(in_the_way) if misses else ()
    return Fitted(config, now, tuple(choices), misses, way, tuple(untried), began)


def _held_by(config: Config, fixed: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The keys that must stay, each with what the user set that holds it: itself, or what leaves it no choice."""
    found = {key: (key,) for key in fixed}
    if split := tuple(key for key in ("skip.front", "skip.tail", "skip.middle") if key in fixed):
        found["skip.ratio"] = split
    if config.train.lisa_blocks:
        found |= dict.fromkeys(("skip.ratio", "model.quantization", "train.stream_middle"), ("train.lisa_blocks",))
    return found


def _smaller(after: Plan, now: Plan, budget: Budget, step: _Step) -> bool:
    """Whether a phase over the budget needs less after a change, or the files do."""
    if step.disk and budget.over_disk(now) and after.disk_bytes < now.disk_bytes:
        return True
    for name in budget.over(now).keys() & step.phases:
        one, other = after.phases[name], now.phases[name]
        if budget.device is not None and one.device_peak_bytes < other.device_peak_bytes > budget.device:
            return True
        if budget.host is not None and one.host_peak_bytes < other.host_peak_bytes > budget.host:
            return True
    return False


def _undone(
    config: Config, start: Config, budget: Budget, plan: Callable[[Config], Plan], now: Plan, choices: list[Choice]
) -> tuple[Config, Plan, list[Choice]]:
    """Without the changes that later ones made needless, those that cost quality first."""
    first = to_flat(start)
    for key in (
        "data.resolution",
        "skip.ratio",
        "model.quantization",
        "data.text_length",
        "train.gradient_checkpointing",
        "model.read_ahead",
    ):
        if any(choice.key == key for choice in choices):
            without = _with(config, {key: first[key]})
            tried = plan(without)
            if not budget.misses(tried):
                config, now = without, tried
                choices = [choice for choice in choices if choice.key != key]
    return config, now, choices


def _ladder(plan: Plan, longest_caption: int) -> Iterator[_Step]:
    """The changes in the order in which they are tried."""
    training, preview = frozenset({"train", "save"}), frozenset({"preview"})
    everything = frozenset({"encode pictures", "precompute", "train"})
    length, resolution = int(plan.settings["data.text_length"]), int(plan.settings["data.resolution"])
    alone = {"model.read_ahead": False}
    yield _Step({"preview.stream": True}, preview)
    yield _Step(alone, preview | {"precompute"})
    for side in (2 * resolution, resolution):
        if side < (plan.settings["preview.height"] or plan.settings["data.full_resolution"]):
            yield _Step({"preview.stream": True, "preview.height": side, "preview.width": side}, preview)
    yield _Step({"model.stream_text_encoders": True}, frozenset({"encode text", "preview"}))
    for window in WINDOWS:
        yield _Step({"features.window": window}, frozenset({"precompute"}))
        if window == SMALLEST_BEFORE_DISK:
            yield _Step(ON_DISK, frozenset({"precompute"}))
    stored = plan.phases["precompute"].disk_bytes
    for part in (4, 16, 64):
        if stored:
            yield _Step({"features.disk": f"{stored // part}B"}, frozenset(), disk=True)
    yield _Step({"train.gradient_checkpointing": True}, training)
    for shorter in (256, 128):
        if longest_caption <= shorter < length:
            yield _Step({"data.text_length": shorter}, everything | {"encode text"}, disk=True)
    half = resolution // 2 // STRIDE * STRIDE
    if half >= LOWEST_RESOLUTION:
        yield _Step({"data.resolution": half}, everything, disk=True)
    for quantization in ("int8", "nf4"):
        yield _Step({"model.quantization": quantization}, training)
    for ratio in RATIOS:
        yield _Step({"skip.ratio": ratio}, training)
    yield _Step({"train.stream_middle": True, "model.quantization": "none"}, training)
    yield _Step(alone, training)


def _with(config: Config, values: dict[str, Any]) -> Config:
    return from_flat(to_flat(config) | values)


def as_options(fitted: Fitted) -> dict[str, Any]:
    """The changed keys with their values, as a config file would have them."""
    return {choice.key: choice.value for choice in fitted.choices}


def describe(fitted: Fitted) -> list[str]:
    """What was chosen and why, a line each: what did not fit when it was chosen, later changes not yet made."""
    lines = [f"{choice.key} = {choice.value}: before it {choice.reason}." for choice in fitted.choices]
    if fitted.began is not None and fitted.config.skip.ratio == fitted.began:
        lines.append(f"skip.ratio = {fitted.began}: a budget begins with the mildest of the paper's ratios.")
    return lines + _untried(fitted)


def _untried(fitted: Fitted) -> list[str]:
    return [f"Not tried: {sentence}" for sentence in fitted.untried]


def refused(fitted: Fitted, budget: Budget, origins: Mapping[str, str] | None = None) -> list[str]:
    """Why nothing fits: the smallest that would, and the user's own settings that stand in the way.

    Args:
        origins: whose the keys are that the user did not give himself: ``of the preset flux/8gb``.
    """
    smallest = f"the smallest plan takes {size(fitted.plan.device_peak_bytes)} of device memory"
    smallest += f" and {size(fitted.plan.host_peak_bytes)} of host memory"
    if budget.disk is not None:
        smallest += f", and writes {size(fitted.plan.disk_bytes)}"
    problems = [f"The budget is too small: {'; '.join(fitted.misses)}. Of what was tried, {smallest}."]
    problems += _untried(fitted)
    whose: dict[str, list[str]] = {}
    for key in fitted.in_the_way:
        whose.setdefault((origins or {}).get(key, "of yours"), []).append(key)
    return problems + [
        f"These settings {origin} were left as they are and stand in the way: {', '.join(keys)}."
        for origin, keys in whose.items()
    ]
