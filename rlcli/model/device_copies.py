"""Copies of many small tensors between host and device at once, so that the host waits for few of them, or for none.

A copy from ordinary memory of the host makes it wait for all that the device has been asked to compute so far; one from
pinned memory is queued behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

Move = Callable[[Tensor], Tensor]

ALIGNED = 16
"""Each tensor begins at a multiple of so many bytes in a common buffer, so that it can be viewed in its dtype."""
STAGED_BYTES = 64 << 20
"""Pinned memory for one copy: tensors beyond it go with the next one. torch keeps pinned memory for later copies."""


class Movable(Protocol):
    """A record of tensors that can be on another device."""

    def moved(self, move: Move) -> Self:
        """The same record with `move` of each of its tensors, which is called in an order that is always the same."""
        ...


Record = TypeVar("Record", bound=Movable)


def all_moved(records: Sequence[Record], device: torch.device) -> list[Record]:
    """`records`, whose tensors are on the host, on `device`: themselves if that is the host."""
    if device.type == "cpu":
        return list(records)
    tensors: list[Tensor] = []

    def noted(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    for record in records:
        record.moved(noted)
    on_device = iter(upload(tensors, device))
    return [record.moved(lambda _: next(on_device)) for record in records]


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of the host's `tensors` on `device`, for which the host does not wait: themselves if that is the host."""
    if device.type == "cpu":
        return list(tensors)
    found: list[Tensor] = []
    for group in _grouped(tensors):
        places = _places(group)
        staged = torch.empty(places[-1], dtype=torch.uint8, pin_memory=True)
        for part, tensor in zip(_views(staged, group, places), group, strict=True):
            part.copy_(tensor)
        found += _views(staged.to(device, non_blocking=True), group, places)
    return found


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the host of `tensors`, all of one device, for which the host waits once: themselves if they are
    there."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    places = _places(tensors)
    staged = torch.empty(places[-1], dtype=torch.uint8, device=tensors[0].device)
    for part, tensor in zip(_views(staged, tensors, places), tensors, strict=True):
        part.copy_(tensor)
    return list(_views(staged.cpu(), tensors, places))


def _grouped(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
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


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor begins in a common buffer, and the buffer's size."""
    return list(accumulate((-(-one.nbytes // ALIGNED) * ALIGNED for one in tensors), initial=0))


def _views(buffer: Tensor, tensors: Sequence[Tensor], places: Sequence[int]) -> Iterator[Tensor]:
    for tensor, start in zip(tensors, places[:-1], strict=True):
        yield buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
