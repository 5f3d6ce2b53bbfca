"""`rlcli quickstart` keeps its promise: a tiny model gets unmistakably better, and the second time starts at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Cli

from tests.warm_starts import assert_it_can_show_its_work_but_mostly_does_not

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

POINTS = 0.30


def test_a_tiny_model_learns_and_the_warm_start_is_kept(cli: Cli, tmp_path: Path) -> None:
    words = ("quickstart", "--cache", tmp_path / "cache", "--json")
    first = json.loads(cli(*words, "--out", tmp_path / "first", "--steps", "20", timeout=600).stdout)
    before, after = (first["evaluations"][step]["pass"]["pass@1"] for step in ("0", "20"))
    assert after["mean"] - before["mean"] > POINTS
    assert before["high"] < after["low"]
    assert first["rewards"][-1] > first["rewards"][0]
    assert not first["warm_start_cached"]
    (warm,) = (tmp_path / "cache").glob("warm-start-*")
    assert_it_can_show_its_work_but_mostly_does_not(warm, tmp_path / "first-data")
    assert (tmp_path / "first" / "reward.png").stat().st_size > 10_000

    again = cli(*words[:-1], "--out", tmp_path / "again", "--steps", "1")
    assert "cached" in again.stderr
    assert "pass@1" in again.stdout
    assert "rlcli train grpo" in again.stdout
