"""Checks of the machine that a run uses, and what follows from its device: dtype and size of the KV cache."""

from __future__ import annotations

import os
from collections.abc import Callable

from rlcli.cluster.ray_session import check_local, cluster_address, resolve_device, with_origin
from rlcli.config.schema import RunConfig
from rlcli.errors import ConfigError, RlcliError, SetupError
from rlcli.launch.planner import planner
from rlcli.support.machine import processor
from rlcli.support.machine.gpus import NVML, for_rocm, has_gpu, has_nvml

WITHOUT_FLOAT16 = ("gemma3_text", "glm4", "gpt_oss")
"""Kinds of models that vLLM does not run in float16."""


def check_machine(config: RunConfig) -> str:
    """The device that workers run on, after checking that they fit.

    On this machine's CPUs at most one worker a core; two are always allowed, so that features with several can be used.
    """
    device = resolve_device(config.cluster.device, config.cluster.address)
    check_device(config, device)
    if not cluster_address(config.cluster.address):
        check_local()
        if device == "cuda":
            check_nvml(config)
    cores = len(os.sched_getaffinity(0))
    if device == "cpu" and not cluster_address(config.cluster.address) and config.all_workers > max(2, cores):
        pools = {
            "cluster": config.cluster.workers,
            "critic": config.critic.workers,
            "teacher": config.teacher.workers,
            "rollout": config.rollout.workers,
        }
        listed = " + ".join(f"{name}.workers = {count}" for name, count in pools.items() if count)
        raise ConfigError(
            f"{listed}, but this machine has {cores} CPU cores",
            f"give {max(2, cores)} workers or fewer in all, or name a Ray cluster with --ray-address",
        )
    return device


def check_device(config: RunConfig, device: str) -> None:
    """Refuse GPU-only settings if workers run on CPUs, and vLLM on a processor that its builds do not run on."""
    if config.rollout.engine == "vllm" and device == "cpu" and not processor.runs_vllm():
        raise SetupError(
            f"this processor ({processor.name()}) has no AVX2, which vLLM's builds for CPUs need",
            "use another engine: --set rollout.engine=transformers",
        )
    if config.rollout.quantization and device == "cpu":
        raise ConfigError(
            f"rollout.quantization = {config.rollout.quantization}, but CPUs have no 8-bit floating point "
            "arithmetic, and workers run on them (cluster.device)",
            "leave it out",
        )
    if config.model.compile and device == "cpu":
        raise ConfigError(
            "model.compile = true, but workers run on CPUs (cluster.device), and layers are compiled only for GPUs",
            "leave it out",
        )


def check_nvml(config: RunConfig) -> None:
    """Raise `SetupError` if vLLM would find no GPU on this machine, although torch does."""
    rollout = config.rollout
    starts_vllm = rollout.engine == "vllm" or (rollout.engine == "server" and not rollout.server_urls)
    if starts_vllm and not for_rocm() and not has_nvml():
        raise SetupError(
            f"torch sees a GPU here, but NVIDIA's management library ({NVML}) does not work, through which vLLM looks "
            "for GPUs",
            "give the container NVIDIA_DRIVER_CAPABILITIES=compute,utility, or --set rollout.engine=transformers",
        )


def check_float16(dtype: str, kind: str) -> None:
    if dtype == "float16" and kind in WITHOUT_FLOAT16:
        raise ConfigError(
            f"model.dtype = float16: activations of '{kind}' models exceed its range, and vLLM refuses them",
            "give bfloat16 or float32",
        )


def compute_dtype(config: RunConfig, device: str) -> str:
    """`float32`, `bfloat16` or `float16`; before the model is known, float32 on CPUs by `auto`."""
    return config.model.dtype if config.model.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"


def with_cpu_dtype(config: RunConfig, device: str, parameters: Callable[[], int]) -> RunConfig:
    """The configuration with the precision that `model.dtype = auto` stands for on CPUs. parameters: counts those of
    the model.

    It is float32 unless bfloat16 is known to be faster and does as well: an adapter is added to the weights exactly in
    float32 alone, and the machines of a running cluster are not those that are measured here.
    """
    if config.model.dtype != "auto" or device != "cpu":
        return config
    if config.lora.rank or cluster_address(config.cluster.address):
        return config.changed(model={"dtype": "float32"})
    from rlcli.support.machine.precision import cpu_dtype

    return config.changed(model={"dtype": cpu_dtype(parameters())})


def parameter_count(path: str) -> int:
    """Parameters of the model by its config.json, in milliseconds; 0 if it cannot be used, which `check_model`
    reports."""
    try:
        return planner().parameters(path)
    except RlcliError:
        return 0


def kv_cache_bytes(config: RunConfig, device: str, dtype: str, longest: int) -> int | None:
    """The configured size; else on CPUs as the workload requires; on GPUs None: vLLM measures free memory. longest:
    tokens of the longest sample that the run's prompts allow."""
    rollout = config.rollout
    if rollout.kv_cache_mb is not None:
        return rollout.kv_cache_mb << 20
    if device == "cuda":
        return None
    return planner().kv_cache_bytes(config, 4 if dtype == "float32" else 2, longest)


def note_unused_gpu(config: RunConfig, device: str, on_note: Callable[[str], None]) -> None:
    """Print a note if the run uses the CPUs of a machine with a GPU because the installed packages are built for
    them."""
    device_set = config.cluster.device != "auto" or bool(cluster_address(config.cluster.address))
    if device == "cpu" and not device_set and has_gpu():
        on_note(
            "this machine has a GPU, but the installed torch or vLLM is built for CPUs: the run takes the CPUs. "
            "RLCLI_EXTRA=gpu scripts/env installs what uses the GPU; cluster.device = cpu ends this note"
        )


def note_open_cluster(config: RunConfig, on_note: Callable[[str], None]) -> None:
    """Print a note if the run joins a cluster without a token."""
    address = with_origin(config.cluster.address)
    if address and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        on_note(
            f"the Ray cluster at {address} is joined without a token (RAY_AUTH_MODE is not token): whoever reaches its "
            "ports can run code on its machines"
        )
