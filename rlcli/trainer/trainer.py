"""The controller: plans with lengths and scores, and never touches a response token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlcli.algorithms.algorithm import Algorithm
from rlcli.config.schema import RunConfig
from rlcli.data.cursor import PromptCursor
from rlcli.data.packer import plan_batches
from rlcli.data.prompts import TokenizedPrompts
from rlcli.errors import RunFailed
from rlcli.model.optim import lr_at
from rlcli.rollout.engine import Sampling
from rlcli.trainer.checkpoint import Checkpoints
from rlcli.trainer.collect import Collected, collect
from rlcli.trainer.evaluate import EvalReport, evaluate
from rlcli.trainer.metrics import Clock, plan_metrics, sample_metrics, time_metrics, update_metrics
from rlcli.trainer.run_folder import RunFolder, write_json
from rlcli.trainer.tracking import Trackers
from rlcli.trainer.view import SampleText, View
from rlcli.trainer.work import rank_work
from rlcli.types import Outcome, Sample
from rlcli.workers.group import WorkerGroup
from rlcli.workers.rollout_role import RolloutCall

CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
PROBE_TOKENS = 64


class StopRequest(Protocol):
    """Says whether someone asked the run to end after the current step. The trainer arms it once there are steps to
    finish: before, there is nothing to lose, and asking ends the run at once."""

    requested: bool
    armed: bool


@dataclass(frozen=True)
class RunResult:
    """How a run ended. steps: how many were done. evaluations: step → report. stopped: it was asked to end early."""

    steps: int
    rewards: list[float]
    evaluations: dict[int, EvalReport]
    checkpoint: str
    stopped: bool


class Trainer:
    """One run over `workers`, which are built and idle. The loop is `run`; the algorithm's step is `step`."""

    def __init__(
        self,
        config: RunConfig,
        dtype: str,
        prompts: TokenizedPrompts,
        held_out: TokenizedPrompts | None,
        workers: WorkerGroup,
        folder: RunFolder,
        trackers: Trackers,
        view: View,
        stop: StopRequest,
    ) -> None:
        self.config = config
        self.tolerance = config.rollout.canary_tolerance or CANARY_TOLERANCE[dtype]
        self.algorithm = Algorithm.build(**config.algorithm.model_dump())
        self.prompts, self.held_out = prompts, held_out
        self.cursor = PromptCursor(len(prompts), config.train.seed, config.data.shuffle)
        # Any tokens serve as the canary's probe; those of a prompt are of the kind that the model is used on.
        self.probe = prompts.tokens(max(range(len(prompts)), key=prompts.length))[:PROBE_TOKENS]
        self.workers, self.folder, self.trackers, self.view, self.stop = workers, folder, trackers, view, stop
        self.checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)

    def run(self) -> RunResult:
        """Evaluate, step, checkpoint; returns when all steps are done or `stop` was asked."""
        total, every = self.config.train.steps, self.config.checkpoint.every
        self.view.start(total, self.folder.path.name)
        self.view.phase("sync")
        self.sync_weights()
        evaluations: dict[int, EvalReport] = {}
        if self.held_out is not None:
            evaluations[0] = self.evaluate(self.held_out, 0)
            self.trackers.log(0, _eval_metrics(evaluations[0]))
        rewards: list[float] = []
        checkpoint = ""
        self.stop.armed = True
        for step in range(1, total + 1):
            metrics = self.step(step)
            texts = self.texts()
            rewards.append(metrics["reward/mean"])
            last = step == total or self.stop.requested
            if last or (every and step % every == 0):
                checkpoint = self.save(step)
            if self.held_out is not None and self.evaluation_due(step, last=step == total):
                evaluations[step] = self.evaluate(self.held_out, step)
                metrics |= _eval_metrics(evaluations[step])
            self.trackers.log(step, metrics)
            self.view.step(metrics)
            self.view.samples(texts)
            if last:
                break
        return RunResult(len(rewards), rewards, evaluations, checkpoint, stopped=len(rewards) < total)

    def step(self, number: int) -> dict[str, float]:
        """One pass: generate and verify, plan, update, hand the new weights to the engine."""
        clock, train = Clock(self.view.phase), self.config.train
        with clock.phase("generate"):
            batch = self.collect(number)
        with clock.phase("plan"):
            self.workers.release_rollout_memory()
            advantages = self.advantages(batch.samples)
            plan = plan_batches(
                [s.prompt_tokens for s in batch.samples],
                [s.response_tokens for s in batch.samples],
                [s.prompt for s in batch.samples],
                minibatches=train.minibatches,
                ranks=len(self.workers),
                tokens_per_microbatch=train.tokens_per_microbatch,
                max_response_tokens=self.config.rollout.max_response_tokens,
                active=None if self.algorithm.has_token_terms else [a != 0.0 for a in advantages],
            )
        with clock.phase("load"):
            self.workers.load(rank_work(plan, batch, advantages, ranks=len(self.workers)))
        if self.algorithm.needs_old_log_probs(train.minibatches):
            with clock.phase("old_log_probs"):
                self.workers.compute_old_log_probs()
        if self.algorithm.needs_reference:
            with clock.phase("reference"):
                self.workers.compute_reference_log_probs()
        lr = lr_at(
            number - 1,
            steps=train.steps,
            peak=train.lr,
            warmup_steps=train.warmup_steps,
            schedule=train.schedule,
            min_fraction=train.min_lr_fraction,
        )
        with clock.phase("update"):
            updates = [self.workers.update(index, lr) for index in range(train.minibatches)]
        with clock.phase("sync"):
            canary = self.sync_weights()
        return {
            **sample_metrics(batch.samples),
            **plan_metrics(plan),
            **update_metrics(updates),
            "update/lr": lr,
            "canary/max_abs_diff": canary,
            **time_metrics(clock, batch, plan),
        }

    def collect(self, step: int) -> Collected:
        rollout, train = self.config.rollout, self.config.train
        save_as = _by_rank(self.folder.samples, step) if self.config.tracking.save_samples else ""
        collected = collect(
            self.workers,
            self.prompts,
            self.cursor.take(rollout.prompts_per_step),
            rollout.samples_per_prompt,
            RolloutCall(Sampling(rollout.temperature, rollout.max_response_tokens), train.seed, "train", step, save_as),
            tensor_parallel=rollout.tensor_parallel,
            on_progress=self.view.progress,
        )
        self.check_crashes(collected.samples)
        return collected

    def advantages(self, samples: Sequence[Sample]) -> list[float]:
        import torch

        rewards = torch.tensor([s.verdict.score for s in samples], dtype=torch.float64)
        groups = torch.tensor([s.prompt for s in samples])
        advantages: list[float] = self.algorithm.advantages(rewards, groups).tolist()
        return advantages

    def sync_weights(self) -> float:
        """Hand the weights over and hear the canary. Raises RunFailed where engine and trainer disagree."""
        difference: float = max(self.workers.sync_weights(self.probe))
        if not difference <= self.tolerance:
            raise RunFailed(
                f"after the weight sync the engine's log-probs differ from the trainer's by {difference:.3g}, "
                f"more than {self.tolerance:g}",
                "the engine does not run the trained weights; raise rollout.canary_tolerance only if you know why",
            )
        return difference

    def check_crashes(self, samples: Sequence[Sample]) -> None:
        """Stop rather than train on the zeros of a verifier that fails."""
        failed = [s.verdict for s in samples if s.verdict.outcome in (Outcome.CRASH, Outcome.TIMEOUT)]
        if len(failed) > self.config.verifier.max_crash_rate * len(samples):
            reasons: dict[str, int] = {}
            for verdict in failed:
                reason = f"{verdict.outcome}: {verdict.detail}"
                reasons[reason] = reasons.get(reason, 0) + 1
            most = max(reasons, key=lambda reason: reasons[reason])
            raise RunFailed(
                f"{len(failed)} of {len(samples)} verifications failed, most often with «{most}»",
                "mend the verifier, or raise verifier.max_crash_rate or verifier.deadline_s",
            )

    def evaluation_due(self, step: int, last: bool) -> bool:
        every = self.config.evaluation.every
        return not self.stop.requested and (last or (every > 0 and step % every == 0))

    def evaluate(self, prompts: TokenizedPrompts, step: int) -> EvalReport:
        settings = self.config.evaluation
        self.view.phase("evaluate")
        report = evaluate(
            self.workers,
            prompts,
            samples=settings.samples,
            sampling=Sampling(settings.temperature, self.config.rollout.max_response_tokens),
            seed=self.config.train.seed,
            tensor_parallel=self.config.rollout.tensor_parallel,
            save_as=_by_rank(self.folder.evaluations, step),
            step=step,
            on_progress=self.view.progress,
        )
        write_json(self.folder.evaluations / f"step-{step:06d}.json", report.as_dict())
        self.view.note(f"evaluation at step {step}: {report.headline()}")
        return report

    def texts(self) -> list[SampleText]:
        """What the view shows of the last rollout, fetched before an evaluation takes its place."""
        if not self.view.show_samples:
            return []
        found: list[dict[str, Any]] = [t for rank in self.workers.texts(self.view.show_samples) for t in rank]
        return [(t["prompt"], t["response"], t["score"], t["outcome"]) for t in found]

    def save(self, step: int) -> str:
        self.view.phase("checkpoint")
        target = self.checkpoints.path(step)
        self.workers.save(str(target))
        self.checkpoints.committed(step)
        return str(target)


def _by_rank(folder: Path, step: int) -> str:
    """Where each worker writes its samples: `step-000001.rank-{rank}.parquet`, the rank left for it to fill in."""
    return str(folder / f"step-{step:06d}.rank-{{rank}}.parquet")


def _eval_metrics(report: EvalReport) -> dict[str, float]:
    return {f"eval/{name}": value for name, value in report.metrics().items()}
