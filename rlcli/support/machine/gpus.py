"""GPU functions that torch.accelerator lacks, and names that are CUDA's. No other module has them.

A torch that is built for ROCm drives AMD's GPUs as `torch.cuda`: devices are called `cuda` there too, and RCCL `nccl`.
For streams, synchronization and memory, other modules use torch.accelerator.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
from datetime import timedelta
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroupNCCL, Store

GROUPS = "cpu:gloo,cuda:nccl"
"""The backends of a process group of workers on GPUs, for tensors of each device."""

HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Environment variables that hide all GPUs from a process."""

AMD_DRIVER = Path("/dev/kfd")

NVIDIA_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files of NVIDIA's driver: on Linux, and on WSL."""

NVML = "libnvidia-ml.so.1"


def for_rocm() -> bool:
    """True if the installed torch is built for ROCm, by its version (`2.13.0+rocm7.2`): nothing is imported."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return "rocm" in metadata.version("torch")
    return False


def visible_variable() -> str:
    """The environment variable that lists the GPUs visible to a process. With AMD's GPUs Ray sets HIP's."""
    return "HIP_VISIBLE_DEVICES" if for_rocm() else "CUDA_VISIBLE_DEVICES"


def has_gpu() -> bool:
    """True if this machine has a GPU of the maker that torch is built for. Nothing is imported. `nvidia-smi` has to
    list one (it may be installed on a machine without), or torch to detect one: containers may lack the tool."""
    if for_rocm():
        return AMD_DRIVER.exists()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if "GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout:
            return True
    return bool(seen_by_torch())


def has_nvml() -> bool:
    """True if NVIDIA's management library works here, by which Ray and vLLM detect GPUs. A container has it if its
    NVIDIA_DRIVER_CAPABILITIES contain `utility`."""
    try:
        return bool(ctypes.CDLL(NVML).nvmlInit_v2() == 0)
    except (OSError, AttributeError):
        return False


def seen_by_torch() -> tuple[tuple[str, int], ...]:
    """Name and bytes of each GPU that torch detects in another process, since this one must not initialise a GPU. Empty
    without a driver of NVIDIA's."""
    return _query_torch() if any(path.exists() for path in NVIDIA_DRIVERS) else ()


@cache
def _query_torch() -> tuple[tuple[str, int], ...]:
    code = (
        "import json, torch; print(json.dumps([(torch.cuda.get_device_name(i), "
        "torch.cuda.get_device_properties(i).total_memory) for i in range(torch.cuda.device_count())]))"
    )
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True
        )
        return tuple((name, memory) for name, memory in json.loads(process.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()  # no torch, or one that does not start


def gpu_available() -> bool:
    """True if torch can use a GPU in this process."""
    import torch

    return bool(torch.cuda.is_available())


def capability() -> tuple[int, int]:
    """The compute capability of this process's GPU; on ROCm the numbers of its architecture (9, 4 for gfx942)."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return major, minor


def gpu_rng_state() -> Tensor:
    """The state of the GPU's random number generator, a tensor of bytes on the CPU."""
    import torch

    return torch.cuda.get_rng_state()


def set_gpu_rng_state(state: Tensor) -> None:
    """Restore the state that `gpu_rng_state` returned."""
    import torch

    torch.cuda.set_rng_state(state)


def tensor_group(store: Store, rank: int, world: int, timeout: timedelta) -> ProcessGroupNCCL:
    """A process group for tensors on GPUs, in addition to the default group."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world, options)


def describe() -> dict[str, Any]:
    """The installed torch: version; build (`CUDA 13.0`, `ROCm 7.2` or `CPU build`); gpus: name and bytes of each that
    it detects."""
    import torch

    builds = {"CUDA": torch.version.cuda, "ROCm": getattr(torch.version, "hip", None)}
    return {
        "version": torch.__version__,
        "build": next((f"{name} {number}" for name, number in builds.items() if number), "CPU build"),
        "gpus": [
            (torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory)
            for i in range(torch.cuda.device_count())
        ],
    }
