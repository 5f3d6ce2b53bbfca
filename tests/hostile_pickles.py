"""Pickles that make a folder, the marker, when they are loaded without care."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch


class Runs:
    """Unpickling it makes the folder `marker`, as `posix.mkdir`."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def code_in_metadata(checkpoint: Path, marker: Path) -> None:
    """Have the metadata of a checkpoint's policy name `Runs`, in a field that nothing reads."""
    file = checkpoint / "policy" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = Runs(marker)
    file.write_bytes(pickle.dumps(metadata))


LEGACY = ("torch", "pickle", "protocol 0")


def legacy(form: str, marker: Path) -> bytes:
    """`Runs` as `torch.save` wrote it before torch 1.6, or as a bare pickle."""
    match form:
        case "torch":
            file = io.BytesIO()
            torch.save(Runs(marker), file, _use_new_zipfile_serialization=False)
            return file.getvalue()
        case "pickle":
            return pickle.dumps(Runs(marker))
        case _:
            return pickle.dumps(Runs(marker), protocol=0)
