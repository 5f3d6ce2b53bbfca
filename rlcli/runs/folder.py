"""The folder of a run: its layout, its lock, and writes that leave no half-written file when the process is killed."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlcli.errors import RlcliError, RunFailed, SetupError
from rlcli.runs.software_record import environment
from rlcli.support.files import (
    closed_folder,
    file_mode,
    folder_mode,
    read_object,
    read_objects,
    remove,
    replacing,
    write_synced,
)
from rlcli.support.reading import UnfitFile, check_regular
from rlcli.support.redact import redacted

LOCK = ".lock"
"""Marks a folder as a run's; held with flock while the run is alive, so it is released however the run ends."""
LOCK_TRIES, LOCK_PAUSE_S = 3, 0.1
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
TIMELINE = "timeline.jsonl"
"""A line a step: when the controller was in which phase, and each worker in which call."""
RECORDS = ("config.toml", METRICS, EVENTS, "samples", "evaluations")
"""A folder that has any of these is a run's."""
PROMPTS = "prompts.jsonl"
"""A line a step: the scored groups of each prompt."""
TRACKERS = "trackers.json"
"""The run's id in each tracker."""
INPUTS = "inputs.json"
"""Digests of what the run reads by path."""
SOURCES = "sources"
"""Copies of the code and of other small texts among these."""
PROGRESS = ".place"
"""The run's current step and phase, as JSON padded to PROGRESS_BYTES."""
PROGRESS_BYTES = 256
HINT = "free some space or fix the disk"
LAYOUT = (
    *("config.toml", "environment.json", METRICS, "samples", "evaluations", "checkpoints", "logs"),
    *(EVENTS, TIMELINE, PROMPTS, "exports", "bad-batches", "reward.png", "profile", "rescored"),
    *(INPUTS, SOURCES),
    *(TRACKERS, "wandb", "tensorboard", "mlflow", "swanlab", "trackio"),
)
"""Everything that a run writes into its folder; `RunFolder.create` removes it."""
FILES = (
    "config.toml",
    "environment.json",
    METRICS,
    EVENTS,
    TIMELINE,
    PROMPTS,
    TRACKERS,
    INPUTS,
    "reward.png",
    LOCK,
    PROGRESS,
)
"""Files that a run reads, or writes to again when it is resumed."""
LINKED = "checkpoints"
"""The folder that may be a link, to a larger disk: a checkpoint is used only if its files are those of its manifest."""


class RunFolder:
    """A folder that this process has locked:

        config.toml  environment.json  metrics.jsonl  events.jsonl  timeline.jsonl  prompts.jsonl  trackers.json
        inputs.json  sources/9f2c9f2c9f2c-mine.py
        samples/step-000001/rank-0.parquet  evaluations/step-000000.json  checkpoints/  logs/

    with RunFolder.create(Path("runs/first")) as folder:
        folder.append_metrics({"step": 1, "reward/mean": 0.25})
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.samples = path / "samples"
        self.evaluations = path / "evaluations"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self._progress_file = os.open(path / PROGRESS, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, file_mode(path))

    @classmethod
    def create(
        cls, path: Path, force: bool = False, facts: Mapping[str, Any] | None = None, *, shared: bool = False
    ) -> RunFolder:
        """Make the folder, lock it, and write environment.json.

        force: replace the run in the folder, unless that run is alive; files that are not a run's are never removed.
        facts: further entries of environment.json for this run. shared: permissions follow the umask; otherwise only
        this user may enter the folder, even one that existed.
        Leftovers of a run that failed to start (logs, its configuration) are always replaced.
        Raises `RlcliError` if the folder is in use, has a run, or has other files; `SetupError` if it cannot be
        written.
        """
        path = path.absolute()
        with _writable(path):
            lock = _hold(path, force, 0o777 if shared else 0o700)
            if not shared:
                closed_folder(path)
            folder = cls(path, lock)
            try:
                folder._clear()
                for subfolder in folder._subfolders:
                    subfolder.mkdir(folder_mode(path))
                write_json(path / "environment.json", environment() | dict(facts or {}))
            except BaseException:
                folder.close()
                raise
        return folder

    @classmethod
    def resume(cls, path: Path) -> RunFolder:
        """Lock the folder of a run to resume. Changes nothing in it except that missing subfolders are created.

        Raises `RlcliError` if the run is alive or the folder has none; `SetupError` if it cannot be written.
        """
        path = path.absolute()
        if not (path / "config.toml").is_file():
            raise RlcliError(f"{path} holds no run: it has no config.toml", "name the folder of a run")
        with _writable(path, hint=HINT):
            try:
                lock = _lock(path, file_mode(path))
            except RlcliError as alive:
                raise RlcliError(alive.message, "stop it first: Ctrl-C finishes its step and saves it") from None
            folder = cls(path, lock)
            for subfolder in folder._subfolders:
                subfolder.mkdir(folder_mode(path), exist_ok=True)
        return folder

    @staticmethod
    def check(path: Path, force: bool = False) -> None:
        """Raise what `create` would, without side effects: for the start of a command, long before the run."""
        path = path.absolute()
        new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            with _writable(path):
                os.close(_hold(path, force))
        finally:
            with suppress(OSError):
                if new_folders:
                    (path / LOCK).unlink(missing_ok=True)
                for folder in new_folders:
                    folder.rmdir()

    def write_config(self, toml: str) -> None:
        """Write the resolved configuration as TOML, synced to disk. SetupError if it cannot be written."""
        with _writable(self.path, hint=HINT), replacing(self.path / "config.toml") as temporary:
            write_synced(temporary, toml.encode())

    def write_inputs(self, record: Mapping[str, Any], copies: Mapping[str, tuple[bytes, int]]) -> None:
        """Write the record and copies of the files that the run reads by path. record: the content of inputs.json.
        copies: name in sources/ → content and mode of the original, whose permissions the copy does not exceed; earlier
        ones stay. SetupError if they cannot be written."""
        sources = self.path / SOURCES
        with _writable(self.path, hint=HINT):
            if copies:
                sources.mkdir(folder_mode(self.path), exist_ok=True)
            for name, (content, mode) in copies.items():
                with replacing(sources / name) as temporary:
                    temporary.touch(file_mode(sources) & mode | 0o600)
                    temporary.write_bytes(content)
            write_json(self.path / INPUTS, record)

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl. JSON has no NaN and no infinity: such a value is written as null, and listed
        with its value under `nonfinite`. Raises `RunFailed` if it cannot be written: a run without its record is of
        little use.

        >>> json.dumps(finite({"step": 3, "update/grad_norm": math.nan}))
        '{"step": 3, "update/grad_norm": null, "nonfinite": {"update/grad_norm": "nan"}}'
        """
        path = self.path / METRICS
        try:
            append_line(path, json.dumps(finite(metrics), ensure_ascii=False, allow_nan=False))
        except OSError as error:
            raise _unrecorded(path, error) from None

    def write_evaluation(self, step: int, report: Mapping[str, Any]) -> None:
        """Write the report of an evaluation after `step`. Raises `RunFailed` if it cannot be written."""
        path = self.evaluations / f"step-{step:06d}.json"
        try:
            write_json(path, report)
        except OSError as error:
            raise _unrecorded(path, error) from None

    def event(self, kind: str, /, **facts: object) -> None:
        """Add one line to events.jsonl: the kind of the event, its time (seconds since 1970) and its entries. Write
        errors are ignored: most events report a failure, which a write error must not hide."""
        add_event(self.path, kind, **facts)

    def at(self, step: int, phase: str) -> None:
        """Record the current step and phase, in case the run dies. One small write, in place."""
        progress = {"step": step, "phase": phase[:100], "time": round(time.time(), 3), "pid": os.getpid()}
        with suppress(OSError):
            os.pwrite(self._progress_file, json.dumps(progress).ljust(PROGRESS_BYTES).encode(), 0)

    def close(self) -> None:
        """Unlock the folder. May be called again."""
        if self._lock >= 0:
            os.close(self._lock)
            os.close(self._progress_file)
            self._lock = self._progress_file = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _subfolders(self) -> tuple[Path, ...]:
        return self.samples, self.evaluations, self.checkpoints, self.logs

    def _clear(self) -> None:
        os.ftruncate(self._progress_file, 0)
        for name in LAYOUT:
            remove(self.path / name)


def add_event(path: Path, kind: str, /, **facts: object) -> None:
    """`RunFolder.event` of the run in the folder `path`, for a process without its lock."""
    line = {"time": round(time.time(), 3), "event": kind, **finite(facts)}
    with suppress(OSError):
        append_line(path / EVENTS, redacted(json.dumps(line, ensure_ascii=False, default=str)))


def append_line(path: Path, line: str) -> None:
    """Append a line to the file: all of it, or nothing on an error. If a kill truncated the last line, a line feed is
    added first, so that only that line is lost."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, file_mode(path.parent))
    try:
        size = os.fstat(file).st_size
        cut = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        data = ("\n" * cut + line + "\n").encode(errors="replace")  # for example a file name that is not UTF-8
        try:
            while data:  # a nearly full disk may take part of a line
                data = data[os.write(file, data) :]
        except OSError:
            os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def check_is_run(path: Path) -> None:
    """RlcliError unless the folder has a file or folder that a run writes."""
    why = "" if path.is_dir() else "it is a file" if path.exists() else "no such folder"
    if not why and not any((path / name).exists() for name in RECORDS):
        why = f"it has neither config.toml nor {METRICS}"
    if why:
        raise RlcliError(f"{path} is not a run: {why}", "give the folder of a run; rlcli runs list shows them")


def check_records(path: Path) -> None:
    """UnfitFile unless the entries of the folder are regular files and folders, as a run writes them, without links. A
    pipe would block a reader, and a write to a link would change a file elsewhere."""
    for name in FILES:
        with suppress(OSError):  # it is missing, or its reader says why it cannot be read
            check_regular(path / name)
    for subfolder in (path / name for name in LAYOUT if name not in FILES):
        with suppress(OSError):
            mode = (os.stat if subfolder.name == LINKED else os.lstat)(subfolder).st_mode
            if stat.S_ISLNK(mode):
                raise UnfitFile(
                    subfolder, f"is a link, to {os.readlink(subfolder)!r:.200}", "put the folder itself there"
                )
            if not stat.S_ISDIR(mode):
                raise UnfitFile(subfolder, "is not a folder", "put the folder there that the run has written")


def progress_of(path: Path) -> dict[str, Any]:
    """The last recorded progress of the run in the folder `path`: step, phase, time, pid; empty if unknown."""
    return read_object(path / PROGRESS)


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of the run in the folder `path`, oldest first; truncated lines are left out."""
    with suppress(OSError):
        return read_objects(path / EVENTS)
    return []


def finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """`metrics` for JSON: scalars as Python numbers, non-finite numbers as null and listed."""
    clean: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for name, value in metrics.items():
        if hasattr(value, "item"):  # NumPy's scalars and tensors of one element
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[name], value = str(value), None
        clean[name] = value
    return clean | {"nonfinite": nonfinite} if nonfinite else clean


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def evaluation_folder(path: Path, *, shared: bool = False) -> Path:
    """Create the folder of an evaluation's samples and logs, and check that it is writable. A run's folder is refused:
    its logs would be overwritten. shared: a new one follows the umask; otherwise only this user may enter it."""
    with _writable(path, "folder"):
        path.mkdir(0o777 if shared else 0o700, parents=True, exist_ok=True)
        if (path / LOCK).exists():
            raise RlcliError(f"folder {path} holds a run", "give another folder with --out")
        with tempfile.TemporaryFile(dir=path):
            pass
    return path.resolve()


def _unrecorded(path: Path, error: OSError) -> RunFailed:
    return RunFailed(f"{path} cannot be written: {error.strerror}", HINT)


@contextmanager
def _writable(path: Path, description: str = "run folder", hint: str = "give another with --out") -> Iterator[None]:
    """Turn an OSError into a SetupError about the folder `path`."""
    try:
        yield
    except OSError as error:
        blocking_file = next(
            (parent for parent in (path, *path.parents) if parent.exists() and not parent.is_dir()), None
        )
        why = f"{blocking_file} is a file" if blocking_file else error.strerror
        raise SetupError(f"{description} {path} cannot be written: {why}", hint) from None


def _hold(path: Path, force: bool, mode: int = 0o700) -> int:
    """Create the folder `path` with this mode, less the umask, if it is missing, and lock it for a new run. Removes
    nothing."""
    path.mkdir(mode, parents=True, exist_ok=True)
    names = {entry.name for entry in path.iterdir()}
    if names and LOCK not in names:
        raise RlcliError(f"run folder {path} has files that are not a run's", "give another folder with --out")
    lock = _lock(path, mode & 0o666)
    if has_results(path) and not force:
        os.close(lock)
        raise RlcliError(
            f"run folder {path} already holds a run",
            "give another folder with --out; rlcli train replaces it with --force",
        )
    return lock


def has_results(path: Path) -> bool:
    """True if the folder has results of a run. A run that failed to start has none."""
    subfolders = (path / name for name in ("samples", "evaluations", "checkpoints"))
    return (path / METRICS).exists() or any(subfolder.is_dir() and any(subfolder.iterdir()) for subfolder in subfolders)


def _lock(path: Path, mode: int) -> int:
    """Open and lock the lock file. mode: of a new lock file, less the umask. RlcliError if another process holds it."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode)
    try:
        _take(lock)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()} on {platform.node()}".encode())
    except BlockingIOError:
        holder = os.read(lock, 200).decode(errors="replace") or "unknown"
        os.close(lock)
        raise RlcliError(f"run folder {path} is in use by process {holder}", "give another folder with --out") from None
    except OSError:
        os.close(lock)
        raise
    return lock


def _take(lock: int) -> None:
    """Lock the file, or raise BlockingIOError. Retries, since a check whether the run is alive locks it briefly."""
    for tries_left in range(LOCK_TRIES - 1, -1, -1):
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not tries_left:
                raise
            time.sleep(LOCK_PAUSE_S)


def default_out(recipe: str, root: Path = Path("runs")) -> Path:
    """`runs/grpo-1`, or the next free number."""
    number = 1
    while (root / f"{recipe}-{number}").exists():
        number += 1
    return root / f"{recipe}-{number}"
