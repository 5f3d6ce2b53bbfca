"""Reads parts of a model's weights: each rank reads its rows, so that no rank ever has the full model in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlcli.errors import ModelError
from rlcli.model.io.model_checks import weight_files
from rlcli.model.io.mxfp4 import BLOCKS, SCALES, dequantized, read_shapes
from rlcli.model.tensor_names import base_name, expert_names, file_name, stored_shapes
from rlcli.model.weight_check.finite_weights import check_finite

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class WeightFiles:
    """The safetensors files of the model at `path`, read by the names of its parameters, which may include those of an
    adapter's wrappers. Weights are read on request. tied: the head is the embedding. kind: the `model_type`."""

    def __init__(self, path: str, files: Iterable[Path], *, tied: bool, kind: str = "") -> None:
        self._path, self._tied, self._kind = path, tied, kind
        self.new: Mapping[str, Tensor] = {}
        """Full values of parameters that are in no file, by name."""
        self._opened: dict[str, Any] = {}
        try:
            for file in files:
                opened: Any = safe_open(file, framework="pt")
                self._opened |= dict.fromkeys(opened.keys(), opened)
        except SafetensorError as error:
            raise ModelError(f"{file}: not a complete safetensors file: {error}", "download it again") from error

    @classmethod
    def find(cls, path: str, *, tied: bool, kind: str = "") -> WeightFiles | None:
        """The files of a folder, or of a hub id in the cache; None if they have another format or some are missing."""
        try:
            files = weight_files(path)
        except ModelError:
            return None
        readable = files and all(file.suffix == ".safetensors" for file in files)
        return cls(path, files, tied=tied, kind=kind) if readable else None

    @property
    def names(self) -> set[str]:
        """Names of the tensors in the files."""
        return set(self._opened)

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor in the files."""
        dimensions: list[int] = self._opened[name].get_slice(name).get_shape()
        return dimensions

    def tensor(self, name: str) -> Tensor:
        """A tensor of the files, on the CPU. Raises `ModelError` for NaN and infinity."""
        return self._whole(name, torch.device("cpu"))

    def hold(self, name: str, shape: torch.Size) -> bool:
        """True if the files have a parameter of this name and shape."""
        if name in self.new:
            return tuple(self.new[name].shape) == tuple(shape)
        if self._is_whole(name) and self.shape(file_name(self._own(name), self._kind)) == list(shape):
            return True
        wanted = stored_shapes(self._own(name), shape, self._kind)
        return all(self._shape(part) == part_shape for part, part_shape in wanted.items())

    def rows(self, name: str, begin: int, count: int, device: torch.device) -> Tensor:
        """Rows of a parameter, from its first dimension, in the dtype of the file, on `device`, where they are checked:
        a worker with a GPU has only one CPU thread. Raises `ModelError` for NaN and infinity."""
        if name in self.new:
            return self.new[name][begin : begin + count]
        fused, name = self._is_whole(name), self._own(name)
        if expert_names(name, begin, self._kind) and not fused:
            experts = (expert_names(name, expert, self._kind) for expert in range(begin, begin + count))
            return torch.stack([torch.cat([self._whole(matrix, device) for matrix in names]) for names in experts])
        name = file_name(name, self._kind)
        if name + BLOCKS in self._opened:
            blocks = self._slice(name + BLOCKS)[begin : begin + count].to(device)
            scales = self._slice(name + SCALES)[begin : begin + count].to(device)
            part = torch.stack([dequantized(block, scale) for block, scale in zip(blocks, scales, strict=True)])
        else:
            part = self._slice(name)[begin : begin + count].to(device)
        check_finite(self._path, [(name, part)])
        return part

    def _is_whole(self, name: str) -> bool:
        """True if a file has the parameter in its form in memory, such as fused experts."""
        return file_name(self._own(name), self._kind) in self._opened

    def _slice(self, name: str) -> Any:
        return self._opened[name].get_slice(name)

    def _shape(self, name: str) -> list[int]:
        """The shape of a tensor after dequantisation; empty if it is missing."""
        ends = [end for end in ("", BLOCKS, SCALES) if name + end in self._opened]
        shapes = {name + end: list(self._slice(name + end).get_shape()) for end in ends}
        return read_shapes(self._path, shapes).get(name, [])

    def _whole(self, name: str, device: torch.device) -> Tensor:
        tensor: Tensor = self._opened[name].get_tensor(name).to(device)
        check_finite(self._path, [(name, tensor)])
        return tensor

    def _own(self, name: str) -> str:
        """The parameter's name without adapters; a tied head may be missing in the files, so the embedding's."""
        name = base_name(name)
        return EMBEDDING if name == HEAD and self._tied else name
