"""Evaluation: pass@1 and pass@k of whatever the workers' engines run, or of a served model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rlcli.data.prompts import TokenizedPrompts
from rlcli.rollout.engine import Sampling
from rlcli.trainer.collect import OnProgress, collect
from rlcli.trainer.statistics import PassReport, summarise
from rlcli.types import Outcome, Verdict
from rlcli.workers.group import WorkerGroup
from rlcli.workers.rollout_role import RolloutCall


@dataclass(frozen=True)
class EvalReport:
    """passes: pass@k with intervals. outcomes: share of each. truncated: share of responses cut at the limit.
    pass_rates: the share of each prompt's samples that passed, in the prompts' order. crash: what the first crash of a
    verifier says; empty where none crashed."""

    passes: PassReport
    outcomes: dict[str, float]
    mean_response_tokens: float
    truncated: float
    pass_rates: tuple[float, ...]
    crash: str

    def metrics(self) -> dict[str, float]:
        """Flat numbers, for trackers."""
        return {
            **self.passes.metrics(),
            **{f"outcome/{name}": share for name, share in self.outcomes.items()},
            "response_tokens/mean": self.mean_response_tokens,
            "response_tokens/truncated": self.truncated,
        }

    def as_dict(self) -> dict[str, Any]:
        """The whole report, for `--json`."""
        return {
            "prompts": self.passes.prompts,
            "samples": self.passes.samples,
            "pass": {f"pass@{k}": asdict(estimate) for k, estimate in sorted(self.passes.passed.items())},
            "outcomes": self.outcomes,
            "mean_response_tokens": self.mean_response_tokens,
            "truncated": self.truncated,
        }

    def headline(self) -> str:
        """One line: `pass@1 41.2% [37.0, 45.6] on 512 prompts`."""
        parts = [f"pass@{k} {estimate}" for k, estimate in sorted(self.passes.passed.items())]
        return f"{', '.join(parts)} on {self.passes.prompts} prompts"


def evaluate(
    workers: WorkerGroup,
    prompts: TokenizedPrompts,
    *,
    samples: int,
    sampling: Sampling,
    seed: int,
    tensor_parallel: int = 1,
    save_as: str = "",
    step: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> EvalReport:
    """Generate `samples` responses to every prompt, through the rollout and scoring code of training, and report."""
    call = RolloutCall(sampling, seed, "eval", step, save_as)
    collected = collect(
        workers,
        prompts,
        range(len(prompts)),
        samples,
        call,
        tensor_parallel=tensor_parallel,
        on_progress=on_progress,
    )
    return report_of(
        [(s.prompt, s.verdict, s.response_tokens, s.finish_reason == "length") for s in collected.samples], len(prompts)
    )


def report_of(results: Iterable[tuple[int, Verdict, int | None, bool]], prompts: int) -> EvalReport:
    """From (prompt, verdict, response tokens, truncated) of every sample. A sample passes where its outcome is ok.

    Response tokens are None where a server does not count them.
    """
    results = list(results)
    counted = [tokens for _, _, tokens, _ in results if tokens is not None]
    passed: list[list[bool]] = [[] for _ in range(prompts)]
    for prompt, verdict, _, _ in results:
        passed[prompt].append(verdict.outcome == Outcome.OK)
    outcomes = Counter(verdict.outcome for _, verdict, _, _ in results)
    n = len(results)
    return EvalReport(
        passes=summarise(passed, _ks(min(len(row) for row in passed))),
        outcomes={str(outcome): outcomes[outcome] / n for outcome in Outcome},
        mean_response_tokens=sum(counted) / len(counted) if counted else float("nan"),
        truncated=sum(cut for _, _, _, cut in results) / n,
        pass_rates=tuple(sum(row) / len(row) for row in passed),
        crash=next((verdict.detail for _, verdict, _, _ in results if verdict.outcome == Outcome.CRASH), ""),
    )


def _ks(samples: int) -> list[int]:
    """1, the powers of two below `samples`, and `samples`.

    >>> _ks(1), _ks(6)
    ([1], [1, 2, 4, 6])
    """
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i < samples]
    return sorted({1, *powers, samples})
