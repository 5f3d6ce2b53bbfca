"""scripts/proofs/distillation.py: what it reads of a run, and how arms are compared."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from rlcli.config.load import resolve
from rlcli.launch.algorithm_rules import check_algorithm


@pytest.fixture(scope="module")
def proof() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "proofs" / "distillation.py"))


def test_every_arm_draws_as_many_samples_and_is_accepted(proof: dict[str, Any]) -> None:
    from rlcli.algorithms.build import build_algorithm

    for recipe, of_prompt, sets in proof["ARMS"].values():
        teacher_overrides = ["teacher.path=t"] if recipe == "opd" else []
        config = resolve(recipe, {"train.steps": 16}, [*proof["COMMON"], *sets, *teacher_overrides]).config
        check_algorithm(config, build_algorithm(**config.algorithm.model_dump()))
        assert 8 % of_prompt == 0


def test_a_curve_counts_the_drawn_tokens_up_to_each_evaluation(proof: dict[str, Any], tmp_path: Path) -> None:
    taught = {"update/teacher_kl": 0.5, "update/teacher_agreement": 0.25}
    lines = [
        {"step": 0, "eval/pass@1": 0.1},
        {"step": 1, "response_tokens/mean": 10.0, **taught},
        {"step": 2, "response_tokens/mean": 20.0, "eval/pass@1": 0.9, **taught, "update/teacher_kl": 0.125},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    points, extra = proof["curve_of"](tmp_path, 16)
    assert points == [(0.0, 0.1), (16 * 30.0, 0.9)]
    assert (extra["update/teacher_kl/first"], extra["update/teacher_kl/last"]) == (0.5, 0.125)


def test_arms_are_compared_on_straight_lines_between_evaluations(proof: dict[str, Any]) -> None:
    points = [(0.0, 0.1), (100.0, 0.5), (200.0, 0.95)]
    assert proof["value_at"](points, 50.0) == pytest.approx(0.3)
    assert proof["value_at"](points, 999.0) == 0.95
    assert proof["tokens_to"](points, 0.3) == pytest.approx(50.0)
    assert proof["tokens_to"](points, 0.99) == float("inf")
