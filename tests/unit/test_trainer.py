"""The controller's own arithmetic: metrics, work for the ranks, checkpoints kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlcli.data.packer import Plan, plan_batches
from rlcli.trainer.checkpoint import Checkpoints
from rlcli.trainer.collect import Collected
from rlcli.trainer.metrics import Clock, sample_metrics, time_metrics, update_metrics
from rlcli.trainer.work import rank_work
from rlcli.types import Outcome, Sample, Verdict


def sample(prompt: int, index: int, score: float, tokens: int, outcome: Outcome = Outcome.OK, shard: int = 0) -> Sample:
    return Sample(
        prompt=prompt,
        sample=index,
        shard=shard,
        row=10 * prompt + index,
        prompt_tokens=5,
        response_tokens=tokens,
        finish_reason="length" if tokens >= 8 else "stop",
        verdict=Verdict(score, outcome, parts={"form": score / 2}),
        version=1,
    )


@pytest.fixture
def samples() -> list[Sample]:
    return [
        sample(0, 0, 1.0, 4),
        sample(0, 1, 0.0, 8, Outcome.WRONG, shard=1),
        sample(1, 0, 0.0, 2, Outcome.TIMEOUT),
        sample(1, 1, 0.0, 6, Outcome.NO_ANSWER, shard=1),
    ]


def planned(samples: Sequence[Sample], advantages: Sequence[float]) -> Plan:
    return plan_batches(
        [s.prompt_tokens for s in samples],
        [s.response_tokens for s in samples],
        [s.prompt for s in samples],
        minibatches=1,
        ranks=2,
        tokens_per_microbatch=32,
        max_response_tokens=8,
        active=[a != 0 for a in advantages],
    )


def test_sample_metrics_count_what_a_reader_would_count(samples: Sequence[Sample]) -> None:
    metrics = sample_metrics(samples)
    assert metrics["reward/mean"] == 0.25
    assert metrics["reward/equal_groups"] == 0.5
    assert metrics["reward/part/form"] == 0.125
    assert [metrics[f"outcome/{name}"] for name in ("ok", "wrong", "no_answer", "timeout", "crash")] == [0.25] * 4 + [
        0.0
    ]
    assert metrics["response_tokens/mean"] == 5.0
    assert metrics["response_tokens/truncated"] == 0.25


def test_update_metrics_are_means_over_tokens_not_over_minibatches() -> None:
    first = {"tokens": 3.0, "policy_loss": 3.0, "entropy": 6.0, "grad_norm": 1.0, "mismatch_kl": 0.3, "updates": 1.0}
    second = {"tokens": 1.0, "policy_loss": 5.0, "entropy": 2.0, "grad_norm": 3.0, "mismatch_kl": 9.0, "updates": 1.0}
    metrics = update_metrics([first, {}, second])
    assert metrics["update/policy_loss"] == 2.0
    assert metrics["update/entropy"] == 2.0
    assert metrics["update/grad_norm"] == 2.0
    assert metrics["mismatch/kl"] == pytest.approx(0.1)
    assert (metrics["update/count"], metrics["update/skipped"]) == (2.0, 1.0)


def test_update_metrics_of_a_step_without_any_gradient() -> None:
    assert update_metrics([{}, {}]) == {"update/count": 0.0, "update/skipped": 2.0}


def test_the_clock_adds_up_phases_and_says_them(samples: Sequence[Sample]) -> None:
    heard: list[str] = []
    clock = Clock(heard.append)
    with clock.phase("generate"):
        pass
    with clock.phase("update"):
        pass
    metrics = time_metrics(clock, Collected(list(samples), [], 2.0, 0.5), planned(samples, [0.5, -0.5, 0.0, 0.0]))
    assert heard == ["generate", "update"]
    assert metrics["throughput/rollout_tokens_per_s"] == 10.0
    # Only the two samples that carry a gradient are forwarded: 9 and 13 tokens.
    assert metrics["throughput/update_tokens_per_s"] == pytest.approx(22 / metrics["time/update_s"])
    assert metrics["time/step_s"] == pytest.approx(metrics["time/generate_s"] + metrics["time/update_s"])


def test_every_active_sample_reaches_one_rank_with_its_place_and_advantage(samples: Sequence[Sample]) -> None:
    advantages = [0.5, -0.5, 0.0, 0.0]
    plan = planned(samples, advantages)
    work = rank_work(plan, Collected(list(samples), ["first", "second"], 0.0, 0.0), advantages, ranks=2)
    assert all(w.shards == ["first", "second"] for w in work)
    rows = {
        (int(shard), int(row)): float(advantage)
        for w in work
        for mini in w.minibatches
        for micro in mini.micro
        for shard, row, advantage in zip(micro.shards, micro.rows, micro.advantages, strict=True)
    }
    assert rows == {(0, 0): 0.5, (1, 1): -0.5}
    assert {(m.tokens, m.sequences, m.max_length) for w in work for m in w.minibatches} == {(20, 4, 8)}


def test_the_newest_checkpoints_are_kept_and_latest_points_to_the_last(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (2, 4, 6, 10):
        checkpoints.path(step).mkdir(parents=True)
        checkpoints.committed(step)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000006", "step-000010"]
    assert (tmp_path / "latest").resolve() == checkpoints.path(10)
