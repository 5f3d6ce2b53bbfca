"""Markdown from plain text of the code: docstrings, help, tables."""

from __future__ import annotations

import re
from collections.abc import Sequence


def prose(text: str, language: str = "text") -> str:
    """A docstring or a help text as Markdown. Paragraphs that are indented become code in that language; those that
    begin with `>>>`, Python.

    >>> print(prose("The mean of a * b:\\n\\n  rlcli doctor", "bash"))
    The mean of a \\* b:
    <BLANKLINE>
    ```bash
    rlcli doctor
    ```
    """
    parts = []
    for paragraph in re.split(r"\n[ \t]*\n", text.strip("\n")):
        lines = paragraph.splitlines()
        if lines and lines[0].startswith(">>>"):
            parts.append(block(paragraph, "python").rstrip("\n"))
        elif lines and all(line.startswith("  ") for line in lines):
            parts.append(block("\n".join(line[2:] for line in lines), language).rstrip("\n"))
        else:
            parts.append("\n".join(_escaped(line) for line in lines))
    return re.sub(rf"\n```\n\n```{language}\n", "\n", "\n\n".join(parts))  # examples, one a paragraph: one block


def _escaped(line: str) -> str:
    """The line with what Markdown or HTML would read as markup escaped, except in code."""
    pieces = re.split(r"(`[^`]+`)", line)
    return "".join(piece if at % 2 else re.sub(r"([\\*<\[\]|#])", _escape, piece) for at, piece in enumerate(pieces))


def _escape(sign: re.Match[str]) -> str:
    return {"<": "&lt;", "|": "&#124;", "#": "&#35;"}.get(sign[0], f"\\{sign[0]}")


def cell(text: str) -> str:
    """Plain text in one cell of a table."""
    return _escaped(" ".join(text.split()))


def code(text: str) -> str:
    """Text as code in a line or a cell."""
    ticks = "``" if "`" in text else "`"
    text = " ".join(text.split())
    return f"{ticks} {text} {ticks}" if ticks == "``" else f"`{text}`" if text else ""


def block(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```\n"


def entry(title: str, anchor: str, depth: int) -> str:
    """A heading; the anchor is derived from its text if none is given."""
    return f"{'#' * depth} {title}{f' {{ #{anchor} }}' if anchor else ''}\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
