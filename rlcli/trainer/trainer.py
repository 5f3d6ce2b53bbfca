"""The controller: plans with lengths and scores, and never touches a response token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlcli.algorithms.algorithm import Algorithm
from rlcli.config.schema import RunConfig
from rlcli.data.cursor import PromptCursor
from rlcli.data.packer import Plan
from rlcli.data.prompts import TokenizedPrompts
from rlcli.errors import RunFailed
from rlcli.model.optim import lr_at
from rlcli.rollout.engine import Sampling
from rlcli.trainer.checkpoint import Checkpoints
from rlcli.trainer.choose import Chosen, choose, plan_step, rank_work
from rlcli.trainer.collect import Collected
from rlcli.trainer.critic import Critic
from rlcli.trainer.evaluate import EvalReport, evaluate
from rlcli.trainer.metrics import (
    Clock,
    Updates,
    plan_metrics,
    sample_metrics,
    source_metrics,
    time_metrics,
    update_metrics,
)
from rlcli.trainer.run_folder import RunFolder, write_json
from rlcli.trainer.source import RolloutSource, Source
from rlcli.trainer.supervised import SupervisedSource
from rlcli.trainer.tracking import Trackers
from rlcli.trainer.view import SampleText, View
from rlcli.workers.group import WorkerGroup
from rlcli.workers.work import Coefficients, step_seed

CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
PROBE_TOKENS = 64
IDLE_STEPS = 3
"""After so many steps without a gradient the run warns, and again after as many more."""


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
        critics: WorkerGroup | None,
        folder: RunFolder,
        trackers: Trackers,
        view: View,
        stop: StopRequest,
    ) -> None:
        self.config = config
        self.tolerance = config.rollout.canary_tolerance or CANARY_TOLERANCE[dtype]
        self.algorithm = Algorithm.build(**config.algorithm.model_dump())
        self.held_out = held_out
        self.idle_steps = 0
        self.has_engine = held_out is not None or not config.data.response
        # Any tokens serve as the canary's probe; those of a prompt are of the kind that the model is used on.
        self.probe = prompts.tokens(max(range(len(prompts)), key=prompts.length))[:PROBE_TOKENS]
        self.workers, self.folder, self.trackers, self.view, self.stop = workers, folder, trackers, view, stop
        self.critic = Critic(self.algorithm, config, workers, critics)
        self.checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
        cursor = PromptCursor(len(prompts), config.train.seed, config.data.shuffle)
        self.source: Source = (
            SupervisedSource(prompts, cursor, config.rollout.prompts_per_step)
            if config.data.response
            else RolloutSource(
                workers,
                prompts,
                cursor,
                config,
                save_as=lambda step: _by_rank(folder.samples, step) if config.tracking.save_samples else "",
                greedy=self.algorithm.needs_baselines,
                on_progress=view.progress,
            )
        )

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
        """One pass: generate and verify, choose and plan, work out advantages, update, hand the new weights over."""
        clock, seed = Clock(self.view.phase), step_seed(self.config.train.seed, number)
        with clock.phase("generate"):
            batch = self.source.take(number)
        with clock.phase("plan"):
            self.release_rollout_memory()
            chosen = choose(batch, self.algorithm, self.config, seed)
            plan = plan_step(chosen, self.config, len(self.workers))
        with clock.phase("load"):
            self.workers.load(rank_work(plan, chosen, ranks=len(self.workers), seed=seed))
            self.critic.load(chosen, seed)
        if self.algorithm.needs_old_log_probs(len(plan.minibatches) * self.config.train.passes):
            with clock.phase("old_log_probs"):
                self.workers.compute_old_log_probs()
        if self.algorithm.needs_reference:
            with clock.phase("reference"):
                self.workers.compute_reference_log_probs()
        with clock.phase("critic"):
            self.critic.infer()
        with clock.phase("advantages"):
            self.workers.compute_advantages(self.algorithm.kl.coef)
        with clock.phase("update"):
            updates, lr = self.update(number, len(plan.minibatches))
        with clock.phase("sync"):
            canary = self.sync_weights()
        return self.measure(batch, chosen, plan, updates) | lr | canary | time_metrics(clock, batch, plan)

    def update(self, number: int, minibatches: int) -> tuple[Updates, dict[str, float]]:
        """Every optimizer step of this step: the critic's, and once it is warm the policy's."""
        train, warmup, updates = self.config.train, self.config.critic.warmup_steps, Updates([], [])

        def rate(peak: float, since: int) -> float:
            return lr_at(
                max(number - since - 1, 0),
                steps=train.steps - since,
                peak=peak,
                warmup_steps=train.warmup_steps,
                schedule=train.schedule,
                min_fraction=train.min_lr_fraction,
            )

        # The policy's own warm-up begins when the critic's has ended.
        rates = {"update/lr": rate(train.lr, warmup)}
        if self.critic.needed:
            rates["critic/lr"] = rate(self.config.critic.lr, 0)
        coefficients = Coefficients(rates["update/lr"], self.algorithm.kl.coef, self.algorithm.entropy.coef)
        self.critic.share_returns()
        for _ in range(train.passes):
            for index in range(minibatches):
                if self.critic.needed:
                    updates.critic.append(self.critic.update(index, rates["critic/lr"]))
                if number > warmup:
                    updates.policy.append(self.workers.update(index, coefficients))
        return updates, rates

    def measure(self, batch: Collected, chosen: Chosen, plan: Plan, updates: Updates) -> dict[str, float]:
        """The step's metrics, which the coefficients then follow."""
        metrics = {
            **sample_metrics(batch.samples),
            "reward/shaped": chosen.reward,
            **source_metrics(batch),
            **plan_metrics(plan),
            **update_metrics(updates.policy),
            **self.critic.metrics(updates.critic),
            "update/kl_coef": self.algorithm.kl.coef,
            "update/entropy_coef": self.algorithm.entropy.coef,
        }
        if "update/kl" in metrics:
            self.algorithm.kl.update(metrics["update/kl"], len(chosen.samples))
        if "update/entropy" in metrics:
            self.algorithm.entropy.update(metrics["update/entropy"], len(chosen.samples))
        self.watch_gradient(metrics)
        if not batch.stale:  # samples that waited are of an older policy: it is that from which they differ
            self.watch(metrics.get("mismatch/kl", 0.0))
        return metrics

    def watch_gradient(self, metrics: Mapping[str, float]) -> None:
        """Warn where step after step teaches nothing."""
        if metrics.get("critic/grad_norm") or (metrics["update/count"] and metrics["update/grad_norm"] > 0):
            self.idle_steps = 0
            return
        self.idle_steps += 1
        if self.idle_steps % IDLE_STEPS == 0:
            why = f"rewards are equal in {metrics['reward/equal_groups']:.0%} of the groups"
            if metrics.get("mismatch/corrected") == 1.0:
                why += ", and algorithm.correction cuts every token"
            self.view.note(f"no gradient for {self.idle_steps} steps: {why}; reward {metrics['reward/mean']:.3g}")

    def watch(self, mismatch: float) -> None:
        """Warn where engine and trainer drift apart."""
        # Sampling from a nucleus of mass p makes up to −ln p of the KL by itself.
        by_design = -math.log(self.config.rollout.top_p)
        if mismatch - by_design > self.algorithm.mismatch_alarm:
            self.view.note(
                f"engine and trainer disagree: mismatch/kl = {mismatch:.3g} is above algorithm.mismatch_alarm = "
                f"{self.algorithm.mismatch_alarm:g}; look at mismatch/outliers and at model.dtype"
            )

    def release_rollout_memory(self) -> None:
        if self.has_engine:
            self.workers.release_rollout_memory()

    def sync_weights(self) -> dict[str, float]:
        """Hand the weights over and hear the canary. Raises RunFailed where engine and trainer disagree."""
        self.critic.drop_batch()
        if not self.has_engine:
            self.workers.drop_batch()
            return {}
        difference: float = max(self.workers.sync_weights(self.probe))
        if not difference <= self.tolerance:
            raise RunFailed(
                f"after the weight sync the engine's log-probs differ from the trainer's by {difference:.3g}, "
                f"more than {self.tolerance:g}",
                "the engine does not run the trained weights; raise rollout.canary_tolerance only if you know why",
            )
        return {"canary/max_abs_diff": difference}

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
        if not self.view.show_samples or self.config.data.response:
            return []
        found: list[dict[str, Any]] = [t for rank in self.workers.texts(self.view.show_samples) for t in rank]
        return [(t["prompt"], t["response"], t["score"], t["outcome"]) for t in found]

    def save(self, step: int) -> str:
        self.view.phase("checkpoint")
        target = self.checkpoints.path(step)
        self.workers.save(str(target))
        self.critic.save(target)
        self.checkpoints.committed(step)
        return str(target)


def _by_rank(folder: Path, step: int) -> str:
    """Where each worker writes its samples: `step-000001.rank-{rank}.parquet`, the rank left for it to fill in."""
    return str(folder / f"step-{step:06d}.rank-{{rank}}.parquet")


def _eval_metrics(report: EvalReport) -> dict[str, float]:
    return {f"eval/{name}": value for name, value in report.metrics().items()}
