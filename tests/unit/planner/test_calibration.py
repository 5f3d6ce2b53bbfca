"""Measured constants of the planner: the fit finds them, and plans use them until the packages change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlcli.cli.main import main
from rlcli.launch.planning.calibrate import Case, fit, measured, predicted
from rlcli.planner.calibration import Constants, calibration_file, load, save
from rlcli.planner.device import GIB, parse_gpus
from rlcli.planner.shape import ModelShape
from tests.planner_settings import qwen_7b, setting


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def small(hidden: int) -> ModelShape:
    return replace(qwen_7b(), hidden=hidden, intermediate=3 * hidden, layers=4, vocab=512)


def cases(gpus: str, truth: Constants) -> list[Case]:
    """What runs would measure if `truth` were the constants."""
    keys = ([], ["lora.rank=16"], ["train.tokens_per_microbatch=8192"], ["rollout.samples_per_prompt=4"])
    made = [setting(small(512 * (1 + n)), gpus, "checkpoint.every=0", *sets) for n, sets in enumerate(keys)]
    made = [replace(of, device=replace(of.device, flops=1e12, read_rate=1e10, link_rate=1e9)) for of in made]
    return [Case(of, predicted(of, truth)) for of in made]


@pytest.mark.parametrize("gpus", ["cpu", "h100"])
def test_the_fit_predicts_what_was_measured(gpus: str) -> None:
    start = Constants()
    truth = replace(
        start,
        base_with_engine=start.base_with_engine * 1.3,
        context=start.context * 0.7,
        engine_rest=start.engine_rest * 1.5,
        heap_temporary=0.2,
        heap_always=start.heap_always * 2,
        over_flops=8.0,
        decode_step_s=0.0007,
    )
    known = cases(gpus, truth)
    found = fit(known, start)
    for case in known:
        now = predicted(case.setting, found)
        assert now == pytest.approx(case.measured, rel=0.02)
    assert found.over_links == pytest.approx(start.over_links), "one device: no case depends on links"
    assert found.over_flops == pytest.approx(8.0, rel=0.05)


def test_figures_are_the_largest_memory_and_the_usual_time() -> None:
    records = [{"memory/update_gb": float(n), "time/update_s": s} for n, s in ((1, 9.0), (3, 1.0), (2, 2.0), (2, 3.0))]
    assert measured(records) == {"memory/update": 3 * GIB, "time/update": 2.0}


def test_plans_use_measured_figures_of_the_same_packages() -> None:
    assert parse_gpus("h100")[0].constants == load("h100") == Constants()
    save("h100", Constants(context=123.0, measured="2026-01-02"))
    assert parse_gpus("h100:2")[0].constants == Constants(context=123.0, measured="2026-01-02")
    assert parse_gpus("a100")[0].constants == Constants()
    file = calibration_file("h100")
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"versions": {"torch": "0.1"}}))
    assert load("h100") == Constants()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"versions": 1}', '{"constants": {}}', "\udcff"])
def test_an_unreadable_file_leaves_the_defaults(text: str) -> None:
    calibration_file("cpu").parent.mkdir(parents=True)
    calibration_file("cpu").write_text(text, encoding="utf-8", errors="surrogateescape")
    assert load("cpu") == Constants()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "error: rlcli plan needs a recipe; for example: rlcli plan grpo --model ./my-model\n"),
        *(
            (["plan", *words, "--calibrate"], "error: --calibrate measures this machine, not a run; give it alone,")
            for words in (["grpo"], ["--gpus", "h100:8"], ["--set", "lora.rank=8"])
        ),
    ],
)
def test_plan_is_for_a_run_or_for_the_machine(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
