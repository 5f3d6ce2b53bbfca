"""Read the key=value words of a shell script that runs verl, with the variables that the script itself sets. Nothing is
executed, and of this machine's environment only the home folder is read."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcli.errors import ConfigError
from rlcli_port.configs.key_report import Unresolved, scalar
from rlcli_port.configs.parsed_python import arithmetic

OVERRIDE = re.compile(r"(?P<add>\+{0,2})(?P<key>[A-Za-z_]\w*(\.[A-Za-z_]\w*)+)=(?P<value>.*)", re.DOTALL)
ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
SUM = re.compile(r"\$\(\(([^$`\n]{1,200}?)\)\)(?!\))")
VARIABLE = re.compile(r"\$\{(?P<braced>[A-Za-z_]\w*)(?::?-(?P<default>[^{}]*))?\}|\$(?P<plain>[A-Za-z_]\w*)")
LONGEST_COMMAND = 200
"""Lines that a quoted text may span."""
MOST_SKIPPED = 20
"""Maximum lines with open quotes that are skipped."""
LONGEST_VALUE = 10_000


def overrides(text: str, path: Path) -> dict[str, Any]:
    """Dotted key → value (the last one wins); `Unresolved` if a variable remains that the script does not set."""
    variables = {"HOME": os.path.expanduser("~")}
    values: dict[str, Any] = {}
    for words in _commands(text, path):
        for index, word in enumerate(words):
            override = OVERRIDE.fullmatch(word)
            assigned = ASSIGNMENT.fullmatch(word)
            if override:
                value = _filled(override["value"], variables)
                values[override["key"]] = Unresolved(override["value"]) if _open(value) else scalar(value)
            elif assigned and (index == 0 or words[0] in ("export", "declare", "local", "readonly")):
                variables[assigned["name"]] = _filled(assigned["value"], variables)
    return values


def _commands(text: str, path: Path) -> Iterator[list[str]]:
    """The words of each command: a line that ends in a backslash, or in an open quote, continues in the next one."""
    text = SUM.sub(lambda match: "".join(match[0].split()), text.replace("\r\n", "\n"))
    lines = text.replace("\\\n", " ").split("\n")
    at = skipped = 0
    while at < len(lines):
        words, next_line = _command(lines, at)
        if words is not None:
            yield words
        elif "verl." in lines[at] or any(map(OVERRIDE.fullmatch, lines[at].split())) or skipped >= MOST_SKIPPED:
            raise ConfigError(f"{path}: a quote is not closed: {lines[at].strip()[:80]}", "close it")
        else:  # an apostrophe in the text of a here-document
            skipped += 1
        at = next_line


def _command(lines: list[str], at: int) -> tuple[list[str] | None, int]:
    """The words of the command that begins in line `at` (None if a quote is not closed), and the line after it."""
    held = ""
    for line in range(at, min(len(lines), at + LONGEST_COMMAND)):
        held = f"{held}\n{lines[line]}" if line > at else lines[line]
        try:
            return shlex.split(held, comments=True), line + 1
        except ValueError:  # a quote is still open
            if len(held) > LONGEST_VALUE * 5:
                break
    return None, at + 1


def _filled(value: str, variables: Mapping[str, str]) -> str:
    """The value with the script's own variables and arithmetic expanded. `${NAME:-text}` is the text, unless the script
    sets NAME."""

    def fill(match: re.Match[str]) -> str:
        return variables.get(match["braced"] or match["plain"], match["default"] or match[0])

    def add(match: re.Match[str]) -> str:
        terms = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
        total = arithmetic(terms)
        return match[0] if total is None else str(int(total))

    filled = SUM.sub(add, VARIABLE.sub(fill, value)) if len(value) <= LONGEST_VALUE else "$too_long"
    return filled if len(filled) <= LONGEST_VALUE else "$too_long"


def _open(value: str) -> bool:
    return "$" in value or "`" in value
