"""Processes that a program leaves behind end with it, whatever they try. Hostile processes exit within a minute."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlcli.support import owned_main

pytestmark = pytest.mark.timeout(120)

SUPERVISOR = [sys.executable, "-I", "-S", owned_main.__file__, "0"]
HOSTILE = """
import ctypes, os, signal, sys, time

ENDS = time.monotonic() + 50

def log():
    with open(sys.argv[2], "a") as file:
        file.write(f"{os.getpid()}\\n")

def live():
    "As one that only SIGKILL ends."
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    log()
    while time.monotonic() < ENDS:
        time.sleep(0.05)
    os._exit(0)

def child(work=live):
    "Fork: the child works, the parent goes on."
    if os.fork() == 0:
        work()
        os._exit(0)

def parent_of(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

def session():
    os.setsid()
    live()

def daemon():
    os.setsid()
    os.chdir("/")
    for descriptor in range(3):
        os.close(descriptor)
    child()

def family():
    "A daemon that adopts its own orphans."
    os.setsid()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    child(daemon)
    live()

def stopped():
    os.setsid()
    log()
    os.kill(os.getpid(), signal.SIGSTOP)

def stops_its_supervisors():
    inner = os.getppid()
    child(session)
    await_lines(1)
    os.kill(parent_of(inner), signal.SIGSTOP)
    os.kill(inner, signal.SIGSTOP)
    time.sleep(50)

def kills_the_inner_supervisor():
    child(session)
    await_lines(1)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(50)

def kills_the_outer_supervisor():
    child(session)
    await_lines(1)
    os.kill(parent_of(os.getppid()), signal.SIGKILL)
    time.sleep(50)

def flees():
    "One process at a time, which forks and exits, again and again."
    log()
    while time.monotonic() < ENDS and os.fork() == 0:
        pass
    os._exit(0)

def await_lines(count):
    while not os.path.exists(sys.argv[2]) or len(open(sys.argv[2]).readlines()) < count:
        time.sleep(0.01)

LEAVES = {"session": (session, 1), "daemon": (daemon, 1), "family": (family, 2), "stopped": (stopped, 1),
          "flees": (flees, 1)}
work, _, goes_on = sys.argv[1].partition(" and ")
if work not in LEAVES:
    globals()[work]()
else:
    child(LEAVES[work][0])
    await_lines(LEAVES[work][1])
    if goes_on:
        log()
        time.sleep(50)
"""
OWNER = """
import os, subprocess, sys, time
process = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, start_new_session=True)
if sys.argv[1] == "shared" and os.fork() == 0:  # holds the pipe, too
    time.sleep(50)
    os._exit(0)
process.wait()
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[list[str]]:
    """The command of the hostile program, but for its first argument; what it leaves is killed after the test."""
    file = tmp_path / "hostile.py"
    file.write_text(HOSTILE)
    yield [sys.executable, str(file)]
    for pid in living(file):
        os.kill(pid, signal.SIGKILL)


def living(file: Path) -> list[int]:
    """The processes that run a program, without zombies."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, stat = (folder / "cmdline").read_bytes().split(b"\0"), (folder / "stat").read_text()
        except OSError:  # it has ended
            continue
        runs_it = str(file).encode() in words and str(owned_main.__file__).encode() not in words
        if runs_it and stat.rpartition(")")[2].split()[0] != "Z":
            pids.append(int(folder.name))
    return pids


@contextlib.contextmanager
def supervised(words: Sequence[str], errors: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The program under its supervisor, whose pipe is open until the end of the block."""
    with errors.open("wb") as file:
        process = subprocess.Popen([*SUPERVISOR, *words], stdin=subprocess.PIPE, stderr=file, start_new_session=True)
    with process:
        yield process


def await_lines(file: Path, count: int) -> None:
    while not file.exists() or len(file.read_text().splitlines()) < count:
        time.sleep(0.01)


def await_end(program: Path) -> None:
    while living(program):
        time.sleep(0.01)


LEAVES = {"session": 1, "daemon": 1, "family": 2, "stopped": 1, "flees": 1}
"""Processes that a program leaves, and the number of its processes."""


@pytest.mark.parametrize("leaves", LEAVES)
def test_what_a_program_leaves_ends_with_it(hostile: list[str], tmp_path: Path, leaves: str) -> None:
    with supervised([*hostile, leaves, str(tmp_path / "pids")], tmp_path / "errors") as process:
        assert process.wait(60) == 0
        assert living(Path(hostile[1])) == []
    assert len((tmp_path / "pids").read_text().splitlines()) == LEAVES[leaves], "they have run"
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.parametrize("leaves", LEAVES)
def test_all_ends_when_the_owner_closes_the_pipe(hostile: list[str], tmp_path: Path, leaves: str) -> None:
    with supervised([*hostile, f"{leaves} and goes on", str(tmp_path / "pids")], tmp_path / "errors") as process:
        await_lines(tmp_path / "pids", LEAVES[leaves] + 1)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == -signal.SIGKILL
        assert living(Path(hostile[1])) == []


@pytest.mark.parametrize("pipe", ["alone", "shared"])
def test_all_ends_with_an_owner_that_is_killed(hostile: list[str], tmp_path: Path, pipe: str) -> None:
    """It can end nothing itself. shared: another process has its pipe, too, which does not end."""
    words = [*hostile, "daemon and goes on", str(tmp_path / "pids")]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, pipe, *SUPERVISOR, *words], start_new_session=True)
    await_lines(tmp_path / "pids", 2)
    owner.kill()
    owner.wait()
    try:
        await_end(Path(hostile[1]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(owner.pid, signal.SIGKILL)


@pytest.mark.parametrize("do", ["kills_the_inner_supervisor", "kills_the_outer_supervisor"])
def test_a_program_that_kills_a_supervisor_ends_with_all_of_its_processes(
    hostile: list[str], tmp_path: Path, do: str
) -> None:
    with supervised([*hostile, do, str(tmp_path / "pids")], tmp_path / "errors") as process:
        assert process.wait(60) == -signal.SIGKILL
        await_end(Path(hostile[1]))  # by the other supervisor


def test_supervisors_that_are_stopped_are_ended_from_outside(hostile: list[str], tmp_path: Path) -> None:
    with supervised([*hostile, "stops_its_supervisors", str(tmp_path / "pids")], tmp_path / "errors") as process:
        while state_of(process.pid) != "T":
            time.sleep(0.01)
        owned_main.kill_from_outside(process.pid)
        assert process.wait(60) == -signal.SIGKILL
        assert living(Path(hostile[1])) == []


def test_nothing_of_others_is_killed(tmp_path: Path) -> None:
    """A process that is no descendant of the supervisor, although it is its owner's child and in its session."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with supervised(["true"], tmp_path / "errors") as process:
            assert process.wait(60) == 0
        assert other.poll() is None


@pytest.mark.parametrize(
    ("words", "status", "errors"),
    [
        (["sh", "-c", "exit 3"], 3, ""),
        (["sh", "-c", "kill -6 $$"], -6, ""),
        (["sh", "-c", "kill -9 $$"], -9, ""),
        (["sh", "-c", "cat; trap"], 0, ""),
        (["/no/such"], 1, "/no/such cannot be started: No such file or directory\n"),
    ],
)
def test_a_supervisor_ends_as_its_program_does(tmp_path: Path, words: list[str], status: int, errors: str) -> None:
    with supervised(words, tmp_path / "errors") as process:
        assert process.wait(60) == status
    assert (tmp_path / "errors").read_text() == errors


def test_a_program_gets_the_signals_of_its_group_and_ignores_none(tmp_path: Path) -> None:
    obeys = "import os, signal; open(r'{}', 'w').close(); signal.pause()".format(tmp_path / "up")
    with supervised([sys.executable, "-c", obeys], tmp_path / "errors") as process:
        await_lines(tmp_path / "up", 0)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
