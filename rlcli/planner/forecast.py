"""All that is predicted of a run, put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlcli.planner.device import GIB
from rlcli.planner.disk import disk
from rlcli.planner.engine import full_responses
from rlcli.planner.memory import PhaseMemory, critic_worker, engine_worker, host_bytes, phases
from rlcli.planner.setting import Setting
from rlcli.planner.solve import (
    Mend,
    all_phases,
    budget,
    fits,
    largest_microbatch,
    largest_utilization,
    mends,
    shortfall,
    solved,
)
from rlcli.planner.timing import PhaseTime, model_flops, step_seconds, times

TOKENS, UTILIZATION = "train.tokens_per_microbatch", "rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class Forecast:
    """memory: of a worker that trains; apart: of one that only generates, and critic_apart: of one that only trains the
    critic, where there are such. budget: bytes that a
    worker may take. largest: key → the largest value that fits; empty where none does. seconds: by phase, empty where
    the device's rates are unknown. mends: what makes it fit, where no sizes do."""

    setting: Setting
    memory: list[PhaseMemory]
    apart: PhaseMemory | None
    critic_apart: PhaseMemory | None
    budget: float
    fits: bool
    largest: dict[str, Any]
    seconds: list[PhaseTime]
    disk: dict[str, float]
    mends: list[Mend]

    @property
    def peak(self) -> PhaseMemory:
        return max(all_phases(self.setting), key=lambda phase: phase.total)

    @property
    def step_seconds(self) -> float:
        """Of a whole step; 0 where the device's rates are unknown."""
        return step_seconds(self.setting, self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """As plain values: memory in GiB under the names of the run's metrics, disk in bytes."""
        setting = self.setting
        return {
            "device": {"name": setting.device.name, "memory_gb": setting.device.memory / GIB},
            "budget_gb": self.budget / GIB,
            "fits": self.fits,
            "shortfall": None if self.fits else shortfall(self.setting),
            "memory": {f"{phase.name}_gb": _in_gib(phase) for phase in self.memory},
            "engine_worker": _in_gib(self.apart) if self.apart else None,
            "critic_worker": _in_gib(self.critic_apart) if self.critic_apart else None,
            "host_gb": None if setting.device.is_cpu else host_bytes(setting) / GIB,
            "largest": self.largest,
            "seconds": {phase.name: {"seconds": phase.seconds, "bound": phase.bound} for phase in self.seconds} or None,
            "step_seconds": self.step_seconds or None,
            "update_flops": model_flops(setting),
            "disk_bytes": self.disk,
            "full_responses_at_once": full_responses(setting) if setting.has_engine else None,
            "mends": [{"set": mend.keys, "cost": mend.cost, "seconds": mend.seconds or None} for mend in self.mends],
        }


def _in_gib(phase: PhaseMemory) -> dict[str, Any]:
    return {"total": phase.total / GIB, "parts": {part: size / GIB for part, size in phase.parts.items()}}


def forecast(setting: Setting) -> Forecast:
    """Of a run as it is configured, and what would be the largest that fits."""
    best = solved(setting)
    return Forecast(
        setting=setting,
        memory=phases(setting),
        apart=engine_worker(setting),
        critic_apart=critic_worker(setting),
        budget=budget(setting),
        fits=fits(setting),
        largest=sizes(best) if best else {},
        seconds=times(setting),
        disk=disk(setting),
        mends=[] if best else mends(setting),
    )


def sizes(setting: Setting) -> dict[str, Any]:
    """The two sizes that memory decides on, as they are; the second only where it decides anything."""
    found: dict[str, Any] = {TOKENS: setting.config.train.tokens_per_microbatch}
    if not setting.device.is_cpu and setting.has_engine and setting.kv_cache_bytes is None:
        found[UTILIZATION] = setting.config.rollout.gpu_memory_utilization
    return found


def largest_of(setting: Setting, keys: set[str]) -> dict[str, Any]:
    """Of `keys`, those two or one of them, the largest values that fit beside the others as they are."""
    found: dict[str, Any] = {}
    if TOKENS in keys and (tokens := largest_microbatch(setting)) is not None:
        found[TOKENS] = tokens
    if UTILIZATION in keys and (share := largest_utilization(setting)) is not None:
        found[UTILIZATION] = share
    return found
