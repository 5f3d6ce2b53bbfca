"""docs/metrics.md names what metrics.jsonl holds: all of it, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from rlcli.algorithms.build import build_algorithm
from rlcli.cluster.process.memory import PHASES
from rlcli.config.schema import RunConfig
from rlcli.data.columns import Samples
from rlcli.data.messages import Coefficients
from rlcli.evaluation.report import report_of
from rlcli.evaluation.responses import Responses
from rlcli.orchestrator.dispatcher import Collected
from rlcli.orchestrator.prefetch import Prefetcher
from rlcli.trainer.alarms import Alarms
from rlcli.trainer.critic import Critic
from rlcli.trainer.engines import Engines
from rlcli.trainer.metrics import PER_TOKEN
from rlcli.trainer.trainer import Trainer
from rlcli.trainer.update_guard import UpdateGuard
from rlcli.types import Outcome, Prompt, Sample, Verdict
from rlcli.workers.roles.weight_transfer import Synced

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"

PROMPT = Prompt("a:0", ({"role": "user", "content": "2+2?"},), "a", "math", "exact", "4")


def documented() -> set[str]:
    """The names in the table's first column."""
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


SUMS = ("tokens", *PER_TOKEN, "grad_norm")
MISMATCH = ("tokens", "kl", "k3", "ratio", "ratio_squared", "outliers", "corrected")
MEMORY = (*PHASES.values(), "base", "shm", "host", "fragmented")
CRITIC = (
    "tokens",
    "loss",
    "clipped",
    "returns",
    "returns_sq",
    "errors",
    "errors_sq",
    "responses",
    "agree",
    "grad_norm",
)


class Workers:
    """Stands in for a group of one: no tokens, just the numbers that a real one returns."""

    def __len__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    def update(self, index: int, coefficients: Coefficients) -> dict[str, float]:
        checks = {"check_pull": 1.0, "check_expected_pull": 1.0}
        return dict.fromkeys(SUMS, 1.0) | checks | {f"mismatch_{name}": 1.0 for name in MISMATCH}

    def update_critic(self, index: int, lr: float) -> dict[str, float]:
        return dict.fromkeys(CRITIC, 1.0)

    def sync_weights(self, probe: Any, version: int) -> list[Synced]:
        return [Synced(0.0, 8, 1.0, 1, 0, 1.0, 1)]

    def memory(self) -> list[dict[str, float]]:
        return [dict.fromkeys((f"{name}_gb" for name in MEMORY), 1.0)]


def written(advantage: str) -> set[str]:
    """The names of one step with everything on, and of an evaluation after it."""
    verdicts = [Verdict(1.0, Outcome.OK, parts={"NAME": 1.0}), Verdict(0.0, Outcome.WRONG)]
    samples = Samples.of(Sample(0, i, 0, i, 4, 4, "length", verdict, 1) for i, verdict in enumerate(verdicts))
    trainer = object.__new__(Trainer)
    trainer.config = RunConfig.model_validate(
        {
            "algorithm": {"kl_coef": 0.1, "advantage": advantage},
            "train": {"passes": 2, "tokens_per_microbatch": 1 << 20},
        }
    )
    trainer.algorithm = build_algorithm(**trainer.config.algorithm.model_dump())
    trainer.view, trainer.folder, trainer.workers = MagicMock(), MagicMock(), Workers()  # type: ignore[assignment]
    trainer.tolerance, trainer.probe, trainer.has_engine = 1.0, None, True
    trainer.version, trainer.since, trainer.listeners = 0, 0.0, []
    trainer.alarms = Alarms(1.0, 1.0, print, MagicMock(), prompts=1, samples=2, lr=1e-6)
    trainer.invariants, trainer.done = MagicMock(), 0
    trainer.critic = Critic(trainer.algorithm, trainer.config, trainer.workers, None)
    trainer.guard = UpdateGuard("skip", None, MagicMock(), print)
    trainer.source = MagicMock()
    trainer.source.take.return_value = Collected(
        samples, [None], 1.0, 0.0, generated=2, generated_tokens=8, sources=["SET"]
    )
    trainer.engines = Engines(trainer.workers, None)
    trainer.prefetcher = Prefetcher(trainer.source, 0, 1, lambda: None)
    report = report_of(Responses.of_samples(samples), [PROMPT])
    evaluation = {f"eval/{name}" for name in replace(report, sets={"SET": report}).metrics()}
    hung_on_it = {"time/checkpoint_s", "time/evaluate_s"}  # what `Trainer.advance` adds
    return {"step", *trainer.step(1), *evaluation, *hung_on_it}


def test_the_metrics_are_those_that_are_documented() -> None:
    written_by_all = written("gae") | written("prime")
    found = {re.sub(r"^(eval/)(pass|maj|mean)@\d+", r"\1\2@K", name) for name in written_by_all}
    found = {re.sub(r"^(eval|source/SET)/outcome/\w+", r"\1/outcome/NAME", name) for name in found}
    found = {re.sub(r"^eval/SET/.+", "eval/SET/NAME", name) for name in found}
    assert found == documented()
