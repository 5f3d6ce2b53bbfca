"""Find the largest sizes that fit, and changes with which a run would fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlcli.config.schema import RunConfig
from rlcli_planner.calibration import MIB
from rlcli_planner.engine_memory import MIN_KV_CACHE, holds_longest, kv_cache, sample_bytes, smallest_cache
from rlcli_planner.known_devices import GIB
from rlcli_planner.phase_memory import OUTSIDE, PhaseMemory, critic_worker, engine_worker, phases, teacher_worker
from rlcli_planner.plan_input import Keys, RunPlanInput, Sections
from rlcli_planner.step_time import step_seconds, times

GPU_SHARE, CPU_SHARE = 0.95, 0.9
"""Share of a device's memory that a plan may use: the rest covers what allocators leave unused and the error of the
prediction."""
CERTAIN = ("base", "weights", "optimizer", "reference", "critic", "teachers", "engine's weights")
"""Parts of a worker's memory that do not depend on the lengths of samples."""
STEP = 128
USEFUL_ON_GPU, USEFUL_ON_CPU = 32768, 8192
"""Tokens of a micro-batch beyond which it is not faster: kernels are saturated long before."""
HIGHEST_UTILIZATION = 0.95
ENOUGH_TOKENS = 2048
"""Tokens of a micro-batch on CPUs that are worth more than a KV cache for all samples at once."""
CONTEXTS = (2, 4, 8)
"""Values of parallel.context that are tried."""


def budget(setting: RunPlanInput) -> float:
    """Bytes that one worker may use."""
    device = setting.device
    if not device.is_cpu:
        return GPU_SHARE * device.memory
    share = max(CPU_SHARE * device.memory - OUTSIDE, 0.0) / setting.config.all_workers
    return min(share, CPU_SHARE * device.process_limit)


def all_phases(setting: RunPlanInput) -> list[PhaseMemory]:
    """Phases of a training worker, of one that only generates, and of one that only trains the critic."""
    separate = (engine_worker(setting), critic_worker(setting), teacher_worker(setting))
    return phases(setting) + [phase for phase in separate if phase]


def fits(setting: RunPlanInput) -> bool:
    """True if a run fits whatever the lengths of its responses are."""
    return all(phase.total <= budget(setting) for phase in all_phases(setting)) and _engine_works(setting)


SLEEPS = ("none", "cache", "all")
"""Values of `rollout.sleep`, from the one that releases least."""


def with_least_sleep(setting: RunPlanInput) -> RunPlanInput:
    """The setting with the value that `rollout.sleep = auto` stands for: the least with which it fits."""
    rollout = setting.config.rollout
    if rollout.sleep != "auto" or setting.device.is_cpu or not setting.hosts_engine:
        return setting
    tried = [
        setting.with_keys(rollout={"sleep": sleep}) for sleep in SLEEPS if sleep != "cache" or rollout.engine == "vllm"
    ]
    return next(filter(fits, tried), tried[-1])


def cannot_fit(setting: RunPlanInput) -> bool:
    """True if the lower bound of every run of these models exceeds the memory: processes, weights, moments."""
    device, workers = setting.device, setting.config.all_workers if setting.device.is_cpu else 1
    available = min(device.memory / workers, device.process_limit if device.is_cpu else device.memory)
    certain = (sum(phase.parts.get(part, 0.0) for part in CERTAIN) for phase in all_phases(setting))
    return max(certain) > available or not _engine_works(setting)


def verdict(setting: RunPlanInput) -> str:
    """`fits`, whatever the responses are; `may not fit`, if they are long; or `does not fit`."""
    if fits(setting):
        return "fits"
    return "does not fit" if cannot_fit(setting) else "may not fit"


def _engine_works(setting: RunPlanInput) -> bool:
    """True if the KV cache holds at least one sample of maximum length."""
    return not setting.has_engine or holds_longest(setting)


def _held_share(setting: RunPlanInput) -> float:
    """Number of samples of maximum length that the KV cache holds."""
    return kv_cache(setting) / sample_bytes(setting, setting.max_length)


def shortfall(setting: RunPlanInput) -> str:
    """Why a run does not fit."""
    peak = max(all_phases(setting), key=lambda phase: phase.total)
    if peak.total <= budget(setting):
        key = "gpu_memory_utilization" if setting.kv_cache_bytes is None else "kv_cache_mb"
        return (
            f"an engine's KV cache holds {_held_share(setting):.2g} of a sample of {setting.max_length} tokens, but "
            f"must hold one (rollout.{key})"
        )
    largest_part = max(peak.parts, key=lambda part: peak.parts[part])
    return (
        f"{peak.name} needs {peak.total / GIB:.1f} GiB (mostly {largest_part}), but a worker may use "
        f"{budget(setting) / GIB:.1f} GiB"
    )


def smallest_microbatch(config: RunConfig) -> int:
    """The smallest train.tokens_per_microbatch that the rules allow: one sample, or a pair."""
    from rlcli.algorithms.build import build_algorithm

    algorithm = build_algorithm(**config.algorithm.model_dump(), trial_calls=False)
    return config.max_length * (2 if algorithm.selects_pairs else 1)


def largest_microbatch(setting: RunPlanInput) -> int | None:
    """The largest useful train.tokens_per_microbatch that fits; None if none fits."""
    least = smallest_microbatch(setting.config)
    a_rank = setting.samples / setting.config.train.minibatches / setting.ranks
    useful = USEFUL_ON_CPU if setting.device.is_cpu else USEFUL_ON_GPU
    upper = max(least, min(useful, int(-(-a_rank // 1) * setting.max_length)))
    training = ("old_log_probs", "reference", "teacher", "critic", "update")

    def holds(tokens: int) -> bool:
        tried = setting.with_keys(train={"tokens_per_microbatch": tokens})
        return all(phase.total <= budget(tried) for phase in all_phases(tried) if phase.name in training)

    return _largest(least, upper, STEP, holds)


@dataclass(frozen=True)
class CpuSizes:
    """Sizes that follow the memory of a machine without GPUs."""

    tokens: int
    """`train.tokens_per_microbatch`."""
    kv_cache_bytes: int | None
    """KV cache of an engine."""
    recompute: bool
    """True if `model.gradient_checkpointing` has to be turned on."""
    fits: bool
    """True if a run with them fits."""


def sizes_on_cpu(setting: RunPlanInput, *, tokens: bool, cache: bool, recompute: bool) -> CpuSizes:
    """The configured sizes, lowered as far as memory requires. tokens, cache, recompute: which of them may change. The
    KV cache shrinks only where that leaves a micro-batch of ENOUGH_TOKENS; layers are recomputed only if nothing else
    is enough."""
    sizes = _sizes_on_cpu(setting, tokens=tokens, cache=cache)
    if sizes.fits or not recompute or setting.config.model.gradient_checkpointing:
        return sizes
    recomputed = _sizes_on_cpu(setting.with_keys(model={"gradient_checkpointing": True}), tokens=tokens, cache=cache)
    return replace(recomputed, recompute=True)


def _sizes_on_cpu(setting: RunPlanInput, *, tokens: bool, cache: bool) -> CpuSizes:
    configured = setting.config.train.tokens_per_microbatch
    least = min(smallest_microbatch(setting.config), configured)

    def largest(tried: RunPlanInput) -> int | None:
        if fits(tried):
            return configured
        return _largest(least, configured, STEP, lambda size: fits(_with_tokens(tried, size))) if tokens else None

    tokens_per_microbatch, size = largest(setting), setting.kv_cache_bytes
    if cache and size is not None:
        lowest = max(MIN_KV_CACHE, smallest_cache(setting.config, setting.policy, setting.bytes_each))
        enough = min(configured, max(least, ENOUGH_TOKENS))
        while (tokens_per_microbatch is None or tokens_per_microbatch < enough) and size > lowest:
            size = max(lowest, size // 2)
            tokens_per_microbatch = largest(replace(setting, kv_cache_bytes=size))
    if tokens_per_microbatch is None:
        return CpuSizes(least if tokens else configured, size, recompute=False, fits=False)
    return CpuSizes(tokens_per_microbatch, size, recompute=False, fits=True)


def _with_tokens(setting: RunPlanInput, tokens: int) -> RunPlanInput:
    return setting.with_keys(train={"tokens_per_microbatch": tokens})


def largest_utilization(setting: RunPlanInput) -> float | None:
    """The largest rollout.gpu_memory_utilization that fits; None if none does, or if it has no effect (on CPUs, and
    with a KV cache of a given size)."""
    if setting.device.is_cpu or not setting.has_engine or setting.kv_cache_bytes is not None:
        return None

    def holds(percent: int) -> bool:
        tried = setting.with_keys(rollout={"gpu_memory_utilization": percent / 100})
        concerned = [phase for phase in all_phases(tried) if phase.name in ("generate", "sync", "checkpoint")]
        return all(phase.total <= budget(tried) for phase in concerned)

    percent = _largest(1, int(100 * HIGHEST_UTILIZATION), 1, holds)
    if percent is None or not _engine_works(setting.with_keys(rollout={"gpu_memory_utilization": percent / 100})):
        return None
    return percent / 100


def _largest(least: int, upper: int, step: int, holds: Callable[[int], bool]) -> int | None:
    """The largest of `least`, `least + step`, … and `upper` that holds, given that all smaller ones hold too."""
    if not holds(least):
        return None
    if holds(upper):
        return upper
    low, high = 0, (upper - least) // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(least + middle * step) else (low, middle - 1)
    return least + low * step


def solved(setting: RunPlanInput) -> RunPlanInput | None:
    """The setting with the largest sizes that fit; None if no sizes fit."""
    tokens, utilization = largest_microbatch(setting), largest_utilization(setting)
    if tokens is None:
        return None
    sized = setting.with_keys(train={"tokens_per_microbatch": tokens})
    if utilization is not None:
        sized = sized.with_keys(rollout={"gpu_memory_utilization": utilization})
    return sized if fits(sized) else None


@dataclass(frozen=True)
class Fix:
    """A change with which the run fits."""

    keys: Keys
    """Configuration keys to set."""
    cost: str
    """Cost, in words."""
    seconds: float
    """Seconds of a step with it; 0 if unknown."""


def fixes(setting: RunPlanInput) -> list[Fix]:
    """Changes that make a run fit: first those that only cost time, the fastest first, then those that change what is
    trained or need more devices."""
    if larger := _larger_cache(setting):
        return [larger]
    on_gpu = not setting.device.is_cpu
    recompute: Sections = {"model": {"gradient_checkpointing": True}}
    offload_inputs: Sections = {"model": {"gradient_checkpointing": "offload"}}
    tried: list[tuple[Sections, str]] = [(recompute, "recomputes each layer")]
    if on_gpu:
        moments: Sections = {"train": {"offload": "optimizer"}}
        everything: Sections = {"train": {"offload": "all"}}
        tried += [
            (moments, "offloads optimizer states to the host"),
            (recompute | moments, "recomputes each layer, and offloads optimizer states"),
            (recompute | everything, "recomputes each layer, and offloads weights and optimizer"),
            (
                offload_inputs | everything,
                "recomputes each layer from inputs in host memory, and offloads weights and optimizer",
            ),
        ]
    if setting.shards < setting.ranks:
        unreplicated: Sections = {"parallel": {"replicate": 1}}
        tried += [
            (unreplicated, "one copy, sharded over all workers"),
            (unreplicated | recompute, "one copy; recomputes each layer"),
        ]
    divided = [_divided(setting, {}), _divided(setting, recompute)]
    within = [fix for change, cost in tried if (fix := _fix(setting, change, cost))]
    within += [fix for fix in divided if fix]
    within.sort(key=lambda hint: hint.seconds)
    beyond: list[Fix | None] = []
    adapter = recompute if setting.config.lora.rank else recompute | {"lora": {"rank": 32}}
    alone = "trains only an adapter" if adapter != recompute else "recomputes each layer"
    if adapter != recompute:
        beyond.append(_fix(setting, adapter, alone))
    if on_gpu:
        beyond.append(_shared_engine(setting, recompute, "recomputes each layer"))
        if not any(beyond) and adapter != recompute:
            beyond.append(_shared_engine(setting, adapter, alone))
        beyond.append(_more_devices(setting, recompute))
    return within + [hint for hint in beyond if hint]


def _fix(setting: RunPlanInput, change: Sections, cost: str) -> Fix | None:
    sized = solved(setting.with_keys(**change))
    if sized is None:
        return None
    keys: Keys = {f"{section}.{key}": value for section, values in change.items() for key, value in values.items()}
    return Fix(keys, cost, step_seconds(sized, times(sized)))


def _larger_cache(setting: RunPlanInput) -> Fix | None:
    """The KV cache size that holds a sample, if it is set to less."""
    if setting.config.rollout.kv_cache_mb is None or _engine_works(setting):
        return None
    size = math.ceil(sample_bytes(setting, setting.max_length) / MIB)
    sized = solved(replace(setting.with_keys(rollout={"kv_cache_mb": size}), kv_cache_bytes=size * MIB))
    if sized is None:
        return None
    return Fix({"rollout.kv_cache_mb": size}, "the minimum for one sample", step_seconds(sized, times(sized)))


def _more_devices(setting: RunPlanInput, change: Sections) -> Fix | None:
    """The smallest number of devices, by doubling, with which it fits."""
    workers = setting.ranks
    for _ in range(6):
        workers *= 2
        fix = _fix(setting, change | {"cluster": {"workers": workers}}, f"{workers} devices")
        if fix is not None:
            return fix
    return None


def _divided(setting: RunPlanInput, change: Sections) -> Fix | None:
    """Fewest workers that divide each micro-batch's tokens so that it fits, with `change`."""
    configured = setting.config.parallel
    for ranks in CONTEXTS:
        if ranks > configured.context and setting.shards % ranks == 0 and ranks <= setting.policy.heads:
            with_context = change | {"parallel": {"context": ranks}}
            cost = "recomputes each layer, and divides" if change else "divides"
            if fix := _fix(setting, with_context, f"{cost} a micro-batch's tokens over {ranks} workers"):
                return fix
    return None


def _shared_engine(setting: RunPlanInput, change: Sections, cost: str) -> Fix | None:
    """The smallest tensor_parallel with which it fits on the current devices."""
    shared = setting.config.rollout.tensor_parallel * 2
    while shared <= setting.config.engine_workers:
        if setting.policy.heads % shared == 0 and setting.config.engine_workers % shared == 0:
            with_shared_engine = change | {"rollout": {"tensor_parallel": shared}}
            fix = _fix(setting, with_shared_engine, f"{cost}; {shared} devices share an engine")
            if fix is not None:
                return fix
        shared *= 2
    return None
