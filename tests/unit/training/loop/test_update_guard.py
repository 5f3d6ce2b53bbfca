"""Reactions to bad updates, by rule, with real batches that are saved and a run folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import MagicMock

import pytest
import torch

from rlcli.data.sample_shard import ShardBuilder
from rlcli.data.train_rows import MinibatchCounts, SampleColumns, TrainRows
from rlcli.data.trajectories import Trajectory
from rlcli.errors import RunFailed
from rlcli.rollout.scheduler.sample_filter import REASONS
from rlcli.runs.folder import RunFolder, events_of
from rlcli.training.loop.checks.invariants import Invariants
from rlcli.training.loop.metrics import critic_metrics, update_metrics
from rlcli.training.loop.trainer import Trainer
from rlcli.training.loop.update_guard import (
    CRITIC,
    LEFT_OUT,
    MOST_ROLLBACKS,
    MOST_SAVED,
    POLICY,
    RollBack,
    UpdateGuard,
    check_trained,
)
from rlcli.training.worker.train_batch import TrainBatch
from rlcli.training.worker.worker import Worker
from tests.groups import CalledByName

BAD = {"bad": 1.0, "grad_norm": math.nan}
SOUND = {"tokens": 4.0, "grad_norm": 0.5}
Rule = Literal["skip", "rollback", "stop"]


class Ranks(CalledByName):
    """One rank with a batch, called as a group is."""

    def __init__(self) -> None:
        import numpy as np

        builder = ShardBuilder()
        prompt, response = np.array([1, 2], np.int32), np.arange(3, dtype=np.int32)
        at = np.array([builder.add(Trajectory.single(prompt, response, -np.ones(3, np.float32)))], np.int64)
        columns = SampleColumns(pairs=np.array([0]), shard=np.array([0]), row=at)
        step = TrainRows([MinibatchCounts(3, 1, 1, 3, 3)], columns, 0, [builder.build()])
        self.worker: Any = Worker(0, 1)
        self.worker.batch = TrainBatch([[(0,)]], step, torch.device("cpu"))

    def save_minibatch(self, minibatch: int, path: str) -> list[str]:
        return [self.worker.save_minibatch(minibatch, path)]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run {rank} {lr=1}")  # a name that the user may give


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr("ray.get", lambda reference, *, timeout: reference)
    return Ranks()


@pytest.fixture
def judged(folder: RunFolder, ranks: Ranks) -> Callable[..., tuple[UpdateGuard, list[str], Callable[..., Any]]]:
    def make(rule: Rule, bound: float | None = None) -> tuple[UpdateGuard, list[str], Callable[..., Any]]:
        notes: list[str] = []
        health = UpdateGuard(rule, bound, folder, notes.append)
        return health, notes, lambda sums, step=1, model=POLICY: health.check(model, ranks, step, 0, dict(sums))  # type: ignore[arg-type]

    return make


def test_a_bad_update_is_left_out_with_a_note_an_event_and_its_batch(judged: Any, folder: RunFolder) -> None:
    _, notes, judge = judged("skip")
    assert judge(SOUND) == SOUND
    assert judge({}) == {}
    assert not notes
    assert judge(BAD, step=12)["bad"] == 1.0
    assert notes == [
        "bad update of the policy in step 12: its gradient norm is nan; the update is skipped; "
        f"the batch is in {folder.path}/bad-batches/step-000012.policy-0.rank-0.pt"
    ]
    (event,) = (event for event in events_of(folder.path) if event["event"] == "bad_update")
    assert (event["step"], event["grad_norm"], event["saved"]) == (
        12,
        "nan",
        "bad-batches/step-000012.policy-0.rank-0.pt",
    )
    batch = torch.load(folder.path / event["saved"], weights_only=True)
    (micro,) = batch["micros"]
    assert micro["packed"]["input_ids"].tolist() == [1, 2, 0, 1, 2]
    assert micro["packed"]["targets"].tolist() == [0, 1, 2]
    assert micro["tokens"]["rollout_log_probs"].tolist() == [-1.0] * 3
    assert batch["work"] == {"tokens": 3, "sequences": 1, "groups": 1, "max_length": 3, "right_tokens": 3}
    assert batch["columns"]["pairs"].tolist() == [0]


def test_three_in_a_row_stop_the_run_and_a_good_one_between_them_forgives(judged: Any) -> None:
    health, _, judge = judged("skip", 8.0)
    for sums in (BAD, BAD, SOUND, BAD, {}, BAD):  # one without a gradient says nothing of them
        judge(sums)
    judge(BAD, model=CRITIC)  # another model's
    with pytest.raises(RunFailed, match=r"nan .*bad_grad_norm = 8\), the 3rd in a row; the batch is in") as raised:
        judge({"bad": 1.0, "grad_norm": math.nan})
    assert not raised.value.retry
    assert health.state() == {POLICY: 3, CRITIC: 1}


def test_how_many_there_were_in_a_row_outlives_a_checkpoint(judged: Any) -> None:
    first_guard, _, judge = judged("skip")
    judge(BAD)
    judge(BAD)
    restored_guard, _, judge = judged("skip")
    restored_guard.restore(first_guard.state())
    with pytest.raises(RunFailed, match="3rd in a row"):
        judge(BAD)


def test_stop_names_step_norm_and_batch(judged: Any) -> None:
    _, _, judge = judged("stop")
    with pytest.raises(
        RunFailed, match=r"in step 7: its gradient norm is 1e\+09; the batch is in .*step-000007.policy"
    ):
        judge({"bad": 1.0, "grad_norm": 1e9}, step=7)


def test_only_the_first_batches_of_a_run_are_saved(judged: Any, folder: RunFolder) -> None:
    _, notes, judge = judged("skip")
    for step in range(1, MOST_SAVED + 3):
        judge(BAD, step=step)
        judge(SOUND, step=step)
    assert len(list((folder.path / "bad-batches").iterdir())) == MOST_SAVED
    assert "the batch is in" in notes[MOST_SAVED - 1]
    assert "the batch is in" not in notes[MOST_SAVED]


def test_a_batch_that_cannot_be_saved_is_noted_and_stops_nothing(judged: Any, folder: RunFolder) -> None:
    _, notes, judge = judged("skip")
    (folder.path / "bad-batches").write_text("in the way")
    assert judge(BAD)["bad"] == 1.0
    assert "could not be saved" in notes[0]
    assert notes[1].endswith("the update is skipped")


def test_a_run_that_keeps_going_back_to_one_checkpoint_stops(judged: Any, folder: RunFolder) -> None:
    _, notes, judge = judged("rollback")
    with pytest.raises(RollBack, match="its gradient norm is nan"):
        judge(BAD)
    checkpoint = SimpleNamespace(step=0, path=folder.path / "checkpoints" / "step-000000")
    for _ in range(MOST_ROLLBACKS):
        folder.event("rolled_back", step=5, to=0)
    trainer: Any = SimpleNamespace(
        folder=folder,
        steps_done=4,
        phase=lambda *at: None,
        view=SimpleNamespace(note=notes.append),
        checkpointer=SimpleNamespace(
            poll=lambda wait: None, checkpoints=SimpleNamespace(newest=lambda on_note: checkpoint)
        ),
        invariants=Invariants(),
        records=MagicMock(),
        listeners=MagicMock(),
        prefetcher=MagicMock(),
    )
    with pytest.raises(RunFailed, match=r"too many, and the run has gone back to .*step-000000 3 times"):
        Trainer.roll_back(trainer, "too many")


def test_a_rollback_keeps_the_prompt_cursor_and_the_bad_update_count(judged: Any, folder: RunFolder) -> None:
    health, notes, _ = judged("rollback")
    health.restore({POLICY: 2})
    shown: list[int] = []
    trainer: Any = SimpleNamespace(
        folder=folder,
        steps_done=6,
        config=SimpleNamespace(train=SimpleNamespace(steps=9)),
        phase=lambda *at: None,
        guard=health,
        source=SimpleNamespace(cursor="beyond step 7"),
        invariants=Invariants(),
        records=MagicMock(),
        listeners=MagicMock(),
        prefetcher=MagicMock(),
        view=SimpleNamespace(note=notes.append),
        show_start=lambda: shown.append(trainer.steps_done),
        checkpointer=SimpleNamespace(
            poll=lambda wait: None,
            checkpoints=SimpleNamespace(newest=lambda on_note: SimpleNamespace(step=4, path="step-000004")),
        ),
        sync_weights=lambda: None,
        log_prob_check=MagicMock(),
    )

    def load(checkpoint: Any) -> None:
        trainer.steps_done, trainer.source.cursor = checkpoint.step, "beyond step 4"
        trainer.guard.restore({POLICY: 0, CRITIC: 0})

    trainer.load = load
    Trainer.roll_back(trainer, "a bad update")
    assert (trainer.steps_done, trainer.source.cursor, health.in_a_row[POLICY]) == (4, "beyond step 7", 2)
    assert [call[0] for call in trainer.prefetcher.method_calls] == ["wait", "discard"]
    assert shown == [4], "the steps are counted from there again"
    trainer.listeners.begin.assert_called_once_with(4)
    assert [event["to"] for event in events_of(folder.path)] == [4]


def test_without_a_checkpoint_a_run_that_would_roll_back_goes_on(folder: RunFolder) -> None:
    notes: list[str] = []
    synced: list[int] = []
    for name in ("step-000001/rank-0", "step-000002/rank-0", "step-000002/rank-0.round-2"):
        (folder.samples / f"{name}.parquet").parent.mkdir(exist_ok=True)
        (folder.samples / f"{name}.parquet").touch()
    trainer: Any = SimpleNamespace(
        folder=folder,
        steps_done=1,
        phase=lambda *at: None,
        view=SimpleNamespace(note=notes.append),
        checkpointer=SimpleNamespace(poll=lambda wait: None, checkpoints=SimpleNamespace(newest=lambda on_note: None)),
        invariants=Invariants(),
        records=MagicMock(),
        listeners=MagicMock(),
        prefetcher=MagicMock(),
        sync_weights=lambda: synced.append(1),
        log_prob_check=MagicMock(),
    )
    Trainer.roll_back(trainer, "a bad update")
    assert synced
    assert notes[0].startswith("a bad update; there is no checkpoint to go back to")
    assert [path.name for path in folder.samples.iterdir()] == ["step-000001"]


def test_metrics_count_what_was_left_out_and_take_nothing_from_it() -> None:
    update = {"tokens": 2.0, "policy_loss": 1.0, "grad_norm": 0.5}
    metrics = update_metrics([update, BAD, {}])
    assert (metrics["update/count"], metrics["update/skipped"], metrics["update/grad_norm"]) == (1.0, 2.0, 0.5)
    assert update_metrics([BAD]) == {"update/count": 0.0, "update/skipped": 1.0}
    value = {"tokens": 2.0, "loss": 1.0, "clipped": 0.0, "returns": 2.0, "returns_sq": 4.0, "errors": 0.0}
    value |= {"errors_sq": 0.0, "grad_norm": 0.5}
    assert critic_metrics([value, BAD])["critic/skipped"] == 1.0
    assert critic_metrics([value, BAD])["critic/loss"] == 0.5
    assert critic_metrics([BAD]) == {"critic/skipped": 1.0}
    assert critic_metrics([]) == {}


def test_a_run_that_left_out_every_update_fails(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        for step in (1, 2):
            folder.append_metrics({"step": step, "update/count": 0.0})
        folder.event("bad_update", step=1, model="policy")
        assert check_trained(folder.path, 4).startswith("no update of the run's 2 steps has changed the policy")
        folder.event("step_skipped", step=2, left_out={"truncated": 8, "crash": 1})
        with pytest.raises(RunFailed, match=r"no update of the run's 2 steps .*: in 1 .* bad, in 1 no sample counted"):
            check_trained(folder.path, 4)
        folder.append_metrics({"step": 3, "update/count": 1.0})
        assert check_trained(folder.path, 4) == ""


def test_a_run_without_a_signal_ends_with_what_to_do(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        assert check_trained(folder.path, 4) == ""  # no step was done
        folder.append_metrics({"step": 1, "update/count": 0.0, "outcome/ok": 0.0})
        text = check_trained(folder.path, 4)
    assert "the rewards within each group are equal; no response is right: train on easier prompts" in text
    assert "raise rollout.samples_per_prompt = 4" in text


def test_a_run_that_left_out_every_sample_names_the_most_frequent_reason(tmp_path: Path) -> None:
    assert set(LEFT_OUT) == set(REASONS)
    with RunFolder.create(tmp_path / "run") as folder:
        folder.append_metrics({"step": 1, "update/count": 0.0})
        folder.event("step_skipped", step=1, left_out={"crash": 1, "truncated": 7})
        with pytest.raises(RunFailed, match=r"responses were cut off: raise rollout\.max_response_tokens"):
            check_trained(folder.path, 4)
