"""GPUs: what torch.accelerator does not offer, and names that are CUDA's. No other module has them.

A torch that is built for ROCm drives AMD's GPUs as `torch.cuda`: devices are called `cuda` there too, and RCCL `nccl`.
Streams, synchronization and memory need nothing from here: other modules use torch.accelerator.
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
from typing import Any

GROUPS = "cpu:gloo,cuda:nccl"
"""The backends of a process group of workers on GPUs, for tensors of each device."""

HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Environment of a process that is to see no GPU."""

AMD_DRIVER = Path("/dev/kfd")

NVIDIA_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""What a driver of NVIDIA's makes: on Linux, and on Windows' Linux."""

NVML = "libnvidia-ml.so.1"


def for_rocm() -> bool:
    """Whether the installed torch is built for ROCm, by its version (`2.13.0+rocm7.2`): nothing is imported."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return "rocm" in metadata.version("torch")
    return False


def visible_variable() -> str:
    """The variable that lists the GPUs which a process sees. With AMD's GPUs Ray sets HIP's."""
    return "HIP_VISIBLE_DEVICES" if for_rocm() else "CUDA_VISIBLE_DEVICES"


def has_gpu() -> bool:
    """Whether this machine has a GPU of the maker that torch is built for. Nothing is imported. `nvidia-smi` has to
    list one (it may be installed on a machine without), or torch to see one: containers may lack the tool."""
    if for_rocm():
        return AMD_DRIVER.exists()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if "GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout:
            return True
    return bool(seen_by_torch())


def has_nvml() -> bool:
    """Whether NVIDIA's management library works here, through which Ray and vLLM look for GPUs. A container has it if
    its NVIDIA_DRIVER_CAPABILITIES contain `utility`."""
    try:
        return bool(ctypes.CDLL(NVML).nvmlInit_v2() == 0)
    except (OSError, AttributeError):
        return False


def seen_by_torch() -> tuple[tuple[str, int], ...]:
    """Name and bytes of each GPU that torch sees, asked in another process, since this one is to hold no GPU. Empty
    without asking if no driver of NVIDIA's is there."""
    return _asked_torch() if any(path.exists() for path in NVIDIA_DRIVERS) else ()


@cache
def _asked_torch() -> tuple[tuple[str, int], ...]:
    code = (
        "import json, torch; print(json.dumps([(torch.cuda.get_device_name(i), "
        "torch.cuda.get_device_properties(i).total_memory) for i in range(torch.cuda.device_count())]))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True
        )
        return tuple((name, memory) for name, memory in json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()  # no torch, or one that does not start


def gpu_available() -> bool:
    """Whether torch can use a GPU in this process."""
    import torch

    return bool(torch.cuda.is_available())


def capability() -> tuple[int, int]:
    """The compute capability of this process's GPU; on ROCm the numbers of its architecture (9, 4 for gfx942)."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return major, minor


def gpu_rng_state() -> Any:
    """The state of the GPU's random number generator, a tensor on the CPU."""
    import torch

    return torch.cuda.get_rng_state()


def set_gpu_rng_state(state: Any) -> None:
    """Continue from `gpu_rng_state`."""
    import torch

    torch.cuda.set_rng_state(state)


def tensor_group(store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    """A process group for tensors on GPUs, beside the default group."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world, options)


def describe() -> dict[str, Any]:
    """What torch is: version; build (`CUDA 13.0`, `ROCm 7.2` or `CPU build`); gpus: name and bytes of each that it
    sees."""
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
