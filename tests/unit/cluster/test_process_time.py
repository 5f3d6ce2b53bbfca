"""When processes began."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from rlcli.cluster.process import process_time


def test_a_process_began_when_it_was_started() -> None:
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        after = time.time()
        assert before - 0.02 <= process_time.born(psutil.Process(child.pid)) <= after + 0.02
        assert child.stdin is not None
        child.stdin.close()


def test_setting_the_clock_moves_no_birth(monkeypatch: pytest.MonkeyPatch) -> None:
    me = psutil.Process()
    known, boot, created = process_time.since_boot_s(me), psutil.boot_time(), me.create_time()
    for moved_s in (-3600.0, -1.0, 1.0, 86400.37):
        monkeypatch.setattr(psutil, "boot_time", lambda moved_s=moved_s: boot + moved_s)
        monkeypatch.setattr(psutil.Process, "create_time", lambda self, moved_s=moved_s: created + moved_s)
        assert process_time.since_boot_s(me) == known
