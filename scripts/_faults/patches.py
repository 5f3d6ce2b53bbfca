"""Changes to a process that can be undone: how a fault is planted from outside, and taken out again."""

from __future__ import annotations

import sys
from typing import Any

_MISSING = "no such attribute before"


def _undo() -> list[tuple[Any, str, Any]]:
    """The process's own list: what is sent to a worker brings a copy of this module along with each call."""
    undo_list: list[tuple[Any, str, Any]] = vars(sys).setdefault("rlcli_planted_faults", [])
    return undo_list


def patch(target: Any, name: str, value: Any) -> Any:
    """Set an attribute until `heal`; returns what it was."""
    original = vars(target).get(name, _MISSING) if hasattr(target, "__dict__") else getattr(target, name)
    _undo().append((target, name, original))
    was = getattr(target, name)
    setattr(target, name, value)
    return was


def heal() -> None:
    """Undo all patches of this process, the last first."""
    undo = _undo()
    while undo:
        target, name, original = undo.pop()
        if isinstance(original, str) and original == _MISSING:
            delattr(target, name)
        else:
            setattr(target, name, original)
