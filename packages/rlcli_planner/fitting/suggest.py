"""Propose layouts: divisions of the devices, and what saves memory, by which a step fits and is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from rlcli_planner.fitting.solve import all_phases, budget, largest_microbatch, smallest_microbatch, solved
from rlcli_planner.forecast import sizes
from rlcli_planner.known_devices import GIB
from rlcli_planner.plan_input import ConfigValue, Keys, RunPlanInput, by_section
from rlcli_planner.step_time import PhaseTime, step_seconds, times

MOST = 5
"""Layouts that are proposed."""
CONTEXTS, ENGINES = (1, 2, 4, 8), (1, 2, 4, 8, 16)
"""Sizes of `parallel.context` and `rollout.tensor_parallel` that are tried."""
DIVIDING = ("parallel.replicate", "parallel.context", "parallel.expert", "rollout.tensor_parallel")
"""Keys that divide devices; the others save memory for time."""
ALIKE = 0.01
"""Layouts whose steps differ by less count as equally fast: the one with fewer changed keys comes first."""
FASTER = 0.95
"""A layout that does not fit is reported only if its step takes at most this share of the best one's."""


@dataclass(frozen=True)
class Proposal:
    """A division of the devices, and what saves memory."""

    keys: Keys
    """Keys that differ from the configured ones."""
    setting: RunPlanInput
    """The setting with the largest sizes that fit."""
    phases: list[PhaseTime]
    """Seconds of its step by phase."""

    @property
    def seconds(self) -> float:
        return step_seconds(self.setting, self.phases)

    @property
    def bound(self) -> str:
        """The longest phase, and the resource that bounds it."""
        longest = max(self.phases, key=lambda phase: phase.seconds)
        return f"{longest.name}: {longest.bound}"

    @property
    def peak_gib(self) -> float:
        return max(phase.total for phase in all_phases(self.setting)) / GIB


@dataclass(frozen=True)
class Suggestions:
    """The proposed layouts."""

    layouts: list[Proposal]
    """The fastest that fit, fastest first."""
    short_of: str
    """If a faster one fails only for lack of memory: how much faster it is, and how much memory it needs."""

    def as_dict(self) -> dict[str, object]:
        rows = [
            {"set": layout.keys, "seconds": layout.seconds, "peak_gb": layout.peak_gib, "bound": layout.bound}
            for layout in self.layouts
        ]
        return {"layouts": rows, "short_of": self.short_of or None}


def suggest_layouts(setting: RunPlanInput) -> Suggestions:
    """The layouts of these devices. Empty if none fits, or if no seconds are predicted."""
    if setting.untimed:
        return Suggestions([], "")
    # With micro-batches as large as they are useful, whether they fit or not, no layout takes longer than it must.
    every = (_unlimited(setting, keys) for keys in _candidates(setting))
    ordered = sorted(every, key=lambda x: (float(f"{x.seconds:.3g}"), len(x.keys)))
    layouts: list[Proposal] = []
    missed: Proposal | None = None
    fitting = _Fitting(setting)
    for best in ordered:
        if len(layouts) >= MOST and best.seconds >= layouts[MOST - 1].seconds:
            break
        sized = fitting.of(best)
        if sized is None:
            missed = missed or best
            continue
        layout = Proposal(best.keys | sizes(sized), sized, times(sized))
        if not any(_no_better(best, layout.seconds, other) for other in layouts):
            layouts.append(layout)
            layouts.sort(key=lambda x: x.seconds)
    return Suggestions(layouts[:MOST], _short_of(missed, layouts))


class _Fitting:
    """Finds the sizes with which layouts fit. If the variant of a division of the devices that needs least memory does
    not fit, no other variant is tried."""

    def __init__(self, setting: RunPlanInput) -> None:
        self._setting = setting
        self._possible: dict[tuple[ConfigValue, ...], bool] = {}

    def of(self, layout: Proposal) -> RunPlanInput | None:
        division = {key: _value(layout.setting, key) for key in DIVIDING}
        key = tuple(division.values())
        if key not in self._possible:
            frugal: Keys = {"model.gradient_checkpointing": "offload", "train.offload": "all"}
            if self._setting.device.is_cpu:
                frugal = {"model.gradient_checkpointing": True}
            self._possible[key] = solved(_with(self._setting, division | frugal)) is not None
        return solved(layout.setting) if self._possible[key] else None


def _no_better(best: Proposal, seconds: float, other: Proposal) -> bool:
    """True if `best` divides the devices as `other` does, or changes all that it changes, and is not much faster."""
    same_division = all(_value(best.setting, key) == _value(other.setting, key) for key in DIVIDING)
    changes_more = other.keys.items() - sizes(other.setting).items() <= best.keys.items()
    return (same_division or changes_more) and other.seconds <= seconds * (1 + ALIKE)


def _candidates(setting: RunPlanInput) -> Iterator[Keys]:
    """Layouts as keys that differ from the setting's: copies of the model, ranks that divide tokens, devices of an
    engine, and what saves memory for time."""
    ranks, heads = setting.ranks, setting.policy.heads
    copies = [size for size in range(1, ranks + 1) if ranks % size == 0]
    engines = [
        size
        for size in ENGINES
        if setting.config.engine_workers % size == 0 and heads % size == 0 and setting.has_engine
    ]
    experts = [size for size in range(1, ranks + 1) if ranks % size == 0 and setting.policy.experts % size == 0]
    recomputed: tuple[ConfigValue, ...] = (False, True, "offload")
    away = ("none",) if setting.device.is_cpu else ("none", "optimizer", "all")
    for replicate, context, expert, engine, checkpointing, offload in product(
        copies, CONTEXTS, experts if setting.policy.experts else [1], engines or [1], recomputed, away
    ):
        if ranks % (replicate * context) or context > heads or ranks // replicate % expert:
            continue
        if setting.device.is_cpu and checkpointing == "offload":
            continue
        yield {
            "parallel.replicate": replicate,
            "parallel.context": context,
            "parallel.expert": expert,
            "rollout.tensor_parallel": engine,
            "model.gradient_checkpointing": checkpointing,
            "train.offload": offload,
        }


def _unlimited(setting: RunPlanInput, keys: Keys) -> Proposal:
    """The layout as if memory did not limit its micro-batches."""
    tried = _with(setting, keys)
    differing = {key: value for key, value in keys.items() if value != _value(setting, key)}
    a_rank = int(-(-tried.samples / tried.config.train.minibatches // tried.data_ranks) * tried.max_length)
    wide = tried.with_keys(train={"tokens_per_microbatch": max(a_rank, tried.max_length)})
    return Proposal(differing, tried, times(wide))


def _with(setting: RunPlanInput, keys: Keys) -> RunPlanInput:
    return setting.with_keys(**by_section(keys))


def _value(setting: RunPlanInput, key: str) -> ConfigValue:
    section, _, name = key.partition(".")
    value: ConfigValue = getattr(getattr(setting.config, section), name)
    return value


def _short_of(missed: Proposal | None, layouts: list[Proposal]) -> str:
    if missed is None or (layouts and missed.seconds > FASTER * layouts[0].seconds):
        return ""
    least = missed.setting
    if (tokens := largest_microbatch(least)) is None:
        tokens = smallest_microbatch(least.config)
    peak = max(all_phases(least.with_keys(train={"tokens_per_microbatch": tokens})), key=lambda phase: phase.total)
    gain = f"up to {layouts[0].seconds / missed.seconds:.2g} × as fast" if layouts else "the fastest"
    needs = f"{peak.total / GIB:.0f} GiB in {peak.name} where {budget(least) / GIB:.0f} GiB may be used"
    return f"memory: {_listed(missed.keys)} would be {gain}, and needs {needs}"


def _listed(keys: Keys) -> str:
    return ", ".join(f"{key} = {str(value).lower()}" for key, value in keys.items()) or "the plan as it is"
