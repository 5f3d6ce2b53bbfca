"""Error messages for a worker that died, failed or ran out of memory."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from pathlib import Path

from rlcli.errors import RunFailed

OFFLOAD_HINT = "on GPUs set train.offload (optimizer, or all)"
PLAN_HINT = "rlcli plan shows what each phase takes, and what fits"
ENGINE_MEMORY_HINT = (
    f"lower rollout.gpu_memory_utilization, rollout.kv_cache_mb or rollout.max_concurrent, {OFFLOAD_HINT}"
)
TRAINER_MEMORY_HINT = (
    "lower train.tokens_per_microbatch, set model.gradient_checkpointing (true, or on GPUs offload), "
    "raise cluster.workers, or train an adapter with lora.rank"
)
SYNC_MEMORY_HINT = f"lower rollout.gpu_memory_utilization, {OFFLOAD_HINT}"
MEMORY_HINTS = {
    "rollout": ENGINE_MEMORY_HINT,
    "sync_weights": SYNC_MEMORY_HINT,
    "load_weight_bucket": SYNC_MEMORY_HINT,
    "receive_broadcast": SYNC_MEMORY_HINT,
    "release_rollout_memory": SYNC_MEMORY_HINT,
    "build": f"{ENGINE_MEMORY_HINT}; {TRAINER_MEMORY_HINT}",
}
"""Hint by the method that runs out of memory; TRAINER_MEMORY_HINT for methods that are not listed."""

_OOM_TYPES = {"OutOfMemoryError", "MemoryError"}  # torch's by name: the command line does not import torch
_OOM_TEXT = re.compile(
    r"out of memory|DefaultCPUAllocator|bad_alloc|cannot allocate memory|_ALLOC_FAILED"
    # vLLM's messages before it allocates.
    r"|free memory on device|no available memory for the cache|larger than the available KV cache memory",
    re.I,
)
_GPU_TEXT = re.compile(
    r"\bECC\b|NVLink|GPU is lost|fallen off the bus|unspecified launch failure|busy or unavailable", re.I
)
_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError", "GetTimeoutError", "ObjectLostError"}
_PEER_TEXT = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|timed out waiting|gloo.*(timeout|timed out)", re.I
)


def memory_hint(method: str) -> str:
    """Hint for `method` when it runs out of memory."""
    return f"{MEMORY_HINTS.get(method, TRAINER_MEMORY_HINT)}; {PLAN_HINT}"


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` is a failed allocation in the process that raised it."""
    return type(error).__name__ in _OOM_TYPES or bool(_OOM_TEXT.search(str(error)))


def is_peer_failure(error: BaseException) -> bool:
    """True if `error` means that another process is gone, which is the one to report."""
    return type(error).__name__ in _PEER_TYPES or bool(_PEER_TEXT.search(str(error)))


def is_gpu_failure(error: BaseException) -> bool:
    """True if `error` is a failed GPU, after which another process may succeed. The effects of a wrong index on a
    kernel (`illegal memory access`, `device-side assert`) would happen again."""
    return type(error).__name__ == "AcceleratorError" and bool(_GPU_TEXT.search(str(error)))


def out_of_memory_error(rank: int, method: str, error: BaseException) -> RunFailed:
    """The error for a worker that ran out of memory. Not retried: it would happen again."""
    lines = str(error).strip().splitlines()
    return RunFailed(
        f"worker {rank} ran out of memory in {method}: {lines[0] if lines else type(error).__name__}",
        memory_hint(method),
        who=f"worker {rank}",
    )


def actor_died(rank: int, method: str, death: Exception, log: Path, tail: str, oom_kills: int) -> RunFailed:
    """The error for an actor that is gone. tail: the end of its log; oom_kills: number of processes that the kernel of
    this machine has killed for lack of memory since the worker was started."""
    text, who = str(death).strip(), f"worker {rank}"
    hint = memory_hint(method)
    # Its log is more informative than Ray, unless the process ended before it wrote any.
    ending = f"; its log {log} ends: {tail}" if tail else f": {_ray_summary(text)}"
    if getattr(death, "actor_init_failed", False):  # Its constructor raised, and would raise again.
        return RunFailed(f"{who} died in {method}{ending}", who=who)
    failed = partial(RunFailed, retry=True, who=who)
    if "running low on memory" in text or type(death).__name__ == "OutOfMemoryError":
        return failed(f"{who} was killed in {method}: its machine{_node_address(text)} ran out of memory{ending}", hint)
    if re.search(r"node (has died|died|is dead|was terminated|has been marked dead)", text, re.I):
        return failed(f"{who} died in {method}: its machine{_node_address(text)} is gone{ending}")
    if oom_kills:
        cause = "the kernel has killed a process on this machine for lack of memory"
        return failed(f"{who} was killed in {method}, and {cause}{ending}", hint)
    return failed(f"{who} died in {method}{ending}", f"if it was killed because memory ran out: {hint}")


def kernel_oom_kills() -> int:
    """Number of processes that this machine's kernel has killed for lack of memory; 0 if it does not count them."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def last_line(error: BaseException) -> str:
    """The last line of an error: in Ray's messages, the cause."""
    return str(error).strip().splitlines()[-1].strip() if str(error).strip() else type(error).__name__


def _ray_summary(text: str) -> str:
    """The most informative line of Ray's message, which explains at length how to configure Ray."""
    lines = text.splitlines()
    memory = [line.strip() for line in lines if "Memory on the node" in line]
    return (memory or [line.strip() for line in lines[-1:]] or ["the cause is unknown"])[0]


def _node_address(text: str) -> str:
    match = re.search(r"\bip: (\S+)|IP: ([\d.]+)", text)
    return f" {match[1] or match[2]}" if match else ""
