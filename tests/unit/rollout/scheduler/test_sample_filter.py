"""Samples that count neither in the loss nor in any statistic: against the step without them, and what is reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.algorithms import advantages
from rlcli.algorithms.aggregation import Denominators
from rlcli.algorithms.build import build_algorithm
from rlcli.algorithms.inputs import LossInputs
from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable, exclusion_reason
from rlcli.data.messages import RolloutBatch
from rlcli.rollout.scheduler.sample_filter import REASONS, exclusion_reasons, rewarded
from rlcli.runs.folder import RunFolder, events_of
from rlcli.training.loop.batch_selection import SelectedSamples, plan_step, select_batch
from rlcli.training.loop.metrics import exclusion_metrics, reward_metrics
from rlcli.training.loop.update_guard import UpdateGuard
from rlcli.types import Outcome, Sample, Verdict

COUNTS, CUT, TIMEOUT, CRASH = "counts", "cut", "timeout", "crash"
BY_TOKENS = ("gae", "vapo", "reinforce_pp", "prime", "opd")
BY_RESPONSES = [name for name in advantages.names() if name not in BY_TOKENS]


def sample(prompt: int, index: int, score: float, tokens: int, fate: str = COUNTS) -> Sample:
    outcome = Outcome(fate) if fate in (TIMEOUT, CRASH) else Outcome.OK if score > 0.5 else Outcome.WRONG
    verdict = Verdict(score, outcome, parts={"format": score / 2, "math": score})
    finish = "length" if fate == CUT else "stop"
    return Sample(prompt, index, 0, 10 * prompt + index, 5, tokens, finish, verdict, 1)  # type: ignore[arg-type]


def chosen_of(samples: Sequence[Sample], rule: str = "mask", **sections: dict[str, Any]) -> SelectedSamples:
    sections["train"] = {"truncated": rule, "tokens_per_microbatch": 1 << 20} | sections.get("train", {})
    sections["rollout"] = {"max_response_tokens": 8} | sections.get("rollout", {})
    config = RunConfig.model_validate(sections)
    baselines = {s.prompt: Verdict(0.25, Outcome.OK) for s in samples}
    batch = RolloutBatch(SampleTable.of(samples), ["shard"], baselines=baselines)
    return select_batch(batch, build_algorithm(**config.algorithm.model_dump(), trial_calls=False), config, seed=3)


def same(actual: SelectedSamples, expected: SelectedSamples) -> bool:
    """True if two steps train on the same samples with the same numbers, bit for bit."""
    columns, wanted = actual.columns.present(), expected.columns.present()
    assert columns.keys() == wanted.keys()
    equal = all(np.array_equal(columns[name], wanted[name]) for name in columns)
    return equal and list(actual.samples) == list(expected.samples) and actual.active == expected.active


GROUPS = st.lists(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 8), st.sampled_from([COUNTS, CUT, TIMEOUT, CRASH])),
        min_size=2,
        max_size=5,
    ),
    min_size=1,
    max_size=4,
)


SHAPING = {"overlong_buffer": 4, "length_weight": 0.1, "format_weight": 0.2}
COMPOSED = [
    *({"advantage": name} | ({"loss": "gpg"} if name == "one" else {}) for name in BY_RESPONSES),
    {"advantage": "dr_grpo", "loss": "dpo", "select": "pairs"},
    {"advantage": "dr_grpo", "select": "best_random"},
    {"advantage": "one", "loss": "gpg", "select": "right"},
]


@pytest.mark.parametrize("composed", COMPOSED, ids=lambda composed: "-".join(composed.values()))
def test_a_step_is_trained_on_as_if_they_had_not_been_sampled(composed: dict[str, str]) -> None:
    @settings(max_examples=10, deadline=None)
    @given(groups=GROUPS)
    def holds(groups: list[list[tuple[float, int, str]]]) -> None:
        samples = [sample(p, i, *fields) for p, group in enumerate(groups) for i, fields in enumerate(group)]
        usable = [s for s in samples if groups[s.prompt][s.sample][2] == COUNTS]
        if composed["advantage"] not in ("remax", "one"):  # samples of one prompt are compared
            usable = [s for s in usable if sum(other.prompt == s.prompt for other in usable) > 1]
        selection = chosen_of(samples, algorithm=composed, shaping=SHAPING)
        expected = chosen_of(usable, "keep", algorithm=composed, shaping=SHAPING)
        assert same(selection, expected)
        assert selection.mean_shaped_reward == expected.mean_shaped_reward or not usable

    holds()


def test_nothing_changes_where_nothing_is_left_out() -> None:
    samples = [sample(0, 0, 1.0, 8), sample(0, 1, 0.0, 3), sample(1, 0, 0.0, 2)]  # a group of one, from the start
    assert same(chosen_of(samples, "mask"), chosen_of(samples, "keep"))
    assert not chosen_of(samples, "mask").exclusion_reasons.any()
    cut = [replace(s, stop_reason="length") for s in samples]
    assert len(chosen_of(cut, "keep").samples) == 3  # as they are scored


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum-norm", "group-mean-token-mean"])
def test_the_loss_is_that_of_plain_loops_over_what_is_left(aggregation: str, ranks: int) -> None:
    fates = [COUNTS, CUT, COUNTS, TIMEOUT, COUNTS, COUNTS, CRASH, COUNTS, COUNTS, CUT, CRASH, TIMEOUT]
    samples = [sample(n // 4, n % 4, float(n % 3 == 0), 1 + n % 5, fate) for n, fate in enumerate(fates)]
    config = RunConfig.model_validate(
        {
            "algorithm": {"advantage": "dr_grpo", "loss": "ppo", "aggregation": aggregation},
            "train": {"truncated": "mask", "tokens_per_microbatch": 16},
            "data": {"max_prompt_tokens": 5},
            "rollout": {"max_response_tokens": 8},
        }
    )
    algorithm = build_algorithm(**config.algorithm.model_dump())
    selection = select_batch(RolloutBatch(SampleTable.of(samples), [None]), algorithm, config, seed=0)
    (mini,) = plan_step(selection, config, ranks).minibatches
    counts = Denominators(mini.tokens, mini.sequences, mini.max_length, mini.groups)
    total = sum(
        float(algorithm.objective(packed(selection, bin), counts).loss)
        for micros in mini.ranks
        for bin in micros
        if bin
    )
    assert total == pytest.approx(by_loops(samples, fates, aggregation), rel=1e-6)


def packed(selection: SelectedSamples, bin: Sequence[int]) -> LossInputs:
    lengths = torch.tensor([int(selection.samples.response_tokens[s]) for s in bin])
    sequence = torch.repeat_interleave(torch.arange(len(bin)), lengths)
    return LossInputs(
        log_probs=torch.full((len(sequence),), -1.0, dtype=torch.float64),
        advantages=torch.tensor(selection.columns.advantages[list(bin)])[sequence],
        sequence=sequence,
        lengths=lengths,
        group_tokens=torch.tensor(selection.columns.group_tokens[list(bin)]),
    )


def by_loops(samples: Sequence[Sample], fates: Sequence[str], aggregation: str) -> float:
    """−Σ A over the tokens (the ratio is 1), divided as the aggregation says, of the samples that count alone."""
    groups: dict[int, list[Sample]] = {}
    for s, fate in zip(samples, fates, strict=True):
        if fate == COUNTS:
            groups.setdefault(s.prompt, []).append(s)
    usable_groups = [group for group in groups.values() if len(group) > 1]
    tokens, sequences = sum(s.response_tokens for group in usable_groups for s in group), sum(map(len, usable_groups))
    total = 0.0
    for group in usable_groups:
        mean = sum(s.verdict.score for s in group) / len(group)
        group_loss = -sum((s.verdict.score - mean) * s.response_tokens for s in group)
        divisors = {
            "token-mean": tokens,
            "seq-mean-token-sum-norm": sequences * 8,
            "group-mean-token-mean": sum(s.response_tokens for s in group) * len(usable_groups),
        }
        total += group_loss / divisors[aggregation]
    return total


def test_the_reward_of_a_response_cut_off_is_zero_where_that_is_asked() -> None:
    samples = [sample(0, 0, 1.0, 8, CUT), sample(0, 1, 1.0, 3), sample(0, 2, 0.0, 3)]
    selection = chosen_of(samples, "zero_reward", algorithm={"advantage": "dr_grpo"})
    assert selection.columns.rewards.tolist() == [0.0, 1.0, 0.0]
    assert selection.columns.right.tolist() == [False, True, False]
    assert selection.columns.parts.tolist() == [[0.0, 0.0], [0.5, 1.0], [0.0, 0.0]]
    assert selection.columns.advantages.tolist() == pytest.approx([-1 / 3, 2 / 3, -1 / 3])
    assert reward_metrics(rewarded(SampleTable.of(samples), "zero_reward"))["reward/mean"] == pytest.approx(1 / 3)


def test_a_group_whose_baseline_could_not_be_verified_is_left_out() -> None:
    samples = SampleTable.of([sample(p, i, float(i), 3) for p in range(3) for i in range(2)])
    baselines = {0: Verdict(0.0, Outcome.OK), 1: Verdict(0.0, Outcome.TIMEOUT), 2: Verdict(0.0, Outcome.CRASH)}
    config = RunConfig.model_validate({"algorithm": {"advantage": "remax"}})
    algorithm = build_algorithm(**config.algorithm.model_dump())
    selection = select_batch(RolloutBatch(samples, [None], baselines=baselines), algorithm, config, seed=0)
    assert [(s.prompt, s.sample) for s in selection.samples] == [(0, 0), (0, 1)]
    assert exclusion_metrics(selection.exclusion_reasons)["samples/left_out/baseline"] == 4


def test_each_reason_is_counted_once() -> None:
    fates = [[COUNTS, CUT, TIMEOUT, CRASH], [COUNTS, COUNTS, CUT], [CRASH]]
    samples = SampleTable.of([sample(p, i, 0.0, 3, fate) for p, row in enumerate(fates) for i, fate in enumerate(row)])
    reasons = exclusion_reasons(samples, "mask", {1: Verdict(0.0, Outcome.OK)}, compared=True)
    counts = [{"timeout": 1, "crash": 2, "truncated": 2, "alone": 1}.get(name, 0) for name in REASONS]
    assert exclusion_metrics(reasons) == {
        "samples/left_out": 6,
        **{f"samples/left_out/{name}": count for name, count in zip(REASONS, counts, strict=True)},
    }
    alone = [exclusion_reason(s.verdict.outcome, s.stop_reason == "length", "mask") for s in samples]
    assert [name or 0 for name in alone] == [
        REASONS[r - 1] if 0 < r <= REASONS.index("truncated") + 1 else 0 for r in reasons
    ]
    assert exclusion_reasons(samples, "keep")[1] == 0


@pytest.mark.parametrize("advantage", advantages.names())
def test_a_step_in_which_nothing_counts_has_nothing_to_train(advantage: str) -> None:
    samples = [sample(p, i, 1.0, 3, fate) for p, fate in enumerate([TIMEOUT, CRASH, CUT]) for i in range(2)]
    algorithm = {"advantage": advantage} | ({"loss": "gpg"} if advantage == "one" else {})
    selection = chosen_of(samples, algorithm=algorithm, shaping={"format_weight": 0.1, "length_weight": 0.1})
    config = RunConfig.model_validate({"algorithm": algorithm, "train": {"tokens_per_microbatch": 1 << 20}})
    assert (len(selection.samples), plan_step(selection, config, 2).minibatches, selection.active or []) == (0, (), [])
    assert math.isnan(selection.mean_shaped_reward)
    assert math.isnan(reward_metrics(SampleTable.of([]))["reward/mean"])


def test_a_step_in_which_nothing_counts_is_reported(tmp_path: Path) -> None:
    notes: list[str] = []
    folder = RunFolder.create(tmp_path / "run")
    health = UpdateGuard("skip", None, folder, notes.append)
    health.check_counted(1, np.array([0, 1], np.int8))
    health.check_counted(2, np.zeros(0, np.int8))
    assert notes == []
    health.check_counted(
        3, np.array([1 + REASONS.index(name) for name in ("timeout", "truncated", "truncated", "alone")])
    )
    assert notes == [
        "step 3 is skipped: all 4 samples are left out (1 timeout, 2 truncated, 1 alone); the weights are unchanged; "
        "responses were cut off: raise rollout.max_response_tokens, or set train.truncated = keep"
    ]
    (event,) = (event for event in events_of(folder.path) if event["event"] == "step_skipped")
    assert (event["step"], event["samples"], event["left_out"]) == (3, 4, {"timeout": 1, "truncated": 2, "alone": 1})
    folder.close()
