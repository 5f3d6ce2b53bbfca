"""The planner: estimates a run's memory, time and disk before it starts, and finds sizes that fit.

It is not part of the core: a package publishes it.

    [project.entry-points."rlcli.planners"]
    default = "rlcli_planner.launch.run_planner:PLANNER"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlcli.errors import SetupError
from rlcli.registry import Registry

if TYPE_CHECKING:
    from rlcli.config.load import Resolved
    from rlcli.config.schema import RunConfig
    from rlcli.launch.prepared_run import Prepared

Rows = list[tuple[str, str]]
"""Rows of a printed plan: label, text."""


class Planner(Protocol):
    """Interface of a planner. Sizes that a user has set never change."""

    def parameters(self, model: str) -> int:
        """The number of parameters of the model in this folder or of this hub id, by its config.json. Raises
        `ModelError`."""

    def kv_cache_bytes(self, config: RunConfig, bytes_each: int, longest: int) -> int:
        """Bytes of the KV cache of an engine on CPUs. bytes_each: of a number in it. longest: tokens of the longest
        sample that the run's prompts allow."""

    def resolve(self, recipe: str, flags: Mapping[str, object], sets: Sequence[str]) -> Resolved:
        """As `rlcli.config.load.resolve`; sizes that `with_sizes` chooses may be missing."""

    def rates_are_known(self, config: RunConfig, device: str) -> bool:
        """True if `measure_rates` has nothing to measure. device: `cpu` or `cuda`."""

    def measure_rates(self, config: RunConfig, device: str) -> None:
        """Measure how fast this machine computes, unless that is known. Takes seconds."""

    def with_sizes(self, resolved: Resolved, prepared: Prepared, *, largest: bool) -> tuple[Resolved, Prepared, Rows]:
        """With sizes that fit the machine's memory, and rows that list them. largest: the largest that fit; else sizes
        are lowered, on CPUs, as far as the memory requires. Raises `ConfigError` if nothing fits."""

    def with_least_sleep(self, prepared: Prepared) -> tuple[Prepared, Rows]:
        """With the least `rollout.sleep` with which the run fits, if it is `auto`, and a row that states it."""

    def estimates(self, prepared: Prepared, steps: int) -> Rows:
        """Memory, time and disk of a run of this many steps."""

    def summary(self, prepared: Prepared, plan: Rows, target: Path, steps_done: int) -> Rows:
        """The plan in five rows. plan: all rows. target: the run's folder. steps_done: of a run that resumes."""

    def setting(self, prepared: Prepared) -> Any | None:
        """The planner's input for a run on this machine, for listeners that plan; None if the machine is not known."""

    def advice(self, prepared: Prepared) -> str:
        """One line on whether asynchrony would make the run's steps faster; empty if that is unknown."""


PLANNERS: Registry[Planner] = Registry("planner", "rlcli.planners")


def planner() -> Planner:
    """The installed planner. Raises `SetupError` if there is none."""
    if "default" not in PLANNERS.names():
        raise SetupError("no planner is installed", "install rlcli again (scripts/env)")
    return PLANNERS.get("default")
