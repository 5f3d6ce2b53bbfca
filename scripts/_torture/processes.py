"""The processes of a run: every one carries its mark in the environment, whoever its parent has become."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import psutil

MARK = "RLCLI_TORTURE"


def marked(mark: str) -> list[psutil.Process]:
    """Live processes that were started, however indirectly, with `mark` in their environment."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def line_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is(name: str, process: psutil.Process) -> bool:
    line = line_of(process)
    if name == "worker":
        return line.startswith("ray::Worker")
    if name == "scoring service":
        return "rlcli.rewards.service.scoring_service" in line
    if name in (
        "fork server",
        "scoring worker",
    ):  # the fork server forks the scoring workers, which keep its command line
        child = "fork_server_main" in line_of(process.parent() or process)
        return "fork_server_main" in line and child == (name == "scoring worker")
    return line.split(" ")[0].rpartition("/")[2] == name


def victims(name: str, mark: str, supervisor: int) -> list[psutil.Process]:
    """Live processes of the run marked `mark` that are called `name` in a plan."""
    if name == "supervisor":
        return [process for process in marked(mark) if process.pid == supervisor]
    if name == "driver":
        return drivers(supervisor)
    matches = []
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            if _is(name, process):
                matches.append(process)
    return matches


def drivers(supervisor: int) -> list[psutil.Process]:
    """The supervisor's child that trains, if it is there."""
    with contextlib.suppress(psutil.Error):
        return [child for child in psutil.Process(supervisor).children() if "rlcli.cli.main" in line_of(child)]
    return []


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def wait_gone(find: Callable[[], list[psutil.Process]], patience_s: float) -> list[str]:
    """Wait until `find` finds no process. Those that are there after `patience_s` seconds are named, and killed."""
    deadline = time.monotonic() + patience_s
    while remaining := find():
        if time.monotonic() > deadline:
            names = [f"{process.pid}: {line_of(process)[:120]}" for process in remaining]
            kill(remaining)
            return names
        time.sleep(0.1)
    return []
