"""Checkpoint folders: written to a temporary folder first, verified before use, pruned by rule."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

import rlcli
from rlcli.errors import CheckpointError, RunFailed
from rlcli.support.files import described, remove, sync_folder, write_synced
from rlcli.support.reading import UnfitFile, parse_json, read_bytes

FORMAT = 1
"""Incremented whenever older code could not read, or would misread, what this code writes."""
MANIFEST, STATE, CONFIG = "manifest.json", "state.json", "config.toml"
TEMPLATE = "chat_template.jinja"
"""The chat template of the run, if `model.chat_template` names a file."""
DTYPES = ("float32", "bfloat16", "float16")
HASHING_THREADS = 4
MOST_BYTES = 1 << 30
"""Largest manifest and state of the controller."""
_NAME = re.compile(r"step-(\d{6,})")


class _Damaged(CheckpointError):
    """A checkpoint damaged by a kill or by a full or bad disk: the previous one may be used instead."""


class _File(BaseModel, strict=True):
    """Size and hash of a file, as the manifest lists it."""

    size: int
    sha256: str


class Manifest(BaseModel, strict=True):
    """Written last: a folder that has it is complete."""

    format: int
    """Version of the folder's layout (`FORMAT`)."""
    rlcli: str
    """Version of rlcli that wrote it."""
    step: int
    """Steps that were done."""
    world: int
    """Ranks of the policy."""
    files: dict[str, _File]
    """Name relative to the folder → size and hash of the file as it was written."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder `step-000050`. Only `read_checkpoint` and `newest` verify that it is intact."""

    path: Path
    step: int

    @cached_property
    def state(self) -> dict[str, Any]:
        """The controller's state. CheckpointError if it cannot be read."""
        state = _json(self.path, STATE)
        if not isinstance(state, dict):
            raise _damaged(self.path, f"{STATE} is not a table")
        return state

    @property
    def dtype(self) -> str:
        """The dtype that the trainer computed in: `float32`, `bfloat16` or `float16`."""
        with self.restoring() as state:
            dtype = DTYPES[DTYPES.index(state.get("dtype", "float32"))]
        return dtype

    @contextlib.contextmanager
    def restoring(self) -> Iterator[dict[str, Any]]:
        """The controller's state, for a block that restores it. CheckpointError if the block reads an entry that is
        missing or has another type than this program writes."""
        state = self.state
        try:
            yield state
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path / STATE} is not what this program writes: {type(error).__name__}: {error!s:.200}",
                f"use another checkpoint of {self.path.parent}",
            ) from error


class Checkpoints:
    """Folders `step-000050` below `root`; `latest` links to the newest.

    A folder has its name only while it is complete: it is written as `.step-000050.partial`, and removed as
    `.step-000050.old`. Leftovers of a killed run are removed when the next checkpoint starts.

    keep: number of newest checkpoints to keep. keep_best: number of further ones to keep, by the evaluation score of
    their step; of equal scores the newer. keep_every: also keep one at each multiple of this many steps; 0: none.
    """

    def __init__(self, root: Path, keep: int, keep_best: int = 0, keep_every: int = 0) -> None:
        assert keep >= 1
        self.root = root
        self.keep = keep
        self.keep_best = keep_best
        self.keep_every = keep_every
        self._unfinished: set[int] = set()

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def begin(self, step: int) -> Path:
        """A new, empty folder to write the checkpoint of `step` to. Call `commit` or `abandon` next. RunFailed if it
        cannot be made."""
        partial = self._partial(step)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.remove_leftovers()
            remove(partial)
            partial.mkdir()
        except OSError as error:
            raise _cannot_write(partial, error) from error
        self._unfinished.add(step)
        return partial

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        config_toml: str,
        files: Mapping[str, Mapping[str, Any]],
        scores: Mapping[int, float],
        texts: Mapping[str, str] = MappingProxyType({}),
    ) -> Path:
        """Complete the checkpoint: write the controller's state and the manifest, give the folder its name, point
        `latest` at it and prune. Returns the folder.

        files: what the workers wrote there, relative name → size and sha256. scores: step → score of its evaluation,
        higher is better, for all known steps. texts: further files to write, by name. RunFailed if
        something is missing or cannot be written: then nothing has changed, and `abandon` removes the partial folder.
        """
        partial, target = self._partial(step), self.path(step)
        try:
            contents = {STATE: _as_json(state), CONFIG: config_toml.encode()}
            contents |= {name: text.encode() for name, text in texts.items()}
            for name, content in contents.items():
                write_synced(partial / name, content)
            listed = {name: _File.model_validate(dict(facts)) for name, facts in files.items()}
            listed |= {name: _File(**described(partial / name)) for name in contents}
            _check_written(partial, listed)
            world = sum(re.fullmatch(r"policy/rank-\d+\.pt", name) is not None for name in listed)
            manifest = Manifest(format=FORMAT, rlcli=rlcli.__version__, step=step, world=world, files=listed)
            for folder in {partial / Path(name).parent for name in listed}:
                sync_folder(folder)
            write_synced(partial / MANIFEST, _as_json(manifest.model_dump()))
            sync_folder(partial)
            if target.exists():  # a damaged one: the run resumed from an earlier one
                os.replace(target, self._old(target))
            os.replace(partial, target)
            sync_folder(self.root)
        except OSError as error:
            raise _cannot_write(partial, error) from error
        self._unfinished.discard(step)
        # The checkpoint is complete: errors from here on (such as a file system without links) are retried at the next.
        with contextlib.suppress(OSError, CheckpointError):
            self._link(target)
        with contextlib.suppress(OSError, CheckpointError):
            self._prune(step, scores)
        return target

    def abandon(self, step: int) -> None:
        """Remove a checkpoint that could not be completed; never fails."""
        self._unfinished.discard(step)
        with contextlib.suppress(OSError):
            remove(self._partial(step))

    def all(self) -> list[Checkpoint]:
        """All checkpoints, oldest first, not verified. CheckpointError if the folder cannot be read."""
        try:
            candidates = [(_NAME.fullmatch(path.name), path) for path in self.root.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self.root, error) from error
        return sorted((Checkpoint(p, int(name[1])) for name, p in candidates if name), key=lambda c: c.step)

    def newest(self, on_note: Callable[[str], None]) -> Checkpoint | None:
        """The newest intact checkpoint, None if there is none. `on_note` receives a line for each damaged one, with the
        reason. CheckpointError if one cannot be verified: it was written by a newer rlcli, or is not readable."""
        checkpoints = self.all()
        while checkpoints:
            try:
                return read_checkpoint(checkpoints[-1].path)
            except _Damaged as damage:
                checkpoints.pop()
                then = f"going back to {checkpoints[-1].path.name}" if checkpoints else "no earlier one exists"
                on_note(f"{damage.message}; {then}")
        return None

    def remove_leftovers(self) -> None:
        """Remove leftovers of killed runs. Only for the run that owns the folder: otherwise another run may be writing
        there."""
        busy = {self._partial(step) for step in self._unfinished}
        for path in (*self.root.glob(".step-*.partial"), *self.root.glob(".step-*.old")):
            if path not in busy:
                # A folder that a worker still writes to, after another failed, is removed at the next begin.
                shutil.rmtree(path, ignore_errors=True)

    def _partial(self, step: int) -> Path:
        return self.root / f".{self.path(step).name}.partial"

    def _old(self, path: Path) -> Path:
        old = path.with_name(f".{path.name}.old")
        remove(old)
        return old

    def _link(self, target: Path) -> None:
        link = self.root / ".latest.new"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        os.replace(link, self.root / "latest")

    def _prune(self, newest: int, scores: Mapping[int, float]) -> None:
        """Remove checkpoints by the rules. Those after `newest` are damaged, or the run would have resumed there: they
        are ignored here, and replaced at their step."""
        paths = {checkpoint.step: checkpoint.path for checkpoint in self.all() if checkpoint.step <= newest}
        retained = kept_steps(list(paths), scores, self.keep, self.keep_best, self.keep_every)
        for step in paths.keys() - retained:
            os.replace(paths[step], self._old(paths[step]))
        self.remove_leftovers()


def kept_steps(steps: list[int], scores: Mapping[int, float], keep: int, keep_best: int, keep_every: int) -> set[int]:
    """The steps to keep: the newest, the best, and one every `keep_every`.

    >>> sorted(kept_steps([10, 20, 30, 40, 50], {20: 0.5, 30: 0.5, 40: 0.1}, keep=1, keep_best=1, keep_every=0))
    [30, 50]
    >>> sorted(kept_steps([10, 20, 30, 40, 50], {}, keep=2, keep_best=1, keep_every=20))
    [20, 40, 50]
    """
    newest = sorted(steps)[-keep:]
    scored = sorted((step for step in steps if step in scores), key=lambda step: (scores[step], step))
    best = scored[-keep_best:] if keep_best else []
    regular = [step for step in steps if keep_every and step % keep_every == 0]
    return {*newest, *best, *regular}


def is_checkpoint(path: Path) -> bool:
    """True for a checkpoint of a run, even a damaged one; a Hugging Face folder is none."""
    is_step_folder = _NAME.fullmatch(path.resolve().name) is not None and (
        (path / "policy").is_dir() or (path / STATE).exists()
    )
    return is_step_folder or (path / MANIFEST).is_file()


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in this folder or behind this link, after checking its format and the size and hash of every file
    against its manifest. CheckpointError names the first file that differs."""
    folder = path.resolve()
    if not folder.is_dir():
        where = f"{path} links to {folder}, which is missing" if path.is_symlink() else f"no such checkpoint: {path}"
        raise CheckpointError(where, "name a folder step-NNNNNN in the run's checkpoints")
    manifest = _manifest(folder)
    for name in (STATE, CONFIG):
        if name not in manifest.files:
            raise _damaged(folder, f"{MANIFEST} does not list {name}")
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        for problem in pool.map(lambda name: _problem(folder, name, manifest.files[name]), sorted(manifest.files)):
            if problem:
                raise _damaged(folder, problem)
    checkpoint = Checkpoint(folder, manifest.step)
    if checkpoint.state.get("step") != manifest.step:
        raise _damaged(folder, f"{STATE} is of step {checkpoint.state.get('step')}")
    return checkpoint


def _manifest(folder: Path) -> Manifest:
    """The manifest; the format is checked first, since the rest depends on it."""
    content = _json(folder, MANIFEST)
    version = content.get("format") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise _damaged(folder, f"{MANIFEST} names no format")
    if version != FORMAT:
        raise CheckpointError(
            f"{folder.name} was written by rlcli {content.get('rlcli', '(unknown)')}, format {version}; this rlcli "
            f"({rlcli.__version__}) reads up to {FORMAT}",
            "use the version that wrote it" if version > FORMAT else "no rlcli wrote such a format: remove it",
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _damaged(folder, f"{MANIFEST}: {where}: {first['msg']}") from error


def _problem(folder: Path, name: str, expected: _File) -> str:
    """The difference between a file and its entry in the manifest; empty if there is none."""
    path = folder / name
    try:
        if ".." in path.parts or path == Path(name):  # absolute
            return f"{MANIFEST} names a file outside the folder, {name!r:.100}"
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device would never end
            return f"{name} is not a file"
        if status.st_size != expected.size:
            return f"{name} has {status.st_size:,} bytes of {expected.size:,}"
        return "" if described(path)["sha256"] == expected.sha256 else f"{name} differs from what was written"
    except UnfitFile as error:
        return f"{name} {error.why}"
    except PermissionError as error:
        raise _unreadable(path, error) from error
    except OSError as error:
        return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"


def _json(folder: Path, name: str) -> Any:
    path = folder / name
    try:
        return parse_json(read_bytes(path, MOST_BYTES, links=True))
    except UnfitFile as error:
        raise _damaged(folder, f"{name} {error.why}") from error
    except PermissionError as error:
        raise _unreadable(path, error) from error
    except FileNotFoundError as error:
        raise _damaged(folder, f"it has no {name}") from error
    except OSError as error:
        raise _damaged(folder, f"{name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{name} is not JSON") from error


def _damaged(folder: Path, why: str) -> _Damaged:
    return _Damaged(f"{folder.name} is damaged: {why}", f"use another checkpoint of {folder.parent}")


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {path}: {error.strerror}", "give this user permission to read it")


def _check_written(partial: Path, files: Mapping[str, _File]) -> None:
    for name, expected in files.items():
        size = (partial / name).stat().st_size if (partial / name).is_file() else None
        if size != expected.size:
            raise RunFailed(
                f"a worker wrote {partial / name} with {expected.size:,} bytes, but here "
                + ("it is missing" if size is None else f"it has {size:,}"),
                "mount the run folder at the same path on every machine",
            )


def _cannot_write(path: Path, error: OSError) -> RunFailed:
    return RunFailed(
        f"cannot write the checkpoint {path}: {error.strerror or error}",
        "free some space or give a writable folder",
    )


def _as_json(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, indent=1, allow_nan=True).encode() + b"\n"
