"""The precision of a model on CPUs with `model.dtype = auto`: bfloat16 if the model is large and bfloat16 is faster."""

from __future__ import annotations

from functools import cache
from time import thread_time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

LEAST_PARAMETERS = 100_000_000
"""Smaller models stay in float32, in which trainer and engine agree closely: products are less of their time."""

LEAST_SPEEDUP = 1.5
"""Below this, work other than products outweighs the time that bfloat16 saves."""

TOKENS, WIDTH = 128, 1024
"""Size of the timed products: 0.13 billion multiplications, a few milliseconds."""

REPEATS = 15


def cpu_dtype(parameters: int) -> str:
    """`bfloat16` or `float32`, for a model with this number of parameters on this machine's processors."""
    if parameters < LEAST_PARAMETERS or bfloat16_speedup() < LEAST_SPEEDUP:
        return "float32"
    return "bfloat16"


@cache
def bfloat16_speedup() -> float:
    """Speedup of matrix products of one thread in bfloat16 over float32: below 1 on processors without instructions for
    it. Measured once per process, by the thread's processor time, alternating between both: other processes may slow it
    down."""
    import torch

    operands = {dtype: _operands(dtype) for dtype in (torch.float32, torch.bfloat16)}
    seconds = {dtype: float("inf") for dtype in operands}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(REPEATS):
            for dtype, (inputs, weight) in operands.items():
                began = thread_time()
                torch.nn.functional.linear(inputs, weight)
                seconds[dtype] = min(seconds[dtype], thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def _operands(dtype: torch.dtype) -> tuple[Float[Tensor, "tokens width"], Float[Tensor, "width width"]]:
    import torch

    return torch.ones(TOKENS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
