"""Where output goes: results to standard output, progress and messages to standard error."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

REDRAW_S = 0.1
"""Minimum time between two updates of a progress bar: a call for every row must cost almost nothing."""

# Rich is imported inside the functions: commands that print JSON or plain text do not load it.


@cache
def stdout() -> Console:
    """The console of results."""
    from rich.console import Console

    return Console(highlight=False)


@cache
def stderr() -> Console:
    """The console of progress, notes and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def show(result: RenderableType) -> None:
    """Print a result: a table, or text with rich markup."""
    stdout().print(result)


def plain(text: str) -> None:
    """Print a result as it is: no markup, no wrapping."""
    print(text)


def note(text: str) -> None:
    """A line on standard error."""
    stderr().print(text, markup=False, highlight=False, soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table of results. Cells are shown as they are, without markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        # The first column names the row: it is never shortened.
        made.add_column(column, no_wrap=index == 0, overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made


def emit_json(result: object) -> None:
    """Print `result` as JSON: dataclasses, paths and dates too; NaN and infinities become null."""
    print(json.dumps(_jsonable(result), indent=2, ensure_ascii=False))


def _jsonable(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _jsonable(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path | datetime.date | datetime.time):  # TOML has dates
        return str(value)
    return value


@contextmanager
def progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """A function to call with what is being done, how much is done, and the total (None: unknown).

    It shows a bar with the time left on standard error, if that is a terminal.
    """
    terminal = stderr()
    # Not `is_terminal`: FORCE_COLOR, which many CI systems set, makes that true for a log file.
    if not terminal.file.isatty() or terminal.is_dumb_terminal:
        yield lambda what, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, transient=True) as bars:
        tasks: dict[str, tuple[float, TaskID]] = {}

        def update(what: str, done: int, total: int | None) -> None:
            now = time.monotonic()
            if what not in tasks:
                for _, task in tasks.values():
                    bars.remove_task(task)
                tasks.clear()
                tasks[what] = now, bars.add_task(what, total=total)
            last, task = tasks[what]
            if now - last >= REDRAW_S:
                tasks[what] = now, task
                bars.update(task, completed=done, total=total)

        yield update
