"""Events of a run as text: no braces, rounded figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

NOT_SHOWN = ("time", "event", "path", "files")
"""Entries that the text names anyway, or that are shown beside it."""
SUMMARIES = ("text", "message", "headline")
"""Entries that describe the event by themselves."""
MOST_ITEMS = 12
"""Items of a list or table that are shown."""


def event_text(event: Mapping[str, Any], without: Collection[str] = ()) -> str:
    """The event in one line of text. without: entries to leave out.

    >>> event_text({"time": 0.0, "event": "started", "step": 0, "of": 100})
    'step 0 of 100'
    >>> event_text({"event": "pace", "step": 5, "step_s": 12.345678, "best": None, "engine": {"name": "vllm", "at": 3}})
    'step 5, step 12.3 s, engine: name vllm, at 3'
    """
    facts = {name: value for name, value in event.items() if name not in (*NOT_SHOWN, *without)}
    summary = next((str(facts[name]) for name in SUMMARIES if facts.get(name)), "")
    facts = {name: value for name, value in facts.items() if name not in SUMMARIES}
    if "step" in facts and "of" in facts:
        facts["step"] = f"{facts['step']} of {facts.pop('of')}"
    rest = ", ".join(filter(None, (_entry(name, value) for name, value in facts.items())))
    return f"{summary} ({rest})" if summary and rest else summary or rest


def _entry(name: str, value: object) -> str:
    """A name and its value; empty for an unknown value."""
    if value is None or value in ("", [], {}):
        return ""
    words, unit = name.replace("_", " "), ""
    if name.endswith("_s"):
        words, unit = words.removesuffix(" s"), " s"
    if isinstance(value, Mapping):
        items = [_entry(str(key), item) or str(key) for key, item in list(value.items())[:MOST_ITEMS]]
        return f"{words}: {', '.join(items)}"
    if isinstance(value, list | tuple):
        return f"{words} {', '.join(_shown(item) for item in value[:MOST_ITEMS])}"
    return f"{words} {_shown(value)}{unit}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return " ".join(_entry(str(key), item) for key, item in value.items())
    return str(value)
