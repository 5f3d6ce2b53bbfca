"""Reads weight files of torch (`pytorch_model.bin`), without running code that they name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import ModelError
from rlcli.model.io.model_config import first_line

if TYPE_CHECKING:
    from torch import Tensor


def mapped_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in the file, with its name, mapped into memory where the file allows. Raises `ModelError` if it is
    incomplete."""
    import torch

    try:
        with file.open("rb") as opened:
            is_zip = opened.read(2) == b"PK"  # files of torch before 1.6 cannot be mapped
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
        tensors = [(name, value) for name, value in weights.items() if isinstance(value, torch.Tensor)]
    except Exception as error:  # a damaged pickle may raise anything
        raise ModelError(f"{file}: not a complete weights file: {first_line(error)}", "download it again") from error
    yield from tensors
