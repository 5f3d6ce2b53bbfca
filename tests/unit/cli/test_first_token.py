"""Modules that the command line imports at its start, and the timeline of a run's start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcli.cluster.process import startup_times
from rlcli.launch.startup_report import StartReport, timeline
from tests.groups import CalledByName

LIST_COMMANDS = """
import json, sys
from typer.main import get_command
from rlcli.cli.app import app
from rlcli.cli.main import main

HEAVY = ("torch", "ray", "vllm", "transformers", "peft", "accelerate", "datasets", "pyarrow", "wandb", "math_verify")

def paths(command, words):
    yield words
    for name in list(getattr(command, "commands", {})):
        yield from paths(command.resolve_command(None, [name])[1], [*words, name])

outcomes = {}
for words in [*([*path, "--help"] for path in paths(get_command(app), [])), *json.loads(sys.argv[1])]:
    code = main(words)
    outcomes[" ".join(words)] = [code, *(name for name in HEAVY if name in sys.modules)]
sys.stdout.write("\\n" + json.dumps(outcomes))
"""


def test_help_and_lists_load_nothing_heavy(tmp_path: Path) -> None:
    lists = [["recipes", "list"], ["recipes", "show", "grpo"], ["prep", "list"], ["verifiers", "list"]]
    lists += [["runs", "list", str(tmp_path)], ["--version"]]
    completed = subprocess.run(
        [sys.executable, "-c", LIST_COMMANDS, json.dumps(lists)], capture_output=True, text=True, cwd=tmp_path
    )
    assert completed.returncode == 0, completed.stderr
    outcomes = json.loads(completed.stdout.splitlines()[-1])
    assert len(outcomes) > 20
    assert "train --help" in outcomes
    assert "runs list --help" in outcomes
    assert {words: outcome for words, outcome in outcomes.items() if outcome != [0]} == {}


def test_a_timeline_has_the_slowest_worker() -> None:
    workers = [{"engine": 14.0, "process": 12.0}, {"engine": 13.0, "process": 12.5}]
    intervals = timeline(10.0, {"ray": 11.5, "synced": 15.0}, workers)
    assert list(intervals.items()) == [("ray", 1.5), ("worker: process", 2.5), ("worker: engine", 4.0), ("synced", 5.0)]


class Folder:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, **facts: Any) -> None:
        self.events.append({"kind": kind, **facts})


class Group(CalledByName):
    def startup_moments(self) -> list[dict[str, float]]:
        return [startup_times.moments()]

    def describe_engine(self) -> str:
        return "vLLM 0.32.0, second model runner, with its own draws"


def test_startup_is_reported_once_after_the_first_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup_times, "_moments", {})
    monkeypatch.setattr(startup_times, "_steps", 0)
    folder = Folder()
    engines = Group()
    report = StartReport(folder, [engines], engines)  # type: ignore[arg-type, list-item]
    startup_times.done("ray")
    for name in ("sync", "generate"):
        report.phase(name, 1)
    startup_times.engine_step()
    assert "first token" not in startup_times.moments(), "it is about to be computed"
    startup_times.engine_step()
    for name in ("plan", "update", "wait_for_rollout"):
        report.phase(name, 1)
    assert folder.events == [], "the engines may be generating for step 2"
    for name, step in (("sync", 1), ("generate", 2), ("sync", 2)):
        report.phase(name, step)
    (event,) = folder.events
    assert (event["kind"], event["step"]) == ("startup", 1)
    assert event["engine"] == engines.describe_engine()
    elapsed = event["done_after_s"]
    assert list(elapsed) == sorted(elapsed, key=lambda name: elapsed[name])
    assert 0 <= elapsed["process"] < elapsed["ray"] <= elapsed["synced"] <= elapsed["worker: first token"]
