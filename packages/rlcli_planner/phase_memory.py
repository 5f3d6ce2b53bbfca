"""Peak memory of a worker in bytes, by phase and part: the prediction of the metric `memory/PHASE_gb`."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.support.machine.free_memory import COPY_RESERVE
from rlcli_planner import pass_memory
from rlcli_planner.activations import FLOAT
from rlcli_planner.engine_memory import asleep_bytes, engine_parts, weights
from rlcli_planner.heap_memory import wasted
from rlcli_planner.model_shape import ModelShape
from rlcli_planner.plan_input import Parts, RunPlanInput

OUTSIDE = 3 << 29
"""On CPUs, besides the workers: the driver, Ray's daemons and object store, the scoring service and its processes
(1.5 GiB)."""

PINNED = 1.5
"""Host memory of weights that an engine keeps there in its sleep, as a multiple of their size: torch rounds each pinned
block up to a power of two. An assumption; at most 2."""

TEMPORARY_PARTS = {
    "gathered weights",
    "activations",
    "logits",
    "gradients",
    "sync",
    "engine's activations",
    "checkpoint's copy",
}
"""Temporary parts of a phase, which reuse memory that the heap has retained."""


@dataclass(frozen=True)
class PhaseMemory:
    """Peak memory of one phase of a worker."""

    name: str
    parts: Parts
    """Part → bytes."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def phases(setting: RunPlanInput) -> list[PhaseMemory]:
    """The phases of a worker that trains that occur in the run, in the order of a step."""
    result = [_phase("generate", _trainer(setting, "generate"), engine_parts(setting))] if setting.hosts_engine else []
    if setting.algorithm.needs_old_log_probs(setting.updates):
        parts = pass_memory.without_gradient(setting, setting.policy)
        result.append(_phase("old_log_probs", _trainer(setting, "policy"), parts, asleep_bytes(setting)))
    if setting.algorithm.needs_reference:
        parts = pass_memory.without_gradient(setting, setting.policy)
        result.append(_phase("reference", _trainer(setting, "reference"), parts, asleep_bytes(setting)))
    if setting.hosted_teachers:
        parts = _teaching(setting, setting.hosted_teachers)
        result.append(_phase("teacher", _trainer(setting, "teacher"), parts, asleep_bytes(setting)))
    if setting.hosted_critic is not None:
        parts = pass_memory.without_gradient(setting, setting.hosted_critic)
        result.append(_phase("critic", _trainer(setting, "critic"), parts, asleep_bytes(setting)))
    updating = _passes(setting, setting.policy, setting.hosted_critic)
    result.append(_phase("update", _trainer(setting, "update"), updating, asleep_bytes(setting)))
    engine = engine_parts(setting, idle=True) if setting.hosts_engine else {}
    if setting.has_engine:
        result.append(_phase("sync", _trainer(setting, "sync"), engine, pass_memory.sending(setting)))
    if not setting.device.is_cpu:
        result.append(_phase("checkpoint", _trainer(setting, "checkpoint"), {}, engine))
        return result
    copied = _copied(setting, updating)
    result.append(_phase("checkpoint", _trainer(setting, "checkpoint"), copied, engine))
    heap_bytes = _heap_taken(setting, updating, copied if setting.config.checkpoint.every else {})
    return [_with_heap(phase, heap_bytes) for phase in result]


def _with_heap(phase: PhaseMemory, heap_bytes: float) -> PhaseMemory:
    """On CPUs: the phase, plus the memory that the heap retains after an update and a checkpoint."""
    temporary = sum(size for part, size in phase.parts.items() if part in TEMPORARY_PARTS)
    return _phase(phase.name, phase.parts, {"heap": max(heap_bytes - temporary, 0.0)})


def _heap_taken(setting: RunPlanInput, passing: Parts, copied: Parts) -> float:
    """Memory of all temporary parts. The checkpoint's copy (`copied`) reuses the memory of an update (`passing`), or
    the other way round."""
    held = _trainer(setting, "update")
    critic = setting.hosted_critic
    moments = held["optimizer"]
    if critic is not None:
        numbers = setting.critic_moments(critic)
        moments += held["critic"] * numbers / (critic.parameters + numbers)
    return max(sum(passing.values()), sum(copied.values())) + wasted(setting, setting.policy, passing, moments)


def engine_worker(setting: RunPlanInput) -> PhaseMemory | None:
    """Memory of a worker that only generates, if there are any."""
    if not setting.config.rollout.workers or not setting.has_engine:
        return None
    # On GPUs the copy is in host memory, as the rest of the process is.
    copy = setting.config.copies_weights * setting.device.is_cpu * setting.bytes_each * setting.policy.parameters
    return _phase("generate", _process(setting, True), engine_parts(setting), {"copy of the weights": float(copy)})


def critic_worker(setting: RunPlanInput) -> PhaseMemory | None:
    """Memory of a worker that only trains the value model, if there are any."""
    workers, critic = setting.config.critic.workers, setting.critic
    if not workers or critic is None:
        return None
    critic_setting = setting.with_dedicated_workers(workers)
    weights = FLOAT * critic.parameters / workers
    moments = FLOAT * setting.critic_moments(critic) / workers
    held = _process(critic_setting, False) | {"critic": weights + moments}
    passing = _passes(critic_setting, critic)
    heap = wasted(critic_setting, critic, passing, moments) if critic_setting.device.is_cpu else 0.0
    return _phase("update", held, passing, {"heap": heap})


def teacher_worker(setting: RunPlanInput) -> PhaseMemory | None:
    """Memory of a worker that only holds teachers, if there are any."""
    workers = setting.config.teacher.workers
    if not workers or not setting.teachers:
        return None
    teacher_setting = setting.with_dedicated_workers(workers)
    return _phase(
        "teacher",
        _process(teacher_setting, False),
        {"teachers": _frozen(teacher_setting, teacher_setting.teachers)},
        _teaching(teacher_setting, teacher_setting.teachers),
    )


def _teaching(setting: RunPlanInput, teachers: tuple[ModelShape, ...]) -> Parts:
    """The forward pass of the largest of these teachers."""
    candidates = [pass_memory.without_gradient(setting, shape) for shape in teachers]
    return max(candidates, key=lambda parts: sum(parts.values()))


def _scored(setting: RunPlanInput) -> float:
    """Ids and log-probs of the teachers' likeliest tokens, on a rank that trains, until the update is over."""
    of_token = setting.config.teacher.top_k * (8 + FLOAT)
    return setting.samples / setting.data_ranks * setting.config.rollout.max_response_tokens * of_token


def _frozen(setting: RunPlanInput, shapes: tuple[ModelShape, ...]) -> float:
    """Weights of frozen models on a worker, in compute dtype."""
    return sum(shape.parameters for shape in shapes) * setting.bytes_each / setting.shards


def _phase(name: str, *parts: Parts) -> PhaseMemory:
    """Sum parts of the same name."""
    summed: Parts = {}
    for some in parts:
        for part, size in some.items():
            summed[part] = summed.get(part, 0.0) + size
    return PhaseMemory(name, {part: size for part, size in summed.items() if size})


def base_bytes(setting: RunPlanInput, with_engine: bool) -> float:
    """Memory of a process before the first weight."""
    assumed = setting.device.constants
    if setting.device.is_cpu:
        return assumed.base_with_engine if with_engine else assumed.base
    return assumed.context + (assumed.nccl if setting.config.engine_workers > 1 or setting.ranks > 1 else 0)


def _process(setting: RunPlanInput, with_engine: bool) -> Parts:
    """The base, and what is added on first use: on GPUs that is host memory, and does not count."""
    assumed = setting.device.constants
    used = assumed.first_use_with_engine if with_engine else assumed.first_use
    return {"base": base_bytes(setting, with_engine), "first use": used if setting.device.is_cpu else 0.0}


def _trainer(setting: RunPlanInput, doing: str) -> Parts:
    """Memory of the trained models and the reference. doing: the phase, on which `train.offload` depends."""
    away = "none" if setting.device.is_cpu else setting.config.train.offload
    shards = setting.shards
    updating = doing == "update"
    # On CPUs offloading within the same process gains nothing, so nothing is offloaded.
    models = {
        "policy": away != "all" or doing not in ("generate", "checkpoint"),
        "reference": away != "all" or doing == "reference",
        "critic": away != "all" or doing in ("critic", "update"),
    }
    moments = away == "none" or updating
    parts = _process(setting, setting.hosts_engine)
    parts["weights"] = setting.weight_bytes() / shards * models["policy"]
    parts["optimizer"] = FLOAT * setting.moments() / shards * moments
    if setting.reference_copy:
        parts["reference"] = setting.policy.parameters * setting.bytes_each / shards * models["reference"]
    if setting.device.is_cpu:
        parts["copy of what was sent"] = setting.sent_copy()
    if setting.hosted_teachers and (away != "all" or doing == "teacher"):
        parts["teachers"] = _frozen(setting, setting.hosted_teachers)
    if doing in ("teacher", "critic", "update"):
        parts["teacher's top k"] = _scored(setting)
    if doing in ("policy", "reference", "update") and setting.device.is_cpu:
        parts["pictures"] = setting.patch_bytes
    if setting.hosted_critic is not None:
        critic_weights = FLOAT * setting.hosted_critic.parameters / shards
        critic_moments = FLOAT * setting.critic_moments(setting.hosted_critic) / shards
        parts["critic"] = critic_weights * models["critic"] + critic_moments * moments
    return parts


def _passes(setting: RunPlanInput, *shapes: ModelShape | None) -> Parts:
    """The largest of forward and backward pass or optimizer step, of these models."""
    kinds = (pass_memory.with_gradient, pass_memory.stepping)
    candidates = [parts(setting, shape) for shape in shapes if shape is not None for parts in kinds]
    return max(candidates, key=lambda parts: sum(parts.values()))


def _copied(setting: RunPlanInput, passing: Parts) -> Parts:
    """The checkpoint's copy on CPUs, if one is made: the worker leaves it out where memory is short
    (`rlcli.training.worker.worker.Worker.save_state`). passing: temporary parts of an update."""
    size = checkpoint_bytes(setting) / setting.shards
    held = _trainer(setting, "update") | asleep_bytes(setting)
    resident = sum(held.values()) + _heap_taken(setting, passing, {})
    free = (setting.device.memory - OUTSIDE) / setting.config.all_workers
    free = min(free, setting.device.process_limit) - resident
    return {"checkpoint's copy": size} if size + COPY_RESERVE <= free else {}


def checkpoint_bytes(setting: RunPlanInput) -> float:
    """Size of one checkpoint: the trained weights and their moments, in float32, and frozen parts."""
    trained = setting.trained_parameters() + setting.moments()
    if setting.critic is not None:
        trained += setting.critic.parameters + setting.critic_moments(setting.critic)
    return FLOAT * trained + setting.bytes_each * setting.frozen_parameters


def host_bytes(setting: RunPlanInput) -> float:
    """Host memory of a worker on a machine with GPUs: the process, the checkpoint's copy, the step's images, and what
    is offloaded, with `gradient_checkpointing = offload` each layer's input."""
    assumed = setting.device.constants
    base = assumed.base_with_engine if setting.hosts_engine else assumed.base
    shape, each = setting.policy, setting.bytes_each
    inputs = setting.passing().offload * setting.pack.tokens * each * shape.layers * shape.hidden
    sleeping = PINNED * weights(setting) * (setting.hosts_engine and setting.keeps_weights_in_sleep)
    copies = checkpoint_bytes(setting) / setting.shards + setting.sent_copy()
    return base + _sent_away(setting) + inputs + sleeping + copies + setting.patch_bytes


def engine_host_bytes(setting: RunPlanInput) -> float | None:
    """Host memory of a worker that only generates, on a machine with GPUs; None if there are none. Each worker has a
    copy of all weights, also those that share an engine."""
    if setting.device.is_cpu or not setting.config.rollout.workers or not setting.has_engine:
        return None
    copy = setting.config.copies_weights * setting.bytes_each * setting.policy.parameters
    return setting.device.constants.base_with_engine + copy


def _sent_away(setting: RunPlanInput) -> float:
    """Host memory of a worker for `train.offload`: moments, or also weights, including the frozen ones of an adapter's
    base and of a reference."""
    offload = setting.config.train.offload
    if offload == "none":
        return 0.0
    hosted = setting.hosted_critic
    critic = hosted.parameters if hosted is not None else 0
    away: float = FLOAT * (setting.moments() + (setting.critic_moments(hosted) if hosted is not None else 0))
    if offload == "all":
        away += setting.weight_bytes() + FLOAT * critic
        away += setting.policy.parameters * setting.bytes_each * setting.reference_copy
        away += sum(shape.parameters for shape in setting.hosted_teachers) * setting.bytes_each
    return away / setting.shards
