"""The progress bar of a command, on stderr, if that is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlcli.cli import console

REDRAW_S = 0.1
"""Minimum time between two updates: a call for every row must cost almost nothing."""


@contextmanager
def progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """A function to call with what is being done, how much is done, and the total (None: unknown).

    It shows a bar with the time left.
    """
    terminal = console.stderr()
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
