"""Console output: results to standard output, progress and messages to standard error.

The text may come from files that others have written. So control characters in it become escapes, and neither markup
nor emoji codes are interpreted.
"""

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
from typing import TYPE_CHECKING

from rlcli.support.redact import printable, printable_json

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

REDRAW_S = 0.1
"""Minimum time between two updates of a progress bar: a call for every row must cost almost nothing."""

# Rich is imported inside the functions: commands that print JSON or plain text do not load it.


@cache
def stdout() -> Console:
    """The console of results."""
    return _console(to_stderr=False)


@cache
def stderr() -> Console:
    """The console of progress, notes and errors."""
    return _console(to_stderr=True)


def _console(to_stderr: bool) -> Console:
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        """Writes the codes of styles and of live views, and no control character of a text."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    return PrintableConsole(stderr=to_stderr, highlight=False, markup=False, emoji=False)


def show(result: RenderableType) -> None:
    """Print a result: a table, or text."""
    stdout().print(result)


def plain(text: str) -> None:
    """Print a result: no markup, no wrapping."""
    print(printable(text))


def note(text: str) -> None:
    """Print a line on standard error."""
    stderr().print(printable(text), soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table of results, without markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        # The first column names the row: it is never shortened.
        result.add_column(Text(printable(column)), no_wrap=index == 0, overflow="fold")
    for row in rows:
        result.add_row(*(Text(printable(str(cell))) for cell in row))
    return result


def emit_json(result: object) -> None:
    """Print `result` as JSON: dataclasses, paths and dates too; NaN and infinities become null."""
    print(printable_json(json.dumps(_jsonable(result), indent=2, ensure_ascii=False)))


def json_line(result: Mapping[str, object]) -> None:
    """Print a result of several as one line of JSON, at once."""
    print(printable_json(json.dumps(result, ensure_ascii=False)), flush=True)


def _jsonable(value: object) -> object:
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
    """A function to call with the activity, the amount done, and the total (None: unknown).

    It shows a bar with the time left on standard error, if that is a terminal.
    """
    terminal = stderr()
    # Not `is_terminal`: FORCE_COLOR, which many CI systems set, makes that true for a log file.
    if not terminal.file.isatty() or terminal.is_dumb_terminal:
        yield lambda activity, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=terminal,
        transient=True,
    ) as bars:
        tasks: dict[str, tuple[float, TaskID]] = {}

        def update(activity: str, done: int, total: int | None) -> None:
            now = time.monotonic()
            if activity not in tasks:
                for _, task in tasks.values():
                    bars.remove_task(task)
                tasks.clear()
                tasks[activity] = now, bars.add_task(activity, total=total)
            last, task = tasks[activity]
            if now - last >= REDRAW_S:
                tasks[activity] = now, task
                bars.update(task, completed=done, total=total)

        yield update
