"""What differs between two records, under the names of today."""

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


def differences(before: Any, after: Any) -> tuple[list[str], list[str]]:
    """One line for each value that differs or is gone, and one for each that is new, with the way to it."""
    found = list(_differences(before, after, "", renamed()))
    return [line for line in found if not line.endswith(NEW)], [line for line in found if line.endswith(NEW)]


def _differences(before: Any, after: Any, where: str, names: dict[str, str]) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        before = {names.get(name, name): value for name, value in before.items()}
        for name in sorted(before.keys() | after.keys()):
            place = f"{where} › {name}" if where else name
            if name not in after:
                yield f"{place} is gone"
            elif name not in before:
                yield f"{place}{NEW}"
            else:
                yield from _differences(before[name], after[name], place, names)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, two) in enumerate(zip(before, after, strict=True)):
            yield from _differences(one, two, f"{where} [{index}]", names)
    elif repr(before) != repr(after):  # NaN equals NaN, and 0.0 is not -0.0
        yield f"{where}: {str(before)[:60]} → {str(after)[:60]}"
