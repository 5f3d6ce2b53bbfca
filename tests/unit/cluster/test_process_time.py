"""When processes began."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from rlcli.cluster.process import process_time


def test_a_process_began_when_it_was_started() -> None:
    earliest = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        latest = time.time()
        assert earliest - 0.02 <= process_time.started_at(psutil.Process(child.pid)) <= latest + 0.02
        assert child.stdin is not None
        child.stdin.close()


def test_setting_the_clock_changes_no_start_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a clock is set, the kernel moves the boot time that psutil reads; a process known before keeps psutil's."""
    known, new, boot = psutil.Process(), psutil.Process(), psutil.boot_time()
    known.create_time()
    started_s = process_time.since_boot_s(known)
    assert 0 < started_s < time.clock_gettime(time.CLOCK_BOOTTIME)
    for moved_s in (-3600.0, 86400.37):
        for function in ("psutil.boot_time", "psutil._pslinux.boot_time"):
            monkeypatch.setattr(function, lambda moved_s=moved_s: boot + moved_s)
        assert process_time.since_boot_s(known) == process_time.since_boot_s(new) == started_s


def test_a_process_that_has_ended_has_no_start_time() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        process = psutil.Process(child.pid)
    with pytest.raises(psutil.NoSuchProcess):
        process_time.since_boot_s(process)
