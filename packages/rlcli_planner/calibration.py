"""What the planner assumes of a device and of the installed libraries, and no measurement of two seconds finds."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Constants:
    """Figures that no formula gives. The defaults for CPUs were measured on one machine (docs/planning.md), those for
    GPUs are assumed.

    Bytes of a process before the first weight: base_with_engine, base (CPUs; on GPUs host memory): Python and the
    libraries; context, nccl (GPUs): the CUDA context with cuBLAS's workspace, and with several ranks NCCL's buffers.
    first_use_with_engine, first_use: added by the end of the first step (CPUs): more of the libraries' code, and their
    buffers.

    Bytes of vLLM on GPUs: graphs, graphs_per_layer: CUDA graphs, which stay while it sleeps; engine_rest: its buffers,
    its sampler's, and the libraries that it loads.

    Holes of the heap on CPUs: heap_always, in bytes, and as shares of: heap_temporary: all temporary memory;
    heap_rounded: the rounding of its tensors; heap_moments: the optimizer's moments, which are allocated after the
    first update; heap_gathered: weights that are gathered temporarily.

    Times of devices of which only the data sheet is known: over_flops, over_reading, over_links: how many times as long
    as at the peak rate of matrix products, memory and links; decode_step_s: seconds of scheduling and sampling for each
    token step on a GPU, tenfold without CUDA graphs.
    """

    base_with_engine: float = 636 * MIB
    base: float = 515 * MIB
    first_use_with_engine: float = 115 * MIB
    first_use: float = 25 * MIB
    context: float = 600 * MIB
    nccl: float = 400 * MIB
    graphs: float = 256 * MIB
    graphs_per_layer: float = 8 * MIB
    engine_rest: float = 512 * MIB
    heap_always: float = 31 * MIB
    heap_temporary: float = 0.115
    heap_rounded: float = 0.69
    heap_moments: float = 0.17
    heap_gathered: float = 1.6
    over_flops: float = 1 / 0.45
    over_reading: float = 1 / 0.6
    over_links: float = 1 / 0.6
    decode_step_s: float = 0.002
