"""The ways to lock a program in: bubblewrap, Landlock, and for those who ask for it by name, hardly at all."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlcli.errors import SetupError
from rlcli.sandbox import landlock, places, seccomp
from rlcli.sandbox.child import Child, Launch
from rlcli.sandbox.limits import Limits
from rlcli.sandbox.private import MAX_FILES, PrivateFolder, sweep

_NOBODY = "65534"
_HELLO = "print('hello', end='')"
_ADDRESS_SLACK = 256 << 20
"""Bytes of address space over the limit of memory: libraries and threads reserve more than they use."""
_OPEN_FILES = 128
_STACK_BYTES = 64 << 20


@dataclass(frozen=True)
class Sandbox(ABC):
    """A backend that has proven to work here. name: bwrap, landlock or unsafe. version: of bubblewrap, or of the
    kernel's Landlock interface."""

    name: str
    version: str

    @abstractmethod
    def launch(self, main: str, limits: Limits, pass_fds: Sequence[int]) -> Launch:
        """How to start `main`, with all that it needs made."""

    def start(self, main: str, limits: Limits, pass_fds: Sequence[int] = ()) -> Child:
        """Start the Python source `main`, locked in before its first line runs.

        `main` is trusted code that then reads what is not; it finds an isolated interpreter of this process's version
        and packages, an empty working directory, and the descriptors `pass_fds` under their numbers.
        Raises `SetupError` when the sandbox does not come up; never runs anything outside of it.
        """
        launch = self.launch(main, limits, pass_fds)
        try:
            return Child(launch, limits)
        except SetupError as error:
            raise SetupError(f"{self.name}: {error.message}", error.mend) from None

    def prove(self) -> None:
        """Run one program. Raises `SetupError` when that fails."""
        ended = self.start(_HELLO, Limits(wall_s=30.0)).wait()
        if ended.status != 0 or ended.stdout != b"hello":
            said = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise SetupError(f"{self.name}: a trial ended with status {ended.status}: {' '.join(said)}")


@dataclass(frozen=True)
class Bubblewrap(Sandbox):
    """Namespaces of its own: nothing of the machine exists inside but libraries to read, and 'nobody' is there alone."""

    options: tuple[str, ...]
    own_tmpfs: bool
    """Whether this version bounds the size of a tmpfs; else the working directory is a folder that is watched."""

    def launch(self, main: str, limits: Limits, pass_fds: Sequence[int]) -> Launch:
        folder = None if self.own_tmpfs else PrivateFolder()
        room = (
            ("--size", str(limits.disk_bytes), "--tmpfs", "/tmp") if folder is None else ("--bind", folder.path, "/tmp")
        )

        def exceeds_disk(pid: int) -> bool:
            return folder.exceeds(limits.disk_bytes, pid) if folder else _too_many_files(f"/proc/{pid}/root/tmp")

        return Launch(
            command=[*self.options, *room, "--chdir", "/tmp", "--remount-ro", "/", "--", *_python()],
            order=_order(main, limits, die_with_parent=False),
            environment=_environment("/tmp"),
            cwd="/",
            pass_fds=pass_fds,
            status=lambda status: 128 - status if status > 128 else status,
            exceeds_disk=exceeds_disk,
            close=folder.remove if folder else _nothing,
        )


@dataclass(frozen=True)
class Landlock(Sandbox):
    """One process of the owner's own user, fenced by the kernel into one folder of its own."""

    def launch(self, main: str, limits: Limits, pass_fds: Sequence[int]) -> Launch:
        folder = PrivateFolder()
        try:
            ruleset = landlock.ruleset(folder.path)
        except BaseException:
            folder.remove()
            raise

        def close() -> None:
            os.close(ruleset)
            folder.remove()

        return Launch(
            command=_python(),
            order=_order(main, limits, landlock_fd=ruleset, keep_metadata=True),
            environment=_environment(folder.path),
            cwd=folder.path,
            pass_fds=[*pass_fds, ruleset],
            status=_same,
            exceeds_disk=lambda pid: folder.exceeds(limits.disk_bytes, pid),
            close=close,
        )


@dataclass(frozen=True)
class Unsafe(Sandbox):
    """Limits and the system-call filter alone: the program reads every file that its user may, and writes them."""

    def launch(self, main: str, limits: Limits, pass_fds: Sequence[int]) -> Launch:
        folder = PrivateFolder()
        return Launch(
            command=_python(),
            order=_order(main, limits, keep_metadata=True),
            environment=_environment(folder.path),
            cwd=folder.path,
            pass_fds=pass_fds,
            status=_same,
            exceeds_disk=lambda pid: folder.exceeds(limits.disk_bytes, pid),
            close=folder.remove,
        )


def _python() -> list[str]:
    # Not -I, which would ignore the seed of hashes: a program's verdict must not depend on the order of a set.
    return [places.interpreter(), "-s", "-P", "-S", "-B", "-X", "utf8", "-c", _inside(), "{fd}"]


@cache
def _inside() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")


def _order(
    main: str, limits: Limits, *, die_with_parent: bool = True, landlock_fd: int = -1, keep_metadata: bool = False
) -> Mapping[str, Any]:
    return {
        "main": main,
        "path": list(places.packages()),
        "die_with_parent": die_with_parent,
        "landlock_fd": landlock_fd,
        "filter": _filter(keep_metadata),
        "own_pid": seccomp.OWN_PID,
        "limits": {
            "RLIMIT_AS": limits.memory_bytes + _ADDRESS_SLACK,
            # The clock on the wall rules; this is for an owner that has been stopped.
            "RLIMIT_CPU": 4 * math.ceil(limits.wall_s) + 4,
            "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_NOFILE": _OPEN_FILES,
            "RLIMIT_STACK": _STACK_BYTES,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        },
    }


@cache
def _filter(keep_metadata: bool) -> bytes:
    return seccomp.program(keep_metadata)


def _environment(home: str) -> dict[str, str]:
    """All of a program's environment. Numeric libraries keep to one thread, and malloc to two arenas of 64 MiB."""
    one_thread = dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1")
    names = {"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"}
    return names | one_thread


def _same(status: int) -> int:
    return status


def _nothing() -> None:
    pass


def _too_many_files(path: str) -> bool:
    try:
        status = os.statvfs(path)
    except OSError:
        return False  # the program has just ended
    return status.f_files - status.f_ffree > MAX_FILES


@cache
def bubblewrap(path: str | None) -> Bubblewrap:
    """The backend by the program at `path`, proven. Raises `SetupError`."""
    if path is None:
        raise SetupError("bwrap is not installed", "apt install bubblewrap (or dnf, pacman, apk)")
    asked = subprocess.run([path, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
    offered = set(re.findall(r"--[a-z0-9-]+", asked.stdout + asked.stderr))
    said = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
    version = said.stdout.strip().removeprefix("bubblewrap ")
    failure = None
    for proc in (["--proc", "/proc", "--remount-ro", "/proc"], []):
        # Inside a container the kernel may refuse a /proc or a write to its settings. The filter refuses the same.
        for userns in (["--disable-userns"], []):
            if not offered.issuperset(userns):
                continue
            options = (path, *_bubblewrap_options([*userns, *proc]))
            sandbox = Bubblewrap("bwrap", version, options, own_tmpfs="--size" in offered)
            try:
                sandbox.prove()
            except SetupError as error:
                failure = failure or error
            else:
                return sandbox
    assert failure is not None
    raise SetupError(failure.message, _ALLOW_NAMESPACES)


_ALLOW_NAMESPACES = (
    "allow unprivileged user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 or "
    "kernel.unprivileged_userns_clone=1; in Docker, --security-opt seccomp=unconfined)"
)


def _bubblewrap_options(optional: Sequence[str]) -> list[str]:
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--cap-drop", "ALL", "--new-session"]
    options += ["--uid", _NOBODY, "--gid", _NOBODY, "--hostname", "sandbox", *optional]
    for path in places.SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    for path in (*places.libraries(), *places.SETTINGS):
        if os.path.exists(path):
            options += ["--ro-bind", path, path]
    for path in places.DEVICES:
        options += ["--dev-bind", path, path]
    # bubblewrap hands its own environment on, which is the one of `Launch`; --clearenv is not in its old versions.
    return options


@cache
def fenced() -> Landlock:
    """The Landlock backend, proven. Raises `SetupError`."""
    sandbox = Landlock("landlock", f"ABI {landlock.version()}")
    sweep()
    sandbox.prove()
    return sandbox


@cache
def unsafe() -> Unsafe:
    """The backend of last resort, proven. Raises `SetupError`."""
    sandbox = Unsafe("unsafe", "")
    sweep()
    sandbox.prove()
    return sandbox


def backend_name(backend: str | None = None) -> str:
    """The backend that is asked for: `backend`, else the environment variable RLCLI_SANDBOX, else "auto"."""
    return backend or os.environ.get("RLCLI_SANDBOX") or "auto"


def open_sandbox(backend: str | None = None) -> Sandbox:
    """The backend of that name, proven to work here (once a process); None and "auto": see `backend_name`, and
    bubblewrap before Landlock, never anything less. Raises `SetupError`, which says what to install or to allow."""
    name = backend_name(backend)
    if name == "auto":
        return _automatic(shutil.which("bwrap"))
    if name == "bwrap":
        return bubblewrap(shutil.which("bwrap"))
    if name == "landlock":
        return fenced()
    if name == "unsafe":
        return unsafe()
    if name.startswith(("http://", "https://")):
        raise SetupError(f"sandbox {name!r} is a remote one, which runs no program of ours", "use it for code alone")
    raise SetupError(f"no sandbox is called {name!r}", "use auto, bwrap, landlock, unsafe or a SandboxFusion URL")


@cache
def _automatic(bwrap: str | None) -> Sandbox:
    try:
        return bubblewrap(bwrap)
    except SetupError as no_bwrap:
        try:
            return fenced()
        except SetupError as no_landlock:
            raise SetupError(
                f"model-written code cannot be locked in here: {no_bwrap.message}; {no_landlock.message}",
                f"{no_bwrap.mend}; or run it unprotected by --set verifier.sandbox=unsafe or RLCLI_SANDBOX=unsafe",
            ) from None
