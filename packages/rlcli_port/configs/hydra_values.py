"""Values of Hydra's override grammar, as in `key=VALUE` on verl's command line.

hydra-core cannot be a dependency: the parser runtime that it pins contradicts that of math-verify.
"""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(
    r"[+-]?(?:\d(?:_?\d)*|(?:\d(?:_?\d)*\.(?:\d(?:_?\d)*)?|\.\d(?:_?\d)*)(?:e[+-]?\d(?:_?\d)*)?"
    r"|\d(?:_?\d)*e[+-]?\d(?:_?\d)*|inf|nan)",
    re.IGNORECASE,
)
_KEY = re.compile(r"((?:[^:{}\[\],'\"\\]|\\.)++):")
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
_CLOSING = {"[": "]", "{": "}"}
_REFUSED = "(){}[]'\"=~;#&<>!`"
"""Characters that a value without quotes may only have after a backslash."""
_DEEPEST = 40
_LONGEST_INTEGER = 4_000
"""Digits: Python refuses to read longer ones."""


class HydraError(ValueError):
    """Text that Hydra refuses, or reads as a sweep (`a,b`) or a function (`f(x)`)."""


def hydra_value(text: str) -> Any:
    """None, a boolean, a number, a text, a list or a table. Raises `HydraError`.

    >>> [hydra_value(text) for text in ("null", "True", "1e-6", "0.5_2", "none", "'a b'", "[a,{b: 1}]")]
    [None, True, 1e-06, 0.52, 'none', 'a b', ['a', {'b': 1}]]
    """
    text = text.strip()
    value, end = _element(text, 0, "", 0)
    if end != len(text):
        raise HydraError("a sweep" if text[end] == "," else f"unexpected {text[end]!r}")
    return value


def _element(text: str, at: int, ends: str, depth: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends. ends: what ends a value without quotes, besides a comma."""
    if depth > _DEEPEST:
        raise HydraError("too deep")
    at = _after_blanks(text, at)
    if at < len(text) and text[at] in _CLOSING:
        return _several(text, at, depth)
    if at < len(text) and text[at] in "'\"":
        return _quoted(text, at)
    end = at
    while end < len(text) and text[end] not in f"{ends},":
        if text.startswith("${", end):
            end = _after_interpolation(text, end)
            continue
        if text[end] == "\\" and end + 1 < len(text):
            end += 1
        elif text[end] in _REFUSED:
            raise HydraError(f"{text[end]!r} in a value without quotes")
        end += 1
    return _plain(text[at:end].strip()), end


def _several(text: str, at: int, depth: int) -> tuple[Any, int]:
    """A list or a table."""
    closing, at = _CLOSING[text[at]], at + 1
    items: list[Any] = []
    table: dict[Any, Any] = {}
    while True:
        at = _after_blanks(text, at)
        if at < len(text) and text[at] == closing and not items and not table:
            break
        if closing == "}":
            key = _KEY.match(text, at)
            if not key or not key[1].strip():
                raise HydraError("a table without a key")
            table[_plain(key[1].strip())], at = _element(text, key.end(), closing, depth + 1)
        else:
            item, at = _element(text, at, closing, depth + 1)
            items.append(item)
        if at >= len(text) or text[at] not in f",{closing}":
            raise HydraError(f"no {closing}")
        if text[at] == closing:
            break
        at += 1
    return (table if closing == "}" else items), _after_blanks(text, at + 1)


def _quoted(text: str, at: int) -> tuple[str, int]:
    quote, end = text[at], at + 1
    while end < len(text) and text[end] != quote:
        end += 2 if text[end] == "\\" else 1
    if end >= len(text):
        raise HydraError("a quote is not closed")
    return text[at + 1 : end].replace(f"\\{quote}", quote), _after_blanks(text, end + 1)


def _after_interpolation(text: str, at: int) -> int:
    depth, at = 1, at + 2
    while at < len(text) and depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] == " ":
        at += 1
    return at


def _plain(text: str) -> Any:
    words = {"null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if _NUMBER.fullmatch(text):
        plain = text.replace("_", "")
        if re.fullmatch(r"[+-]?(?:0|[1-9]\d*)", plain):
            return int(plain) if len(plain) < _LONGEST_INTEGER else text
        if not re.fullmatch(r"[+-]?0\d+", plain):
            return float(plain)
    return _ESCAPED.sub(r"\1", text)
