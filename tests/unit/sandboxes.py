"""Shared by the tests of the sandbox: its backends, and observations of the machine around it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rlcli_sandbox import Exit, Limits, Sandbox, open_sandbox

from rlcli.errors import SetupError

BACKENDS = ["bwrap", "landlock"]


def opened(name: str) -> Sandbox:
    """The backend; the test is skipped where the machine lacks it, unless RLCLI_REQUIRE_BWRAP=1 forbids that."""
    try:
        return open_sandbox(name)
    except SetupError as error:
        if name == "bwrap" and os.environ.get("RLCLI_REQUIRE_BWRAP") == "1":
            raise
        pytest.skip(str(error))


@pytest.fixture(params=BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return opened(request.param)


def run(
    sandbox: Sandbox, main: str, limits: Limits | None = None, stdin: bytes = b"", pass_fds: Sequence[int] = ()
) -> Exit:
    """The end of `main`; its process is gone, whatever it was."""
    child = sandbox.start(main, limits or Limits(wall_s=20.0), pass_fds)
    child.stdin.write(stdin)
    ended = child.wait()
    assert not Path("/proc", str(child.pid)).exists()
    return ended


def open_fds() -> set[str]:
    """This process's descriptors, with what they are."""
    descriptors = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the one of this listing
    return descriptors


def until(true: Callable[[], bool], within_s: float = 60.0) -> bool:
    """True if the condition holds in time."""
    end = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    """True if a process runs; a zombie does not."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_with(word: str) -> list[int]:
    """Ids of the processes that have `word` in their command line or their environment."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if word.encode() in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
            except OSError:
                continue
    return pids


needs_root = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root changes users")
