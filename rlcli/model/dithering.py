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
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcli.model.parallel.buckets import NamedTensor, rows_of
from rlcli.model.splitmix import GOLDEN, mixed, signed

if TYPE_CHECKING:
    from jaxtyping import Int32

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Weights at a time, by device: what the caches of a CPU hold, and torch computes on one thread; on a GPU, enough for
its kernels."""


def dither(parameters: Iterable[NamedTensor], dtype: torch.dtype) -> None:
    """Add noise that rounding to `dtype` removes to each trained float32 weight that is a number of `dtype`, in place.

    parameters: by name, sharded or not. dtype: bfloat16 or float16. Zeros stay, since numbers near zero are close to
    each other. The noise is uniform over the float32 numbers that round to the weight (around float16's subnormal
    numbers, which are 6e-8 apart, over a part of them) and depends on the parameter's name and the weight's position
    alone: not on sharding or devices. Not collective.
    """
    bits = round(math.log2(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps))  # 16 or 13 are rounded away
    with torch.no_grad():
        for name, parameter in parameters:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not parameter.requires_grad or local.dtype != torch.float32 or not local.numel():
                continue
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
            rows = rows_of(parameter)
            position = 0 if rows is None else rows.begin * local[0].numel()
            for part in local.view(-1).split(CHUNK[local.device.type]):
                noise = _noise(seed, position, part, bits)
                noise *= (part == part.to(dtype)) & (part != 0)
                part.view(torch.int32).add_(noise)  # consecutive float32 numbers are consecutive integers
                position += len(part)


def _noise(seed: int, position: int, part: Tensor, bits: int) -> Int32[Tensor, " N"]:
    """Uniform integers between -2^(bits - 1) and 2^(bits - 1), both exclusive, since the middle between two numbers may
    round to either, for the N weights from `position` on."""
    first, end = position // 4, -(-(position + len(part)) // 4)
    state = torch.arange(first, end, device=part.device) * signed(GOLDEN) + seed
    draws = mixed(state).view(torch.int16)[position % 4 :][: len(part)]  # four from each state
    return (draws.int() >> (16 - bits)).clamp_(min=1 - (1 << bits - 1))
