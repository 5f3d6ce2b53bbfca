"""Differences between two records, under the current names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tree import ROOT

RENAMES = Path("docs") / "notes" / "renames.md"
NEW = " is new"


def renamed(file: Path = ROOT / RENAMES) -> dict[str, str]:
    """New name by old name: rows "| `old` | `new` |" of the page of renamed metrics, events and keys."""
    if not file.exists():
        return {}
    return dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", file.read_text(encoding="utf-8"), re.MULTILINE))


def differences(old: Any, new: Any) -> tuple[list[str], list[str]]:
    """One line for each value that differs or is gone, and one for each that is new, with the way to it."""
    lines = list(_differences(old, new, "", renamed()))
    return [line for line in lines if not line.endswith(NEW)], [line for line in lines if line.endswith(NEW)]


def _differences(old: Any, new: Any, where: str, names: dict[str, str]) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        old = {names.get(name, name): value for name, value in old.items()}
        for name in sorted(old.keys() | new.keys()):
            child_path = f"{where} › {name}" if where else name
            if name not in new:
                yield f"{child_path} is gone"
            elif name not in old:
                yield f"{child_path}{NEW}"
            else:
                yield from _differences(old[name], new[name], child_path, names)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (old_item, new_item) in enumerate(zip(old, new, strict=True)):
            yield from _differences(old_item, new_item, f"{where} [{index}]", names)
    elif repr(old) != repr(new):  # NaN equals NaN, and 0.0 is not -0.0
        yield f"{where}: {str(old)[:60]} → {str(new)[:60]}"
