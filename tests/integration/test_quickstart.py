"""`rlcli quickstart` keeps its promise: a tiny model gets unmistakably better, and conversations are learnt too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Cli

from tests.warm_starts import assert_it_can_show_its_work_but_mostly_does_not

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

POINTS = 0.30


def test_a_tiny_model_learns(cli: Cli, tmp_path: Path) -> None:
    words = ("quickstart", "--cache", tmp_path / "cache", "--json")
    done = cli(*words, "--out", tmp_path / "first", "--steps", "20", timeout=600)
    first = json.loads(done.stdout)
    initial, final = (first["evaluations"][step]["pass"]["pass@1"] for step in ("0", "20"))
    assert final["mean"] - initial["mean"] > POINTS
    assert initial["high"] < final["low"]
    assert first["rewards"][-1] > first["rewards"][0]
    assert not first["warm_start_cached"]
    (warm,) = (tmp_path / "cache").glob("warm-start-*")
    assert_it_can_show_its_work_but_mostly_does_not(warm, tmp_path / "first-data")
    assert (tmp_path / "first" / "reward.png").stat().st_size > 10_000
    assert "signals of reward hacking: none" in done.stderr


@pytest.mark.exhaustive  # docs/performance.md has five seeds
def test_conversations_are_trained_and_one_is_shown_before_and_after(cli: Cli, tmp_path: Path) -> None:
    words = ("quickstart", "--task", "tools", "--cache", tmp_path / "cache", "--out", tmp_path / "run", "--steps", "2")
    shown = cli(*words, timeout=600).stdout
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    # It calls the calculator now and then, so sampling finds what the greedy model does not do.
    assert steps[0]["eval/pass@1"] < 0.4
    assert 0.1 < steps[1]["reward/mean"] < 0.6
    initial_index, final_index = shown.index("before: reward"), shown.index("after 2 steps: reward")
    assert "*" in shown[initial_index:final_index], "a product is asked for"
    assert initial_index < final_index < shown.index("pass@1 (greedy)") < shown.index("rlcli env try calculator")


@pytest.mark.exhaustive  # docs/performance.md has three seeds
def test_shapes_are_counted_after_looking(cli: Cli, tmp_path: Path) -> None:
    words = ("quickstart", "--task", "shapes", "--cache", tmp_path / "cache", "--out", tmp_path / "run", "--json")
    result = json.loads(cli(*words, "--steps", "20", timeout=600).stdout)
    initial, final = (result["evaluations"][step]["pass"]["pass@1"]["mean"] for step in ("0", "20"))
    assert initial < 0.5
    assert final > 0.85
