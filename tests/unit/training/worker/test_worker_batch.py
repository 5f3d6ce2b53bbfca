"""The batch of one rank, and the values derived from it: the same however the step is distributed over ranks."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcli.algorithms.build import build_algorithm
from rlcli.algorithms.ranks import Ranks
from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import RolloutBatch
from rlcli.data.sample_shard import ShardBuilder
from rlcli.data.train_rows import SampleColumns, TrainRows
from rlcli.data.trajectories import Trajectory
from rlcli.training.loop.batch_selection import build_train_rows, plan_step, select_batch
from rlcli.training.worker.token_advantages import fill_advantages, fill_selected
from rlcli.training.worker.train_batch import TrainBatch
from rlcli.types import Outcome, Sample, Verdict

LENGTHS, SCORES = (3, 0, 5, 2, 4, 1, 2, 6), (1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0)
"""Two samples each of four prompts; one response is empty, and the last prompt is always right."""
FILLED = ("old_log_probs", "reference_log_probs", "values", "process_rewards")


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the shards themselves, or nothing, which never comes."""

    def get(reference: Any, *, timeout: float) -> Any:
        if reference is None:
            raise TimeoutError(f"not there after {timeout:g} s")
        return reference

    monkeypatch.setattr("ray.get", get)


def collected(context: int = 0) -> RolloutBatch:
    """context: tokens of an environment after the second and after the last token that the policy drew."""
    builder, samples = ShardBuilder(), []
    for index, (length, score) in enumerate(zip(LENGTHS, SCORES, strict=True)):
        tokens, log_probs = np.arange(length, dtype=np.int32) + 10 * index, -np.ones(length, np.float32)
        trajectory = Trajectory.single(np.array([1, 2], np.int32), tokens[:2], log_probs[:2])
        if context:
            trajectory = trajectory.extended("environment", np.full(context, 9, np.int32))
        trajectory = trajectory.extended("policy", tokens[2:], log_probs[2:], 1, "stop")
        if context:
            trajectory = trajectory.extended("environment", np.full(context, 8, np.int32))
        verdict, turns = Verdict(score, Outcome.OK if score else Outcome.WRONG), 2 if context else 1
        counts = {"context_tokens": 2 * context, "turns": turns}
        samples.append(
            Sample(index // 2, index % 2, 0, builder.add(trajectory), 2, length, "stop", verdict, 1, **counts)
        )
    return RolloutBatch(SampleTable.of(samples), [builder.build()])


class Together:
    """Ranks in threads of one process: a sum that waits for all of them."""

    def __init__(self, world: int) -> None:
        self.barrier, self.tensors = threading.Barrier(world, timeout=20), [torch.zeros(0)] * world

    def ranks(self, rank: int) -> Ranks:
        def all_of(tensor: Tensor) -> list[Tensor]:
            self.barrier.wait()
            self.tensors[rank] = tensor
            self.barrier.wait()
            return list(self.tensors)

        return Ranks(lambda tensor: torch.stack(all_of(tensor)).sum(0), lambda tensor: torch.cat(all_of(tensor)))


def worked_out(world: int, name: str, rollouts: RolloutBatch | None = None, **changes: Any) -> dict[int, list[float]]:
    """Row → the values of `name` after filling, on `world` ranks. rollouts: the step's samples; None: `collected()`."""
    train = {"minibatches": 1, "truncated": "keep"}
    config = RunConfig.model_validate(
        {
            "algorithm": {key: value for key, value in changes.items() if key not in train},
            "train": {**{key: changes.get(key, value) for key, value in train.items()}, "tokens_per_microbatch": 16},
            "data": {"max_prompt_tokens": 2},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 6},
        }
    )
    algorithm = build_algorithm(**config.algorithm.model_dump())
    selected = select_batch(rollouts or collected(), algorithm, config, seed=3)
    plan = plan_step(selected, config, world)
    step = build_train_rows(plan, selected, seed=3)
    together, by_rank, failed = Together(world), [{} for _ in range(world)], []

    def run(rank: int) -> None:
        try:
            batch = TrainBatch(plan.of_rank(rank), step, torch.device("cpu"))
            for micro in batch:
                # Of each token by what it is, so that no layout changes it.
                for salt, filled in enumerate(FILLED):
                    micro.tokens.set(filled, -((micro.packed.targets * (salt + 3)) % 7 + 1) / 8)
            fill_advantages(algorithm, batch, together.ranks(rank), kl_coef=0.5)
            if algorithm.token_selector is not None:
                fill_selected(algorithm, batch, together.ranks(rank))
            rows = selected.samples.row
            by_rank[rank] = {int(rows[sample]): values.tolist() for sample, values in batch.export(name).items()}
        except BaseException as error:
            failed.append(error)
            together.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return {sample: values for rank in by_rank for sample, values in rank.items()}


FILLED_IN: list[tuple[str, dict[str, Any]]] = [
    ("advantages", {}),
    ("advantages", {"advantage": "rloo", "kl_in": "reward", "kl_coef": 0.5}),
    ("advantages", {"advantage": "gae", "kl_in": "reward", "kl_coef": 0.5, "lam": 0.9}),
    ("returns", {"advantage": "gae", "gamma": 0.9, "lam": 0.9}),
    ("returns", {"advantage": "vapo"}),
    ("advantages", {"advantage": "reinforce_pp", "select": "best_worst"}),
    ("advantages", {"advantage": "prime"}),
    ("advantages", {"advantage": "turn_rloo"}),
    ("selected", {"loss": "kl_cov", "options": {"cov_share": 0.2}, "minibatches": 2}),
    ("selected", {"loss": "clip_cov", "options": {"cov_share": 0.2, "cov_low": -5.0}, "minibatches": 2}),
]


@pytest.mark.parametrize(("name", "changes"), FILLED_IN)
def test_what_is_worked_out_of_a_batch_is_the_same_on_any_number_of_ranks(name: str, changes: dict[str, Any]) -> None:
    alone = worked_out(1, name, **changes)
    assert any(value for values in alone.values() for value in values)
    for world in (2, 3, 9):  # of nine ranks some have no row
        parted = worked_out(world, name, **changes)
        assert parted.keys() == alone.keys()
        for sample, values in alone.items():
            assert parted[sample] == pytest.approx(values, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("name", "changes"), FILLED_IN)
def test_tokens_that_the_policy_did_not_draw_change_nothing(name: str, changes: dict[str, Any]) -> None:
    """In value and advantage the next drawn token follows the last one before the environment's."""
    alone = worked_out(1, name, **changes)
    for world in (1, 2):
        among = worked_out(world, name, collected(context=3), **changes)
        assert among.keys() == alone.keys()
        for sample, values in alone.items():
            assert among[sample] == pytest.approx(values, rel=1e-6, abs=1e-7)


def test_a_shard_that_was_lost_is_not_waited_for_for_ever() -> None:
    row: np.ndarray = np.zeros(1, np.int64)
    with pytest.raises(TimeoutError):
        TrainBatch([[(0,)]], TrainRows([], SampleColumns(shard=row, row=row), 0, [None]), torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("advantages", {}),
        ("advantages", {"advantage": "rloo", "kl_in": "reward", "kl_coef": 0.5}),
        ("advantages", {"advantage": "gae", "lam": 0.9}),
        ("returns", {"advantage": "vapo"}),
        ("advantages", {"advantage": "reinforce_pp"}),
        ("advantages", {"advantage": "prime"}),
        ("selected", {"loss": "kl_cov", "options": {"cov_share": 0.2}}),
    ],
)
@pytest.mark.parametrize("reason", ["timeout", "crash", "truncated"])
def test_samples_left_out_count_nowhere_on_any_rank(name: str, changes: dict[str, Any], reason: str) -> None:
    """The same as if they had never been sampled: of the first group one of two is lost, of the third both."""
    rollouts, lost = collected(), (0, 4, 5)
    cut = reason == "truncated"
    outcome = Outcome.WRONG if cut else Outcome(reason)
    failed = [
        replace(s, stop_reason="length" if cut else "stop", verdict=replace(s.verdict, outcome=outcome))
        if index in lost
        else s
        for index, s in enumerate(rollouts.samples)
    ]
    compares = changes.get("advantage") not in ("gae", "vapo", "reinforce_pp")
    gone = {*lost, 1} if compares else set(lost)  # the only one left of its group has nothing to be compared with
    remaining = replace(
        rollouts, samples=rollouts.samples.take([index for index in range(len(failed)) if index not in gone])
    )
    rule = {"truncated": "mask"} if cut else {}
    for world in (1, 3):
        without = worked_out(world, name, remaining, **changes)
        filled = worked_out(world, name, replace(rollouts, samples=SampleTable.of(failed)), **changes, **rule)
        assert filled.keys() == without.keys()
        assert gone.isdisjoint(filled)
        for sample, values in without.items():
            assert filled[sample] == pytest.approx(values, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("advantage", ["reinforce_pp", "gae", "prime"])
def test_a_step_without_a_sample_to_train_on_has_no_advantages(advantage: str) -> None:
    assert worked_out(2, "advantages", advantage=advantage, select="right", options={"right_above": 1.5}) == {}


def test_the_kl_of_each_token_is_taken_from_its_reward() -> None:
    """With γ = λ = 1 and Â + V the returns are Σ r from the token on."""
    returns = worked_out(2, "returns", advantage="gae", kl_in="reward", kl_coef=0.5, kl_estimator="k1")
    for sample, length in enumerate(LENGTHS):
        tokens = torch.arange(length) + 10 * sample
        old, reference = (-((tokens * salt) % 7 + 1) / 8 for salt in (3, 4))
        rewards = -0.5 * (old - reference)
        rewards[-1:] += SCORES[sample]
        assert returns[sample] == pytest.approx(rewards.flip(0).cumsum(0).flip(0).tolist(), abs=1e-6)
