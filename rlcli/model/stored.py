"""The tensors of a torch distributed checkpoint, read in one process without a process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


class Stored:
    """The tensors of the distributed checkpoint in `folder` whose names begin with `prefix`, named without it.

    However many ranks wrote it, each tensor is read whole, and nothing else is. The files are taken to be sound: see
    `read_checkpoint`.
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
        """Those tensors on the CPU, in the dtype that they were written in."""
        state = {self.prefix + name: torch.empty(self.shapes[name], dtype=self._dtypes[name]) for name in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group: there is to be none
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder), no_dist=True)
        return {name.removeprefix(self.prefix): tensor for name, tensor in state.items()}
