"""The training loop on the controller, which works with lengths and scores and never touches a response token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

from rlcli.algorithms.build import build_algorithm
from rlcli.cluster.process.peak_memory import largest
from rlcli.context import RunContext
from rlcli.data.messages import Coefficients, RolloutBatch, step_seed
from rlcli.data.packer import Plan
from rlcli.data.prompts.template_choice import BUILT_IN, template_text
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.errors import RunFailed
from rlcli.evaluation.evaluation_report import evaluate
from rlcli.model.optim import lr_at
from rlcli.rollout.scheduler.batch_source import build_batch_source, samples_path
from rlcli.rollout.scheduler.group_checkpoint import source_state
from rlcli.rollout.scheduler.prefetch import Prefetcher
from rlcli.rollout.scheduler.sample_filter import rewarded
from rlcli.runs.checkpoint import TEMPLATE, Checkpoint, Checkpoints
from rlcli.runs.curve_marks import marks_of
from rlcli.runs.folder import RunFolder, events_of
from rlcli.runs.lost_engines import LostEngines
from rlcli.runs.record_files import RunResult, course_of, evaluations_of, metrics_of, rewind
from rlcli.runs.run_measure import measure_of
from rlcli.runs.tracking import Trackers
from rlcli.runs.tracking.run_console import SampleText, View
from rlcli.training.listener import ListenedRun, Listener, Listeners
from rlcli.training.loop.batch_selection import SelectedSamples, build_train_rows, plan_step, select_batch
from rlcli.training.loop.checkpointer import WAITING, Checkpointer, check_probe
from rlcli.training.loop.checks.invariants import Invariants
from rlcli.training.loop.checks.log_prob_check import LogProbCheck
from rlcli.training.loop.engine_groups import Engines
from rlcli.training.loop.learner_groups import Critic, Teachers
from rlcli.training.loop.metrics import (
    Clock,
    Updates,
    critic_metrics,
    engine_metrics,
    exclusion_metrics,
    plan_metrics,
    reward_metrics,
    sample_metrics,
    set_metrics,
    staleness_metrics,
    sync_metrics,
    time_metrics,
    timed,
    update_metrics,
)
from rlcli.training.loop.step_records import StepRecords
from rlcli.training.loop.update_guard import CRITIC, POLICY, RollBack, UpdateGuard, check_rollbacks, check_trained
from rlcli.training.loop.warnings import NO_UPDATE, Warnings
from rlcli.training.worker.calls import WorkerCalls, Workers
from rlcli.training.worker.worker_pools import WorkerPools

if TYPE_CHECKING:
    from ray import ObjectRef

    from rlcli.data.sample_shard import SampleShard

PROBE_TOKENS = 64
"""Tokens of the prompt whose prefix must not outlive a weight sync, and whose log-probs go into checkpoints."""
PROBE_PROMPTS = 4
"""Prompts that the log-prob check compares before there are samples."""


class StopRequest(Protocol):
    """A request to end the run after the current step."""

    requested: bool
    armed: bool
    """Set by the trainer once there are steps to finish: before that, a request ends the run at once."""


class Trainer:
    """One run on `pools` of workers, which are built and idle. The loop is `run`; the algorithm's step is `step`.

    The state between steps is here, in `source`, in the algorithm's controllers and in the workers; `state_dict` lists
    all of it. listeners: constructors of the published listeners, by name. planner_input: `ListenedRun.plan`.
    """

    def __init__(
        self,
        context: RunContext,
        prompts: TokenizedPrompts,
        held_out: TokenizedPrompts | None,
        pools: WorkerPools,
        folder: RunFolder,
        trackers: Trackers,
        view: View,
        stop: StopRequest,
        listeners: Mapping[str, Callable[[ListenedRun], Listener]] | None = None,
        planner_input: Callable[[], object] = lambda: None,
    ) -> None:
        self.config = config = context.config
        self.dtype = context.facts.dtype
        self.algorithm = build_algorithm(**config.algorithm.model_dump())
        self.held_out = held_out
        self.steps_done = 0
        """Steps so far."""
        self.version = 0
        """Weight syncs so far."""
        self.period_start = time.perf_counter()
        """Start of the period that the next step's metrics cover."""
        self.curve_measure = measure_of(config.model_dump())
        """Metric of the run's learning curve."""
        self.curve_values: list[float] = []
        """Value of `curve_measure` in each step so far."""
        self.next_texts: list[SampleText] = []
        """Samples that are shown with the next step."""
        self.evaluations: dict[int, dict[str, object]] = {}
        """Step → report, as in the run folder."""
        self.has_engine = held_out is not None or not config.data.response
        # Any tokens serve as the probe; a prompt's tokens are typical for the model.
        self.probe = prompts.text_tokens(prompts.longest())[:PROBE_TOKENS]
        self.fingerprint = prompts.fingerprint()
        self.workers, self.folder, self.trackers, self.view, self.stop = pools.policy, folder, trackers, view, stop
        self.critic = Critic(self.algorithm, config, pools.policy, pools.critic)
        self.teachers = Teachers(self.algorithm, config, pools.policy, pools.teachers)
        self.engines = Engines(
            pools.policy,
            pools.engines,
            view.note,
            copies=config.copies_weights,
            overlaps="ahead" in config.rollout.sync,
        )
        rules = config.checkpoint
        checkpoints = Checkpoints(folder.checkpoints, rules.keep, rules.keep_best, rules.keep_every)
        self.records = StepRecords(folder, config, view.note)
        template = config.model.chat_template
        texts = {TEMPLATE: template_text(template)} if template and template not in BUILT_IN else {}
        self.checkpointer = Checkpointer(
            checkpoints,
            folder,
            pools.policy,
            pools.critic,
            view.note,
            self.records.flush,
            rules.best_by,
            texts,
        )
        self.warnings = Warnings.of(config, self.algorithm.mismatch_warning, view.warning, folder.event)
        self.log_prob_check = self._log_prob_check(prompts)
        listened = ListenedRun(folder.path, config, view.note, view.warning, folder.event, planner_input)
        self.listeners = Listeners.of(listened, listeners or {})
        self.invariants = Invariants()
        faults = config.fault_tolerance
        self.guard = UpdateGuard(faults.on_bad_update, faults.bad_grad_norm, folder, view.note)
        self.lost_engines = LostEngines(folder.path)
        self.source = build_batch_source(
            config,
            prompts,
            self.engines.workers,
            folder.samples,
            greedy=self.algorithm.needs_baselines,
            on_progress=self._progressed,
        )
        concurrent = bool(config.async_.staleness and config.rollout.workers)
        self.prefetcher = Prefetcher(self.source, concurrent, config.train.steps, self.engines.workers.kill)

    def _log_prob_check(self, prompts: TokenizedPrompts) -> LogProbCheck:
        from rlcli.model.rounding import unit_of

        config = self.config
        rows = [(prompts.text_tokens(i), 1) for i in range(min(PROBE_PROMPTS, len(prompts)))]
        return LogProbCheck(
            config.rollout.log_prob_check if self.has_engine else "off",
            unit_of(self.dtype, config.rollout.quantization),
            rows,
            config.data.max_prompt_tokens + config.rollout.max_response_tokens - 1,
            self.workers,
            self.engines.workers,
            self.warnings.log_prob_check,
        )

    def _progressed(self, done: int, total: int) -> None:
        if self.prefetcher.waited_for:
            self.view.progress(done, total)

    def run(self, checkpoint: Checkpoint | None = None) -> RunResult:
        """Run from the first step, or from a checkpoint of this run, to the last step or until `stop` is requested."""
        total = self.config.train.steps
        with closing(self.prefetcher), closing(self.listeners), self.lost_engines.reporting(self.view.note):
            self.begin(checkpoint)
            while self.steps_done < total and not self.stop.requested:
                step = self.steps_done + 1
                try:
                    self.after_step(step, self.step(step))
                except RollBack as bad:
                    self.roll_back(str(bad))
                    self.period_start = time.perf_counter()
            return self.finish()

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Start the run: load a checkpoint, sync the weights to the engines, evaluate them."""
        if checkpoint is not None:
            self.phase("restore", checkpoint.step)
            self.load(checkpoint)
        self.show_start()
        self.listeners.begin(self.steps_done)
        self.phase("sync", self.steps_done)
        self.log_prob_check.prepare(self.steps_done, 0.0, counts=False)
        self.sync_weights()
        self.log_prob_check.check(self.steps_done, [], counts=False)
        if self.evaluation_due():  # of the initial model, or one that an exit interrupted
            metrics = self.evaluate()
            self.trackers.amend(self.steps_done, metrics) if self.steps_done else self.trackers.log(0, metrics)
            self.listeners.evaluated(self.steps_done, metrics)
        self.stop.armed = True
        self.period_start = time.perf_counter()

    def finish(self) -> RunResult:
        """End the run: write the last checkpoint, and return the result."""
        if self.checkpointer.saved < self.steps_done:
            self.phase("checkpoint", self.steps_done)
            self.checkpointer.begin(self.steps_done, *self.state_dict())
        self.checkpointer.finish()
        self.records.flush()
        self.listeners.finish(self.steps_done)
        stopped = self.steps_done < self.config.train.steps or self.evaluation_due()
        if not stopped and (text := check_trained(self.folder.path, self.config.rollout.samples_per_prompt)):
            self.view.warning(f"warning {NO_UPDATE}: {text}")
            self.folder.event("warning", step=self.steps_done, name=NO_UPDATE, text=text)
        self.folder.event("stopped" if stopped else "finished", step=self.steps_done)
        return RunResult(
            self.steps_done,
            self.curve_measure,
            self.curve_values,
            self.evaluations,
            str(self.checkpointer.newest or ""),
            stopped,
        )

    def after_step(self, step: int, metrics: dict[str, float]) -> None:
        """Start a checkpoint, evaluate, and record metrics. The checkpoint is written while the run continues,
        and committed only once the metrics of its step are on disk."""
        every = self.config.checkpoint.every
        self.period_start = time.perf_counter()
        self.records.phase("record")
        self.steps_done = step
        self.curve_values.append(self.curve_measure.of(metrics))
        texts = self.texts()
        self.checkpointer.poll()
        if self.stop.requested or step == self.config.train.steps or (every and step % every == 0):
            with timed("checkpoint", metrics):
                self.phase("checkpoint", step)
                self.checkpointer.begin(step, *self.state_dict())
        if not self.stop.requested and self.evaluation_due():
            with timed("evaluate", metrics):
                metrics |= self.evaluate()
        outside_step_s = metrics.get("time/checkpoint_s", 0.0) + metrics.get("time/evaluate_s", 0.0)
        self.period_start += outside_step_s
        self.records.phase("record")
        if outside_step_s:
            groups = self.worker_groups()
            self.records.add_spans({name: group.call(WorkerCalls.busy_spans) for name, group in groups.items()})
        self.trackers.log(step, metrics)
        self.records.end(step)
        self.listeners.step(step, metrics)
        self.view.step(metrics)
        self.view.samples(texts)

    def step(self, step: int) -> dict[str, float]:
        """One step: generate and verify, select and plan, compute advantages, update, sync the new weights."""
        clock = Clock(lambda name: self.phase(name, step), self.period_start)
        self.records.begin()
        seed = step_seed(self.config.train.seed, step)
        with clock.phase("generate"):
            batch = self.prefetcher.take(step)
            self.invariants.check_seeds(batch.samples)
            self.listeners.generated(batch.samples)
        with clock.phase("plan"):
            if self.has_engine:
                self.engines.release_memory()
            selected = select_batch(batch, self.algorithm, self.config, seed)
            plan = plan_step(selected, self.config, self.workers.data_ranks)
            self.guard.check_counted(step, selected.exclusion_reasons)
        with clock.phase("load"):
            bins = [plan.of_rank(rank) for rank in range(self.workers.data_ranks)]
            recording = self.records.recording(step, batch, selected)
            self.workers.call(WorkerCalls.load, bins, build_train_rows(plan, selected, seed, recording, self.version))
            self.critic.load(selected, seed)
            self.teachers.load(selected, seed)
        if self.algorithm.needs_old_log_probs(len(plan.minibatches) * self.config.train.passes):
            with clock.phase("old_log_probs"):
                self.workers.call(WorkerCalls.compute_old_log_probs)
        if self.algorithm.needs_reference:
            with clock.phase("reference"):
                self.workers.call(WorkerCalls.compute_reference_log_probs)
        if self.teachers.needed:
            with clock.phase("teacher"):
                self.teachers.infer()
        with clock.phase("critic"):
            self.critic.infer()
        with clock.phase("advantages"):
            if self.algorithm.works_on_tokens:
                self.workers.call(WorkerCalls.compute_advantages, self.algorithm.kl.coef)
        with clock.phase("update"):
            updates, lr = self.update(step, plan, selected)
        with clock.phase("wait_for_rollout"):
            self.engines.send_ahead(self.prefetcher.generation)
            self.prefetcher.wait()
        with clock.phase("sync"):
            self.log_prob_check.prepare(step, updates.compared_tokens)
            synced = self.sync_weights()
        self.records.phase("measure")
        reports = {name: group.call(WorkerCalls.step_report) for name, group in self.worker_groups().items()}
        compared = self.log_prob_check.check(step, [report.compared for report in reports["worker"]])
        self.records.trained(step, batch, selected, reports)
        peaks = largest(report.memory for ranks in reports.values() for report in ranks)
        measured = (
            self.measure(batch, selected, plan, updates) | lr | synced | compared | peaks | engine_metrics(reports)
        )
        self.warnings.check_sync(step, measured)
        return measured | time_metrics(clock, batch, plan, self.prefetcher.busy_s)

    def update(self, step: int, plan: Plan, selected: SelectedSamples) -> tuple[Updates, dict[str, float]]:
        """Every optimizer step of this step: the critic's and, after the critic's warm-up, the policy's."""
        train, warmup, updates = self.config.train, self.config.critic.warmup_steps, Updates([], [])

        def rate(peak: float, first_step: int) -> float:
            return lr_at(
                max(step - first_step - 1, 0),
                steps=train.steps - first_step,
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
                    updates.critic.append(self.guard.check(CRITIC, self.critic.workers, step, index, sums))
                if step > warmup:
                    sums = self.workers.call(WorkerCalls.update, index, coefficients)
                    updates.policy.append(self.guard.check(POLICY, self.workers, step, index, sums))
                    self.invariants.check_update(plan, selected, index, sums)
        return updates, rates

    def measure(self, batch: RolloutBatch, selected: SelectedSamples, plan: Plan, updates: Updates) -> dict[str, float]:
        """The step's metrics. Also adapts the KL and entropy coefficients to them."""
        counted = rewarded(batch.samples, self.config.train.truncated).take(selected.exclusion_reasons == 0)
        metrics = {
            **reward_metrics(counted),
            **sample_metrics(batch.samples),
            **set_metrics(batch.samples, counted, batch.sources),
            **exclusion_metrics(selected.exclusion_reasons),
            "reward/shaped": selected.mean_shaped_reward,
            **batch.stats.metrics(),
            **batch.selection,
            **staleness_metrics(batch.samples, 0 if self.config.data.response else self.version - 1),
            **plan_metrics(plan),
            **update_metrics(updates.policy),
            **critic_metrics(updates.critic),
            "update/kl_coef": self.algorithm.kl.coef,
            "update/entropy_coef": self.algorithm.entropy.coef,
        }
        if "update/kl" in metrics:
            self.algorithm.kl.update(metrics["update/kl"], len(selected.samples))
        if "update/entropy" in metrics:
            self.algorithm.entropy.update(metrics["update/entropy"], len(selected.samples))
        self.warnings.check(self.steps_done + 1, metrics)
        return metrics

    def sync_weights(self) -> dict[str, float]:
        """Sync weights. Raises RunFailed if an engine does not hold them, or returns a log-prob that is not finite."""
        self.prefetcher.wait()
        self.critic.drop_batch()
        self.teachers.drop_batch()
        self.version += 1
        if not self.has_engine:
            self.workers.call(WorkerCalls.drop_batch)
            return {}
        synced = self.engines.sync(self.probe, self.version)
        if not math.isfinite(synced.difference):
            raise RunFailed(
                "after the weight sync the log-probs of the engine or the trainer are not finite",
                "check update/grad_norm in the last steps; with model.dtype = float16 values may have overflowed",
            )
        return sync_metrics(synced)

    def worker_groups(self) -> dict[str, Workers]:
        """Each group of workers once, by its first role, as in the timeline. Call them while they are idle, as after a
        sync: a group that generates would answer only afterwards."""
        by_role = {
            "worker": self.workers,
            "critic": self.critic.workers,
            "teacher": self.teachers.workers,
            "engine": self.engines.workers,
        }
        first_role = {id(group): role for role, group in reversed(by_role.items())}
        return {role: group for role, group in by_role.items() if first_role[id(group)] == role}

    def evaluation_due(self) -> bool:
        """True if the current weights are to be evaluated and have not been."""
        if self.held_out is None or self.steps_done in self.evaluations:
            return False
        every = self.config.evaluation.every
        return self.steps_done in (0, self.config.train.steps) or (every > 0 and self.steps_done % every == 0)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current weights; returns the metrics."""
        assert self.held_out is not None, "nothing to evaluate on"
        step = self.steps_done
        self.phase("evaluate", step)
        report = evaluate(
            self.engines.workers,
            self.held_out,
            self.config,
            save_as=samples_path(self.folder.evaluations, step),
            step=step,
            on_progress=self.view.progress,
        )
        self.evaluations[step] = report.as_dict() | {"headline": report.headline()}
        self.folder.write_evaluation(step, self.evaluations[step])
        metrics = report.metrics()
        self.checkpointer.evaluated(step, metrics)
        self.folder.event("evaluated", step=step, headline=report.headline())
        self.view.note(f"evaluation at step {step}: {report.headline()}")
        return {f"eval/{name}": value for name, value in metrics.items()}

    def state_dict(self) -> tuple[dict[str, object], list[ObjectRef[SampleShard] | None]]:
        """The controller's state, on which the next step depends besides the workers' state, as plain values; and
        references to the tokens of the waiting samples."""
        source, shards = self.source.state()
        probe = self.probe.tolist()
        return {
            "step": self.steps_done,
            "version": self.version,
            "warnings": self.warnings.state(),
            "cursor": dict(self.source.cursor.state()),
            "kl": self.algorithm.kl.state(),
            "entropy": self.algorithm.entropy.state(),
            "bad_updates": self.guard.state(),
            **source,
            "data": self.fingerprint,
            "dtype": self.dtype,
            "log_prob_check": self.log_prob_check.state(),
            "probe": {"tokens": probe, "log_probs": self.workers.call(WorkerCalls.probe_log_probs, probe)},
        }, shards

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore trainer and workers to the state of `state_dict`, and truncate the records to that step: this comes
        last, since a checkpoint that does not load must leave them unchanged. Raises RunFailed if the loaded weights
        are not those that were saved."""
        with checkpoint.restoring() as state:
            for name, group in self.checkpointer.groups.items():
                group.call(WorkerCalls.load_state, str(checkpoint.path / name))
            if state["dtype"] != self.dtype:  # model.dtype is auto, and the device differs
                self.view.note(f"from here on the run computes in {self.dtype}, before in {state['dtype']}")
            check_probe(self.workers, checkpoint, self.dtype)
            waiting = str(checkpoint.path / WAITING)
            shards = self.workers.call(WorkerCalls.read_waiting, waiting) if state["waiting"] else []
            self.source.cursor = self.source.cursor.restored(state["cursor"])
            self.source.restore(source_state(state), shards)
            self.algorithm.kl.restore(state["kl"])
            self.algorithm.entropy.restore(state["entropy"])
            self.guard.restore(state["bad_updates"])
            if "log_prob_check" in state:  # absent in older checkpoints
                self.log_prob_check.restore(state["log_prob_check"])
            # Older checkpoints have "alarms" instead, or neither.
            self.warnings.restore(state.get("warnings", state.get("alarms", {})))
            self.invariants.forget()
            self.steps_done = checkpoint.step
            self.version = state["version"] - 1  # the sync that follows was counted already
        rewind(self.folder.path, checkpoint.step, sampled=checkpoint.step + 1 if self.source.has_started else -1)
        self.curve_values = course_of(self.folder.path, self.curve_measure)
        self.evaluations = evaluations_of(self.folder.path)
        self.checkpointer.resumed(checkpoint)

    def roll_back(self, why: str) -> None:
        """Continue from the last checkpoint, with the next prompts; if there is none yet, from the current weights,
        since the bad update was skipped."""
        self.phase("restore", self.steps_done)
        self.records.flush()  # before the files of later steps are removed
        self.checkpointer.poll(wait=True)
        self.prefetcher.wait()
        checkpoint = self.checkpointer.checkpoints.newest(self.view.note)
        if checkpoint is None:
            self.view.note(f"{why}; there is no checkpoint to go back to: the step ends with the updates so far")
        else:
            check_rollbacks(self.folder.path, checkpoint, why)
            self.view.note(f"{why}; back to {checkpoint.path}, with other prompts")
            self.folder.event("rolled_back", step=self.steps_done + 1, to=checkpoint.step)
            cursor, in_a_row = self.source.cursor, self.guard.state()
            self.load(checkpoint)
            self.source.cursor = cursor
            self.guard.restore(in_a_row)
            self.show_start()
        self.prefetcher.discard()  # samples of the skipped prompts
        self.invariants.forget()
        rewind(self.folder.path, self.steps_done)  # the step's second attempt may have fewer rounds
        self.listeners.begin(self.steps_done)
        self.log_prob_check.prepare(self.steps_done, 0.0, counts=False)
        self.sync_weights()
        self.log_prob_check.check(self.steps_done, [], counts=False)

    def show_start(self) -> None:
        """Show the step at which the run starts or resumes, with the steps before."""
        earlier_steps = [line for line in metrics_of(self.folder.path) if line["step"]] if self.steps_done else []
        marks = marks_of(events_of(self.folder.path)) if self.steps_done else []
        self.view.start(
            self.config.train.steps,
            self.folder.path.name,
            self.steps_done,
            self.curve_measure,
            earlier_steps,
            0.0,
            marks,
        )

    def phase(self, name: str, step: int) -> None:
        """Report the current phase: to the view, in the run folder and to the listeners."""
        self.view.phase(name)
        self.records.phase(name)
        self.folder.at(step, name)
        self.listeners.phase(name, step)

    def texts(self) -> list[SampleText]:
        """Samples of the last rollout for the view, fetched before an evaluation replaces them."""
        if not self.view.show_samples or self.config.data.response:
            return []
        of_ranks = self.engines.workers.call(WorkerCalls.texts, self.view.show_samples)
        texts = [SampleText.of(row) for rows in of_ranks for row in rows]
        if self.prefetcher.concurrent:  # they belong to the next step, and are shown with it
            texts, self.next_texts = self.next_texts, texts
        return texts
