"""What a failed run notes of its end, for its supervisor and for whoever reads events.jsonl. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rlcli.attempt import RETRY, is_supervised
from rlcli.errors import RlcliError, RunFailed
from rlcli.trainer.run_folder import add_event, events_of, place_of

DIED = " died in "


class Failure(NamedTuple):
    """Why an attempt at a run has failed. where: as in «step 7, update: »; empty where that is not known.
    retry: whether going on from the last checkpoint may help."""

    where: str
    message: str
    mend: str
    retry: bool


def note_failure(
    folder: Path, who: str, message: str, mend: str = "", *, retry: bool, since: float = 0.0, **facts: Any
) -> None:
    """Add the event `failed`, with the step and phase that the run was last in, unless that was before `since`."""
    last = place_of(folder)
    place = {name: last[name] for name in ("step", "phase") if name in last and last.get("time", 0.0) >= since}
    add_event(folder, "failed", who=who, **place, message=message, mend=mend, retry=retry, **facts)


@contextlib.contextmanager
def noting_failure(folder: Path) -> Iterator[None]:
    """Note why the block, which is the run in `folder`, fails; and have a run that failed say how to go on."""
    try:
        yield
    except RlcliError as error:
        who, died, _ = error.message.partition(DIED)
        retry = isinstance(error, RunFailed) and error.retry
        note_failure(folder, who if died else "the run", error.message, error.mend, retry=retry)
        if isinstance(error, RunFailed) and "--resume" not in error.mend:
            raise RunFailed(error.message, "; ".join(filter(None, (error.mend, go_on(folder)))), retry=retry) from error
        raise
    except Exception as error:
        note_failure(folder, "the run", f"{type(error).__name__}: {error}", retry=False)
        raise


def leaving_at_once(folder: Path) -> Callable[[str, str], NoReturn]:
    """What to do, from any thread, when the ground is gone that the run in `folder` stands on, so that its main thread
    may wait for ever: note who died and end this process, whose supervisor and undertaker clear up."""

    def leave(who: str, message: str) -> NoReturn:
        note_failure(folder, who, message, retry=True)
        if not is_supervised():
            with contextlib.suppress(OSError):  # who read it may be gone with the supervisor
                print(f"error: {message}; {go_on(folder)}", file=sys.stderr, flush=True)
        os._exit(RETRY if is_supervised() else 1)

    return leave


def go_on(folder: Path) -> str:
    """How to go on with the run in `folder`."""
    return f"go on with: rlcli train --resume {shlex.quote(str(folder))}"


def last_failure(folder: Path, since: float) -> Failure | None:
    """What the run in `folder` has noted of its failure since the time `since`."""
    for event in reversed(events_of(folder)):
        if event.get("event") == "failed" and event.get("time", 0.0) >= since:
            message, mend = str(event.get("message", "")), str(event.get("mend", ""))
            return Failure(_where(event), message, mend, bool(event.get("retry")))
    return None


def _where(place: dict[str, Any]) -> str:
    """
    >>> _where({"step": 7, "phase": "update"}), _where({"step": 0, "phase": "load model"}), _where({})
    ('step 7, update: ', 'load model: ', '')
    """
    step, phase = place.get("step"), place.get("phase")
    return ", ".join([*([f"step {step}"] if step else []), *([str(phase)] if phase else [])]) + ": " if phase else ""
