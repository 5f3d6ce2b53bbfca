"""The controller: plans with lengths and scores, and never touches a response token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rlcli.algorithms.algorithm import Algorithm
from rlcli.config.schema import RunConfig
from rlcli.data.packer import Plan
from rlcli.data.prompts import TokenizedPrompts
from rlcli.errors import RunFailed
from rlcli.model.optim import lr_at
from rlcli.rollout.engine import Sampling
from rlcli.trainer.ahead import Ahead
from rlcli.trainer.alarms import Alarms
from rlcli.trainer.checkpoint import Checkpoint, Checkpoints
from rlcli.trainer.choose import Chosen, choose, plan_step, rank_work, step_work
from rlcli.trainer.collect import Collected
from rlcli.trainer.critic import Critic
from rlcli.trainer.engines import Engines
from rlcli.trainer.evaluate import evaluate
from rlcli.trainer.health import CRITIC, POLICY, Health, RollBack, check_trained, roll_back
from rlcli.trainer.invariants import Invariants
from rlcli.trainer.keeper import CANARY_TOLERANCE, Keeper, restore, snapshot
from rlcli.trainer.metrics import (
    Clock,
    Updates,
    left_out_metrics,
    plan_metrics,
    reward_metrics,
    sample_metrics,
    set_metrics,
    source_metrics,
    sync_metrics,
    time_metrics,
    timed,
    update_metrics,
)
from rlcli.trainer.run_folder import RunFolder
from rlcli.trainer.source import by_rank, source_of
from rlcli.trainer.tracking import Trackers
from rlcli.trainer.usable import rewarded
from rlcli.trainer.view import SampleText, View
from rlcli.workers.group import WorkerGroup
from rlcli.workers.memory import largest
from rlcli.workers.work import Coefficients, step_seed

PROBE_TOKENS = 64


class StopRequest(Protocol):
    """Says whether someone asked the run to end after the current step. The trainer arms it once there are steps to
    finish: before, there is nothing to lose, and asking ends the run at once."""

    requested: bool
    armed: bool


@dataclass(frozen=True)
class RunResult:
    """How a run ended, from its first step on. steps: how many were done. rewards: mean of each. evaluations: step →
    report, as its file holds it. checkpoint: the newest. stopped: it was asked to end early."""

    steps: int
    rewards: list[float]
    evaluations: dict[int, dict[str, Any]]
    checkpoint: str
    stopped: bool


class Trainer:
    """One run over `workers`, which are built and idle. The loop is `run`; the algorithm's step is `step`.

    What a step leaves to the next one is here, in `source`, in the algorithm's controllers and in the workers, and
    `keeper.snapshot` names all of it. done: steps so far. version: weight syncs so far. since: when what the last
    step's metrics tell of had ended. listeners: are told each phase as it begins, and its step.
    """

    def __init__(
        self,
        config: RunConfig,
        dtype: str,
        prompts: TokenizedPrompts,
        held_out: TokenizedPrompts | None,
        workers: WorkerGroup,
        critics: WorkerGroup | None,
        engines: WorkerGroup | None,
        folder: RunFolder,
        trackers: Trackers,
        view: View,
        stop: StopRequest,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.tolerance = config.rollout.canary_tolerance or CANARY_TOLERANCE[config.rollout.quantization or dtype]
        self.algorithm = Algorithm.build(**config.algorithm.model_dump())
        self.held_out = held_out
        self.done = self.version = 0
        self.since = time.perf_counter()
        self.rewards: list[float] = []
        self.coming: list[SampleText] = []
        self.listeners: list[Callable[[str, int], None]] = []
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.has_engine = held_out is not None or not config.data.response
        # Any tokens serve as the canary's probe; those of a prompt are of the kind that the model is used on.
        self.probe = prompts.tokens(prompts.longest())[:PROBE_TOKENS]
        self.fingerprint = prompts.fingerprint()
        self.workers, self.folder, self.trackers, self.view, self.stop = workers, folder, trackers, view, stop
        self.critic = Critic(self.algorithm, config, workers, critics)
        self.engines = Engines(workers, engines)
        rules = config.checkpoint
        checkpoints = Checkpoints(folder.checkpoints, rules.keep, rules.keep_best, rules.keep_every)
        self.keeper = Keeper(checkpoints, folder, workers, critics, view.note)
        self.alarms = Alarms(
            self.algorithm.mismatch_alarm,
            config.rollout.top_p,
            view.note,
            folder.event,
            prompts=config.rollout.prompts_per_step,
            samples=config.rollout.samples_per_prompt,
            lr=config.train.lr,
            given=bool(config.data.response),
        )
        self.invariants = Invariants()
        faults = config.fault_tolerance
        self.health = Health(faults.on_bad_update, faults.bad_grad_norm, folder, view.note)
        self.source = source_of(
            config,
            prompts,
            self.engines.workers,
            folder.samples,
            greedy=self.algorithm.needs_baselines,
            on_progress=lambda done, total: view.progress(done, total) if self.ahead.waited_for else None,
        )
        self.ahead = Ahead(self.source, config.async_.staleness, config.train.steps, self.engines.workers.kill)

    def run(self, checkpoint: Checkpoint | None = None) -> RunResult:
        """From the first step, or from a checkpoint of this run, to the last one, or until `stop` was asked."""
        total = self.config.train.steps
        if checkpoint is not None:
            self.phase("restore", checkpoint.step)
            restore(self, checkpoint)
        self.view.start(total, self.folder.path.name, self.done)
        self.phase("sync", self.done)
        self.sync_weights()
        if self.evaluation_due():  # of the model as it came, or one that an exit has cut short
            found = self.evaluate()
            self.trackers.amend(self.done, found) if self.done else self.trackers.log(0, found)
        self.stop.armed = True
        self.since = time.perf_counter()
        while self.done < total and not self.stop.requested:
            try:
                self.advance(self.done + 1)
            except RollBack as bad:
                roll_back(self, str(bad))
                self.since = time.perf_counter()
        if self.keeper.saved < self.done:
            self.phase("checkpoint", self.done)
            self.keeper.begin(self.done, *snapshot(self))
        self.keeper.finish()
        stopped = self.done < total or self.evaluation_due()
        if not stopped:
            check_trained(self.folder.path)
        self.folder.event("stopped" if stopped else "finished", step=self.done)
        return RunResult(self.done, self.rewards, self.evaluations, str(self.keeper.newest or ""), stopped)

    def advance(self, number: int) -> None:
        """A step and what hangs on it: the checkpoint, which is written while the run goes on, and the evaluation. What
        was begun before is committed once the metrics of its step are on disk, and not earlier."""
        every = self.config.checkpoint.every
        metrics = self.step(number)
        self.since = time.perf_counter()
        self.done = number
        self.rewards.append(metrics["reward/mean"])
        texts = self.texts()
        self.keeper.poll()
        if self.stop.requested or number == self.config.train.steps or (every and number % every == 0):
            with timed("checkpoint", metrics):
                self.phase("checkpoint", number)
                self.keeper.begin(number, *snapshot(self))
        if not self.stop.requested and self.evaluation_due():
            with timed("evaluate", metrics):
                metrics |= self.evaluate()
        self.since += metrics.get("time/checkpoint_s", 0.0) + metrics.get("time/evaluate_s", 0.0)
        self.trackers.log(number, metrics)
        self.view.step(metrics)
        self.view.samples(texts)

    def step(self, number: int) -> dict[str, float]:
        """One pass: generate and verify, choose and plan, work out advantages, update, hand the new weights over."""
        clock = Clock(lambda name: self.phase(name, number), self.since)
        seed = step_seed(self.config.train.seed, number)
        with clock.phase("generate"):
            batch = self.ahead.take(number)
            self.invariants.check_seeds(batch.samples)
        with clock.phase("plan"):
            if self.has_engine:
                self.engines.release_memory()
            chosen = choose(batch, self.algorithm, self.config, seed)
            plan = plan_step(chosen, self.config, len(self.workers))
            self.health.counted(number, chosen.left_out)
        with clock.phase("load"):
            self.workers.load(rank_work(plan, chosen, len(self.workers)), step_work(plan, chosen, seed))
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
            if self.algorithm.works_on_tokens:
                self.workers.compute_advantages(self.algorithm.kl.coef)
        with clock.phase("update"):
            updates, lr = self.update(number, plan, chosen)
        with clock.phase("wait_for_rollout"):
            self.ahead.settle()
        with clock.phase("sync"):
            canary = self.sync_weights()
        measured = self.measure(batch, chosen, plan, updates) | lr | canary | self.memory()
        self.alarms.check_sync(number, measured)
        return measured | time_metrics(clock, batch, plan)

    def update(self, number: int, plan: Plan, chosen: Chosen) -> tuple[Updates, dict[str, float]]:
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
            for index in range(len(plan.minibatches)):
                if self.critic.needed:
                    sums = self.critic.update(index, rates["critic/lr"])
                    updates.critic.append(self.health.judge(CRITIC, self.critic.workers, number, index, sums))
                if number > warmup:
                    sums = self.workers.update(index, coefficients)
                    updates.policy.append(self.health.judge(POLICY, self.workers, number, index, sums))
                    self.invariants.check_update(plan, chosen, index, sums)
        return updates, rates

    def measure(self, batch: Collected, chosen: Chosen, plan: Plan, updates: Updates) -> dict[str, float]:
        """The step's metrics, which the coefficients then follow."""
        counted = rewarded(batch.samples, self.config.train.truncated).take(chosen.left_out == 0)
        metrics = {
            **reward_metrics(counted),
            **sample_metrics(batch.samples),
            **set_metrics(batch.samples, counted, batch.sources),
            **left_out_metrics(chosen.left_out),
            "reward/shaped": chosen.reward,
            **source_metrics(batch),
            "rollout/staleness": self.behind(batch),
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
        self.alarms.check(self.done + 1, metrics)
        return metrics

    def sync_weights(self) -> dict[str, float]:
        """Hand the weights over and hear the canary. Raises RunFailed where engine and trainer disagree."""
        self.ahead.settle()
        self.critic.drop_batch()
        self.version += 1
        if not self.has_engine:
            self.workers.drop_batch()
            return {}
        synced = self.engines.sync(self.probe, self.version)
        if not synced.difference <= self.tolerance:
            raise RunFailed(
                f"after the weight sync the engine's log-probs differ from the trainer's by {synced.difference:.3g}, "
                f"more than {self.tolerance:g}",
                "the engine does not run the trained weights; raise rollout.canary_tolerance only if you know why",
            )
        return sync_metrics(synced)

    def memory(self) -> dict[str, float]:
        """What each phase since the last sync has taken at most. All workers are idle when a sync has ended: one that
        generated would answer only after that."""
        groups = {id(group): group for group in (self.workers, self.critic.workers, self.engines.workers)}
        return largest(peaks for group in groups.values() for peaks in group.memory())

    def evaluation_due(self) -> bool:
        """Whether the weights as they are now are to be evaluated and have not been yet."""
        if self.held_out is None or self.done in self.evaluations:
            return False
        every = self.config.evaluation.every
        return self.done in (0, self.config.train.steps) or (every > 0 and self.done % every == 0)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the weights as they are now; the metrics."""
        assert self.held_out is not None, "nothing to evaluate on"
        settings, step = self.config.evaluation, self.done
        self.phase("evaluate", step)
        report = evaluate(
            self.engines.workers,
            self.held_out,
            samples=settings.samples,
            sampling=Sampling(settings.temperature, self.config.rollout.max_response_tokens),
            seed=self.config.train.seed,
            tensor_parallel=self.config.rollout.tensor_parallel,
            slots=self.config.rollout.max_concurrent,
            save_as=by_rank(self.folder.evaluations, step),
            step=step,
            on_progress=self.view.progress,
        )
        self.evaluations[step] = report.as_dict() | {"headline": report.headline()}
        self.folder.write_evaluation(step, self.evaluations[step])
        metrics = report.metrics()
        self.keeper.evaluated(step, metrics)
        self.folder.event("evaluated", step=step, headline=report.headline())
        self.view.note(f"evaluation at step {step}: {report.headline()}")
        return {f"eval/{name}": value for name, value in metrics.items()}

    def behind(self, batch: Collected) -> float:
        """How many updates older than the policy that trained on them the samples' was, on average."""
        given = bool(self.config.data.response)
        return 0.0 if given else float(self.version - 1 - batch.samples.version.mean())  # the sync has counted on

    def phase(self, name: str, step: int) -> None:
        """Say what the run is doing: to the reader, to whoever finds it dead, and to who else listens."""
        self.view.phase(name)
        self.folder.at(step, name)
        for hear in self.listeners:
            hear(name, step)

    def texts(self) -> list[SampleText]:
        """What the view shows of the last rollout, fetched before an evaluation takes its place."""
        if not self.view.show_samples or self.config.data.response:
            return []
        found: list[dict[str, Any]] = [t for rank in self.engines.workers.texts(self.view.show_samples) for t in rank]
        texts = [(t["prompt"], t["response"], t["score"], t["outcome"]) for t in found]
        if self.config.async_.staleness:  # they are the next step's, and shown with it
            texts, self.coming = self.coming, texts
        return texts
