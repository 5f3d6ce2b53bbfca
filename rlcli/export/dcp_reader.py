"""Read the tensors of a torch distributed checkpoint in one process, without a process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


class Stored:
    """The tensors in the distributed checkpoint `folder` whose names start with `prefix`, named without it.

    Each tensor is read whole, for any number of ranks that wrote it; no other tensors are read. The files are assumed
    to be undamaged: see `read_checkpoint`.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, prefix
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        self.shapes: dict[str, torch.Size] = {
            name.removeprefix(prefix): entry.size
            for name, entry in metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        self._dtypes = {name: metadata[prefix + name].properties.dtype for name in self.shapes}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors on the CPU, in their stored dtype."""
        state = {self.prefix + name: torch.empty(self.shapes[name], dtype=self._dtypes[name]) for name in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group, which is intended
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder), no_dist=True)
        return {name.removeprefix(self.prefix): tensor for name, tensor in state.items()}
