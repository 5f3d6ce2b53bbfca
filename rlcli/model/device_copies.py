"""Batched copies of many small tensors between host and device, so that the host synchronises rarely or not at all.

A copy from pageable host memory makes the host wait for all work queued on the device; a copy from pinned memory is
queued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

Move = Callable[[Tensor], Tensor]
"""Returns the tensor's copy on another device."""

ALIGNED = 16
"""Alignment in bytes of tensors in a common buffer, so that each can be viewed in its dtype."""
STAGED_BYTES = 64 << 20
"""Most pinned memory for one copy; further tensors are copied by the next one. torch caches pinned memory."""


class Movable(Protocol):
    """A record of tensors that can be moved to another device."""

    def moved(self, move: Move) -> Self:
        """A copy of the record with `move` applied to each of its tensors, always in the same order."""
        ...


Record = TypeVar("Record", bound=Movable)


def all_moved(records: Sequence[Record], device: torch.device) -> list[Record]:
    """Copies on `device` of records whose tensors are on the host: the records themselves if `device` is the host."""
    if device.type == "cpu":
        return list(records)
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    for record in records:
        record.moved(collect)
    on_device = iter(upload(tensors, device))
    return [record.moved(lambda _: next(on_device)) for record in records]


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies on `device` of the host's `tensors`, without waiting: the tensors themselves if `device` is the host."""
    if device.type == "cpu":
        return list(tensors)
    copies: list[Tensor] = []
    for group in _grouped(tensors):
        offsets = _offsets(group)
        staged = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=True)
        for part, tensor in zip(_views(staged, group, offsets), group, strict=True):
            part.copy_(tensor)
        copies += _views(staged.to(device, non_blocking=True), group, offsets)
    return copies


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the host of `tensors`, all on one device, with one synchronisation: the tensors themselves if they are
    on the host."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    offsets = _offsets(tensors)
    staged = torch.empty(offsets[-1], dtype=torch.uint8, device=tensors[0].device)
    for part, tensor in zip(_views(staged, tensors, offsets), tensors, strict=True):
        part.copy_(tensor)
    return list(_views(staged.cpu(), tensors, offsets))


def _grouped(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of at most STAGED_BYTES, or of one larger tensor."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.nbytes > STAGED_BYTES:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield group


def _offsets(tensors: Sequence[Tensor]) -> list[int]:
    """The offset of each tensor in a common buffer, in bytes, and the buffer's size."""
    return list(accumulate((-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors), initial=0))


def _views(buffer: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> Iterator[Tensor]:
    """Views of the buffer in the dtypes and shapes of `tensors`."""
    for tensor, start in zip(tensors, offsets[:-1], strict=True):
        yield buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
