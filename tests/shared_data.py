"""Real data for tests, where the machine has some."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def shared_data(name: str) -> Path:
    """The file or folder `name` under $RLCLI_SHARED_DATA, else ../shared/data; skips the test where there is none."""
    default_folder = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    path = Path(os.environ.get("RLCLI_SHARED_DATA") or default_folder) / name
    if not path.exists():
        pytest.skip(f"no {path}: set RLCLI_SHARED_DATA to a folder that holds {name}")
    return path
