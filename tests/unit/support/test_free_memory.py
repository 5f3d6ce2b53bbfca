"""Free memory follows the machine, control groups and the limits of a process."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from rlcli.support.machine import free_memory
from rlcli.support.machine.free_memory import available_memory, process_limit


def test_control_groups_limit_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tightest of this group and those above it; files in its memory make room."""
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/job/step\n")
    files = {"memory.max": "max", "memory.current": "0"}
    for folder, limit in ((tmp_path / "job", 3 << 20), (inner, 9 << 20)):
        for name, text in (files | {"memory.max": str(limit), "memory.current": str(2 << 20)}).items():
            (folder / name).write_text(text)
    (tmp_path / "job" / "memory.stat").write_text("anon 1\nactive_file 524288\ninactive_file 524288\nnot a number x\n")
    groups = free_memory._memory_groups
    monkeypatch.setattr(free_memory, "_memory_groups", lambda: groups(str(tmp_path), str(tmp_path / "cgroup")))
    assert available_memory() == 2 << 20
    (tmp_path / "job" / "memory.max").write_text("max")
    assert available_memory() == 7 << 20


def test_the_first_version_of_control_groups_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "memory" / "api"
    folder.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("5:devices:/\n4:memory:/api\n0::/\n")
    (folder / "memory.limit_in_bytes").write_text(str(8 << 20))
    (folder / "memory.usage_in_bytes").write_text(str(5 << 20))
    (folder / "memory.stat").write_text("active_file 1\ntotal_active_file 1048576\ntotal_inactive_file 0\n")
    groups = free_memory._memory_groups
    monkeypatch.setattr(free_memory, "_memory_groups", lambda: groups(str(tmp_path), str(tmp_path / "cgroup")))
    assert available_memory() == 4 << 20


def test_limits_of_the_shell_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_DATA: (5 << 30, -1), resource.RLIMIT_AS: (resource.RLIM_INFINITY, -1)}
    monkeypatch.setattr("rlcli.support.machine.free_memory.resource.getrlimit", lambda kind: limits[kind])
    assert process_limit() == 5 << 30
    limits[resource.RLIMIT_DATA] = (resource.RLIM_INFINITY, -1)
    assert process_limit() == float("inf")
