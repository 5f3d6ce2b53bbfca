"""The complete prediction of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
from rlcli_planner.plan_input import Keys, RunPlanInput
from rlcli_planner.step_time import PhaseTime, model_flops, step_seconds, times

TOKEN_BYTES, SAMPLE_BYTES, RECORDED_TOKEN_BYTES = 4.0, 320.0, 25.0
"""Size of samples as compressed parquet: text per token, as response and in the messages; the other columns per sample;
and what is recorded of each token of `tracking.token_samples`."""
TOKENS, UTILIZATION = "train.tokens_per_microbatch", "rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class Forecast:
    """The prediction of a run."""

    setting: RunPlanInput
    """The planner's input, with the value of `rollout.sleep` that `auto` stands for."""
    memory: list[PhaseMemory]
    """Memory of a worker that trains, by phase."""
    engine_worker: PhaseMemory | None
    """Memory of a dedicated engine worker, if there are any."""
    critic_worker: PhaseMemory | None
    """Memory of a worker that only trains the critic, if there are any."""
    teacher_worker: PhaseMemory | None
    """Memory of a worker that only holds teachers, if there are any."""
    budget: float
    """Bytes that a worker may use."""
    fits: bool
    """True if the run fits whatever the lengths of its responses are."""
    largest: Keys
    """Key → the largest value that fits; empty if none does."""
    seconds: list[PhaseTime]
    """Seconds by phase; empty if the device's rates are unknown."""
    disk: dict[str, float]
    """Item → maximum bytes."""
    fixes: list[Fix]
    """Changes that make the run fit, if no sizes do."""
    lengths: Lengths | None
    """Response lengths, if they are known."""

    @cached_property
    def asynchrony(self) -> Advice | None:
        """Advice on asynchrony; None if it cannot be simulated."""
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

    def as_dict(self) -> dict[str, object]:
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
            "engine_worker": _in_gib(self.engine_worker) if self.engine_worker else None,
            "critic_worker": _in_gib(self.critic_worker) if self.critic_worker else None,
            "teacher_worker": _in_gib(self.teacher_worker) if self.teacher_worker else None,
            "sleep": self.sleep,
            "host_gb": None if setting.device.is_cpu else host_bytes(setting) / GIB,
            "engine_host_gb": None if (engine := engine_host_bytes(setting)) is None else engine / GIB,
            "largest": self.largest,
            "seconds": {phase.name: {"seconds": phase.seconds, "bound": phase.bound} for phase in self.seconds} or None,
            "step_seconds": self.step_seconds or None,
            "update_flops": model_flops(setting),
            "disk_bytes": self.disk,
            "full_responses_at_once": full_responses(setting) if setting.has_engine else None,
            "pictures": _images(setting),
            "asynchrony": self.asynchrony.as_dict() if self.asynchrony else None,
            "hints": [{"set": hint.keys, "cost": hint.cost, "seconds": hint.seconds or None} for hint in self.fixes],
        }


def _images(setting: RunPlanInput) -> dict[str, float] | None:
    """Image tokens of a mean prompt, bytes of a step's pixels in the object store, and of a worker's
    patches in host memory; None if there are no images."""
    if not setting.image_stats.tokens:
        return None
    return {
        "tokens": setting.image_stats.tokens,
        "pixel_bytes": setting.pixel_bytes,
        "patch_bytes": setting.patch_bytes,
    }


def _in_gib(phase: PhaseMemory) -> dict[str, object]:
    return {"total": phase.total / GIB, "parts": {part: size / GIB for part, size in phase.parts.items()}}


def forecast(setting: RunPlanInput, lengths: Lengths | None = None) -> Forecast:
    """The prediction for a run as configured, with the largest sizes that fit. lengths: as in `Forecast`. Those sizes
    are for an engine that releases what `rollout.sleep` allows; memory and time for the least with which it fits."""
    best = solved(setting)
    changes = [] if best else fixes(setting)
    setting = with_least_sleep(setting)
    return Forecast(
        setting=setting,
        memory=phases(setting),
        engine_worker=engine_worker(setting),
        critic_worker=critic_worker(setting),
        teacher_worker=teacher_worker(setting),
        budget=budget(setting),
        fits=fits(setting),
        largest=sizes(best) if best else {},
        seconds=times(setting),
        disk=disk(setting),
        fixes=changes,
        lengths=lengths,
    )


def sizes(setting: RunPlanInput) -> Keys:
    """The current values of the two sizes that memory limits; the second only if it has an effect."""
    values: Keys = {TOKENS: setting.config.train.tokens_per_microbatch}
    if not setting.device.is_cpu and setting.has_engine and setting.kv_cache_bytes is None:
        values[UTILIZATION] = setting.config.rollout.gpu_memory_utilization
    return values


def largest_of(setting: RunPlanInput, keys: set[str]) -> Keys:
    """The largest values that fit for `keys` (one or both sizes), with all other keys unchanged."""
    values: Keys = {}
    if TOKENS in keys and (tokens := largest_microbatch(setting)) is not None:
        values[TOKENS] = tokens
    if UTILIZATION in keys and (share := largest_utilization(setting)) is not None:
        values[UTILIZATION] = share
    return values


def disk(setting: RunPlanInput) -> dict[str, float]:
    """Item → maximum bytes: the kept checkpoints (plus one that is written before the oldest is removed), the samples
    of all steps with full-length responses, and one export of the model."""
    config = setting.config
    rules, steps = config.checkpoint, config.train.steps
    written = steps // rules.every if rules.every else 0
    written += 1 if not rules.every or steps % rules.every else 0
    retained = rules.keep + rules.keep_best + (steps // rules.keep_every if rules.keep_every else 0)
    items = {"checkpoints": min(written, retained + 1) * checkpoint_bytes(setting)}
    if config.tracking.save_samples and not config.data.response:
        rollout = config.rollout
        a_step = rollout.prompts_per_step * rollout.samples_per_prompt
        recorded = min(config.tracking.token_samples, a_step) * setting.sample_tokens * RECORDED_TOKEN_BYTES
        items["samples"] = steps * (a_step * (setting.sample_tokens * TOKEN_BYTES + SAMPLE_BYTES) + recorded)
    exported = setting.trained_parameters() * 4 if config.lora.rank else setting.policy.parameters * setting.bytes_each
    return items | {"an export": exported}
