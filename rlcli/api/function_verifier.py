"""Stores a program's verifier function in a folder where the processes that score responses find it."""

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
"""Folder of such functions, in the folder of a run or an evaluation."""

Function = Callable[..., Verdict | float | None]


@contextmanager
def stored_in_run(function: Function, run: Path, force: bool) -> Iterator[str]:
    """Store a function in the folder of a run that the block starts; yields the verifier's expression. If the block
    fails before there is a run that names it, the folder is restored.

    force: the run may replace one. Raises `VerifierError` for a function that cannot be stored, and the errors of a run
    in that folder, before anything is written.
    """
    source = source_of(function)
    new_folders = make_run_folder(run, force)
    file, is_new = _write(source, function.__name__, run.absolute() / CODE)
    try:
        yield _expression(file, function)
    except BaseException:
        if is_new and str(file) not in str(config_of(run).get("verifier", {}).get("name", "")):
            remove_stored(file, run / CODE, new_folders)
        raise


def make_run_folder(run: Path, force: bool) -> list[Path]:
    """Create the folder of a run that is to start, and return the created folders. Raises the errors of a run in that
    folder, before anything is written."""
    RunFolder.check(run, force)
    new_folders = [folder for folder in (run, *run.parents) if not folder.exists()]
    run.mkdir(parents=True, exist_ok=True)
    (run / LOCK).touch()  # marks the folder as a run's
    return new_folders


@contextmanager
def stored_in_evaluation(function: Function, folder: Path) -> Iterator[str]:
    """Store a function in the folder of an evaluation's samples; yields the verifier's expression. Removed if the block
    fails."""
    source = source_of(function)
    new_folders = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    file, is_new = _write(source, function.__name__, folder.absolute() / CODE)
    try:
        yield _expression(file, function)
    except BaseException:
        if is_new:
            remove_stored(file, folder / CODE, new_folders)
        raise


def _write(source: str, name: str, folder: Path) -> tuple[Path, bool]:
    """Write NAME.py, or NAME-2.py and so on if another function has that name: a run that uses it may still resume.
    Returns the file, and True if it is new."""
    folder.mkdir(parents=True, exist_ok=True)
    file, number = folder / f"{name}.py", 2
    while file.exists():
        if file.read_text(encoding="utf-8") == source:
            return file, False
        file, number = folder / f"{name}-{number}.py", number + 1
    with replacing(file) as temporary:
        temporary.write_text(source, encoding="utf-8")
    return file, True


def _expression(file: Path, function: Function) -> str:
    from rlcli.rewards.expression import Term

    return Term(f"{file}:{function.__name__}").verifier


def remove_stored(file: Path, folder: Path, new_folders: list[Path]) -> None:
    """Remove a stored file, its folder in that of a run, and the folders that were created for the run, unless they
    have other files."""
    with suppress(OSError):
        file.unlink(missing_ok=True)
        folder.rmdir()
        remaining = {entry.name for entry in folder.parent.iterdir()}
        if new_folders and remaining <= {LOCK}:
            (folder.parent / LOCK).unlink(missing_ok=True)
            for folder in new_folders:
                folder.rmdir()
