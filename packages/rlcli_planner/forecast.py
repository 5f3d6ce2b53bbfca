"""The complete prediction of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlcli_planner.asynchrony.advice import Advice, advice
from rlcli_planner.asynchrony.lengths import Lengths
from rlcli_planner.engine_memory import full_responses
from rlcli_planner.fitting.solve import (
    Fix,
    all_phases,
    budget,
    fits,
    fixes,
    largest_microbatch,
    largest_utilization,
    shortfall,
    solved,
    verdict,
    with_least_sleep,
)
from rlcli_planner.known_devices import GIB
from rlcli_planner.phase_memory import (
    PhaseMemory,
    checkpoint_bytes,
    critic_worker,
    engine_host_bytes,
    engine_worker,
    host_bytes,
    phases,
    teacher_worker,
)
from rlcli_planner.run_setting import Setting
from rlcli_planner.step_time import PhaseTime, model_flops, step_seconds, times

TOKEN_BYTES, SAMPLE_BYTES, RECORDED_TOKEN_BYTES = 4.0, 320.0, 25.0
"""Size of samples as compressed parquet: text per token, as response and in the messages; the other columns per sample;
and what is recorded of each token of `tracking.token_samples`."""
TOKENS, UTILIZATION = "train.tokens_per_microbatch", "rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class Forecast:
    """memory: of a worker that trains; apart: of one that only generates, critic_apart: of one that only trains the
    critic, and teacher_apart: of one that only holds teachers, if there are any. budget: bytes that a worker may use.
    largest: key → the largest value that fits; empty if none does. seconds: by phase, empty if the device's rates are
    unknown. fixes: changes that make it fit if no sizes do. lengths: of responses, if they are known."""

    setting: Setting
    memory: list[PhaseMemory]
    apart: PhaseMemory | None
    critic_apart: PhaseMemory | None
    teacher_apart: PhaseMemory | None
    budget: float
    fits: bool
    largest: dict[str, Any]
    seconds: list[PhaseTime]
    disk: dict[str, float]
    fixes: list[Fix]
    lengths: Lengths | None

    @cached_property
    def asynchrony(self) -> Advice | None:
        """Whether generating ahead would be faster; None if that is not known."""
        return advice(self.setting, self.lengths)

    @property
    def peak(self) -> PhaseMemory:
        return max(all_phases(self.setting), key=lambda phase: phase.total)

    @property
    def sleep(self) -> str | None:
        """The value of `rollout.sleep`; None if no engine shares a GPU with the trainer."""
        return (
            self.setting.config.rollout.sleep if self.setting.hosts_engine and not self.setting.device.is_cpu else None
        )

    @property
    def step_seconds(self) -> float:
        """Seconds of a whole step; 0 if the device's rates are unknown."""
        return step_seconds(self.setting, self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """As plain values: memory in GiB under the names of the run's metrics, disk in bytes."""
        setting = self.setting
        return {
            "device": {"name": setting.device.name, "memory_gb": setting.device.memory / GIB},
            "rates": setting.device.rates_from or None,
            "budget_gb": self.budget / GIB,
            "fits": self.fits,
            "verdict": verdict(setting),
            "shortfall": None if self.fits else shortfall(self.setting),
            "memory": {f"{phase.name}_gb": _in_gib(phase) for phase in self.memory},
            "engine_worker": _in_gib(self.apart) if self.apart else None,
            "critic_worker": _in_gib(self.critic_apart) if self.critic_apart else None,
            "teacher_worker": _in_gib(self.teacher_apart) if self.teacher_apart else None,
            "sleep": self.sleep,
            "host_gb": None if setting.device.is_cpu else host_bytes(setting) / GIB,
            "engine_host_gb": None if (engine := engine_host_bytes(setting)) is None else engine / GIB,
            "largest": self.largest,
            "seconds": {phase.name: {"seconds": phase.seconds, "bound": phase.bound} for phase in self.seconds} or None,
            "step_seconds": self.step_seconds or None,
            "update_flops": model_flops(setting),
            "disk_bytes": self.disk,
            "full_responses_at_once": full_responses(setting) if setting.has_engine else None,
            "pictures": _pictures(setting),
            "asynchrony": self.asynchrony.as_dict() if self.asynchrony else None,
            "hints": [{"set": hint.keys, "cost": hint.cost, "seconds": hint.seconds or None} for hint in self.fixes],
        }


def _pictures(setting: Setting) -> dict[str, float] | None:
    """Tokens of a mean prompt that stand for pictures, bytes of a step's pixels in the object store, and of a worker's
    patches in host memory; None if there are no pictures."""
    if not setting.shown.tokens:
        return None
    return {"tokens": setting.shown.tokens, "pixel_bytes": setting.pixel_bytes, "patch_bytes": setting.patch_bytes}


def _in_gib(phase: PhaseMemory) -> dict[str, Any]:
    return {"total": phase.total / GIB, "parts": {part: size / GIB for part, size in phase.parts.items()}}


def forecast(setting: Setting, lengths: Lengths | None = None) -> Forecast:
    """The prediction for a run as configured, with the largest sizes that fit. lengths: as in `Forecast`. Those sizes
    are for an engine that releases what `rollout.sleep` allows; memory and time for the least with which it fits."""
    best = solved(setting)
    changes = [] if best else fixes(setting)
    setting = with_least_sleep(setting)
    return Forecast(
        setting=setting,
        memory=phases(setting),
        apart=engine_worker(setting),
        critic_apart=critic_worker(setting),
        teacher_apart=teacher_worker(setting),
        budget=budget(setting),
        fits=fits(setting),
        largest=sizes(best) if best else {},
        seconds=times(setting),
        disk=disk(setting),
        fixes=changes,
        lengths=lengths,
    )


def sizes(setting: Setting) -> dict[str, Any]:
    """The current values of the two sizes that memory limits; the second only if it has an effect."""
    found: dict[str, Any] = {TOKENS: setting.config.train.tokens_per_microbatch}
    if not setting.device.is_cpu and setting.has_engine and setting.kv_cache_bytes is None:
        found[UTILIZATION] = setting.config.rollout.gpu_memory_utilization
    return found


def largest_of(setting: Setting, keys: set[str]) -> dict[str, Any]:
    """The largest values that fit for `keys` (one or both sizes), with all other keys unchanged."""
    found: dict[str, Any] = {}
    if TOKENS in keys and (tokens := largest_microbatch(setting)) is not None:
        found[TOKENS] = tokens
    if UTILIZATION in keys and (share := largest_utilization(setting)) is not None:
        found[UTILIZATION] = share
    return found


def disk(setting: Setting) -> dict[str, float]:
    """Item → maximum bytes: the kept checkpoints (plus one that is written before the oldest is removed), the samples
    of all steps with full-length responses, and one export of the model."""
    config = setting.config
    rules, steps = config.checkpoint, config.train.steps
    made = steps // rules.every if rules.every else 0
    made += 1 if not rules.every or steps % rules.every else 0
    kept = rules.keep + rules.keep_best + (steps // rules.keep_every if rules.keep_every else 0)
    found = {"checkpoints": min(made, kept + 1) * checkpoint_bytes(setting)}
    if config.tracking.save_samples and not config.data.response:
        rollout = config.rollout
        a_step = rollout.prompts_per_step * rollout.samples_per_prompt
        recorded = min(config.tracking.token_samples, a_step) * setting.sample_tokens * RECORDED_TOKEN_BYTES
        found["samples"] = steps * (a_step * (setting.sample_tokens * TOKEN_BYTES + SAMPLE_BYTES) + recorded)
    exported = setting.trained_parameters() * 4 if config.lora.rank else setting.policy.parameters * setting.bytes_each
    return found | {"an export": exported}
