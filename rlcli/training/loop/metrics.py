"""The metrics of a step. `rlcli.runs.metric_names` documents the names."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlcli.algorithms.correction.mismatch import mismatch_metrics
from rlcli.data.columns import OUTCOMES, SampleTable
from rlcli.data.messages import RolloutBatch
from rlcli.data.packer import Plan
from rlcli.rollout.scheduler.sample_filter import REASONS
from rlcli.training.worker.rank_step_recorder import StepReport
from rlcli.training.worker.weight_sync.weight_transfer import Synced
from rlcli.types import ENDED, LOGGED, USAGE, is_reward

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int8

PER_TOKEN = (
    *("policy_loss", "clip_low_tokens", "clip_high_tokens", "ratio_abs_dev", "kl", "entropy"),
    *("teacher_kl", "teacher_agreement"),
)
"""Sums over tokens that `update` returns, reported as means."""


@dataclass(frozen=True)
class Updates:
    """Results of the optimizer steps of a step, in order; empty if nothing had a gradient."""

    policy: list[dict[str, float]]
    critic: list[dict[str, float]]

    @property
    def compared_tokens(self) -> float:
        """Tokens of the step whose log-probs engine and trainer computed with the same weights."""
        return sum(sums.get("compared_tokens", 0.0) for sums in self.policy)


@dataclass
class Clock:
    """Seconds by phase of one step."""

    on_phase: Callable[[str], None]
    """Called at the start of each phase."""
    began: float = field(default_factory=time.perf_counter)
    """Start of the step, by time.perf_counter."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Metrics so far."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.on_phase(name)
        with timed(name, self.seconds):
            yield


@contextmanager
def timed(name: str, metrics: dict[str, float]) -> Iterator[None]:
    """Set the block's seconds in a step's metrics."""
    started = time.perf_counter()
    try:
        yield
    finally:
        metrics[f"time/{name}_s"] = time.perf_counter() - started


def reward_metrics(samples: SampleTable) -> dict[str, float]:
    """Metrics of the samples that count; NaN if there are none. `reward/equal_groups`: share of groups whose rewards
    are all equal, which have no gradient under a group baseline."""
    import numpy as np

    rewards, n = samples.score, len(samples)
    if not n:
        return dict.fromkeys(("reward/mean", "reward/std", "reward/equal_groups"), math.nan)
    mean = math.fsum(rewards) / n
    by_group = np.lexsort((rewards, samples.prompt))
    starts = np.flatnonzero(np.diff(samples.prompt[by_group], prepend=-1))
    ordered = rewards[by_group]
    equal = np.minimum.reduceat(ordered, starts) == np.maximum.reduceat(ordered, starts)
    parts = {name: values for name, values in sorted(samples.parts.items()) if is_reward(name)}
    scored = {name: values[~np.isnan(values)] for name, values in parts.items()}
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((rewards - mean) ** 2) / n),
        "reward/equal_groups": float(equal.mean()),
        **({"reward/truncated": float(rewards[samples.truncated].mean())} if samples.truncated.any() else {}),
        **{f"reward/part/{name}": math.fsum(values) / len(values) for name, values in scored.items() if len(values)},
    }


def exclusion_metrics(reasons: Int8[np.ndarray, " S"]) -> dict[str, float]:
    """Number of samples that do not count, in total and by reason. reasons: from `sample_filter.exclusion_reasons`."""
    import numpy as np

    counts = np.bincount(reasons, minlength=1 + len(REASONS))[1:].tolist()
    return {
        "samples/left_out": float(sum(counts)),
        **{f"samples/left_out/{name}": float(count) for name, count in zip(REASONS, counts, strict=True)},
    }


def sample_metrics(samples: SampleTable) -> dict[str, float]:
    """Outcomes and lengths of all samples, including those that do not count."""
    import numpy as np

    lengths, n = samples.response_tokens, len(samples)
    counts = np.bincount(samples.outcome, minlength=len(OUTCOMES)).tolist()
    return {
        **{f"outcome/{outcome}": count / n for outcome, count in zip(OUTCOMES, counts, strict=True)},
        "verify/overran": float(samples.overran.mean()),
        "response_tokens/mean": int(lengths.sum()) / n,
        "response_tokens/max": float(lengths.max()),
        "response_tokens/truncated": float(samples.truncated.mean()),
        "prompt_tokens/mean": int(samples.prompt_tokens.sum()) / n,
        **({"rollout/several_versions": float((samples.newer_by > 0).mean())} if samples.newer_by.any() else {}),
        **{name: float(np.nansum(values)) for name, values in samples.parts.items() if name.startswith(USAGE)},
        **{
            name: float(np.nanmean(values))
            for name, values in samples.parts.items()
            if name.startswith(LOGGED) and not np.isnan(values).all()
        },
        **_conversation_metrics(samples),
    }


def _conversation_metrics(samples: SampleTable) -> dict[str, float]:
    """Metrics of conversations with an environment."""
    import numpy as np

    held = samples.take(samples.ended > 0)
    if not len(held):
        return {}
    ends = np.bincount(held.ended, minlength=len(ENDED)).tolist()
    return {
        "turns/mean": float(held.turns.mean()),
        "turns/max": float(held.turns.max()),
        "context_tokens/mean": float(held.context_tokens.mean()),
        "tool_calls/mean": float(held.tool_calls.mean()),
        "tool_calls/failed": float(held.failed_calls.mean()),
        **({"branches/mean": float(held.branches.mean())} if (held.branches > 1).any() else {}),
        **{f"ended/{name}": count / len(held) for name, count in zip(ENDED, ends, strict=True) if name},
    }


def set_metrics(samples: SampleTable, counted: SampleTable, sources: Sequence[str]) -> dict[str, float]:
    """Metrics by dataset, in runs with several. counted: samples whose rewards count. sources: dataset of each
    group."""
    import numpy as np

    metrics: dict[str, float] = {}
    for name in sorted(set(sources) - {""}):
        groups = [group for group, source in enumerate(sources) if source == name]
        in_dataset, rewarded = (some.take(np.isin(some.prompt, groups)) for some in (samples, counted))
        if not len(in_dataset):
            continue
        dataset_metrics = sample_metrics(in_dataset)
        outcomes = {key: value for key, value in dataset_metrics.items() if key.startswith("outcome/")}
        figures = {
            "prompts": float(len(groups)),
            "reward": reward_metrics(rewarded)["reward/mean"],
            "pass@1": outcomes["outcome/ok"],
            **outcomes,
            "response_tokens": dataset_metrics["response_tokens/mean"],
            "truncated": dataset_metrics["response_tokens/truncated"],
        }
        metrics |= {f"source/{name}/{key}": value for key, value in figures.items()}
    return metrics


def plan_metrics(plan: Plan) -> dict[str, float]:
    return {
        "plan/imbalance": plan.imbalance,
        "plan/microbatches": float(plan.microbatches),
        "plan/skipped_samples": float(plan.skipped),
    }


def steps_taken(updates: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """The results of updates whose optimizer stepped. The others had no gradient, or a bad one."""
    return [update for update in updates if update and "bad" not in update]


def update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the step's minibatches. The mismatch is that of the first minibatch, before the policy changes."""
    done = steps_taken(updates)
    metrics = {"update/count": float(len(done)), "update/skipped": float(len(updates) - len(done))}
    if not done:
        return metrics
    tokens = sum(update["tokens"] for update in done)
    for name in PER_TOKEN:
        if name in done[0]:
            label = f"update/{name.removesuffix('_tokens')}"
            metrics[label] = sum(update[name] for update in done) / max(tokens, 1.0)
    metrics["update/grad_norm"] = statistics.fmean(update["grad_norm"] for update in done)
    for name in ("busiest_expert", "unused_experts", "routes_known", "routes_differ", "gradient_scale"):
        if name in done[0]:
            metrics[f"update/{name}"] = statistics.fmean(update[name] for update in done)
    if "kl" in updates[0]:
        metrics["update/kl_start"] = updates[0]["kl"] / max(updates[0]["tokens"], 1.0)
    if updates[0].get("check_expected_grad_dot_advantage", 0.0) > 0:
        metrics["update/loss_scale"] = (
            updates[0]["check_grad_dot_advantage"] / updates[0]["check_expected_grad_dot_advantage"]
        )
    if "mismatch_tokens" in done[0]:
        metrics |= mismatch_metrics(done[0])
    return metrics


def staleness_metrics(samples: SampleTable, version: int) -> dict[str, float]:
    """Age of the samples when training on them started, in updates. version: of the policy then."""
    import numpy as np

    oldest = np.maximum(version - samples.version, 0)
    by_version = samples.version_tokens
    known = by_version.sum(axis=1) > 0 if by_version.shape[1] else np.zeros(len(samples), bool)
    tokens = np.bincount(oldest[~known], weights=samples.response_tokens[~known])
    for newer in range(by_version.shape[1]):
        mask = known & (by_version[:, newer] > 0)
        counts = np.bincount(oldest[mask] - newer, weights=by_version[mask, newer])
        size = max(len(tokens), len(counts))
        tokens = np.pad(tokens, (0, size - len(tokens))) + np.pad(counts, (0, size - len(counts)))
    shares = tokens / max(tokens.sum(), 1.0)
    return {
        "rollout/staleness": float(oldest.mean()),
        "rollout/staleness_max": float(oldest.max()),
        **{f"rollout/age/{age}": float(share) for age, share in enumerate(shares) if share},
    }


def sync_metrics(synced: Synced) -> dict[str, float]:
    """Metrics of a weight sync."""
    return {
        "sync/bytes": float(synced.bytes),
        "sync/checked_tensors": float(synced.checked),
        "sync/unchecked_tensors": float(synced.unchecked),
        "sync/changed_tensors": float(synced.changed),
        "sync/changed_share": synced.share,
        "time/transfer_s": synced.seconds,
        "time/check_s": synced.check_s,
        "throughput/sync_gb_per_s": synced.bytes / synced.seconds / 1e9,
    }


def engine_metrics(reports: Mapping[str, Sequence[StepReport]]) -> dict[str, float]:
    """Sums over all engines of their counts."""
    totals: dict[str, float] = {}
    for report in (report for ranks in reports.values() for report in ranks):
        for name, value in report.engine.items():
            totals[f"engine/{name}"] = totals.get(f"engine/{name}", 0.0) + value
    return totals


def critic_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For a value model: means over the tokens of a step, and the share of the returns' variance that it explains. For
    a process reward model: means over its responses."""
    done = steps_taken(updates)
    metrics = {"critic/skipped": float(len(updates) - len(done))} if updates else {}
    if not done:
        return metrics
    sums = {name: sum(update[name] for update in done) for name in done[0]}
    size = max(sums["responses"] if "responses" in sums else sums["tokens"], 1.0)
    metrics["critic/loss"] = sums["loss"] / size
    if "responses" in sums:
        metrics["critic/accuracy"] = sums["agree"] / size
    else:
        variance = {name: sums[f"{name}_sq"] / size - (sums[name] / size) ** 2 for name in ("returns", "errors")}
        metrics["critic/clipped"] = sums["clipped"] / size
        metrics["critic/returns"] = sums["returns"] / size
        metrics["critic/explained_variance"] = (
            1.0 - variance["errors"] / variance["returns"] if variance["returns"] > 1e-12 else 0.0
        )
    return metrics | {"critic/grad_norm": sums["grad_norm"] / len(done)}


def time_metrics(clock: Clock, batch: RolloutBatch, plan: Plan, concurrent_s: float = 0.0) -> dict[str, float]:
    """Seconds by phase and tokens per second. The phases and `bookkeeping`, the time outside all of them, add up to the
    step; the wait for verdicts is part of generation. concurrent_s: seconds of generation concurrent with training."""
    seconds, step_s = clock.seconds, time.perf_counter() - clock.began
    tokens = int(batch.samples.tokens.sum())
    trained = sum(sum(minibatch.rank_tokens) for minibatch in plan.minibatches)
    return {
        **seconds,
        "time/bookkeeping_s": step_s - sum(seconds.values()),
        "time/trainer_idle_s": seconds.get("time/generate_s", 0.0) + seconds.get("time/wait_for_rollout_s", 0.0),
        "time/engine_idle_s": max(0.0, step_s - seconds.get("time/generate_s", 0.0) - concurrent_s),
        "time/step_s": step_s,
        "throughput/update_tokens_per_s": trained / max(seconds.get("time/update_s", 0.0), 1e-9),
        "throughput/tokens_per_s": tokens / max(step_s, 1e-9),
    }
