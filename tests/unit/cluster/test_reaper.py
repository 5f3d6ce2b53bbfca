"""Processes that the reaper ends, and processes that it ignores."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlcli.cluster.reaper import Reaper

GROUP = "0123abcd"
SLEEP = "import time; time.sleep(600)"
DRIVER = f"""
import subprocess, sys, time
from rlcli.cluster.reaper import Reaper

reaper = Reaper(sys.argv[1], sys.argv[2])
daemon = subprocess.Popen([sys.executable, "-c", {SLEEP!r}, f"--session_dir={{sys.argv[1]}}/session"])
service = subprocess.Popen([sys.executable, "-c", {SLEEP!r}, "tracker"])
reaper.watch()
print(daemon.pid, service.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def session(tmp_path: Path) -> Path:
    folder = tmp_path / "rlcli-ray-test"
    folder.mkdir()
    return folder


def sleeper(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SLEEP, *words])


def named(name: str, session: Path) -> subprocess.Popen[bytes]:
    """A process of that name and with the session's folder in its command line."""
    program = f"from pathlib import Path; Path('/proc/self/comm').write_text({name!r}); {SLEEP}"
    return subprocess.Popen([sys.executable, "-c", program, f"--session_dir={session}"])


def test_the_session_ends_with_its_descendants_and_other_children_live_on(session: Path) -> None:
    reaper = Reaper(str(session), GROUP)
    # It outlives its child: which of the two is killed first is left open.
    nested = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"
    daemon = subprocess.Popen([sys.executable, "-c", nested, f"--temp-dir={session}"])
    other = sleeper("a tracker's service")
    try:
        while not (below := psutil.Process(daemon.pid).children()):
            time.sleep(0.05)
        reaper.watch()
        reaper.close()
        assert daemon.wait(timeout=5) < 0
        assert not psutil.wait_procs(below, timeout=5)[1]
        assert not session.exists()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_signal_to_all_processes_does_not_end_the_one_that_clears_up(session: Path) -> None:
    """As systemd sends it."""
    reaper = Reaper(str(session), GROUP)
    process = psutil.Process(reaper._process.pid)
    status = Path(f"/proc/{process.pid}/status")
    while not int(re.findall(r"SigIgn:\s*(\w+)", status.read_text())[0], 16) >> (signal.SIGTERM - 1) & 1:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    reaper.close()
    assert not session.exists()


def test_a_killed_driver_is_cleared_up_after(session: Path) -> None:
    shared = Path(f"/dev/shm/rlcli-{GROUP}-cpushm")
    shared.touch()
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(session), GROUP], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    daemon, service = (psutil.Process(int(pid)) for pid in driver.stdout.readline().split())
    try:
        driver.kill()
        driver.wait()
        assert not psutil.wait_procs([daemon], timeout=60)[1]
        deadline = time.monotonic() + 60
        while session.exists() or shared.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert service.is_running()
    finally:
        service.kill()
        driver.stdout.close()
