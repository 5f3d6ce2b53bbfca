"""Changes to a process that can be undone: how a fault is planted from outside, and taken out again."""

from __future__ import annotations

from typing import Any

_MISSING = object()
_undo: list[tuple[Any, str, Any]] = []


def patch(target: Any, name: str, value: Any) -> Any:
    """Set an attribute until `heal`; returns what it was."""
    before = vars(target).get(name, _MISSING) if hasattr(target, "__dict__") else getattr(target, name)
    _undo.append((target, name, before))
    was = getattr(target, name)
    setattr(target, name, value)
    return was


def heal() -> None:
    """Undo all patches of this process, the last first."""
    while _undo:
        target, name, before = _undo.pop()
        if before is _MISSING:
            delattr(target, name)
        else:
            setattr(target, name, before)
