"""Orphans of a backend are reaped, also where the machine's first process reaps none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.sandboxes import opened

# Stands in for a process 1 that reaps nothing: it adopts what the inner program leaves, and counts it.
OUTER = """
import ctypes, os, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)

def state(pid):
    with open(f"/proc/{pid}/stat") as stat:
        state, parent = stat.read().rpartition(")")[2].split()[:2]
    return state if int(parent) == os.getpid() else ""

left = 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        left += bool(state(pid))
    except OSError:
        pass
print("left behind:", left)
"""
TWO_PROGRAMS = """
from rlcli_sandbox import Limits, open_sandbox
sandbox = open_sandbox("bwrap")
for main in ("print(1)", "while True: pass"):
    print(sandbox.start(main, Limits(wall_s=0.3)).wait().killed_for)
"""
# A process between this one and its grandchild ends first, as bubblewrap's does.
ORPHAN = """
import subprocess, sys
from rlcli_sandbox import orphans
middle = 'import subprocess, sys; print(subprocess.Popen([sys.executable, "-c", "input()"]).pid, flush=True); input()'
for adopts in (True,) * 3:
    with orphans.adopting():
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started = subprocess.Popen([sys.executable, "-c", middle], **pipes)
        child = int(started.stdout.readline())
        parent, grandchild = orphans.parent_of(child), __import__("os").pidfd_open(child)
        started.communicate("\\n\\n")
        orphans.reap(grandchild)
        orphans.reap(parent)
    assert not orphans._is_subreaper()
orphans.reap(-1)
assert orphans.parent_of(2**22 + 1) == -1
"""


def left_behind(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", OUTER, program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_process_that_is_left_behind_is_adopted_and_reaped() -> None:
    assert left_behind(ORPHAN) == "left behind: 0"
    assert left_behind(ORPHAN.replace("orphans.reap(grandchild)", "pass")) == "left behind: 3"  # the count sees them


def test_bubblewrap_leaves_no_zombie() -> None:
    opened("bwrap")
    assert left_behind(TWO_PROGRAMS) == "left behind: 0"


@pytest.mark.parametrize("subreaper", [True, False])
def test_a_process_stays_the_subreaper_that_it_was(subreaper: bool) -> None:
    program = f"""
from rlcli_sandbox import orphans
orphans._set_subreaper({subreaper})
with orphans.adopting():
    with orphans.adopting():
        pass
    assert orphans._is_subreaper()
assert orphans._is_subreaper() == {subreaper}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
