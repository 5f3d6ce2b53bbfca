"""Parses `--data PATH[:WEIGHT]`, given once or several times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def data_sets(texts: Sequence[str] | None) -> object:
    """The value of `data.path` for the given `--data` options: a path, or several with their weights; None: not given.

    A number after the last colon is a weight, unless a file or folder with that whole name exists.

    >>> data_sets(["data/math"]), data_sets(["data/math:2", "http:x", "b"])
    ('data/math', [{'path': 'data/math', 'weight': 2.0}, 'http:x', 'b'])
    """
    return one_or_all([_data_set(text) for text in texts or ()])


def one_or_all(found: Sequence[Any] | None) -> object:
    """The only element itself; None if empty."""
    if not found:
        return None
    return found[0] if len(found) == 1 and isinstance(found[0], str) else list(found)


def _data_set(text: str) -> str | dict[str, object]:
    path, colon, weight = text.rpartition(":")
    if not colon or not path or Path(text).expanduser().exists():
        return text
    try:
        return {"path": path, "weight": float(weight)}
    except ValueError:
        return text
