"""Stores a verifier that a program gives as a function, where the processes that score responses find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlcli.api.function_source import source_of
from rlcli.runs.folder import LOCK, RunFolder
from rlcli.runs.listing import config_of
from rlcli.support.files import replacing
from rlcli.types import Verdict

CODE = "code"
"""The folder of such functions, in that of a run or an evaluation."""

Function = Callable[..., Verdict | float | None]


@contextmanager
def stored_in_run(function: Function, run: Path, force: bool) -> Iterator[str]:
    """Store a function in the folder of a run that the block starts; gives the verifier's expression. If the block
    fails before there is a run that names it, the folder is as it was before.

    force: the run may replace one. Raises `VerifierError` for a function that cannot be stored, and what a run in that
    folder would raise, before anything is written.
    """
    source = source_of(function)
    made = make_run_folder(run, force)
    file, is_new = _write(source, function.__name__, run.absolute() / CODE)
    try:
        yield _expression(file, function)
    except BaseException:
        if is_new and str(file) not in str(config_of(run).get("verifier", {}).get("name", "")):
            remove_stored(file, run / CODE, made)
        raise


def make_run_folder(run: Path, force: bool) -> list[Path]:
    """Make the folder of a run that is to start, and return the folders that were made for it. Raises what a run in
    that folder would raise, before anything is written."""
    RunFolder.check(run, force)
    made = [folder for folder in (run, *run.parents) if not folder.exists()]
    run.mkdir(parents=True, exist_ok=True)
    (run / LOCK).touch()  # the folder is a run's: it holds a file
    return made


@contextmanager
def stored_in_evaluation(function: Function, folder: Path) -> Iterator[str]:
    """Store a function in the folder of an evaluation's samples; gives the verifier's expression. Removed if the block
    fails."""
    source = source_of(function)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    file, is_new = _write(source, function.__name__, folder.absolute() / CODE)
    try:
        yield _expression(file, function)
    except BaseException:
        if is_new:
            remove_stored(file, folder / CODE, made)
        raise


def _write(source: str, name: str, folder: Path) -> tuple[Path, bool]:
    """Write NAME.py, or NAME-2.py and so on if another function has that name: a run that uses it may still resume.
    Returns the file, and whether it is new."""
    folder.mkdir(parents=True, exist_ok=True)
    file, number = folder / f"{name}.py", 2
    while file.exists():
        if file.read_text(encoding="utf-8") == source:
            return file, False
        file, number = folder / f"{name}-{number}.py", number + 1
    with replacing(file) as beside:
        beside.write_text(source, encoding="utf-8")
    return file, True


def _expression(file: Path, function: Function) -> str:
    from rlcli.rewards.expression import Term

    return Term(f"{file}:{function.__name__}").verifier


def remove_stored(file: Path, room: Path, made: list[Path]) -> None:
    """Remove a stored file, its folder in that of a run, and the folders that were made for the run, unless something
    else is in them."""
    with suppress(OSError):
        file.unlink(missing_ok=True)
        room.rmdir()
        left = {one.name for one in room.parent.iterdir()}
        if made and left <= {LOCK}:
            (room.parent / LOCK).unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
