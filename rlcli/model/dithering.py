"""Dithers master weights, so that a model computed in 16 bits shows updates smaller than its rounding.

Published weights are bfloat16 numbers. Float32 master weights that start on them must move by half the distance to the
next bfloat16 number before their rounded copies, with which trainer and engine compute, change at all: a weight of 0.02
by 6e-5, which takes sixty updates in one direction at a learning rate of 1e-6. `dither` moves each master weight to a
random place in the interval that rounds to the published value. The rounded model stays the same, bit for bit, and from
then on a rounded weight changes, in expectation, by as much as its master (Schuchman 1964, "Dither Signals and Their
Effect on Quantization Noise"; stochastic rounding, arXiv 1502.02551, draws such noise again at each update).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcli.model.parallel.buckets import NamedTensor, rows_of

BLOCK = 1 << 18
"""Values drawn at once, or one row if it is longer. A rank draws all of a block of which it has a row."""


def dither(parameters: Iterable[NamedTensor], dtype: torch.dtype) -> None:
    """Add noise that rounding to `dtype` removes to each trained float32 weight that is a number of `dtype`, in place:
    uniform over the float32 numbers that round to it. Zeros stay: numbers near them are close together.

    parameters: by name, with at least one dimension, sharded or not. dtype: bfloat16 or float16. The noise depends on
    the parameter's name, a weight's position and the kind of device alone: it is the same however the parameters are
    sharded. Not collective.
    """
    with torch.no_grad():
        for name, parameter in parameters:
            if parameter.requires_grad and parameter.dtype == torch.float32:
                for part, noise in _with_noise(name, parameter, dtype):
                    noise *= (part == part.to(dtype)) & (part != 0)
                    part.view(torch.int32).add_(noise)  # consecutive float32 numbers are consecutive integers


def _with_noise(name: str, parameter: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's rows of a parameter, in parts, each with its noise in float32 units in the last place."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if not local.numel():
        return
    rows = rows_of(parameter)
    begin = 0 if rows is None else rows.begin
    end = begin + len(local)
    # Rounding removes the last 16 bits (bfloat16) or 13 (float16). The middle between two numbers may round to either.
    half = round(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps) // 2
    generator = torch.Generator(local.device)
    block_rows = max(1, BLOCK // math.prod(local.shape[1:]))
    for first in range(begin // block_rows * block_rows, end, block_rows):
        generator.manual_seed(int.from_bytes(hashlib.sha256(f"{name} {first}".encode()).digest()[:4]))
        size = (min(block_rows, len(parameter) - first), *local.shape[1:])
        noise = torch.randint(1 - half, half, size, generator=generator, dtype=torch.int32, device=local.device)
        own = slice(max(first, begin), min(first + block_rows, end))
        yield local[own.start - begin : own.stop - begin], noise[own.start - first : own.stop - first]
