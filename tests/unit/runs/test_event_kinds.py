"""`EVENTS` names every kind of event that the program writes, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rlcli.runs import curve_marks
from rlcli.runs.event_kinds import EVENTS
from tests.page_commands import ROOT

WRITERS = {"event": 0, "add_event": 1}
"""Name of the function → which of its arguments is the kind."""


def kinds() -> Iterator[str]:
    for path in [*(ROOT / "rlcli").rglob("*.py"), *(ROOT / "packages").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name in WRITERS and len(node.args) > WRITERS[name]:
                yield from texts(node.args[WRITERS[name]])


def texts(argument: ast.expr) -> Iterator[str]:
    """The kinds that an argument may be: a text, a constant of `marks`, or one of two."""
    if isinstance(argument, ast.IfExp):
        yield from (*texts(argument.body), *texts(argument.orelse))
    elif isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        yield argument.value
    elif isinstance(argument, ast.Name) and argument.id.isupper():
        yield getattr(curve_marks, argument.id)


def test_every_event_that_is_written_has_a_description() -> None:
    assert {*kinds()} == {*EVENTS}
