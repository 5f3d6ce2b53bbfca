"""Checksums of tensors, additive over parts of a tensor: 64 bits, by torch, on the tensor's device.

    checksum(W) = Σ_ij word(W_ij) · row_key(i) · column_key(j)   modulo 2⁶⁴

word: 32 bits of a row as an integer: an element of 4 bytes, or two neighbours of 2 bytes. The keys are odd
pseudo-random numbers: swapped elements, rows or columns are detected, and two different tensors agree with a
probability of about 2⁻³² or less. Since it is a sum, the checksums of the slices of W (one projection's rows of a fused
weight, one rank's part), each with the keys of its position in W, add up to that of W.

Numbers below the smallest normal one, including −0, count as 0: matrix kernels of CPUs read them so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements per chunk by device: on CPUs the intermediate 8-byte integers stay in the cache, on GPUs chunks are large
compared with a kernel launch."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by its number of bytes."""


class TensorChecksum(NamedTuple):
    """Metadata of a sent tensor."""

    checksum: int
    """Checksum of the full tensor, as int64."""
    numel: int
    """Number of elements."""
    dtype: torch.dtype
    """The dtype in which it was sent."""


class Checksums:
    """Checksums of tensors as they are streamed: each is read once, and all results are transferred to the host once.

    sums = Checksums()
    engine.load_weights(sums.of(policy.stream_weights()))
    sums.sent()                 # name → TensorChecksum
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, int, torch.dtype]] = {}

    def of(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: Tensor) -> None:
        self._sums[name] = checksum(tensor), tensor.numel(), tensor.dtype

    def sent(self) -> dict[str, TensorChecksum]:
        sums = to_host([total for total, _, _ in self._sums.values()])
        entries = zip(self._sums.items(), sums, strict=True)
        return {name: TensorChecksum(total, numel, dtype) for (name, (_, numel, dtype)), total in entries}


def columns_of(shape: torch.Size) -> int:
    """Columns of a tensor as the checksum sees it, `[rows, columns]`; a one-dimensional tensor is one row."""
    return max(1, shape[-1] if shape else 1)


def checksum(tensor: Tensor) -> Tensor:
    """Checksum of a whole tensor of any shape: int64 scalar."""
    values = tensor.detach().reshape(-1, columns_of(tensor.shape))
    return part_checksum(values, keys(values.shape[0], 0, values.device), 0)


def part_checksum(part: Tensor, row_keys: Tensor, column: int) -> Tensor:
    """The contribution of `part`, `[r, c]`, without a gradient, to the checksum of the tensor that it is cut from.
    row_keys: int64 `[r]`, of the rows in that tensor; its columns are those from `column` on."""
    width = part.shape[1]
    words_of: Callable[[Tensor], Tensor] = _bits
    if part.itemsize != 2:
        column_keys = keys(column + width, 1, part.device)[column:]
    elif column % 2 == width % 2 == 0:
        words_of, column_keys = _pairs, keys((column + width) // 2, 1, part.device)[column // 2 :]
    else:
        words_of, column_keys = _halves(column, width, part.device)
    rows = max(1, CHUNK[part.device.type] // max(width, 1))
    pieces = zip(part.split(rows), row_keys.split(rows), strict=True)
    # Converted first: a product of two integer types is not vectorised.
    sums = [((words_of(piece).to(torch.int64) * column_keys).sum(-1) * weights).sum() for piece, weights in pieces]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def keys(count: int, salt: int, device: torch.device) -> Tensor:
    """The first `count` keys of a kind (0: of rows, 1: of columns): odd, int64."""
    return _keys(1 << max(count - 1, 1).bit_length(), salt, device)[:count]


def to_host(sums: list[Tensor]) -> list[int]:
    return torch.stack(sums).tolist() if sums else []


def _bits(values: Tensor) -> Tensor:
    if values.dtype.is_floating_point and values.itemsize > 1:
        values = torch.nn.functional.hardshrink(values, torch.finfo(values.dtype).tiny)
    return values.view(INTEGERS[values.itemsize])


def _pairs(values: Tensor) -> Tensor:
    """int32 `[r, c / 2]`: elements of 2 bytes, two at a time; the first one is the low half."""
    return _bits(values).contiguous().view(torch.int32)


def _halves(column: int, width: int, device: torch.device) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """For columns that do not begin or end with a pair: a function that returns the word of each element of 2 bytes,
    and the key of each, shifted if the element is the high half of its pair."""
    index = torch.arange(column, column + width, device=device)
    high = index % 2
    masks = torch.where(high == 1, -1, 0xFFFF)
    column_keys = keys((column + width + 1) // 2, 1, device)[index // 2] << (16 * high)
    return lambda values: _bits(values).to(torch.int64) & masks, column_keys


@cache
def _keys(count: int, salt: int, device: torch.device) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) over place and kind. Integer arithmetic wraps, and
    shifts copy the sign bit, which the masks remove."""
    state = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    state += salt * 0x632BE59BD9B4E019
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (state ^ ((state >> 31) & 0x1FFFFFFFF)) | 1
