"""The preferred backend: bubblewrap, which runs a program in separate namespaces."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rlcli.errors import SetupError
from rlcli_sandbox import readable_paths, sandbox_base
from rlcli_sandbox.child import Launch
from rlcli_sandbox.limits import Limits
from rlcli_sandbox.namespace_processes import members_of
from rlcli_sandbox.private_folder import MAX_FILES, PrivateFolder, sweep

_NOBODY = "65534"
_SIGNALS = 64
_INSTALL = "apt install bubblewrap (or dnf, pacman, zypper, apk)"
_ALLOW_NAMESPACES = (
    "allow unprivileged user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 or "
    "kernel.unprivileged_userns_clone=1; in Docker, --security-opt seccomp=unconfined)"
)


@dataclass(frozen=True)
class Bubblewrap(sandbox_base.Sandbox):
    """Inside, nothing of the machine exists except libraries to read: no network, no other process, no user files."""

    options: tuple[str, ...]
    """bubblewrap's command line without the arguments of a single program."""
    sized_tmpfs: bool
    """True if this version can limit the size of a tmpfs; else the working directory is a folder that is monitored."""

    def launch(self, main: str, limits: Limits, pass_fds: Sequence[int]) -> Launch:
        folder = None if self.sized_tmpfs else PrivateFolder()
        where = working_directory()
        room = ["--bind", folder.path] if folder else ["--size", str(limits.disk_bytes), "--tmpfs"]
        variables = [word for pair in sandbox_base.environment(where).items() for word in ("--setenv", *pair)]

        def exceeds_disk(pid: int) -> bool:
            return folder.exceeds(limits.disk_bytes, pid) if folder else _too_many_files(f"/proc/{pid}/root{where}")

        return Launch(
            command=[*self.options, *variables, *room, where, "--chdir", where, "--", *sandbox_base.interpreter()],
            order=sandbox_base.order(main, limits, keep_metadata=False, bare=False),
            environment={},
            cwd="/",
            pass_fds=pass_fds,
            status=lambda status: 128 - status if 128 < status <= 128 + _SIGNALS else status,
            exceeds_disk=exceeds_disk,
            close=lambda: folder.remove() if folder else None,
            leaves_parent=True,
            members=members_of,
        )


@cache
def bubblewrap(path: str | None) -> Bubblewrap:
    """The backend with the program at `path`, tested. Raises `SetupError`; None: not installed."""
    if path is None:
        raise SetupError("bwrap is not installed", _INSTALL)
    offered = set(re.findall(r"--[a-z0-9-]+", _output_of(path, "--help")))
    version = _output_of(path, "--version").removeprefix("bubblewrap").strip()
    failures = []
    for optional in _variants(offered):
        options = (path, *_options(optional))
        sandbox = Bubblewrap("bwrap", version, options, sized_tmpfs="--size" in offered)
        try:
            sandbox.prove()
        except SetupError as error:
            failures.append(error)
        else:
            sweep()
            return sandbox
    raise SetupError(failures[0].message, _ALLOW_NAMESPACES)


def _variants(offered: set[str]) -> list[list[str]]:
    """Sets of optional options to try, largest first.

    Inside a container the kernel may refuse the write to its settings that disables further user namespaces. No
    guarantee depends on it: the system-call filter refuses namespaces.
    """
    clear = [option for option in ("--clearenv",) if option in offered]
    return [[*clear, "--disable-userns"], clear] if "--disable-userns" in offered else [clear]


def _options(optional: Sequence[str]) -> list[str]:
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--uid", _NOBODY, "--gid", _NOBODY, "--hostname", "sandbox", *optional]
    for path in readable_paths.SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    for path in (*readable_paths.libraries(), *readable_paths.SETTINGS):
        if os.path.exists(path):
            options += ["--ro-bind", path, path]
    for path in readable_paths.DEVICES:
        options += ["--dev-bind", path, path]
    # No /proc: it would expose the memory of bubblewrap's own first process, which has no filter.
    # The root is a tmpfs without a size limit; the working directory is mounted on it afterwards.
    return [*options, "--dir", working_directory(), "--remount-ro", "/"]


@cache
def working_directory() -> str:
    """/tmp, which programs expect to write to; another folder if packages are below /tmp, which it would hide."""
    return "/box" if any(path.startswith("/tmp/") for path in readable_paths.libraries()) else "/tmp"


def _output_of(path: str, option: str) -> str:
    try:
        run = subprocess.run([path, option], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{path} does not run: {error}", _INSTALL) from None
    return run.stdout + run.stderr


def _too_many_files(path: str) -> bool:
    try:
        status = os.statvfs(path)
    except OSError:
        return False  # the program has just ended
    return status.f_files - status.f_ffree > MAX_FILES
