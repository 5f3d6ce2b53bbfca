"""Weights on their way to servers: safetensors files in a folder that both sides see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import RunFailed

if TYPE_CHECKING:
    from torch import Tensor

FILE_BYTES = 512 << 20
"""Bytes of tensors in one file, unless a single one is larger."""


def fast_folder() -> Path:
    """In memory if there is such a folder."""
    return Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp")


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write all tensors to the new folder `folder`. What is streamed may be overwritten by its sender at the next one,
    so that each is copied. Raises `RunFailed` if it cannot be written."""
    try:
        folder.mkdir(parents=True)
        files, size, tensors = 0, 0, dict[str, "Tensor"]()
        for name, tensor in weights:
            if tensors and size + tensor.nbytes > FILE_BYTES:
                _write(folder, files, tensors)
                files, size, tensors = files + 1, 0, {}
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += tensor.nbytes
        if tensors:
            _write(folder, files, tensors)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise RunFailed(
            f"the weights for the servers cannot be written to {folder}: {error.strerror or error}",
            "free some room there, or give another rollout.servers_folder",
        ) from None


def _write(folder: Path, number: int, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, folder / f"{number:05}.safetensors")
    except SafetensorError as error:
        raise OSError(str(error)) from None
