"""Writes files that a kill cannot leave half done, and hashes files."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcli.reading import LINES_BYTES, json_objects, opened, read_json


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` to write to, which replaces it at the end; removed on an error.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with replacing(target) as beside:
    ...     _ = beside.write_text("whole")
    >>> target.read_text(), len(list(target.parent.iterdir()))
    ('whole', 1)
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        if beside.parent.is_dir():
            beside.unlink(missing_ok=True)


@contextmanager
def replacing_all(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Like `replacing`, for files that belong together: on an error, none of them is replaced."""
    beside = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]
    kept = [path.with_name(f".{path.name}.{os.getpid()}.old") for path in paths]
    done: list[tuple[Path, Path]] = []
    try:
        yield beside
        try:
            for path, new, old in zip(paths, beside, kept, strict=True):
                if path.exists():
                    _keep(path, old)
                os.replace(new, path)
                done.append((path, old))
        except BaseException:
            for path, old in done:
                if old.exists():
                    os.replace(old, path)
                else:
                    path.unlink(missing_ok=True)
            raise
    finally:
        for left in (*beside, *kept):
            if left.parent.is_dir():
                left.unlink(missing_ok=True)


def _keep(path: Path, old: Path) -> None:
    try:
        os.link(path, old)
    except OSError:  # a file system without hard links
        shutil.copy2(path, old)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there. OSError if that cannot be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def cache_folder() -> Path:
    """The cache, for what can be made again: ~/.cache/rlcli. RuntimeError if there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlcli"


def by_umask(folder: Path) -> None:
    """Give the files below `folder` the permissions of a new file: safetensors creates files with 0600, and others on a
    shared machine could not read the model."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it cannot be read or holds something else. Raises `UnfitFile`."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_objects(path: Path, most: int = LINES_BYTES) -> list[dict[str, Any]]:
    """The JSON objects in the lines of a file, without truncated lines. most: of bytes in all; 0: any number. Raises
    `UnfitFile`, and OSError if it cannot be read."""
    return list(json_objects(path, most=most))


def described(path: Path) -> dict[str, Any]:
    """`{"size": bytes, "sha256": hex}` of a file. Raises `UnfitFile`, and OSError if it cannot be read."""
    with opened(path, links=True) as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that is on the disk, not only in a cache, when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Sync the content of a closed file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder, such as a new file name, to the disk, if its file system can."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not support it
            raise
    finally:
        os.close(handle)
