"""Constants of devices and libraries that the short measurement of a machine does not find."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Constants:
    """Constants without a formula. Those of CPUs were measured on one machine (docs/planning.md), those of GPUs are
    assumed."""

    base_with_engine: float = 636 * MIB
    """Bytes of a process with an engine before the first weight: Python and the libraries, in host memory."""
    base: float = 515 * MIB
    """The same without an engine."""
    first_use_with_engine: float = 115 * MIB
    """CPUs: bytes added in the first step by a process with an engine: library code and buffers."""
    first_use: float = 25 * MIB
    """The same without an engine."""
    context: float = 600 * MIB
    """GPUs: bytes of the CUDA context with the workspace of cuBLAS."""
    nccl: float = 400 * MIB
    """GPUs: bytes of NCCL's buffers, with several ranks."""
    graphs: float = 256 * MIB
    """GPUs: bytes of vLLM's CUDA graphs, which stay allocated while it sleeps."""
    graphs_per_layer: float = 8 * MIB
    """Bytes of them for each layer."""
    engine_rest: float = 512 * MIB
    """GPUs: bytes of vLLM's other buffers, its sampler's, and the libraries that it loads."""
    heap_always: float = 31 * MIB
    """CPUs: bytes of heap fragmentation of any worker."""
    heap_temporary: float = 0.115
    """Fragmentation as a share of all temporary memory."""
    heap_rounded: float = 0.69
    """Fragmentation as a share of the rounding of temporary tensors."""
    heap_moments: float = 0.17
    """Fragmentation as a share of the optimizer's moments, which are allocated after the first update."""
    heap_gathered: float = 1.6
    """Fragmentation as a share of temporarily gathered weights."""
    over_flops: float = 1 / 0.45
    """Data sheet: measured time of matrix products over the time at the peak rate."""
    over_reading: float = 1 / 0.6
    """The same for reading memory."""
    over_links: float = 1 / 0.6
    """The same for links."""
    decode_step_s: float = 0.002
    """GPUs: seconds of scheduling and sampling of a decoding step; tenfold without CUDA graphs."""
