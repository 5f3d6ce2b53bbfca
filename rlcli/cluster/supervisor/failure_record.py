"""Records the failure of a run, for its supervisor and readers of events.jsonl. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rlcli.errors import RlcliError, RunFailed
from rlcli.runs.folder import add_event, events_of, progress_of
from rlcli.support.attempt import RETRY, is_supervised
from rlcli.support.redact import printable

RECORDED = "recorded_by_rlcli"
"""Attribute of an error that has been recorded."""


class Failure(NamedTuple):
    """The failure of an attempt at a run."""

    where: str
    """Step and phase, such as «step 7, update: »; empty if unknown."""
    message: str
    """The error in one line."""
    hint: str
    """The fix; empty if unknown."""
    retry: bool
    """True if resuming from the last checkpoint may help."""


def note_failure(
    folder: Path, who: str, message: str, hint: str = "", *, retry: bool, since: float = 0.0, **facts: object
) -> None:
    """Add the event `failed`, with the last recorded step and phase, unless those are older than `since`."""
    last = progress_of(folder)
    progress = {name: last[name] for name in ("step", "phase") if name in last and last.get("time", 0.0) >= since}
    add_event(folder, "failed", who=who, **progress, message=message, hint=hint, retry=retry, **facts)


@contextlib.contextmanager
def noting_failure(folder: Path) -> Iterator[None]:
    """Record an error of the block, the run in `folder`, and add the command to resume it to the error of a failed run.
    Blocks may be nested: the innermost records, so that the error is on disk before Ray is shut down, which may end the
    process."""
    try:
        yield
    except Exception as error:
        if getattr(error, RECORDED, False):
            raise
        setattr(error, RECORDED, True)
        if isinstance(error, RunFailed):
            note_failure(folder, error.who, error.message, error.hint, retry=error.retry)
            hint = "; ".join(filter(None, (error.hint, resume_command(folder))))
            failed = RunFailed(error.message, hint, retry=error.retry, who=error.who)
            setattr(failed, RECORDED, True)
            raise failed from error
        if isinstance(error, RlcliError):
            note_failure(folder, "the run", error.message, error.hint, retry=False)
        else:
            note_failure(folder, "the run", f"{type(error).__name__}: {error}", retry=False)
        raise


def exit_when_cluster_lost(folder: Path) -> Callable[[str, str], NoReturn]:
    """The callback, from any thread, for the loss of the Ray cluster of the run in `folder`, whose main thread may wait
    indefinitely: record the failure and exit this process; its supervisor and reaper clean up."""

    def leave(who: str, message: str) -> NoReturn:
        note_failure(folder, who, message, retry=True)
        if not is_supervised():
            with contextlib.suppress(OSError):  # the reader may be gone with the supervisor
                print(printable(f"error: {message}; {resume_command(folder)}"), file=sys.stderr, flush=True)
        os._exit(RETRY if is_supervised() else 1)

    return leave


def resume_command(folder: Path) -> str:
    """The command to resume the run in `folder`."""
    return f"resume with: rlcli train --resume {shlex.quote(str(folder))}"


def last_failure(folder: Path, since: float) -> Failure | None:
    """The failure that the run in `folder` has recorded since the time `since`."""
    for event in reversed(events_of(folder)):
        if event.get("event") == "failed" and event.get("time", 0.0) >= since:
            message, hint = str(event.get("message", "")), str(event.get("hint", ""))
            return Failure(_where(event), message, hint, bool(event.get("retry")))
    return None


def _where(event: dict[str, Any]) -> str:
    """
    >>> _where({"step": 7, "phase": "update"}), _where({"step": 0, "phase": "load model"}), _where({})
    ('step 7, update: ', 'load model: ', '')
    """
    step, phase = event.get("step"), event.get("phase")
    return ", ".join([*([f"step {step}"] if step else []), *([str(phase)] if phase else [])]) + ": " if phase else ""
