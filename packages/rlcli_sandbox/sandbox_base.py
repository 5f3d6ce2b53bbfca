"""Common parts of all backends: how a program is started, and the settings of its interpreter."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlcli.errors import SetupError
from rlcli_sandbox import readable_paths
from rlcli_sandbox.child import Child, Launch
from rlcli_sandbox.kernel import seccomp
from rlcli_sandbox.limits import Limits

_HELLO = "print('hello', end='')"
_ADDRESS_SLACK = 256 << 20
"""Bytes of address space above the memory limit: libraries and threads reserve more than they use."""
_OPEN_FILES = 128
_STACK_BYTES = 64 << 20
_filter = cache(seccomp.program)


@dataclass(frozen=True)
class Sandbox(ABC):
    """A backend."""

    name: str
    """`bwrap`, `landlock` or `unsafe`."""
    version: str
    """Version of bubblewrap, or of the kernel's Landlock interface."""

    @abstractmethod
    def launch(self, main: str, limits: Limits, pass_fds: Sequence[int]) -> Launch:
        """Create all resources that `main` needs, and describe how to start it."""

    def start(self, main: str, limits: Limits, pass_fds: Sequence[int] = ()) -> Child:
        """Start the Python source `main`, isolated before its first line runs.

        `main` is trusted code that then reads untrusted input; it runs in an isolated interpreter of this process's
        version with its packages, an empty working directory, and the descriptors `pass_fds` under their numbers.
        Raises `SetupError` if the sandbox does not start; never runs anything outside of it.
        """
        launch = self.launch(main, limits, pass_fds)
        try:
            return Child(launch, limits)
        except SetupError as error:
            raise SetupError(f"{self.name}: {error.message}", error.hint) from None

    def prove(self) -> None:
        """Run one program. Raises `SetupError` when that fails."""
        ended = self.start(_HELLO, Limits(wall_s=30.0)).wait()
        if ended.status != 0 or ended.stdout != b"hello":
            last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise SetupError(f"{self.name}: a trial ended with status {ended.status}: {' '.join(last)}")


def interpreter() -> list[str]:
    """The command that runs `inside.py` in a bare interpreter; `{fd}` as in `Launch`."""
    # Not -I, which would ignore the hash seed: a program's verdict must not depend on the order of a set.
    return [readable_paths.interpreter(), "-s", "-P", "-S", "-B", "-X", "utf8", "-c", _inside(), "{fd}"]


def environment(home: str) -> dict[str, str]:
    """A program's whole environment. Numeric libraries use one thread, and malloc two arenas of 64 MiB."""
    one_thread = dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1")
    names = {"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"}
    return names | one_thread


def order(main: str, limits: Limits, *, keep_metadata: bool, bare: bool, landlock_fd: int = -1) -> Mapping[str, object]:
    """The settings sent to `inside.py`.

    keep_metadata: see `seccomp.program`. bare: no process between the program and its owner kills the program when the
    owner dies. landlock_fd: the ruleset to enter, -1: none.
    """
    return {
        "main": main,
        "path": list(readable_paths.packages()),
        "die_with_parent": bare,
        "landlock_fd": landlock_fd,
        "filter": _filter(keep_metadata, limits.processes > 1),
        "own_pid": seccomp.OWN_PID,
        "limits": {
            "RLIMIT_AS": limits.memory_bytes + _ADDRESS_SLACK,
            # The owner checks the time limits; this is for an owner that has been stopped.
            "RLIMIT_CPU": 4 * math.ceil(min(limits.cpu_s, limits.wall_s)) + 4,
            "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_NOFILE": _OPEN_FILES,
            "RLIMIT_STACK": _STACK_BYTES,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        },
    }


@cache
def _inside() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
