"""The processor's name and instruction sets, from /proc/cpuinfo."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@lru_cache
def name() -> str:
    """Model name, as in `AMD EPYC 9454P`; empty if unknown."""
    return _field("model name")


@lru_cache
def instructions() -> frozenset[str]:
    """Instruction sets as the kernel names them, such as `avx2` and `avx512_bf16`; empty if unknown."""
    return frozenset(_field("flags").split())


def runs_vllm() -> bool:
    """True if vLLM's builds for x86-64 CPUs run here: they need AVX2. True if the processor is unknown."""
    return platform.machine() != "x86_64" or not instructions() or "avx2" in instructions()


def _field(field: str) -> str:
    """The value of a field for the first core."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == field), "")
