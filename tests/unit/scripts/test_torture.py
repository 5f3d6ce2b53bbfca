"""The torture's own parts: the plans of a seed, and a comparison that reports each difference."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed import checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts" / "_torture"))

from aims import QUIET, RECIPES, STEPS, VICTIMS, draw
from equal import differences, lost_samples
from leftovers import left_since, seen

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_gives_the_same_blows_and_all_that_were_asked_for(seed: int) -> None:
    plans = draw(20, seed, RECIPES, [1, 2])
    assert plans == draw(20, seed, RECIPES, [1, 2])
    aims = [aim for plan in plans for aim in plan.aims]
    victims = Counter(aim.victim for aim in aims)
    assert sum(victims.values()) == 20
    assert victims["node"] == 2
    assert all(victims[name] >= 2 for name in VICTIMS)
    assert {(plan.kind.recipe, plan.kind.workers) for plan in plans} >= {("grpo", 1), ("dapo", 1), ("ppo", 1)}
    assert all((aim.victim == "node") == plan.kind.cluster for plan in plans for aim in plan.aims)
    for plan in plans:
        steps = [aim.step for aim in plan.aims]
        assert steps == sorted(steps)
        assert steps[-1] < STEPS - 2
        for previous, aim in zip(plan.aims, plan.aims[1:], strict=False):
            assert not (previous.victim in QUIET and aim.phase == "start"), "no start follows"


def test_runs_whose_generation_goes_on_through_updates_are_among_them() -> None:
    kinds = {plan.kind.recipe for plan in draw(40, 1, RECIPES, [1, 2])}
    assert kinds == set(RECIPES)
    assert {plan.kind.trains for plan in draw(5, 1, ["async"], [1], cluster=False)} == {"grpo"}


def test_seeds_differ() -> None:
    assert len({tuple(draw(20, seed, RECIPES, [1, 2])) for seed in range(20)}) == 20


def a_run(folder: Path) -> Path:
    for room in ("samples/step-000001", "evaluations", "checkpoints/step-000002"):
        (folder / room).mkdir(parents=True)
    lines = [{"step": step, "reward/mean": 0.5, "time/step_s": len(folder.name)} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [{"prompt_id": "a", "response": "b", "verify_s": float(len(folder.name))}] * 3
    pq.write_table(pa.Table.from_pylist(rows), folder / "samples" / "step-000001" / "rank-0.parquet")
    (folder / "evaluations" / "step-000002.json").write_text("{}")
    checkpoint = folder / "checkpoints" / "step-000002"
    dcp.save({"policy.model.weight": torch.arange(4.0)}, checkpoint_id=checkpoint / "policy", no_dist=True)
    torch.save({"torch": torch.arange(3)}, checkpoint / "policy" / "rank-0.pt")
    (folder / "checkpoints" / "latest").symlink_to("step-000002")
    return folder


def write_metrics(run: Path) -> None:
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": 0.5000000000000001}\n'
    )


def write_samples(run: Path) -> None:
    rows = [{"prompt_id": "a", "response": text, "verify_s": 0.0} for text in "bcb"]
    pq.write_table(pa.Table.from_pylist(rows), run / "samples" / "step-000001" / "rank-0.parquet")


def write_weights(run: Path) -> None:
    weight = torch.arange(4.0)
    weight[0] = -0.0  # one bit
    dcp.save({"policy.model.weight": weight}, checkpoint_id=run / "checkpoints/latest/policy", no_dist=True)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl, line 2: reward/mean": write_metrics,
    "metrics.jsonl has 0 lines": lambda run: (run / "metrics.jsonl").write_text(""),
    "samples/step-000001/rank-0.parquet differs": write_samples,
    "samples/ holds other files": lambda run: (run / "samples" / "step-000001" / ".rank-0.tmp").touch(),
    "evaluations/step-000002.json differs": lambda run: (run / "evaluations/step-000002.json").write_text("[]"),
    "evaluations/ holds other files": lambda run: (run / "evaluations" / "step-000002.json").unlink(),
    "checkpoint: policy/policy.model.weight differs": write_weights,
    "checkpoint: policy/rank-0.pt/torch differs": lambda run: torch.save(
        {"torch": torch.zeros(3)}, run / "checkpoints/latest/policy/rank-0.pt"
    ),
}


@pytest.mark.parametrize("expected", CHANGES)
def test_the_comparison_sees_each_difference(expected: str, tmp_path: Path) -> None:
    run, reference = a_run(tmp_path / "run"), a_run(tmp_path / "reference")
    assert differences(run, reference) == []
    assert lost_samples(run, reference) == 0
    CHANGES[expected](run)
    assert [line.startswith(expected) for line in differences(run, reference)] == [True]


def test_a_sample_is_lost_where_its_file_is_gone_or_holds_another(tmp_path: Path) -> None:
    run, reference = a_run(tmp_path / "run"), a_run(tmp_path / "reference")
    write_samples(reference)
    assert lost_samples(run, reference) == 1
    (run / "samples" / "step-000001" / "rank-0.parquet").unlink()
    assert lost_samples(run, reference) == 3


def test_files_of_an_attempt_whose_reaper_lives_are_no_leftovers() -> None:
    initial_entries, group = seen(), uuid.uuid4().hex[:8]
    workers = Path("/dev/shm", f"rlcli-{group}-workers")
    workers.mkdir()
    try:
        assert str(workers) in left_since(initial_entries)
        with subprocess.Popen([sys.executable, "-c", "input()", group], stdin=subprocess.PIPE) as reaper:
            try:
                assert str(workers) not in left_since(initial_entries)
            finally:
                reaper.communicate(b"\n")
    finally:
        workers.rmdir()
