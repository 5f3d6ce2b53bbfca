"""The private folder of a sandboxed program: created, measured while the program runs, and removed with its content."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator

PREFIX = "rlcli-sandbox-"
MAX_FILES, MAX_FOLDERS = 1024, 256
"""A program that makes more is ended as if it filled the disk. The owner needs the time to remove them: some file
systems take milliseconds for a folder."""
_LOCKED_WITHIN_S = 60.0


class PrivateFolder:
    """A folder under the system's temporary folder, locked while its owner lives, so that a later one can sweep it."""

    def __init__(self) -> None:
        self.path = os.path.realpath(tempfile.mkdtemp(prefix=PREFIX))
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def exceeds(self, disk_bytes: int, pid: int) -> bool:
        """True if it holds more than `disk_bytes`, `MAX_FILES` or `MAX_FOLDERS`.

        Files that `pid` holds open without a name count. A folder that cannot be read (too deep, or closed to its
        owner) exceeds the limit.
        """
        size = files = folders = 0
        try:
            for status in _walk(self.path):
                files += 1
                folders += stat.S_ISDIR(status.st_mode)
                size += status.st_blocks * 512
                if size > disk_bytes or files > MAX_FILES or folders > MAX_FOLDERS:
                    return True
        except OSError:
            return True
        return size + _nameless(pid) > disk_bytes

    def remove(self) -> None:
        """Delete it and all its content; it must no longer be in use. Idempotent."""
        if self._fd >= 0:
            _empty(self._fd)
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self.path)
            os.close(self._fd)
            self._fd = -1


def sweep() -> None:
    """Remove the private folders of owners that died before they could."""
    root = tempfile.gettempdir()
    for name in os.listdir(root):
        path = os.path.join(root, name)
        with contextlib.suppress(OSError):
            if not name.startswith(PREFIX) or not _abandoned(os.lstat(path)):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _empty(fd)
                os.rmdir(path)
            finally:
                os.close(fd)


def _abandoned(status: os.stat_result) -> bool:
    """True if this may be the folder of a dead owner: a live one's is locked, except in its first moment."""
    return status.st_uid == os.geteuid() and time.time() - status.st_mtime > _LOCKED_WITHIN_S


def _empty(root: int) -> None:
    """Delete all entries of the folder opened as `root`. Links are removed, never followed.

    A nested folder is moved to the top first, so that neither depth nor a path's length matters.
    """
    moved = 0
    while names := os.listdir(root):
        for name in names:
            if not _is_folder(name, root):
                os.unlink(name, dir_fd=root)
                continue
            os.chmod(name, 0o700, dir_fd=root)
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
            try:
                for inner in os.listdir(fd):
                    if _is_folder(inner, fd):
                        os.chmod(inner, 0o700, dir_fd=fd)
                        os.rename(inner, f".{PREFIX}{moved}", src_dir_fd=fd, dst_dir_fd=root)
                        moved += 1
                    else:
                        os.unlink(inner, dir_fd=fd)
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=root)


def _is_folder(name: str, folder: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _walk(path: str) -> Iterator[os.stat_result]:
    """The status of each entry below `path`. Raises OSError at a folder that its owner can neither read nor name."""
    folders = [path]
    while folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)


def _nameless(pid: int) -> int:
    """Bytes of the files that `pid` holds open although they are deleted."""
    size = 0
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{entry}")
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    size += status.st_blocks * 512
    return size
