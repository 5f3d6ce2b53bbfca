"""Host memory for copies of a device's tensors. For GPUs it is pinned: copies then run at the speed of the bus, whereas
pageable memory needs a second copy by one thread. It is allocated in large blocks that are kept: allocating pinned
memory takes longer than a copy."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BLOCK_BYTES = 256 << 20
"""Size of a block: torch rounds pinned memory up to a power of two, which wastes up to half for single tensors."""
ALIGNED = 512
"""Alignment of pieces in bytes."""


class HostMemory:
    """A bump allocator over blocks of host memory. pinned: for copies of a GPU's tensors."""

    def __init__(self, pinned: bool = True) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []
        self._block, self._used = 0, 0

    def reuse(self) -> None:
        """Free everything: the next allocations overwrite the first block."""
        self._block, self._used = 0, 0

    def take(self, size: int) -> list[Tensor]:
        """`size` bytes, uint8, in order: several pieces if they do not fit into a block."""
        pieces = []
        while size:
            if not self._left:
                self._next(1)
            piece = self._piece(min(size, self._left))
            pieces.append(piece)
            size -= len(piece)
        return pieces

    def take_whole(self, size: int) -> Tensor:
        """`size` consecutive bytes, uint8."""
        while self._left < size or not self._blocks:
            self._next(size)
        return self._piece(size)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` with the same sharding, of which this rank copies its part. A tensor on the CPU is copied
        to ordinary memory instead."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.to("cpu", copy=True)
        if not isinstance(tensor, DTensor):
            return self._copy(tensor)
        copy = cast(DTensor, torch.empty_like(tensor, device="cpu"))  # never written to, so that it takes no memory
        copy._local_tensor = self._copy(tensor.to_local())
        return copy

    def _copy(self, tensor: Tensor) -> Tensor:
        return self.take_whole(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    @property
    def _left(self) -> int:
        return len(self._blocks[self._block]) - self._used if self._blocks else 0

    def _piece(self, size: int) -> Tensor:
        piece = self._blocks[self._block][self._used : self._used + size]
        self._used = min(self._used + -(-size // ALIGNED) * ALIGNED, len(self._blocks[self._block]))
        return piece

    def _next(self, size: int) -> None:
        """Advance to the next block; allocate one, of at least `size` bytes, if there is none."""
        self._block += bool(self._blocks)
        self._used = 0
        if self._block == len(self._blocks):
            block_bytes = max(BLOCK_BYTES, 1 << (size - 1).bit_length())
            self._blocks.append(torch.empty(block_bytes, dtype=torch.uint8, pin_memory=self._pinned))
