"""The supervisor of a run: a small process that has the run as its child, begins it again from the last checkpoint
where a process or a machine has failed it, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
import tomllib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import typer

from rlcli.attempt import INTERRUPTED, RETRY, TOLD, is_supervised, remove_leftovers, told
from rlcli.cli.group import command_line
from rlcli.errors import RunFailed
from rlcli.trainer.failing import Failure, go_on, last_failure, note_failure
from rlcli.trainer.run_folder import add_event

GRACE_S = 5.0
"""How long what an attempt has left behind gets to end by itself."""
PATIENCE_S, MOST_PATIENCE_S = 1.0, 60.0
"""Pause before the first restart, and the longest: each is twice as long as the one before."""
SILENT = 1
"""How a child ends that a library has ended: what failed by itself ends with TOLD."""
LEAVING = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP}
"""How a child ends that was asked to leave before it listened."""

P = ParamSpec("P")
Options = Mapping[str, Any]


def supervised(folder_of: Callable[[Options], Path | None]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Have a command that trains run under supervision when it comes from a shell. folder_of: the run folder that its
    options mean; None where they mean none, which the command then says itself."""

    def wrap(command: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(command)
        def run(*args: P.args, **options: P.kwargs) -> None:
            words = command_line.get()
            alone = words is None or is_supervised() or options.get("dry_run")
            if alone or not words or (folder := folder_of(options)) is None:
                return command(*args, **options)
            goes_on = "out" not in options or bool(options.get("resume"))
            debug = ["--debug"] if "--debug" in words else []
            name, *rest = (word for word in words if word != "--debug")
            out = [] if goes_on or options["out"] else ["--out", str(folder)]
            first = _rlcli(name, *out, *rest, *debug)
            again = first  # what it changes may not be in the folder yet; made a second time, it changes nothing
            if not goes_on:
                again = _rlcli("train", "--resume", str(folder), *_of_this_call(options), *debug)
            raise typer.Exit(supervise(folder, first, again, goes_on=goes_on))

        return run

    return wrap


def train_folder(options: Options) -> Path | None:
    """Where `rlcli train` puts its run: the folder that it goes on with, the one it was given, or the next free one."""
    if options["resume"]:
        from rlcli.trainer.resume import find_run

        return find_run(options["resume"])
    from rlcli.config.recipes import load
    from rlcli.trainer.run_folder import default_out

    out: Path | None = options["out"]
    recipe: str | None = options["recipe"]
    return out or (default_out(load(recipe).header.name) if recipe else None)


def _of_this_call(options: Options) -> list[str]:
    """The options that are no part of the run's configuration, which its folder holds."""
    kept = []
    if options.get("ray_address"):
        kept += ["--ray-address", str(options["ray_address"])]
    if options.get("show_samples"):
        kept += ["--show-samples", str(options["show_samples"])]
    if options.get("profile"):
        kept.append("--profile")
    return [*kept, "--json"] if options.get("as_json") else kept


def _rlcli(*words: str) -> list[str]:
    # -P: what lies in the current folder must not take the place of a library.
    return [sys.executable, "-P", "-m", "rlcli.cli.main", *words]


def supervise(
    folder: Path,
    first: Sequence[str],
    again: Sequence[str],
    *,
    goes_on: bool = False,
    patience_s: float = PATIENCE_S,
    grace_s: float = GRACE_S,
) -> int:
    """Run the command `first` to train in `folder`, then `again` as often as the run's configuration allows, where a
    cause outside the run has ended it. Returns the exit code of the last; 130 where it was asked to leave at once.

    What counts are restarts without progress: a failure after a newer checkpoint than at any failure before starts the
    count again. A run that fails at the same step each time comes to an end.

    goes_on: `first` too goes on with a run that the folder holds.
    Raises `RunFailed`, which says what failed, where, and how to go on, when there is to be no further attempt.
    """
    from rlcli.cli.child import Children  # which brings psutil

    before, restarts, reached, words = _stamp(folder), 0, 0, first
    with Children(grace_s) as children:
        while True:
            since, group = time.time(), uuid.uuid4().hex[:8]
            status = children.run(words, {**os.environ, **told(group, restarts)})
            remove_leftovers(group)
            if status == TOLD:
                return 1
            if status >= 0 and status not in (RETRY, SILENT):
                return status
            _show_cursor()
            if children.asked > 1 or (children.asked and status in LEAVING):
                return INTERRUPTED
            begun = goes_on or _stamp(folder) not in (None, before)  # None: --force had removed it
            failure = _failure(folder if begun else None, status, since)
            # RETRY: of two threads that noted why, the one that left has the say.
            retry = begun and (failure.retry or status == RETRY) and not children.asked
            most = _max_restarts(folder) if retry else 0
            if retry and (newest := last_checkpoint(folder)) > reached:
                restarts, reached = 0, newest
            if restarts >= most:
                raise _gave_up(failure, restarts, folder if begun else None)
            restarts, words, goes_on = restarts + 1, again, True
            _announce(failure, folder, restarts, most)
            children.pause(min(MOST_PATIENCE_S, patience_s * 2.0 ** (restarts - 1)))
            if children.asked:
                return INTERRUPTED


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Changes when the folder's configuration is written: only from then on is there this run to go on with."""
    try:
        found = (folder / "config.toml").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _max_restarts(folder: Path) -> int:
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        return int(config["fault_tolerance"]["max_restarts"])
    except (OSError, ValueError, LookupError):
        return 0


def _failure(folder: Path | None, status: int, since: float) -> Failure:
    """What the attempt noted of its end since `since`, else what its exit status tells, which is noted then. folder:
    None where the attempt has not come as far as to write to it."""
    if folder and (failure := last_failure(folder, since)):
        return failure
    message, mend, killed_by = "the run failed without a word", "", ""
    if status == SILENT:
        message = "the driver was ended without a word, as Ray does where the raylet is gone"
    if status < 0:
        killed_by = signal.Signals(-status).name
        message = f"the driver died of {killed_by}"
    if status == -signal.SIGKILL:
        mend = "if nobody killed it, the machine ran out of memory: dmesg tells"
    if not folder:
        return Failure("", message, mend, retry=True)
    note_failure(folder, "the driver", message, mend, retry=True, since=since, signal=killed_by)
    return last_failure(folder, since) or Failure("", message, mend, retry=True)


def _announce(failure: Failure, folder: Path, restart: int, most: int) -> None:
    step = last_checkpoint(folder)
    from_where = f"step {step}" if step else "the start"
    add_event(folder, "restarted", restart=restart, of=most, step=step)
    _say(f"{failure.where}{failure.message}: restart {restart} of {most} from {from_where}")


def _gave_up(failure: Failure, restarts: int, folder: Path | None) -> RunFailed:
    spent = f"given up after {restarts} restarts without a newer checkpoint" if restarts else ""
    spent += " (fault_tolerance.max_restarts)" if restarts else ""
    further = go_on(folder) if folder else "nothing was done yet"
    mend = "; ".join(part for part in (failure.mend, spent, further) if part)
    return RunFailed(failure.where + failure.message, mend)


def last_checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint by its name; 0 where there is none."""
    steps = (path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*"))
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def _show_cursor() -> None:
    """A live view that was killed has hidden it, and left its last line open."""
    with contextlib.suppress(OSError, AttributeError):
        if sys.stderr.isatty():
            print("\x1b[?25h", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        print(" ".join(text.split()), file=sys.stderr, flush=True)
