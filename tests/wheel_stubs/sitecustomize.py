"""A GPU that is not there, for processes that import a wheel of vLLM for CUDA and compute nothing.

Python imports this file at its start in every process that has the folder in PYTHONPATH, so that the processes in which
vLLM looks at models see the same. WHEEL: the folder of the wheel; CAPABILITY: of the GPU (`9.0`); GPU: its name.
Compiled parts of vLLM, which need CUDA's libraries, are empty modules, NVML is one that answers, and torch's own checks
of operators answer that they are supported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

WHEEL = Path(os.environ["WHEEL"])
NVML = "vllm.third_party.pynvml"
ANSWERS = {
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetCudaComputeCapability": tuple(map(int, os.environ["CAPABILITY"].split("."))),
    "nvmlDeviceGetName": os.environ["GPU"],
    "nvmlDeviceGetUUID": "GPU-0",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 << 30, free=80 << 30, used=0),
}


class Stubs:
    """Finds the compiled modules of the wheel, and NVML's, before Python does."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        folder, _, last = fullname.replace(".", "/").rpartition("/")
        compiled = fullname.startswith("vllm.") and any((WHEEL / folder).glob(f"{last}.*so"))
        return ModuleSpec(fullname, self) if compiled or fullname == NVML else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        if spec.name == NVML:
            module.NVMLError = module.NVMLError_NotSupported = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]
        module.__getattr__ = _function  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def _function(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: ANSWERS.get(name)


def supported_operators() -> None:
    """Let torch's namespaces of vLLM's operators have those that say whether others are supported."""
    import torch

    space = torch._ops._OpNamespace
    looked_up = space.__getattr__

    def __getattr__(self: Any, name: str) -> Any:
        try:
            return looked_up(self, name)
        except AttributeError:
            if "supports" in name or "supported" in name:
                return lambda *args: True
            raise

    space.__getattr__ = __getattr__  # type: ignore[method-assign]


sys.meta_path.insert(0, Stubs())
supported_operators()
