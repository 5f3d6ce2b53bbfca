"""Counts bytes of live tensors, operation by operation: what a computation needs, whatever allocators make of it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """In the block: `peak`, the most bytes of storages that were alive at once, without those that were there before
    and were not touched. `mark(tensors)` takes in what is held already."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}
        self.peak = 0
        self.at = ""

    @property
    def live(self) -> int:
        return sum(storage.nbytes() for ref in list(self._storages.values()) if (storage := ref()) is not None)

    def mark(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                tensor = getattr(tensor, "_local_tensor", tensor)
                storage = tensor.untyped_storage()
                number = storage._cdata
                self._storages[number] = weakref.ref(storage, lambda _, n=number: self._storages.pop(n, None))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.mark((result, args))
        live = self.live
        if live > self.peak:
            self.peak, self.at = live, str(function)
        return result
