"""The processes of a server: what they inherit, and how they end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rlcli.rollout.model_servers import server_processes

LEAVES = "trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$ > {0}; while :; do sleep 50; done' & wait; sleep 50"
"""A shell that SIGTERM does not end, and one that has left its group."""


def test_a_server_inherits_no_secret_but_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "WANDB_API_KEY", "SOME_SETTING"):
        monkeypatch.setenv(name, "value")
    variables = server_processes.inherited()
    assert variables["HF_TOKEN"] == variables["SOME_SETTING"] == "value"
    assert not variables.keys() & {"AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "WANDB_API_KEY"}


def test_what_has_left_the_group_of_a_server_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_processes, "END_S", 0.5)
    pid = tmp_path / "pid"
    process = server_processes.start_group(["sh", "-c", LEAVES.format(pid)], os.environ, tmp_path / "log")
    while not pid.exists() or not pid.read_text():
        time.sleep(0.01)
    server_processes.end_group(process)
    assert process.returncode is not None
    status = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
    server_processes.end_group(process)
