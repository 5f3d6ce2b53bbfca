"""Memory that the heap of a CPU worker holds besides live tensors: fragmentation, and freed memory that it retains.

Freed memory is not returned to the system (`rlcli.cluster.process.malloc`): the peak of temporary memory, in an update
or a checkpoint's copy, stays for the rest of the run, and later phases reuse it. The shares
are measured (docs/planning.md), with jemalloc.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlcli_planner.activations import kept_bytes
from rlcli_planner.model_shape import ModelShape
from rlcli_planner.plan_input import RunPlanInput

CLASSES = 4
"""Number of jemalloc size classes between two powers of two."""


def wasted(setting: RunPlanInput, shape: ModelShape, parts: dict[str, float], moments: float) -> float:
    """Holes in an update of `shape` with the temporary `parts`. moments: bytes of the optimizer's moments."""
    share = setting.device.constants
    holes = share.heap_temporary * sum(parts.values()) + share.heap_rounded * rounding(setting, shape)
    gathered = share.heap_gathered * parts.get("gathered weights", 0.0)
    return holes + share.heap_moments * moments + gathered + share.heap_always


def rounding(setting: RunPlanInput, shape: ModelShape) -> float:
    """Rounding of a pass's activations: computed as if the model were wider by it."""
    pack, run = setting.pack, setting.passing(trained_whole=shape != setting.policy)

    def width(nominal: int, tokens: float) -> float:
        return size_class(tokens * run.bytes_each * nominal) / (tokens * run.bytes_each)

    head_dim = round(width(shape.query, pack.attention_tokens) / shape.heads)
    wider = replace(
        shape,
        hidden=round(width(shape.hidden, pack.tokens)),
        intermediate=round(width(shape.intermediate, pack.tokens)),
        head_dim=head_dim,
        rotated=shape.rotated * head_dim // shape.head_dim,
    )
    return kept_bytes(wider, run, pack) - kept_bytes(shape, run, pack)


def size_class(size: float) -> int:
    """Bytes that jemalloc allocates for a large tensor of `size` bytes.

    >>> size_class(5 << 20) / (1 << 20), size_class((5 << 20) + 1) / (1 << 20)
    (5.0, 6.0)
    """
    power = (math.ceil(size) - 1).bit_length()  # the exponent of the next power of two
    step = max(1, (1 << power) // 2 // CLASSES)
    return -(-math.ceil(size) // step) * step
