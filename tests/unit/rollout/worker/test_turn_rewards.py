"""The rewards of turns on their way to the tokens that earned them, against plain loops, in whatever split."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcli.algorithms.build import build_algorithm
from rlcli.algorithms.ranks import Ranks
from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import Coefficients, RolloutBatch
from rlcli.data.sample_shard import ShardBuilder
from rlcli.data.signature import signature, tokens_digest
from rlcli.data.trajectories import Trajectory
from rlcli.errors import RunFailed
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.training.loop.batch_selection import SelectedSamples, build_train_rows, plan_step, select_batch
from rlcli.training.loop.checks.invariants import Invariants
from rlcli.training.worker.fsdp_backend import FsdpLoader
from rlcli.training.worker.policy_role import PolicyRole
from rlcli.training.worker.token_advantages import fill_advantages
from rlcli.training.worker.train_batch import TrainBatch
from rlcli.types import Outcome, Sample, Verdict


class Talk(NamedTuple):
    """lengths: sampled tokens of each turn. rewards: of the environment. score: the verifier's. states: before each
    turn."""

    lengths: Sequence[int]
    rewards: Sequence[float]
    score: float
    states: Sequence[int]
    cut: bool = False
    outcome: Outcome = Outcome.OK


TALKS = (
    Talk((2, 3, 1), (0.5, 0.0, 1.0), 1.5, (1, 2, 3)),
    Talk((3,), (0.25,), 0.25, (1,)),
    Talk((1, 2), (0.5, 0.0), 0.75, (1, 2), cut=True),  # the verifier gives 1/4 more than the environment
    Talk((2, 2), (0.0, 0.0), 0.0, (5, 6)),  # nothing but zeros, in the whole group
    Talk((1, 1), (0.0, 0.0), 0.0, (5, 5)),
    Talk((1,), (0.0,), 0.0, (5,)),
    Talk((2, 0, 2), (0.5, -1.0, 2.0), 1.5, (7, 8, 7)),  # its second turn has no token
    Talk((0, 2), (1.0, 0.5), 1.5, (7, 8)),
    Talk((0,), (0.125,), 0.125, (7,)),  # no token at all
    Talk((2, 1), (0.0, 9.0), 9.0, (4, 4)),  # a group of which the others fail
    Talk((1,), (3.0,), 0.0, (4,), outcome=Outcome.CRASH),
    Talk((1,), (3.0,), 0.0, (4,), outcome=Outcome.ENVIRONMENT),
)
GROUP = 3
VALUES = 3


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the shards themselves."""
    monkeypatch.setattr("ray.get", lambda reference, *, timeout: reference)


def values_of(ids: Any) -> Any:
    """The critic's, of each token by its id, exact in float32."""
    return -((ids * VALUES) % 7 + 1) / 8


def token(index: int, turn: int, at: int) -> int:
    return 10 + 7 * index + 3 * turn + at


def trajectory(index: int, talk: Talk) -> Trajectory:
    rollout = Trajectory.of_prompt(np.array([1, 2], np.int32))
    for turn, length in enumerate(talk.lengths):
        if turn:
            rollout = rollout.extended("environment", np.full(2, 9, np.int32))
        ids = np.array([token(index, turn, at) for at in range(length)], np.int32)
        rollout = rollout.extended("policy", ids, -np.ones(length, np.float32), 1, "length" if talk.cut else "stop")
    return rollout


def collected(talks: Sequence[Talk] = TALKS) -> RolloutBatch:
    builder, samples = ShardBuilder(), []
    for index, talk in enumerate(talks):
        rollout = trajectory(index, talk)
        samples.append(
            Sample(
                index // GROUP,
                index % GROUP,
                0,
                builder.add(rollout),
                2,
                sum(talk.lengths),
                stop_reason="length" if talk.cut else "stop",
                verdict=Verdict(talk.score, talk.outcome),
                version=1,
                signature=signature(tokens_digest(rollout), talk.score),
                context_tokens=2 * (len(talk.lengths) - 1),
                turns=len(talk.lengths),
                turn_rewards=tuple(talk.rewards),
                turn_states=tuple(talk.states),
            )
        )
    return RolloutBatch(SampleTable.of(samples), [builder.build()])


def configured(budget: int = 20, truncated: str = "keep", **algorithm: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "algorithm": algorithm,
            "train": {"tokens_per_microbatch": budget, "truncated": truncated},
            "data": {"max_prompt_tokens": 2},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": GROUP, "max_response_tokens": 18},
        }
    )


def selected(rollouts: RolloutBatch, config: RunConfig) -> SelectedSamples:
    return select_batch(rollouts, build_algorithm(**config.algorithm.model_dump()), config, seed=3)


def on_ranks(world: int) -> list[Ranks]:
    """Of threads that meet in every sum."""
    barrier, gathered = threading.Barrier(world, timeout=20), [torch.zeros(0)] * world

    def of(rank: int) -> Ranks:
        def all_of(tensor: Tensor) -> list[Tensor]:
            barrier.wait()
            gathered[rank] = tensor
            barrier.wait()
            return list(gathered)

        return Ranks(lambda tensor: torch.stack(all_of(tensor)).sum(0), lambda tensor: torch.cat(all_of(tensor)))

    return [of(rank) for rank in range(world)]


def filled(name: str, rollouts: RolloutBatch, world: int, config: RunConfig) -> dict[int, list[float]]:
    """Row → what is filled in under `name` for its drawn tokens."""
    algorithm, selection = build_algorithm(**config.algorithm.model_dump()), selected(rollouts, config)
    plan = plan_step(selection, config, world)
    step, values_by_row = build_train_rows(plan, selection, seed=3), dict[int, list[float]]()

    def run(rank: int, ranks: Ranks) -> None:
        batch = TrainBatch(plan.of_rank(rank), step, torch.device("cpu"))
        for micro in batch:
            micro.tokens.values = values_of(micro.packed.targets)
        fill_advantages(algorithm, batch, ranks, kl_coef=0.0)
        values_by_row.update({int(selection.samples.row[s]): v.tolist() for s, v in batch.export(name).items()})

    threads = [threading.Thread(target=run, args=(rank, ranks)) for rank, ranks in enumerate(on_ranks(world))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return values_by_row


# --- references -------------------------------------------------------------------------------------------------------


def rewards_of(talk: Talk) -> list[float]:
    """The score beyond the sum of the environment's rewards counts to the last turn."""
    return [*talk.rewards[:-1], talk.rewards[-1] + talk.score - sum(talk.rewards)]


def others_of(index: int) -> list[int]:
    group = range(index // GROUP * GROUP, index // GROUP * GROUP + GROUP)
    return [other for other in group if other != index and TALKS[other].outcome is Outcome.OK]


def turn_rloo(index: int) -> list[float]:
    turn_rewards, result = rewards_of(TALKS[index]), []
    for turn in range(len(turn_rewards)):
        theirs = [sum(rewards_of(TALKS[other])[turn:]) for other in others_of(index)]
        result.append(sum(turn_rewards[turn:]) - sum(theirs) / len(theirs))
    return result


def compared(value: float, among: Sequence[float]) -> float:
    mean = sum(among) / len(among)
    spread = math.sqrt(sum((x - mean) ** 2 for x in among) / max(len(among) - 1, 1))
    return (value - mean) / (spread + 1e-6)


def discounted(index: int, gamma: float) -> list[float]:
    rewards = rewards_of(TALKS[index])
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def gigpo(index: int) -> list[float]:
    members = [index, *others_of(index)]
    episode = compared(sum(rewards_of(TALKS[index])), [sum(rewards_of(TALKS[member])) for member in members])
    result = []
    for state, turn_return in zip(TALKS[index].states, discounted(index, 0.5), strict=True):
        anchored = [
            theirs
            for member in members
            for other, theirs in zip(TALKS[member].states, discounted(member, 0.5), strict=True)
            if other == state
        ]
        result.append(episode + 2.0 * compared(turn_return, anchored))
    return result


def by_token(index: int, by_turn: Sequence[float]) -> list[float]:
    return [value for value, length in zip(by_turn, TALKS[index].lengths, strict=True) for _ in range(length)]


def token_rewards(index: int) -> list[float]:
    """Each turn's on its last drawn token; a turn without tokens counts to the token before it, else to the first."""
    talk = TALKS[index]
    rewards, generated = [0.0] * sum(talk.lengths), 0
    for length, reward in zip(talk.lengths, rewards_of(talk), strict=True):
        generated += length
        if rewards:
            rewards[max(generated - 1, 0)] += reward
    return rewards


def returns_of_gae(index: int, gamma: float, lam: float) -> list[float]:
    """Chained over drawn tokens alone: γ and λ are spent on no token of the environment."""
    talk, rewards = TALKS[index], token_rewards(index)
    ids = [token(index, turn, at) for turn, length in enumerate(talk.lengths) for at in range(length)]
    result, advantage, following = [0.0] * len(ids), 0.0, 0.0
    for position in reversed(range(len(ids))):
        value = float(values_of(ids[position]))
        advantage = rewards[position] + gamma * following - value + gamma * lam * advantage
        following, result[position] = value, advantage + value
    return result


COUNTED = [index for index in range(len(TALKS)) if index < 9]
"""Of the last group a single one is left, with nothing to be compared with."""
LEFT_OUT_OF_GAE = {10, 11}


@pytest.mark.parametrize("world", [1, 2, 7])
@pytest.mark.parametrize("budget", [20, 200])
def test_every_token_of_a_turn_has_the_turns_advantage(world: int, budget: int) -> None:
    cases: list[tuple[Callable[[int], list[float]], dict[str, Any]]] = [
        (turn_rloo, {"advantage": "turn_rloo"}),
        (gigpo, {"advantage": "gigpo", "gamma": 0.5, "options": {"omega": 2.0}}),
    ]
    for reference, changes in cases:
        config = configured(budget, kl_coef=0.1, **changes)  # with a KL term those without advantage are forwarded, too
        by_sample = filled("advantages", collected(), world, config)
        assert by_sample.keys() == set(COUNTED)
        for index in COUNTED:
            assert by_sample[index] == pytest.approx(by_token(index, reference(index)), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("world", [1, 2, 7])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8)])
def test_gae_chains_drawn_tokens_and_finds_each_reward_at_its_turns_end(world: int, gamma: float, lam: float) -> None:
    by_sample = filled("returns", collected(), world, configured(advantage="gae", gamma=gamma, lam=lam))
    assert by_sample.keys() == set(range(len(TALKS))) - LEFT_OUT_OF_GAE
    for index, values in by_sample.items():
        assert values == pytest.approx(returns_of_gae(index, gamma, lam), rel=1e-5, abs=1e-6)


def test_the_rewards_of_turns_add_up_to_the_samples_reward() -> None:
    selection = selected(collected(), configured(advantage="turn_rloo"))
    by_turn, rewards = selection.columns.turn_rewards, selection.columns.rewards
    assert by_turn.sum(1) == pytest.approx(rewards)
    assert by_turn[2].tolist() == [0.5, 0.25, 0.0]
    assert by_turn[0].tolist() == [0.5, 0.0, 1.0], "the environment's sum leaves nothing to the last turn"


def test_what_is_cut_off_without_reward_has_none_in_any_turn() -> None:
    selection = selected(collected(), configured(truncated="zero_reward", advantage="turn_rloo"))
    assert selection.columns.turn_rewards[2].tolist() == [0.0] * 3
    assert selection.columns.turn_rewards[0].tolist() == [0.5, 0.0, 1.0]


def test_shaping_belongs_to_the_last_turn() -> None:
    config = configured(advantage="turn_rloo")
    config = config.changed(shaping={"overlong_buffer": 18, "overlong_penalty": 1.8})
    selection = selected(collected(), config)
    assert selection.columns.turn_rewards[0].tolist() == pytest.approx([0.5, 0.0, 1.0 - 0.6])


def test_a_sample_is_forwarded_if_any_of_its_turns_has_an_advantage() -> None:
    selection = selected(collected(), configured(advantage="turn_rloo"))
    assert selection.active == [True] * 3 + [False] * 3 + [True] * 3
    swapped = [Talk((1, 1), (1.0, 0.0), 1.0, (1, 2)), Talk((1, 1), (0.0, 1.0), 1.0, (1, 2))]
    assert selected(collected(swapped), configured(advantage="turn_rloo")).active == [True, True]
    assert selected(collected(swapped), configured(advantage="rloo")).active == [False, False]


def test_an_update_is_checked_against_the_planned_advantages_of_turns(mesh: Any, base: str) -> None:
    config = configured(advantage="turn_rloo").changed(model={"path": base})
    role = PolicyRole(
        config,
        torch.device("cpu"),
        FsdpLoader(config, torch.float32, torch.device("cpu"), ParallelDims.of(mesh.size(), 1)),
    )
    selection = selected(collected(), config)
    plan = plan_step(selection, config, 1)
    batch = TrainBatch(plan.of_rank(0), build_train_rows(plan, selection, 0), torch.device("cpu"))
    sums = role.update(batch, 0, Coefficients(lr=1e-3, kl=0.0, entropy=0.0))
    assert sums["check_grad_dot_advantage"] == pytest.approx(sums["check_expected_grad_dot_advantage"], rel=1e-4)
    Invariants().check_update(plan, selection, 0, sums)
    selection.columns.advantages[0, 2] += 0.25
    with pytest.raises(RunFailed, match="advantages of the samples trained on"):
        Invariants().check_update(plan, selection, 0, sums)
