"""docs/metrics.md names what metrics.jsonl holds: all of it, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rlcli.algorithms.algorithm import Algorithm
from rlcli.config.schema import RunConfig
from rlcli.data.packer import plan_batches
from rlcli.trainer import trainer as trainer_module
from rlcli.trainer.collect import Collected
from rlcli.trainer.evaluate import report_of
from rlcli.trainer.trainer import Trainer, _eval_metrics
from rlcli.types import Outcome, Sample, Verdict

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> set[str]:
    """The names in the table's first column."""
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


class Workers:
    """Stands in for a group of one: no tokens, just the numbers that a real one returns."""

    def __len__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    def update(self, index: int, lr: float) -> dict[str, float]:
        sums = ("tokens", "policy_loss", "clip_low_tokens", "clip_high_tokens", "ratio_abs_dev", "kl", "entropy")
        return dict.fromkeys((*sums, "mismatch_kl", "grad_norm"), 1.0)

    def sync_weights(self, probe: Any) -> list[float]:
        return [0.0]


def written(monkeypatch: Any) -> set[str]:
    """The names of one step with everything on, and of an evaluation after it."""
    verdicts = [Verdict(1.0, Outcome.OK, parts={"NAME": 1.0}), Verdict(0.0, Outcome.WRONG)]
    samples = [Sample(0, i, 0, i, 4, 4, "stop", verdict, 1) for i, verdict in enumerate(verdicts)]
    trainer = object.__new__(Trainer)
    trainer.config = RunConfig.model_validate(
        {"algorithm": {"kl_coef": 0.1}, "train": {"minibatches": 2, "tokens_per_microbatch": 1 << 20}}
    )
    trainer.algorithm = Algorithm.build(**trainer.config.algorithm.model_dump())
    trainer.view, trainer.workers = type("View", (), {"phase": lambda self, name: None})(), Workers()  # type: ignore[assignment]
    trainer.tolerance, trainer.probe = 1.0, None
    monkeypatch.setattr(trainer, "collect", lambda number: Collected(samples, [None], 1.0, 0.0))
    monkeypatch.setattr(trainer_module, "rank_work", lambda *args, **kwargs: [])
    monkeypatch.setattr(
        trainer_module, "plan_batches", lambda *args, **kwargs: plan_batches(*args, **{**kwargs, "minibatches": 1})
    )
    evaluation = _eval_metrics(report_of([(0, verdict, 4, False) for verdict in verdicts], 1))
    return {"step", *trainer.step(1), *evaluation}


def test_the_metrics_are_those_that_are_documented(monkeypatch: Any) -> None:
    found = {re.sub(r"pass@\d+", "pass@K", name) for name in written(monkeypatch)}
    found = {re.sub(r"^eval/outcome/\w+", "eval/outcome/NAME", name) for name in found}
    assert found == documented()
