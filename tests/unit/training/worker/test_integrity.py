"""Training uses the samples that were generated and planned: each way of mixing them up stops the run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rlcli.algorithms.build import build_algorithm
from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import RolloutBatch
from rlcli.data.prompts.cursor import PromptCursor
from rlcli.data.prompts.dataset_mixture import MixedCursor
from rlcli.data.sample_shard import SampleShard, ShardBuilder
from rlcli.data.signature import signature, tokens_digest
from rlcli.data.trajectories import Trajectory
from rlcli.errors import RunFailed
from rlcli.rollout.scheduler.round_totals import DrawCheck
from rlcli.training.loop.batch_selection import SelectedSamples, build_train_rows, plan_step, select_batch
from rlcli.training.loop.checks.invariants import Invariants
from rlcli.training.worker.plan_integrity import MIN_WATCHED, StepCheck, signature_weights, watch_grad_dot_advantage
from rlcli.training.worker.train_batch import TrainBatch
from rlcli.types import Outcome, Sample, Verdict

CPU = torch.device("cpu")
CONFIG = RunConfig.model_validate(
    {
        "data": {"max_prompt_tokens": 8},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 8},
        "train": {"tokens_per_microbatch": 32},
    }
)
GROUPS, GROUP = 3, 4


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the shards themselves."""
    monkeypatch.setattr("ray.get", lambda reference, *, timeout: reference)


def collected() -> RolloutBatch:
    """Signed samples of ragged lengths; one is empty."""
    random, builder, samples = np.random.default_rng(0), ShardBuilder(), []
    for index in range(GROUPS * GROUP):
        group, length = index // GROUP, index % 5
        prompt = np.array([1, 2, 3 + group], np.int32)
        tokens, log_probs = random.integers(9, 50, length, dtype=np.int32), -random.random(length, dtype=np.float32)
        verdict = Verdict(float(random.random() < 0.5), Outcome.OK)
        trajectory = Trajectory.single(prompt, tokens, log_probs)
        row, signed = builder.add(trajectory), signature(tokens_digest(trajectory), verdict.score)
        samples.append(
            Sample(group, index % GROUP, 0, row, 3, length, "stop", verdict, 1, seed=index + 1, signature=signed)
        )
    return RolloutBatch(SampleTable.of(samples), [builder.build()])


def batches(selected: SelectedSamples, ranks: int = 2) -> list[TrainBatch]:
    plan = plan_step(selected, CONFIG, ranks)
    step = build_train_rows(plan, selected, 0)
    return [TrainBatch(plan.of_rank(rank), step, CPU) for rank in range(ranks)]


def chosen_of(batch: RolloutBatch) -> SelectedSamples:
    return select_batch(batch, build_algorithm(), CONFIG, seed=0)


def test_a_sound_batch_passes() -> None:
    assert sum(len(micro.samples) for batch in batches(chosen_of(collected())) for micro in batch) > GROUP


def test_rewards_that_truncation_sets_to_0_keep_their_signature() -> None:
    samples = collected()
    cut_off = replace(samples, samples=replace(samples.samples, truncated=samples.samples.score > 0))
    config = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update={"truncated": "zero_reward"})})
    selected = select_batch(cut_off, build_algorithm(advantage="reinforce_pp_baseline"), config, seed=0)
    assert not selected.columns.rewards.any()
    plan = plan_step(replace(selected, active=None), CONFIG, 1)
    TrainBatch(plan.of_rank(0), build_train_rows(plan, selected, 0), CPU)


def _other_scores(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, samples=replace(batch.samples, score=np.roll(batch.samples.score, 1)))


def _other_rows(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, samples=replace(batch.samples, row=np.roll(batch.samples.row, 1)))


def _other_groups(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, samples=replace(batch.samples, prompt=np.roll(batch.samples.prompt, 1)))


def _shard(change: Any) -> Any:
    def harm(batch: RolloutBatch) -> RolloutBatch:
        (shard,) = batch.shards
        return replace(batch, shards=[change(shard)])

    return harm


def _shifted(shard: SampleShard) -> SampleShard:
    return replace(shard, log_probs=np.roll(shard.log_probs, 1))


@pytest.mark.parametrize("harm", [_other_scores, _other_rows, _other_groups, _shard(_shifted)])
def test_a_batch_that_was_mixed_up_stops_the_run(harm: Any) -> None:
    with pytest.raises(RunFailed, match=r"other tokens, log-probs or reward|different prompts"):
        batches(chosen_of(harm(collected())))


def test_a_mask_that_begins_with_the_prompts_end_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    row = SampleShard.row

    def early(shard: SampleShard, index: int) -> Trajectory:
        trajectory = row(shard, index)
        at = trajectory.prompt_tokens - 1
        spans = tuple(
            replace(span, **{"end" if span.speaker == "prompt" else "start": at}) for span in trajectory.spans
        )
        return replace(trajectory, spans=spans, log_probs=np.concatenate([[np.float32(0)], trajectory.log_probs]))

    monkeypatch.setattr(SampleShard, "row", early)
    with pytest.raises(RunFailed, match="other tokens"):
        batches(chosen_of(collected()))


def sums_of(selected: SelectedSamples, ranks: int = 2) -> dict[str, float]:
    """Sums that the updates of all ranks report for a sound batch."""
    total = {"tokens": 0.0, "check_rows": 0.0, "check_advantages": 0.0, "check_denominator": 0.0, "grad_norm": 1.0}
    for batch in batches(selected, ranks):
        total["check_denominator"] += batch.minibatch_counts[0].tokens / ranks
        for micro in batch:
            signatures = batch.columns.signatures[micro.samples]
            total["tokens"] += float(micro.lengths.sum())
            total["check_rows"] += float(signatures.sum())
            total["check_advantages"] += float(
                (batch.columns.advantages[micro.samples] * signature_weights(signatures)).sum()
            )
    return total | {"check_watched": 99.0, "check_moved": 3.0}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_sound_update_passes_on_any_number_of_ranks(ranks: int) -> None:
    selected = chosen_of(collected())
    Invariants().check_update(plan_step(selected, CONFIG, ranks), selected, 0, sums_of(selected, ranks))
    Invariants().check_update(plan_step(selected, CONFIG, ranks), selected, 0, {"bad": 1.0, "grad_norm": 1.0})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokens", "response tokens forwarded"),
        ("check_rows", "signatures of the samples"),
        ("check_advantages", "advantages of the samples"),
        ("check_denominator", "denominator"),
        ("check_moved", "changed no weight"),
    ],
)
def test_an_update_that_was_not_planned_so_stops_the_run(name: str, message: str) -> None:
    selected = chosen_of(collected())
    plan, sums = plan_step(selected, CONFIG, 2), sums_of(selected)
    wrong = 0.0 if name == "check_moved" else sums[name] * 1.1
    with pytest.raises(RunFailed, match=message):
        Invariants().check_update(plan, selected, 0, sums | {name: wrong})


def test_tokens_that_a_correction_rejects_were_forwarded_all_the_same() -> None:
    selected = chosen_of(collected())
    plan, sums = plan_step(selected, CONFIG, 2), sums_of(selected)
    corrected_sums = sums | {"mismatch_tokens": sums["tokens"], "tokens": sums["tokens"] - 3}
    Invariants().check_update(plan, selected, 0, corrected_sums)
    with pytest.raises(RunFailed, match="response tokens forwarded"):
        Invariants().check_update(plan, selected, 0, corrected_sums | {"mismatch_tokens": sums["tokens"] - 1})


def test_seeds_that_repeat_stop_the_run() -> None:
    samples, invariants = collected().samples, Invariants()
    invariants.check_seeds(samples)
    invariants.check_seeds(replace(samples, seed=samples.seed + 100))
    with pytest.raises(RunFailed, match="12 of an earlier step's"):
        invariants.check_seeds(samples)
    invariants.forget()
    with pytest.raises(RunFailed, match="5 of this step's"):
        invariants.check_seeds(replace(samples, seed=samples.seed // 2 * 2))


def test_a_cursor_that_stands_still_stops_the_run() -> None:
    draws = DrawCheck(8)
    draws.check([0, 1, 2])
    draws.check([3, 4, 5])
    draws.check([3, 4, 5])  # the last ones of an epoch, and the first ones of the next
    with pytest.raises(RunFailed, match="does not move"):
        draws.check([3, 4, 5])
    few = DrawCheck(3)
    for _ in range(4):
        few.check([0, 1, 2])  # there are no others


@pytest.mark.parametrize("count", [4, 5, 16])
def test_a_cursor_over_few_prompts_is_never_taken_to_stand_still(count: int) -> None:
    for seed in range(20):
        cursor, draws = PromptCursor(count, seed, shuffle=True), DrawCheck(count)
        for _ in range(200):
            draws.check(cursor.take(2))


def test_a_small_set_among_large_ones_may_give_the_same_prompts_again() -> None:
    cursor = MixedCursor(["small", "large"], [0, 2, 100], [0.99, 0.01], seed=0, shuffle=False)
    draws = DrawCheck(cursor.draws_without_repeat)
    for _ in range(10):
        draws.check(cursor.take(2))


@pytest.mark.parametrize("world", [1, 2])
def test_the_loss_gradient_along_the_advantages_is_the_expected_one(world: int) -> None:
    """Of any aggregation, and of any split over ranks: the sum over ranks is what counts."""
    from rlcli.algorithms.aggregation import Denominators
    from rlcli.algorithms.build import is_weighted_by_advantage
    from rlcli.algorithms.inputs import LossInputs

    for aggregation in ("token-mean", "seq-mean-token-mean"):
        algorithm = build_algorithm(aggregation=aggregation)
        assert is_weighted_by_advantage(algorithm)
        lengths, expected, total = torch.tensor([2, 1]), 0.0, torch.zeros((), dtype=torch.float64)
        for rank in range(world):
            log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
            advantages = torch.tensor([0.7, 0.7, -0.7]) * (rank + 1)
            inputs = LossInputs(
                log_probs=log_probs,
                rollout_log_probs=log_probs.detach() - 1.5,  # a correction that cuts
                advantages=advantages,
                sequence=torch.tensor([0, 0, 1]),
                lengths=lengths,
            )
            denominators = Denominators(tokens=3 * world, sequences=2 * world, max_length=4)
            watch = partial(watch_grad_dot_advantage, advantages=advantages.double(), total=total, world=world)
            (algorithm.objective(inputs, denominators, policy_input_hook=watch).loss * world).backward()
            expected += float(algorithm.grad_dot_advantage(inputs, denominators))
        assert float(total) == pytest.approx(expected)
        uncorrected = inputs.replace(rollout_log_probs=None)
        assert float(algorithm.grad_dot_advantage(inputs, denominators)) == pytest.approx(
            2 * float(algorithm.grad_dot_advantage(uncorrected, denominators))
        )
    assert not is_weighted_by_advantage(build_algorithm(advantage="dr_grpo", loss="dpo", select="pairs"))
    assert not is_weighted_by_advantage(build_algorithm(correction="bypass"))
    assert not is_weighted_by_advantage(build_algorithm(loss="gmpo"))  # which weighs whole responses


@pytest.mark.parametrize("token_mask", [None, [True, False, True]])
def test_other_terms_of_the_loss_are_no_part_of_that_gradient(token_mask: list[bool] | None) -> None:
    """KL and NLL have gradients too: where advantages are small, larger ones."""
    from rlcli.algorithms.aggregation import Denominators
    from rlcli.algorithms.inputs import LossInputs

    algorithm = build_algorithm(kl_coef=0.5, nll_coef=0.5)
    log_probs, advantages = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), torch.tensor([0.01, 0.01, -0.01])
    inputs = LossInputs(
        log_probs=log_probs,
        reference_log_probs=log_probs.detach() + 1,
        advantages=advantages,
        sequence=torch.tensor([0, 0, 1]),
        lengths=torch.tensor([2, 1]),
        right=torch.tensor([True, False]),
        kept=None if token_mask is None else torch.tensor(token_mask),
    )
    denominators, total = Denominators(tokens=3, sequences=2, max_length=4), torch.zeros((), dtype=torch.float64)
    kept_advantages = (advantages if token_mask is None else advantages[torch.tensor(token_mask)]).double()
    watch = partial(watch_grad_dot_advantage, advantages=kept_advantages, total=total, world=1)
    algorithm.objective(inputs, denominators, kl_coef=0.5, right_tokens=2, policy_input_hook=watch).loss.backward()
    assert float(total) == pytest.approx(float(algorithm.grad_dot_advantage(inputs, denominators)))
    assert log_probs.grad is not None
    assert abs(log_probs.grad[0]) > 0.1  # the other terms are there


def test_an_optimizer_that_does_not_step_is_seen() -> None:
    model = torch.nn.Linear(3, 2)
    check = StepCheck(model)
    check.before(0.1)
    assert check.after() == {}  # no gradient
    model.weight.grad = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1e-9, 0.0]])
    for lr, moved in ((0.0, 0), (0.1, 2)):
        check.before(lr)
        torch.optim.SGD(model.parameters(), lr=lr).step()
        assert {name: int(value) for name, value in check.after().items()} == {"check_watched": 2, "check_moved": moved}


@pytest.mark.parametrize(
    ("lr", "gradient", "watched"),
    [
        (1e-6, 1e-4, True),
        (2.5e-12, 1e-4, False),  # of the last step of a cosine: less than what float32 resolves
        (1e-6, 1e-12, False),  # of a token that never occurs
    ],
)
def test_a_step_too_small_to_show_is_no_fault(lr: float, gradient: float, watched: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    check, optimizer = StepCheck(model), torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    model.weight.grad = torch.randn(64, 64) * gradient
    check.before(lr)
    optimizer.step()
    sums = {name: float(value) for name, value in check.after().items()}
    assert (sums["check_watched"] >= MIN_WATCHED) == watched
    assert sums["check_moved"] == sums["check_watched"] or not watched


def test_a_head_over_the_vocabulary_is_not_what_is_watched() -> None:
    model = torch.nn.ModuleDict({"inner": torch.nn.Linear(3, 2), "lm_head": torch.nn.Linear(2, 5)})
    model["inner"].weight.grad = torch.ones(2, 3)
    check = StepCheck(model)
    check.before(0.1)
    assert int(check.after()["check_watched"]) == 6
    assert StepCheck(torch.nn.ModuleDict({"lm_head": torch.nn.Linear(2, 5)}))._parameter.shape == (5, 2)
