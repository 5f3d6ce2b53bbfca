"""Writes files atomically, hashes files, and creates folders that other users cannot enter."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

from rlcli.errors import SetupError
from rlcli.support.reading import LINES_BYTES, json_objects, opened, read_json


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file in the folder of `path` to write to, which replaces it at the end; removed on an error. It has
    no permissions for users who cannot enter its folder.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with replacing(target) as temporary:
    ...     _ = temporary.write_text("complete")
    >>> target.read_text(), len(list(target.parent.iterdir()))
    ('complete', 1)
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _narrow(temporary)
        os.replace(temporary, path)
    finally:
        if temporary.parent.is_dir():
            temporary.unlink(missing_ok=True)


def _narrow(file: Path) -> None:
    mode = stat.S_IMODE(file.stat().st_mode)
    if (narrowed := mode & folder_mode(file.parent)) != mode:
        file.chmod(narrowed)


@contextmanager
def replacing_all(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Like `replacing`, for files that belong together: on an error, none of them is replaced."""
    new_files = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]
    backups = [path.with_name(f".{path.name}.{os.getpid()}.old") for path in paths]
    replaced: list[tuple[Path, Path]] = []
    try:
        yield new_files
        try:
            for path, new, old in zip(paths, new_files, backups, strict=True):
                if path.exists():
                    _keep(path, old)
                os.replace(new, path)
                replaced.append((path, old))
        except BaseException:
            for path, old in replaced:
                if old.exists():
                    os.replace(old, path)
                else:
                    path.unlink(missing_ok=True)
            raise
    finally:
        for leftover in (*new_files, *backups):
            if leftover.parent.is_dir():
                leftover.unlink(missing_ok=True)


def _keep(path: Path, old: Path) -> None:
    try:
        os.link(path, old)
    except OSError:  # a file system without hard links
        shutil.copy2(path, old)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists. OSError if that fails."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def cache_folder() -> Path:
    """The cache, for files that can be computed again: ~/.cache/rlcli. RuntimeError if there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlcli"


def private_folder(path: Path) -> Path:
    """The folder `path` in a folder that all users of the machine share, such as /tmp, where another user may have
    created it first: new, with mode 0700, or one that only this user could change so far.

    Raises `SetupError` for anything else of that name: a link, a file, a folder of others or writable by them.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        return path
    check_private(path)
    return path


def check_private(path: Path) -> None:
    """Raise `SetupError` unless `path` is a folder of this user that others cannot change; from now on they cannot read
    it either. FileNotFoundError if it does not exist."""
    # In a folder with a sticky bit nobody else can replace a folder of this user after this check.
    status = path.lstat()
    mode, problem = stat.S_IMODE(status.st_mode), ""
    if not stat.S_ISDIR(status.st_mode):
        problem = "is a link" if stat.S_ISLNK(status.st_mode) else "is not a folder"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to another user (id {status.st_uid})"
    elif mode & 0o022:
        problem = f"can be changed by other users (mode {mode:o})"
    if problem:
        raise SetupError(
            f"{path} {problem}", "remove it, or have its owner do so: this user needs a folder of that name"
        )
    if mode & 0o077:
        path.chmod(0o700)


def closed_folder(path: Path) -> Path:
    """Create a folder of this user, with its parents, that others cannot enter (0700). An existing one is closed too,
    if its disk lets this user do so."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)
    return path


def folder_mode(parent: Path) -> int:
    """Permissions, less the umask, of a new folder in `parent`: none for users who cannot enter `parent`, since that
    may be opened later.

    >>> import tempfile
    >>> oct(folder_mode(Path(tempfile.mkdtemp())))  # made with 0700
    '0o700'
    """
    mode = parent.stat().st_mode
    return 0o777 & ~sum(users for users in (0o070, 0o007) if not mode & users)


def file_mode(folder: Path) -> int:
    """`folder_mode` for a new file."""
    return folder_mode(folder) & 0o666


def by_umask(folder: Path) -> None:
    """Set the permissions of a new file for the files below `folder`: safetensors creates files with 0600, and others
    on a shared machine could not read the model."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it cannot be read or holds something else. Raises `UnfitFile`."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_objects(path: Path, max_bytes: int = LINES_BYTES) -> list[dict[str, Any]]:
    """The JSON objects in the lines of a file, without truncated lines. max_bytes: of the file; 0: any number. Raises
    `UnfitFile`, and OSError if it cannot be read."""
    return list(json_objects(path, max_bytes=max_bytes))


class FileFacts(TypedDict):
    """Size and hash of a file."""

    size: int
    """In bytes."""
    sha256: str
    """Hexadecimal digits."""


def described(path: Path) -> FileFacts:
    """Size and hash of a file. Raises `UnfitFile`, and OSError if it cannot be read."""
    with opened(path, links=True) as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def filled_path(pattern: str, field: str, value: object) -> str:
    """`pattern` with `value` in place of `{field}` in the file's name alone: the user's folders may have braces in
    their names.

    >>> filled_path("runs/{rank}/step-000001/rank-{rank}.parquet", "rank", 3)
    'runs/{rank}/step-000001/rank-3.parquet'
    """
    folder, name = os.path.split(pattern)
    return os.path.join(folder, name.replace(f"{{{field}}}", str(value)))


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
