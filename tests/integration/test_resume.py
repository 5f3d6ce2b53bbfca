"""A run that was interrupted and resumed equals the one that was not, bit for bit: metrics, samples, weights."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, Cli, start
from resuming import STEPS, STOP, settings

from rlcli.runs.folder import events_of, progress_of
from rlcli.runs.record_files import judged_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

REFILLS = "dapo that refills"
IN_FLIGHT = "grpo through updates"
CASES = {
    "grpo": "grpo,algorithm.kl_coef=0.1,algorithm.kl_target=0.01,train.schedule=linear",
    REFILLS: "dapo,dynamic_sampling.oversample=1",
    "dapo with a surplus": "dapo,dynamic_sampling.oversample=2,data.sampling=thompson,data.retire=1",
}
MORE = {
    "ppo": "ppo",
    "opd": "opd,algorithm.advantage=one,algorithm.loss=opd_reverse,teacher.top_k=4",
}
"""A critic is trained beside the policy; a teacher is not."""
OTHERS = {"grpo with muon": "grpo,train.optimizer=muon"}
"""For a model with recurrent layers."""
MORE_AHEAD = {
    "grpo ahead": "grpo,rollout.workers=1,async.staleness=1,async.engine_steps=0,train.minibatches=1",
}
AHEAD = {
    "dapo ahead with a surplus, of two sets": "dapo,rollout.workers=1,async.staleness=1,async.engine_steps=0,"
    "dynamic_sampling.oversample=2,data.mix=tokens,data.sampling=difficulty",
}
"""Engines in workers of their own, which generate the next step's samples during the training of the current one."""
THROUGH = {
    IN_FLIGHT: "grpo,rollout.engine=transformers,rollout.kv_cache_mb=unset,rollout.workers=1,async.staleness=2,"
    "async.engine_steps=7,data.sampling=thompson,dynamic_sampling.keep=unequal,train.minibatches=1",
}
"""The same, with weight updates during the generation of a response."""
EXHAUSTIVE = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
NOT_COMPARED = ("time/", "throughput/", "memory/")
Runs = dict[str, dict[str, Path]]


def train_cases(
    model: Path, data: Path, output_folder: Path, workers: int, *stopped_runs: Path, cases: Mapping[str, str] = CASES
) -> Runs:
    """Case → how the run ended → its run folder. stopped_runs: further runs to resume."""
    program = Path(__file__).with_name("resuming.py")
    completed = subprocess.run(
        [sys.executable, program, model, data, output_folder, str(workers), *cases.values(), *stopped_runs],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-8000:]
    print(completed.stdout)
    return {
        case: {ending: output_folder / str(number) / ending for ending in ("whole", "stopped", "killed", "moved")}
        for number, case in enumerate(cases)
    }


@pytest.fixture(scope="module")
def one_rank(tiny: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return train_cases(tiny, sums, tmp_path_factory.mktemp("one") / "runs", 1)


@pytest.fixture(scope="module")
def more_on_one_rank(tiny: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return train_cases(tiny, sums, tmp_path_factory.mktemp("more") / "runs", 1, cases=MORE)


@pytest.fixture(scope="module")
def more_on_two_ranks(tiny: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    cases = {"grpo": CASES["grpo"], "dapo with a surplus": CASES["dapo with a surplus"], "opd": MORE["opd"]}
    return train_cases(tiny, sums, tmp_path_factory.mktemp("more") / "runs", 2, cases=cases)


@pytest.fixture(scope="module")
def hybrid_on_two_ranks(sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    from rlcli.model.io.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("hybrid")
    model = make_tiny_model(folder / "tiny", kind="qwen3_5_moe", hidden=64, heads=2, kv_heads=1, layers=3)
    return train_cases(model, sums, folder / "runs", 2, cases=OTHERS)


@pytest.fixture(scope="module")
def ahead(tiny: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return train_cases(tiny, sums, tmp_path_factory.mktemp("ahead") / "runs", 1, cases=AHEAD)


@pytest.fixture(scope="module")
def more_ahead(tiny: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return train_cases(tiny, sums, tmp_path_factory.mktemp("more_ahead") / "runs", 1, cases=MORE_AHEAD)


@pytest.fixture(scope="module")
def through(tiny: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return train_cases(tiny, sums, tmp_path_factory.mktemp("through") / "runs", 1, cases=THROUGH)


@pytest.fixture(scope="module")
def two_ranks(tiny: Path, sums: Path, one_rank: Runs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    moved = one_rank["grpo"]["moved"]
    cases = {"ppo": MORE["ppo"]}
    return train_cases(tiny, sums, tmp_path_factory.mktemp("two") / "runs", 2, moved, cases=cases) | {
        "moved": {"": moved}
    }


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Its lines without the timings."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(NOT_COMPARED)} for line in lines]


def samples_of(run: Path, subfolder: str) -> dict[str, list[dict[str, Any]]]:
    """File → its rows without the timings."""
    import pyarrow.parquet as pq

    files = sorted((run / subfolder).rglob("*.parquet"))
    assert files
    tables = {str(path.relative_to(run)): pq.read_table(path).to_pylist() for path in files}
    return {
        name: [{key: value for key, value in row.items() if key != "verify_s"} for row in rows]
        for name, rows in tables.items()
    }


def tensors_of(run: Path) -> dict[str, Any]:
    """Every tensor of the newest checkpoint: weights and optimizer of all that is trained."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    merged = run / "whole.pt"
    dcp_to_torch_save(run / "checkpoints" / "latest" / "policy", merged)
    tensors: dict[str, Any] = torch.load(merged, weights_only=True)
    return tensors


def assert_equal(expected: Path, actual: Path) -> None:
    import torch

    assert metrics_of(expected) == metrics_of(actual)
    assert judged_of(expected) == judged_of(actual) != []
    for subfolder in ("samples", "evaluations"):
        assert samples_of(expected, subfolder) == samples_of(actual, subfolder)
    a, b = tensors_of(expected), tensors_of(actual)
    assert a.keys() == b.keys()
    assert len(a) > 50
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize(
    ("ranks", "case", "ending"),
    [
        *(("one_rank", case, ending) for case, ending in (("grpo", "killed"), *((case, "stopped") for case in CASES))),
        *(("two_ranks", case, ending) for case, ending in (("ppo", "killed"), ("ppo", "stopped"))),
        *(EXHAUSTIVE("more_on_one_rank", case, "stopped") for case in MORE),
        *(EXHAUSTIVE("hybrid_on_two_ranks", case, ending) for case in OTHERS for ending in ("stopped", "killed")),
        *(EXHAUSTIVE("more_on_two_ranks", case, "stopped") for case in ("grpo", "dapo with a surplus", "opd")),
        EXHAUSTIVE("more_on_two_ranks", "grpo", "killed"),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    ranks: str, case: str, ending: str, request: pytest.FixtureRequest
) -> None:
    runs: Runs = request.getfixturevalue(ranks)
    assert_equal(runs[case]["whole"], runs[case][ending])


@pytest.mark.parametrize("ending", ["stopped", "killed"])
@pytest.mark.parametrize(
    ("fixture", "case"),
    [*(("ahead", case) for case in AHEAD), *(EXHAUSTIVE("more_ahead", case) for case in MORE_AHEAD)],
)
def test_what_was_generated_ahead_is_neither_lost_nor_used_twice(
    fixture: str, case: str, ending: str, request: pytest.FixtureRequest
) -> None:
    runs: Runs = request.getfixturevalue(fixture)
    uninterrupted = runs[case]["whole"]
    assert_equal(uninterrupted, runs[case][ending])
    steps = metrics_of(uninterrupted)[1:]
    assert steps[0]["rollout/staleness"] == 0.0
    assert [line["rollout/staleness"] >= 1.0 for line in steps[1:]] == [True] * 3
    assert all(line["log_prob_check/max_abs_diff"] < 1e-3 and line["update/grad_norm"] > 0 for line in steps)
    state = json.loads((uninterrupted / "checkpoints/step-000002/state.json").read_text())
    assert state["waiting"]
    assert state["rounds"]["count"] > 0
    mixed = "two sets" in case
    assert [any(name.startswith("source/") for name in line) for line in steps] == [mixed] * 4
    assert ("tokens" in state["cursor"]) == mixed


@pytest.mark.parametrize("ending", ["stopped", "killed"])
def test_responses_go_on_through_updates_in_a_resumed_run_too(through: Runs, ending: str) -> None:
    uninterrupted = through[IN_FLIGHT]["whole"]
    assert_equal(uninterrupted, through[IN_FLIGHT][ending])
    state = json.loads((uninterrupted / "checkpoints/step-000002/state.json").read_text())
    partial = [response for group in state["waiting"] if group["open"] for response in group["open"]["partial"]]
    assert any(0 < response["tokens"] < 24 for response in partial)
    steps = metrics_of(uninterrupted)[1:]
    assert max(line["rollout/staleness_max"] for line in steps) == 2.0
    assert any("rollout/several_versions" in line for line in steps)
    shares = [sum(share for name, share in line.items() if name.startswith("rollout/age/")) for line in steps]
    assert shares == pytest.approx([1.0] * 4)


def test_what_is_compared_is_there(one_rank: Runs) -> None:
    """Equality of runs without updates would prove nothing."""
    for case, runs in one_rank.items():
        steps = metrics_of(runs["whole"])
        assert [line["step"] for line in steps] == [0, 1, 2, 3, 4], case
        assert all(line["update/grad_norm"] > 0 for line in steps[1:]), case
        assert all(("eval/pass@1" in line) == (line["step"] % 2 == 0) for line in steps), case
        assert len({line["reward/mean"] for line in steps[1:]}) > 1, case
    state = json.loads((one_rank["dapo with a surplus"]["whole"] / "checkpoints/step-000002/state.json").read_text())
    assert state["waiting"], "a surplus waits over the step at which the run was interrupted"
    assert state["cursor"]["rates"]["right"], "the pass rates so far"
    assert any(line["rollout/rounds"] > 1 for line in metrics_of(one_rank[REFILLS]["whole"])[1:])
    assert len({line["update/kl_coef"] for line in metrics_of(one_rank["grpo"]["whole"])[1:]}) > 1


def test_a_run_goes_on_with_another_number_of_ranks_and_agrees_to_rounding(one_rank: Runs, two_ranks: Runs) -> None:
    import torch

    uninterrupted, moved = one_rank["grpo"]["whole"], two_ranks["moved"][""]
    assert (moved / "samples" / "step-000004" / "rank-1.parquet").exists()
    for line, moved_line in zip(metrics_of(uninterrupted), metrics_of(moved), strict=True):
        names = {"reward/mean", "update/policy_loss", "update/grad_norm", "update/kl_coef", "eval/pass@1"} & line.keys()
        assert names == names & moved_line.keys()
        for name in names:
            assert line[name] == pytest.approx(moved_line[name], rel=1e-3, abs=1e-6), (name, line["step"])
    expected_tensors, tensors = tensors_of(uninterrupted), tensors_of(moved)
    for name in expected_tensors:
        if ".model." in name:
            torch.testing.assert_close(expected_tensors[name], tensors[name], rtol=1e-3, atol=2e-5)


@pytest.mark.exhaustive  # scripts/torture shows it, and more
def test_a_run_whose_driver_was_killed_goes_on_from_the_command_line(
    one_rank: Runs, cli: Cli, tiny: Path, sums: Path, tmp_path: Path
) -> None:
    run_folder = tmp_path / "run"
    process = start(
        *("train", "grpo", "--model", tiny, "--data", sums, "--steps", str(STEPS), "--out", run_folder),
        *[word for text in settings(CASES["grpo"]) for word in ("--set", text)],
        *("--set", f"evaluation.data={sums}", "--set", "fault_tolerance.max_restarts=0"),
    )
    try:
        while (
            process.poll() is None and not (run_folder / "checkpoints" / f"step-{STOP:06d}" / "manifest.json").exists()
        ):
            time.sleep(0.005)
        os.kill(progress_of(run_folder)["pid"], signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1, stderr
    assert f"rlcli train --resume {run_folder}" in stderr
    listed = json.loads(cli("runs", "list", tmp_path, "--json").stdout)
    assert [(run["name"], run["recipe"], run["state"], run["checkpoint"]) for run in listed] == [
        ("run", "grpo", "failed", STOP)
    ]
    refused = cli("train", "--resume", run_folder, "--set", "train.lr=0.5", expect=2)
    assert "train.lr: was 0.001, is 0.5" in refused.stderr
    result = json.loads(cli("runs", "resume", run_folder, "--json").stdout)
    assert (result["steps"], result["stopped"], len(result["rewards"])) == (STEPS, False, STEPS)
    assert_equal(one_rank["grpo"]["whole"], run_folder)
    repeated = cli("train", "--resume", run_folder)
    assert "nothing to do" in repeated.stderr
    assert [event["event"] for event in events_of(run_folder)][-1] == "finished"
