"""scripts/proofs/prompt_selection.py: one small case, and how runs are compared."""

from __future__ import annotations

import runpy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rlcli_quickstart.sum_lessons import Sums

SCRIPTS = Path(__file__).parents[3] / "scripts" / "proofs"
SMALL = (
    *("train.steps=2", "train.warmup_steps=1", "evaluation.every=1"),
    *("rollout.prompts_per_step=2", "rollout.max_response_tokens=12"),
)


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    found = runpy.run_path(str(SCRIPTS / "prompt_selection.py"))
    monkeypatch.setattr(Sums, "steps", 10)
    return found


def test_a_small_case_runs_the_same_twice_and_each_arm_otherwise(proof: dict[str, Any], tmp_path: Path) -> None:
    proof["TASKS"]["mixed"] = replace(proof["TASKS"]["mixed"], train=24, test=12)

    def ran(arm: str, *more: str) -> dict[str, Any]:
        one: dict[str, Any] = proof["ran"]("mixed", arm, 0, tmp_path, (*SMALL, *more))
        return {**one, "cpu_s": 0.0}

    first = ran("uniform")
    assert [len(point) for point in first["curve"]] == [2, 2, 2]
    assert all(after[0] > before[0] for before, after in pairwise(first["curve"]))
    assert first["curve"][-1][0] == first["tokens"]
    assert ran("uniform", "train.steps=9") == first, "it is not run again"
    (tmp_path / "mixed-uniform-0.json").unlink()
    assert ran("uniform") == first
    other = ran("thompson, unfiltered")
    assert other["groups"] == 4 <= first["groups"] <= 40, "none is replaced"
    assert other["tokens"] != first["tokens"]


def test_ratios_are_to_uniform_with_the_same_seed(proof: dict[str, Any]) -> None:
    def one(arm: str, seed: int, tokens: float, reached: bool = True) -> dict[str, Any]:
        figures = {"tokens_to_target": tokens, "reached": reached, "last": 0.5, "equal_share": 0.25}
        return {"case": "mixed", "arm": arm, "seed": seed, **figures}

    runs = [one("uniform", 0, 100), one("uniform", 1, 400), one("thompson", 0, 50), one("thompson", 1, 200, False)]
    uniform, thompson = proof["compared"](runs)
    assert (uniform["ratio"], uniform["low"], uniform["high"]) == (1.0, 1.0, 1.0)
    assert thompson["ratio"] == pytest.approx(0.5)
    assert (thompson["reached"], thompson["tokens"]) == (1, 125)
    assert "| mixed | thompson | 1 of 2 | ≥ 125 | 0.50 [0.50, 0.50] | 0.500 | 25% |" in proof["table"](runs)


def test_questions_of_the_test_are_not_trained_on(proof: dict[str, Any]) -> None:
    task = proof["TASKS"]["mixed"]
    questions = {split: {one.question for one in some} for split, some in proof["items"](task, 1).items()}
    assert (len(questions["train"]), len(questions["test"])) == (task.train, task.test)
    assert not questions["test"] & questions["train"]
