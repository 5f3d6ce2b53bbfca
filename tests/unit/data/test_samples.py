"""Samples as columns are the samples that they were made of."""

from __future__ import annotations

import pickle
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.data.columns import SampleTable
from rlcli.training.loop.metrics import reward_metrics, sample_metrics
from rlcli.types import Outcome, Sample, Verdict

numbers = st.floats(-1e6, 1e6)
counts = st.integers(0, 2**40)
verdicts = st.builds(
    Verdict,
    score=numbers,
    outcome=st.sampled_from(Outcome),
    answer=st.none() | st.text(max_size=5),
    parts=st.dictionaries(st.sampled_from(["form", "math"]), numbers),
    detail=st.text(max_size=5),
    latency_s=numbers,
)


def rewarded(sample: Sample, turns: list[tuple[float, int]], versions: list[int]) -> Sample:
    turn_columns = {"turn_rewards": tuple(r for r, _ in turns), "turn_states": tuple(s for _, s in turns)}
    newer = {"newer_by": len(versions) - 1, "version_tokens": tuple(versions)} if len(versions) > 1 else {}
    return replace(sample, **turn_columns, **newer)


plain = st.builds(
    Sample,
    prompt=counts,
    sample=st.integers(-1, 20),
    shard=counts,
    row=counts,
    prompt_tokens=counts,
    response_tokens=counts,
    stop_reason=st.sampled_from(["stop", "length"]),
    verdict=verdicts,
    version=counts,
    seed=counts,
    signature=counts,
    context_tokens=counts,
    turns=counts,
    newer_by=counts,
)
by_turn = st.lists(st.tuples(numbers, st.integers(0, 2**63 - 1)), max_size=3)
rewarded_sample = st.builds(rewarded, plain, by_turn, st.lists(st.integers(1, 99), max_size=3))
some = st.lists(rewarded_sample, max_size=6)


@given(some)
def test_columns_give_back_their_samples_also_after_serialization(samples: list[Sample]) -> None:
    columns = pickle.loads(pickle.dumps(SampleTable.of(samples)))
    assert list(columns) == samples
    assert [columns.verdict(index) for index in range(len(columns))] == [s.verdict for s in samples]
    assert columns.tokens.tolist() == [s.tokens for s in samples]


@given(st.lists(some, max_size=4))
def test_what_is_joined_sorted_and_taken_is_what_lists_would_be(parts: Sequence[list[Sample]]) -> None:
    joined, flat = SampleTable.joined([SampleTable.of(part) for part in parts]), [s for part in parts for s in part]
    assert list(joined) == flat
    assert list(joined.sorted()) == sorted(flat, key=lambda s: (s.prompt, s.sample))
    assert list(joined[1:3]) == flat[1:3]
    failed = joined.take(joined.is_(Outcome.CRASH, Outcome.TIMEOUT))
    assert list(failed) == [s for s in flat if s.verdict.outcome in (Outcome.CRASH, Outcome.TIMEOUT)]


@given(st.lists(rewarded_sample, min_size=1, max_size=8))
def test_metrics_of_columns_are_those_of_the_samples_one_by_one(samples: list[Sample]) -> None:
    columns, scores = SampleTable.of(samples), [s.verdict.score for s in samples]
    metrics = reward_metrics(columns) | sample_metrics(columns)
    assert metrics["reward/mean"] == statistics.fmean(scores)
    assert metrics["reward/std"] == pytest.approx(statistics.pstdev(scores), abs=1e-6)
    groups = {s.prompt: {t.verdict.score for t in samples if t.prompt == s.prompt} for s in samples}
    equal = sum(len(of_group) == 1 for of_group in groups.values())
    assert metrics["reward/equal_groups"] == pytest.approx(equal / len(groups))
    for name in {name for s in samples for name in s.verdict.parts}:
        values = [s.verdict.parts[name] for s in samples if name in s.verdict.parts]
        assert metrics[f"reward/part/{name}"] == pytest.approx(statistics.fmean(values))
    for outcome in Outcome:
        share = sum(s.verdict.outcome == outcome for s in samples) / len(samples)
        assert metrics[f"outcome/{outcome}"] == pytest.approx(share)
    assert metrics["response_tokens/mean"] == pytest.approx(statistics.fmean(s.response_tokens for s in samples))
    assert metrics["response_tokens/max"] == max(s.response_tokens for s in samples)
