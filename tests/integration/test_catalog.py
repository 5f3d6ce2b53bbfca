"""Every recipe of the catalog trains two real steps: Ray, FSDP2 on two ranks, vLLM, and the tiny model."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from catalog import STEPS, sets_for
from commands import ENVIRONMENT, Cli

from rlcli.config import recipes
from rlcli.data.sample_files import sample_files
from rlcli.runs.folder import events_of

pytestmark = pytest.mark.timeout(1700)

NAMES = [name for name in recipes.names() if "environment.name" not in recipes.load(name).values]
"""Recipes without an environment; test_environment_recipes.py trains the others."""
ADAPTED = [name for name in NAMES if recipes.load(name).values.get("lora.rank")]
"""These need an engine of another kind, and so workers of their own."""
WITH_CRITIC = {"ppo", "vapo", "prime", "pf_ppo", "ppo-gsm8k-0.5b"}
SPLIT = ["grpo", "ppo", "prime", "dpo", "opd"]
"""One of each kind of model beside the policy: also run with one worker. That no other sum depends on the split either
is shown in `tests/unit/algorithms`."""
HARMED = ["grpo:swapped", "grpo:nan", "grpo:skip", "grpo:rollback", "grpo:tail", "grpo:cut", "ppo:cut", "grpo:zero"]
"""Runs with a fault on one of two ranks, with aborted generation, with truncated samples left out, and with no reward
for truncated samples."""
FEW = ["grpo", "ppo", "grpo:nan", "grpo:skip"]
"""Recipes of the run without tests marked `long`."""
DISTINCT = ["grpo", "ppo", "prime", "dpo", "opd", "dapo", "sft", *ADAPTED]
"""Recipes whose steps differ in more than a formula of tests/unit/algorithms; the others are `exhaustive`."""
COPIES = "ppo:copies"
"""Each of two workers has a whole copy of policy and critic."""
Steps = list[dict[str, Any]]


def train(model: Path, data: Path, output_folder: Path, workers: int, names: list[str]) -> dict[str, dict[str, Any]]:
    completed = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("catalog.py")), model, data, output_folder, str(workers), *names],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-8000:]
    rows = [json.loads(line) for line in completed.stdout.splitlines()]
    return {row["recipe"]: row for row in rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("catalog")


def several(names: list[str]) -> list[Any]:
    """Parameters: FEW unmarked, DISTINCT and those with a fault `long`, the others `exhaustive`."""
    marks = {name: pytest.mark.long if name in DISTINCT or ":" in name else pytest.mark.exhaustive for name in names}
    return [name if name in FEW else pytest.param(name, marks=marks[name]) for name in names]


@pytest.fixture(scope="module")
def two_workers(tiny: Path, sums: Path, folder: Path, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    module_items = [item for item in request.session.items if item.path == request.path]
    if not any(item.get_closest_marker("long") for item in module_items):
        return train(tiny, sums, folder / "two", 2, FEW)
    requested = {item.callspec.params.get("name") for item in module_items if hasattr(item, "callspec")}
    names = [name for name in NAMES if name in requested and name not in ADAPTED]
    rows = train(tiny, sums, folder / "two", 2, [*names, *HARMED, COPIES])
    rows |= train(tiny, sums, folder / "adapted", 2, [*ADAPTED, *(f"{name}:stale" for name in ADAPTED)])
    print(f"\n{'recipe':<24} {'reward':>7} {'loss':>10} {'grad norm':>10} {'trained':>8} {'diff':>8} {'seconds':>8}")
    for name, row in rows.items():
        if row["failed"]:
            print(f"{name:<24} {row['failed']}")
            continue
        last = row["steps"][-1]
        reward = math.nan if last["reward/mean"] is None else last["reward/mean"]
        print(
            f"{name:<24} {reward:>7.3f} {last.get('update/policy_loss', math.nan):>10.2e} "
            f"{last.get('update/grad_norm', math.nan):>10.2e} {last['update/count']:>8.0f} "
            f"{last.get('log_prob_check/max_abs_diff', math.nan):>8.1e} {row['seconds']:>8.1f}"
        )
    return rows


@pytest.mark.parametrize("name", several(NAMES))
def test_a_recipe_trains_two_steps(two_workers: dict[str, dict[str, Any]], name: str) -> None:
    steps: Steps = two_workers[name]["steps"]
    assert [step["step"] for step in steps] == [1, 2]
    assert sum(step["update/count"] for step in steps) >= 1, steps
    assert all("nonfinite" not in step for step in steps)
    # Two optimizer steps, each of some size: the policy has moved.
    assert sum(step.get("update/grad_norm", 0.0) for step in steps) > 0
    if name != "sft":
        assert all(step["log_prob_check/max_abs_diff"] < 1e-3 for step in steps)
        assert all(step["mismatch/kl"] < 1e-3 for step in steps if step["update/count"] and not step["rollout/stale"])
    assert ("critic/loss" in steps[-1]) == (name in WITH_CRITIC)


@pytest.mark.long
def test_an_adapter_reaches_the_engine(
    two_workers: dict[str, dict[str, Any]], cli: Cli, sums: Path, folder: Path
) -> None:
    (name,) = ADAPTED
    steps: Steps = two_workers[name]["steps"]
    # Engine and trainer are compared: an adapter that stayed behind would show after the first update.
    assert all(step["log_prob_check/max_abs_diff"] < 1e-4 for step in steps)
    # Before the first update the adapter is zero and the policy is the reference; after it, it is not.
    assert steps[0]["update/kl"] == pytest.approx(0.0, abs=1e-3)
    assert steps[1]["update/kl"] > 0
    checkpoint = folder / "adapted" / name / "checkpoints" / "latest"
    words = ("eval", "--model", checkpoint, "--data", sums, "--max-tokens", "8", "--verifier", "test-even", "--json")
    assert json.loads(cli(*words).stdout)["prompts"] == 8


@pytest.mark.parametrize("name", several(["grpo:swapped", "grpo:nan", *(f"{name}:stale" for name in ADAPTED)]))
def test_a_run_stops_where_one_engine_has_other_weights_than_the_trainer(
    two_workers: dict[str, dict[str, Any]], name: str
) -> None:
    assert re.match(
        r"after the weight sync the engine of worker 1 does not hold the weights that the trainer sent: \S+ differs",
        two_workers[name]["failed"],
    )
    assert not two_workers[name]["steps"]  # the first sync was sound, the one after the first update was not


def test_an_update_with_a_nan_loss_on_one_rank_is_skipped_on_all(
    two_workers: dict[str, dict[str, Any]], folder: Path
) -> None:
    run, sound = two_workers["grpo:skip"], two_workers["grpo"]["steps"]
    assert not run["failed"]
    assert [(step["update/count"], step["update/skipped"]) for step in run["steps"]] == [(1, 1), (2, 0)]
    assert run["steps"][0]["reward/mean"] == sound[0]["reward/mean"]
    assert all(step["log_prob_check/max_abs_diff"] < 1e-3 for step in run["steps"])
    events = [event for event in events_of(folder / "two" / "grpo:skip") if event["event"] == "bad_update"]
    assert [(event["step"], event["model"], event["minibatch"]) for event in events] == [(1, "policy", 1)]
    saved = sorted((folder / "two" / "grpo:skip" / "bad-batches").iterdir())
    assert [path.name for path in saved] == [f"step-000001.policy-1.rank-{rank}.pt" for rank in (0, 1)]
    for path in saved:
        import torch

        batch = torch.load(path, weights_only=True)
        assert sum(len(micro["samples"]) for micro in batch["micros"]) > 0
        assert {"rollout_log_probs", "advantages"} <= set(batch["micros"][0]["tokens"])


@pytest.mark.long
def test_a_rollback_resumes_from_the_checkpoint_with_other_prompts(
    two_workers: dict[str, dict[str, Any]], folder: Path
) -> None:
    import pyarrow.parquet as pq

    run = two_workers["grpo:rollback"]
    assert not run["failed"]
    assert [step["step"] for step in run["steps"]] == [1, 2]
    assert [step["update/skipped"] for step in run["steps"]] == [0, 0]
    events = [event for event in events_of(folder / "two" / "grpo:rollback") if event["event"] == "rolled_back"]
    assert [(event["step"], event["to"]) for event in events] == [(2, 1)]

    def prompts(name: str, step: int) -> set[str]:
        files = sample_files(folder / "two" / name / "samples", step)
        return {prompt for file in files for prompt in pq.read_table(file)["prompt_id"].to_pylist()}

    assert prompts("grpo:rollback", 1) == prompts("grpo", 1)
    assert not prompts("grpo:rollback", 2) & prompts("grpo", 2)


@pytest.mark.long
def test_what_a_step_breaks_off_goes_on_in_the_next(two_workers: dict[str, dict[str, Any]], folder: Path) -> None:
    import pyarrow.parquet as pq

    run = two_workers["grpo:tail"]
    assert not run["failed"]
    first, second = run["steps"]
    assert first["rollout/aborted"] > 0
    assert (first["rollout/resumed"], first["rollout/stale"]) == (0, 0)
    assert second["rollout/stale"] >= second["rollout/resumed"] > 0
    assert second["log_prob_check/max_abs_diff"] < 1e-3
    rows = [
        row
        for file in sample_files(folder / "two" / "grpo:tail" / "samples", 2)
        for row in pq.read_table(file).to_pylist()
    ]
    assert {row["version"] for row in rows} == {1, 2}
    assert len({(row["prompt_id"], row["sample"]) for row in rows}) == len(rows)


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo:cut", "ppo:cut"])
def test_a_step_in_which_every_sample_is_left_out_is_skipped(
    two_workers: dict[str, dict[str, Any]], folder: Path, name: str
) -> None:
    """Few responses of the random model end within the limit; only those are used. A step without any is skipped."""
    import pyarrow.parquet as pq

    run = two_workers[name]
    trained = any(step["update/count"] for step in run["steps"])
    assert run["failed"].startswith("no update of the run's 2 steps has changed the policy") != trained
    skipped = []
    for step in run["steps"]:
        samples = step["rollout/generated"]
        assert step["samples/left_out/truncated"] == round(step["response_tokens/truncated"] * samples) > 0
        assert (step["reward/mean"] is None) == (step["samples/left_out"] == samples) == (step["update/count"] == 0)
        assert step["log_prob_check/max_abs_diff"] < 1e-3
        skipped += [(step["step"], samples)] if step["reward/mean"] is None else []
    events = [event for event in events_of(folder / "two" / name) if event["event"] == "step_skipped"]
    assert [(event["step"], event["samples"]) for event in events] == skipped
    assert skipped
    for file in (folder / "two" / name / "samples").glob("*/rank-*.parquet"):
        for row in pq.read_table(file).to_pylist():
            assert row["left_out"] == ("truncated" if row["finish_reason"] == "length" else None)


@pytest.mark.long
def test_what_is_cut_off_earns_nothing_and_no_check_takes_that_for_a_fault(
    two_workers: dict[str, dict[str, Any]], folder: Path
) -> None:
    """The samples keep the verifier's score; the reward that is trained on is 0."""
    import pyarrow.parquet as pq

    run, run_folder = two_workers["grpo:zero"], folder / "two" / "grpo:zero"
    assert not run["failed"]
    assert not [event for event in events_of(run_folder) if event["event"] == "warning"]
    assert sum(step["update/count"] for step in run["steps"]) >= 1
    scores = []
    for step in run["steps"]:
        rows = [
            row
            for file in sample_files(run_folder / "samples", step["step"])
            for row in pq.read_table(file).to_pylist()
        ]
        cut_off = [row["finish_reason"] == "length" for row in rows]
        earned = [0.0 if cut else row["score"] for row, cut in zip(rows, cut_off, strict=True)]
        assert step["reward/mean"] == pytest.approx(sum(earned) / len(earned))
        assert step.get("reward/truncated", 0.0) == 0.0
        assert step["response_tokens/truncated"] == pytest.approx(sum(cut_off) / len(rows))
        assert step["samples/left_out"] == 0
        scores += [row["score"] for row, cut in zip(rows, cut_off, strict=True) if cut]
    assert any(scores)  # there was a reward to take away


@pytest.fixture(scope="module")
def one_worker(tiny: Path, sums: Path, folder: Path) -> dict[str, dict[str, Any]]:
    return train(tiny, sums, folder / "one", 1, SPLIT)


@pytest.mark.long
@pytest.mark.parametrize("name", [*SPLIT, COPIES])
def test_neither_ranks_nor_copies_change_anything(
    one_worker: dict[str, dict[str, Any]], two_workers: dict[str, dict[str, Any]], name: str
) -> None:
    figures = (
        "reward/mean",
        "update/policy_loss",
        "update/grad_norm",
        "update/clip_high",
        "critic/loss",
        "update/teacher_kl",
    )
    for expected, actual in zip(one_worker[name.split(":")[0]]["steps"], two_workers[name]["steps"], strict=True):
        for figure in figures:
            assert (figure in expected) == (figure in actual)
            if figure in expected:
                assert expected[figure] == pytest.approx(actual[figure], rel=2e-3, abs=1e-6), (figure, expected["step"])


@pytest.mark.exhaustive  # tests/unit/training/worker
def test_a_critic_in_workers_of_its_own_learns_the_same(
    one_worker: dict[str, dict[str, Any]], cli: Cli, tiny: Path, sums: Path, tmp_path: Path
) -> None:
    sets = [word for text in sets_for("ppo") for word in ("--set", text)]
    cli(
        *("train", "ppo", "--model", tiny, "--data", sums, "--out", tmp_path / "apart", "--steps", str(STEPS)),
        *("--workers", "1", "--set", "critic.workers=1", *sets),
    )
    steps = [json.loads(line) for line in (tmp_path / "apart" / "metrics.jsonl").read_text().splitlines()]
    assert {path.name for path in (tmp_path / "apart" / "logs").iterdir()} == {"critic-0.log", "rank-0.log"}
    from rlcli.export.exported_weights import Stored

    critic = Stored(tmp_path / "apart" / "checkpoints" / "latest" / "critic", "critic.model.")
    (head,) = critic.read([name for name in critic.shapes if name.endswith("score.weight")]).values()
    assert head.shape[0] == 1
    assert head.any()  # it began at 0
    for actual, expected in zip(steps, one_worker["ppo"]["steps"], strict=True):
        for figure in ("reward/mean", "update/policy_loss", "update/grad_norm", "critic/loss", "critic/grad_norm"):
            assert actual[figure] == pytest.approx(expected[figure], rel=1e-4, abs=1e-7), (figure, actual["step"])


@pytest.mark.exhaustive  # tests/unit/training/worker/test_teacher.py
def test_a_teacher_in_workers_of_its_own_teaches_the_same(
    one_worker: dict[str, dict[str, Any]], cli: Cli, tiny: Path, sums: Path, tmp_path: Path
) -> None:
    sets = [word for text in sets_for("opd") for word in ("--set", text)]
    cli(
        *("train", "opd", "--model", tiny, "--data", sums, "--out", tmp_path / "apart", "--steps", str(STEPS)),
        *("--workers", "1", "--set", "teacher.workers=1", *sets),
    )
    steps = [json.loads(line) for line in (tmp_path / "apart" / "metrics.jsonl").read_text().splitlines()]
    assert {path.name for path in (tmp_path / "apart" / "logs").iterdir()} == {"rank-0.log", "teacher-0.log"}
    for actual, expected in zip(steps, one_worker["opd"]["steps"], strict=True):
        for figure in ("update/policy_loss", "update/grad_norm", "update/teacher_kl", "update/teacher_agreement"):
            assert actual[figure] == pytest.approx(expected[figure], rel=1e-4, abs=1e-7), (figure, actual["step"])


@pytest.mark.exhaustive  # test_resume.py has such engines, and checks each step's log-probs
def test_engines_in_workers_of_their_own_generate_the_same(
    one_worker: dict[str, dict[str, Any]], cli: Cli, tiny: Path, sums: Path, tmp_path: Path
) -> None:
    steps = train_with_separate_engine("grpo", cli, tiny, sums, tmp_path)
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"engine-0.log", "rank-0.log"}
    for actual, expected in zip(steps, one_worker["grpo"]["steps"], strict=True):
        assert actual["rollout/staleness"] == 0.0
        for figure in ("reward/mean", "response_tokens/mean", "update/policy_loss", "update/grad_norm"):
            assert actual[figure] == pytest.approx(expected[figure], rel=1e-4, abs=1e-7), (figure, actual["step"])


@pytest.mark.exhaustive  # of adapters and of engines apart other tests have one each
def test_an_adapter_reaches_engines_in_workers_of_their_own(cli: Cli, tiny: Path, sums: Path, tmp_path: Path) -> None:
    train_with_separate_engine(ADAPTED[0], cli, tiny, sums, tmp_path, "async.staleness=1")


def train_with_separate_engine(
    recipe: str, cli: Cli, model: Path, data: Path, run: Path, *extra_settings: str
) -> Steps:
    """Train with one worker and another one for the engine, and check each step's weight sync; returns the steps."""
    sets = [word for text in (*sets_for(recipe), "rollout.workers=1", *extra_settings) for word in ("--set", text)]
    cli("train", recipe, "--model", model, "--data", data, "--out", run, "--steps", str(STEPS), "--workers", "1", *sets)
    steps: Steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        assert step["update/grad_norm"] > 0
        assert step["log_prob_check/max_abs_diff"] < 1e-3
    return steps
