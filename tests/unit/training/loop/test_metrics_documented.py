"""`METRICS` names what metrics.jsonl holds: all of it, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from rlcli.cluster.process.peak_memory import PHASES
from rlcli.data.columns import SampleTable
from rlcli.data.messages import Coefficients, RolloutBatch
from rlcli.data.prompts.prompt_selection import SelectingCursor
from rlcli.data.rollout_stats import RolloutStats
from rlcli.evaluation.evaluation_report import report_of
from rlcli.evaluation.responses import Responses
from rlcli.runs.metric_names import METRIC_NAMES
from rlcli.training.loop.metrics import PER_TOKEN
from rlcli.training.worker.rank_step_recorder import StepReport
from rlcli.training.worker.weight_sync.weight_transfer import Synced
from rlcli.types import Outcome, Sample, Verdict
from tests.groups import CalledByName
from tests.trainers import PROMPT, trainer_of

SUMS = ("tokens", *PER_TOKEN, "grad_norm")
MISMATCH = ("tokens", "kl", "k3", "ratio", "ratio_squared", "outliers", "corrected")
MEMORY = (*PHASES.values(), "base", "shm", "host", "fragmented")
DISTILS = {"loss": "opd_reverse"}
CRITIC = {
    "gae": ("tokens", "loss", "clipped", "returns", "returns_sq", "errors", "errors_sq", "grad_norm"),
    "prime": ("responses", "loss", "agree", "grad_norm"),
}


class Workers(CalledByName):
    """Stands in for a group of one: no tokens, just the numbers that a real one returns."""

    data_ranks = 1

    def __init__(self, advantage: str) -> None:
        self.advantage = advantage

    def __len__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    def update(self, index: int, coefficients: Coefficients) -> dict[str, float]:
        checks = {
            "check_grad_dot_advantage": 1.0,
            "check_expected_grad_dot_advantage": 1.0,
            "busiest_expert": 1.0,
            "unused_experts": 0.0,
        }
        checks |= {"routes_known": 1.0, "routes_differ": 0.0, "gradient_scale": 1.0}
        return dict.fromkeys(SUMS, 1.0) | checks | {f"mismatch_{name}": 1.0 for name in MISMATCH}

    def update_critic(self, index: int, lr: float) -> dict[str, float]:
        return dict.fromkeys(CRITIC[self.advantage], 1.0)

    def sync_weights(self, probe: Any, version: int) -> list[Synced]:
        return [Synced(0.0, 8, 1.0, 1, 0, 1.0, 1)]

    def recent_rows(self, tokens: int) -> list[tuple[Any, int]]:
        return [(np.arange(6), 2)] * 16

    def trainer_log_probs(self, rows: list[Any], unit: float = 0.0, seed: int = 0) -> list[Any]:
        return [np.full(4, -1.0)] * len(rows)

    def engine_log_probs(self, rows: list[Any]) -> list[list[Any]]:
        return [self.trainer_log_probs(rows)]

    def step_report(self) -> list[StepReport]:
        memory = dict.fromkeys((f"{name}_gb" for name in MEMORY), 1.0)
        return [StepReport(memory, [], engine=dict.fromkeys(("servers", "lost", "moved"), 1.0))]


def written(advantage: str, folder: Path) -> set[str]:
    """The names of one step with everything on, and of an evaluation after it."""
    verdicts = [
        Verdict(1.0, Outcome.OK, parts={"NAME": 1.0, "usage/NAME": 7.0, "log/NAME": 0.5}),
        Verdict(0.0, Outcome.WRONG),
    ]
    extra_fields = {"context_tokens": 2, "turns": 2, "newer_by": 1, "ended": 1, "branches": 2}
    samples = SampleTable.of(
        Sample(0, i, 0, i, 4, 4, "length", verdict, 1, **extra_fields) for i, verdict in enumerate(verdicts)
    )
    trainer = trainer_of(
        folder,
        Workers(advantage),
        algorithm={"kl_coef": 0.1, "advantage": advantage, **DISTILS},
        teacher={"path": "teacher", "top_k": 1},
        train={"passes": 2, "tokens_per_microbatch": 1 << 20},
    )
    trainer.invariants = MagicMock()  # the sums of `Workers` are no sums of these samples
    facts = SelectingCursor(4, 0, True, rule="thompson", decay=0.5, retire=1, rest=1).metrics()
    stats = RolloutStats(generated=2, generated_tokens=8, drafted=4, accepted=1, generate_s=1.0)
    batch = RolloutBatch(samples, [None], stats, sources=["SET"], selection=facts)
    trainer.source.take = MagicMock(return_value=batch)  # type: ignore[method-assign]
    report = report_of(Responses.of_samples(samples), [PROMPT])
    evaluation = {f"eval/{name}" for name in replace(report, sets={"SET": report}).metrics()}
    hung_on_it = {"time/checkpoint_s", "time/evaluate_s"}  # what `Trainer.advance` adds
    return {"step", *trainer.step(1), *evaluation, *hung_on_it}


def test_the_metrics_are_those_that_are_documented(tmp_path: Path) -> None:
    written_by_all = written("gae", tmp_path / "gae") | written("prime", tmp_path / "prime")
    metric_names = {re.sub(r"^(eval/)(pass|maj|mean)@\d+", r"\1\2@K", name) for name in written_by_all}
    metric_names = {re.sub(r"^(eval|source/SET)/outcome/\w+", r"\1/outcome/NAME", name) for name in metric_names}
    metric_names = {re.sub(r"^ended/\w+", "ended/NAME", name) for name in metric_names}
    metric_names = {re.sub(r"^rollout/age/\d+", "rollout/age/AGE", name) for name in metric_names}
    metric_names = {re.sub(r"^eval/SET/.+", "eval/SET/NAME", name) for name in metric_names}
    assert metric_names == METRIC_NAMES
