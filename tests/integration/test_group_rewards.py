"""A reward function written for TRL in a run: whole groups in each call, its trainer's arguments, and what it logs."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from commands import SOON, Cli

pytestmark = pytest.mark.timeout(600)

REWARDS = """
import os


def unique(completions, prompts, trainer_state, log_extra, log_metric, **columns):
    with open(os.environ["CALLS"], "a") as file:
        print(len(completions), len(set(map(str, prompts))), file=file)
    log_metric("steps_done", trainer_state.global_step)
    log_metric("of_steps", trainer_state.max_steps)
    log_extra("repeats", [completions.count(one) - 1 for one in completions])
    return [float(completions.count(one) == 1) for one in completions]
"""


@pytest.mark.long
def test_trls_reward_function_gets_whole_groups_and_its_logs_are_kept(
    cli: Cli, tiny: Path, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    calls, run = tmp_path / "calls", tmp_path / "run"
    monkeypatch.setenv("CALLS", str(calls))
    idle = ("--set", "lora.alpha=8")
    verifier = ("--verifier", f"{tmp_path}/rewards.py:unique")
    where = ("--model", tiny, "--data", sums, "--out", run)
    done = cli("train", "grpo", *where, *verifier, *SOON, *idle, "--steps", "2", "--workers", "2")
    assert "lora.alpha = 8.0 has no effect: lora.rank = 0 trains all weights" in done.stderr
    sizes = [tuple(map(int, line.split())) for line in calls.read_text().splitlines()]
    assert {completions / prompts for completions, prompts in sizes} == {4.0}  # in the trial before the run too
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(step["log/steps_done"], step["log/of_steps"]) for step in steps] == [(0.0, 2.0), (1.0, 2.0)]
    assert not any(name.startswith("reward/part/") for step in steps for name in step)
    rows = [row for file in sorted(run.glob("samples/**/rank-*.parquet")) for row in pq.read_table(file).to_pylist()]
    assert len(rows) == 32
    for row in rows:
        repeats = int(dict(row["extra"])["repeats"])
        assert row["score"] == float(repeats == 0)
        group = [other for other in rows if (other["step"], other["group"]) == (row["step"], row["group"])]
        assert sum(other["response"] == row["response"] for other in group) == repeats + 1


@pytest.mark.long
def test_an_address_in_the_environment_is_named(
    cli: Cli, tiny: Path, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    where = ("--model", tiny, "--data", sums, "--out", tmp_path / "run")
    failed = cli("train", "grpo", *where, *SOON, "--steps", "1", expect=2)
    assert "no Ray cluster answers at 127.0.0.1:1 (from the environment variable RAY_ADDRESS)" in failed.stderr
    assert failed.stderr.rstrip().endswith("or unset RAY_ADDRESS")
