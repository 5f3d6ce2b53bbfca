"""Propose a layout: the division of the devices, and what saves memory, with which a step is shortest and fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlcli_planner.fitting.solve import all_phases, budget, largest_microbatch, smallest_microbatch, solved
from rlcli_planner.forecast import sizes
from rlcli_planner.known_devices import GIB
from rlcli_planner.run_setting import Setting
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
"""A layout that does not fit is only worth a word if its step takes at most this share of the best one's."""


@dataclass(frozen=True)
class Layout:
    """keys: what differs from the plan that was asked about. setting: with the largest sizes that fit. phases: seconds
    of its step by phase."""

    keys: dict[str, Any]
    setting: Setting
    phases: list[PhaseTime]

    @property
    def seconds(self) -> float:
        return step_seconds(self.setting, self.phases)

    @property
    def bound(self) -> str:
        """What its step waits for most: the longest phase, and what bounds that."""
        longest = max(self.phases, key=lambda phase: phase.seconds)
        return f"{longest.name}: {longest.bound}"

    @property
    def peak_gib(self) -> float:
        return max(phase.total for phase in all_phases(self.setting)) / GIB


@dataclass(frozen=True)
class Suggested:
    """layouts: the fastest that fit, fastest first. short_of: if a faster one lacks memory only, how much faster and
    how much memory, in words."""

    layouts: list[Layout]
    short_of: str

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {"set": one.keys, "seconds": one.seconds, "peak_gb": one.peak_gib, "bound": one.bound}
            for one in self.layouts
        ]
        return {"layouts": rows, "short_of": self.short_of or None}


def suggested(setting: Setting) -> Suggested:
    """The layouts of these devices. Empty if none fits, or if no seconds are predicted."""
    if setting.untimed:
        return Suggested([], "")
    # With micro-batches as large as they are useful, whether they fit or not, no layout takes longer than it must.
    every = (_unlimited(setting, keys) for keys in _candidates(setting))
    ordered = sorted(every, key=lambda one: (float(f"{one.seconds:.3g}"), len(one.keys)))
    found: list[Layout] = []
    missed: Layout | None = None
    fitting = _Fitting(setting)
    for best in ordered:
        if len(found) >= MOST and best.seconds >= found[MOST - 1].seconds:
            break
        own = fitting.of(best)
        if own is None:
            missed = missed or best
            continue
        layout = Layout(best.keys | sizes(own), own, times(own))
        if not any(_no_better(best, layout.seconds, other) for other in found):
            found.append(layout)
            found.sort(key=lambda one: one.seconds)
    return Suggested(found[:MOST], _short_of(missed, found))


class _Fitting:
    """Finds the sizes with which layouts fit. Of a division of the devices in which not even the most frugal variant
    fits, no other one is tried."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._possible: dict[tuple[Any, ...], bool] = {}

    def of(self, layout: Layout) -> Setting | None:
        division = {key: _value(layout.setting, key) for key in DIVIDING}
        key = tuple(division.values())
        if key not in self._possible:
            frugal: dict[str, Any] = {"model.gradient_checkpointing": "offload", "train.offload": "all"}
            if self._setting.device.is_cpu:
                frugal = {"model.gradient_checkpointing": True}
            self._possible[key] = solved(_with(self._setting, division | frugal)) is not None
        return solved(layout.setting) if self._possible[key] else None


def _no_better(best: Layout, seconds: float, other: Layout) -> bool:
    """Whether `best` divides the devices as `other` does, or changes all that it changes, and is not much faster."""
    alike = all(_value(best.setting, key) == _value(other.setting, key) for key in DIVIDING)
    more = other.keys.items() - sizes(other.setting).items() <= best.keys.items()
    return (alike or more) and other.seconds <= seconds * (1 + ALIKE)


def _candidates(setting: Setting) -> Iterator[dict[str, Any]]:
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
    recomputed = (False, True, "offload")
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


def _unlimited(setting: Setting, keys: dict[str, Any]) -> Layout:
    """The layout as if memory did not limit its micro-batches."""
    tried = _with(setting, keys)
    differing = {key: value for key, value in keys.items() if value != _value(setting, key)}
    a_rank = int(-(-tried.samples / tried.config.train.minibatches // tried.data_ranks) * tried.max_length)
    wide = tried.with_keys(train={"tokens_per_microbatch": max(a_rank, tried.max_length)})
    return Layout(differing, tried, times(wide))


def _with(setting: Setting, keys: dict[str, Any]) -> Setting:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return setting.with_keys(**sections)


def _value(setting: Setting, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(setting.config, section), name)


def _short_of(missed: Layout | None, found: list[Layout]) -> str:
    if missed is None or (found and missed.seconds > FASTER * found[0].seconds):
        return ""
    least = missed.setting
    if (tokens := largest_microbatch(least)) is None:
        tokens = smallest_microbatch(least.config)
    peak = max(all_phases(least.with_keys(train={"tokens_per_microbatch": tokens})), key=lambda phase: phase.total)
    gain = f"up to {found[0].seconds / missed.seconds:.2g} × as fast" if found else "the fastest"
    needs = f"{peak.total / GIB:.0f} GiB in {peak.name} where {budget(least) / GIB:.0f} GiB may be used"
    return f"memory: {_listed(missed.keys)} would be {gain}, and needs {needs}"


def _listed(keys: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {str(value).lower()}" for key, value in keys.items()) or "the plan as it is"
