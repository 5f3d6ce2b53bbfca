"""The actor: one process on one device that hosts the roles. Its methods are thin; the work is in the roles."""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.cluster import watchdog
from rlcli.cluster.dispatch import implements
from rlcli.cluster.process import busy_lanes, peak_memory, startup_times, worker_profile
from rlcli.cluster.rendezvous import rendezvous_address, store_at
from rlcli.data.messages import Coefficients, Progress, PromptTask, RolloutBatch
from rlcli.data.packer import Bin
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.template_choice import choose_template
from rlcli.data.sample_shard import FETCH_TIMEOUT_S
from rlcli.data.train_rows import TrainRows
from rlcli.environments.environment_pool import Environments
from rlcli.environments.gateway.agent_pool import AgentPool
from rlcli.errors import RunFailed
from rlcli.images.image_processor import ImageProcessor
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.rollout.engine import Counting, Described, Engine, engine_named, shared_memory_prefix
from rlcli.rollout.rollout_arguments import RolloutArguments
from rlcli.rollout.worker.rollout_role import RolloutRole
from rlcli.rollout.worker.work_queue import NO_SHARED_TASKS, RoundTasks
from rlcli.support.files import filled_path
from rlcli.support.importing import trust_imports
from rlcli.support.machine.gpus import GROUPS, capability
from rlcli.support.redact import redact_output
from rlcli.training.worker.backend import TrainingBackend
from rlcli.training.worker.calls import WorkerCalls
from rlcli.training.worker.critic_role import CriticRole, ProcessRewardRole
from rlcli.training.worker.fsdp_backend import FsdpLoader
from rlcli.training.worker.policy_role import PolicyRole
from rlcli.training.worker.rank_step_recorder import StepRecorder, StepReport
from rlcli.training.worker.state_writer import Files, StateWriter, read_waiting, room_for_copy, write_waiting
from rlcli.training.worker.teacher import TeacherRole
from rlcli.training.worker.token_advantages import fill_advantages, fill_kept, fill_selected
from rlcli.training.worker.train_batch import TokenColumn, TrainBatch
from rlcli.training.worker.weight_sync.weight_sync import WeightSync
from rlcli.training.worker.worker_scoring import forget_worker, note_worker, scoring_service
from rlcli.training.worker.worker_spec import WorkerSpec

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32
    from ray import ObjectRef
    from transformers import PreTrainedTokenizerBase

    from rlcli.data.sample_files import SampleRow
    from rlcli.data.sample_shard import SampleShard
    from rlcli.training.worker.calls import ExportedTokens, Row

COLLECTIVE_MARGIN_S = 120.0
"""Extra time that a rank waits for others beyond the watchdog, which names the rank at fault."""


class Worker(WeightSync, WorkerCalls):
    """The process of one rank. For debugging without Ray, build one with world 1 and call the same methods, `begin`
    first."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank = rank
        self.world = world
        self.policy: PolicyRole | None = None
        self.critic: CriticRole | ProcessRewardRole | None = None
        self.teacher: TeacherRole | None = None
        self.engine: Engine | None = None
        self.rollout_role: RolloutRole | None = None
        self.batch: TrainBatch | None = None
        self.writer = StateWriter()
        self.recorder = StepRecorder(rank)

    @implements(WorkerCalls.preload)
    def preload(self, engine: str) -> None:
        with startup_times.few_collections():
            import rlcli.model.io.loading  # noqa: F401

            redact_output()  # before an engine creates loggers that write there
            if engine:
                engine_named(engine).preload()
        startup_times.done("preloaded")

    @implements(WorkerCalls.begin)
    def begin(self, spec: WorkerSpec) -> None:
        self.spec, self.config = spec, spec.config
        spec.log_in()
        redact_output()
        trust_imports()
        note_worker(spec, self.rank)
        _log_to(Path(spec.logs) / f"{spec.name}-{self.rank}.log")
        watchdog.start(Path(spec.logs) / f"{spec.name}-{self.rank}.stack", spec.config.fault_tolerance.stall_s)

    @implements(WorkerCalls.rendezvous)
    def rendezvous(self) -> tuple[str, int]:
        import ray

        return rendezvous_address(ray.util.get_node_ip_address(), f"{shared_memory_prefix(self.spec.group_id)}stores")

    @implements(WorkerCalls.join)
    def join(self, host: str, port: int) -> None:
        import torch
        import torch.distributed as dist

        on_gpu = self.spec.facts.device == "cuda"
        # Ray shows each worker only its own GPU, so its index is 0 everywhere.
        local = 0 if on_gpu else self.rank
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.world), "LOCAL_RANK": str(local)}
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.accelerator.set_device_index(self.device)
            # Not enforced: vLLM shares this process and has kernels for which torch has no deterministic version.
            torch.use_deterministic_algorithms(self.config.train.deterministic, warn_only=True)
            # On by default, it fills each new tensor, vLLM's too: slow, and NaN reaches what kernels read as padding.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property
        timeout = timedelta(seconds=2 * self.config.fault_tolerance.stall_s + COLLECTIVE_MARGIN_S)
        store = store_at(host, port, self.rank, self.world, timeout)
        backend = GROUPS if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=timeout)
        startup_times.done("joined")
        peak_memory.start(self.device.type)

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims.of(self.world, self.spec.replicate, self.spec.context_ranks, self.spec.expert)

    @implements(WorkerCalls.data_rank)
    def data_rank(self) -> int:
        return self.dims.data_rank(self.rank)

    @implements(WorkerCalls.build)
    @startup_times.few_collections()
    def build(self, spec: WorkerSpec | None = None) -> None:
        import numpy as np
        import torch
        from transformers import AutoTokenizer
        from transformers.utils import logging

        self.spec = spec or self.spec
        self.config = self.spec.config
        note_worker(self.spec, self.rank)
        self.writer.wait()
        self._reset_sync_state()
        self.policy = self.critic = self.teacher = self.batch = None  # free their memory before more is allocated
        logging.disable_progress_bar()
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(self.config.train.seed)
        roles = self.spec.roles
        if self.device.type == "cuda" and "engine" in roles and roles != {"engine"}:
            engine_named(self.config.rollout.engine).check_beside_trainer(capability())
        with peak_memory.base():
            if roles != {"engine"}:
                import rlcli.model.io.loading  # noqa: F401
        from rlcli.model.parallel.offload import KINDS, Offload

        # On a CPU everything is in host memory anyway.
        self.offload = Offload(KINDS[self.config.train.offload if self.device.type == "cuda" else "none"], self.device)
        load = FsdpLoader(self.config, getattr(torch, self.spec.facts.dtype), self.device, self.dims)
        if "policy" in roles:
            self.policy = PolicyRole(self.config, self.device, load, self.spec.facts.image_rule)
            self.policy.on_outputs = self.recorder.record_outputs
        watchdog.progress()
        if "critic" in roles:
            self.critic = CriticRole(self.config, load)
        if "process_reward" in roles:
            self.critic = ProcessRewardRole(self.config, load)
        if "teacher" in roles:
            self.teacher = TeacherRole(self.config, load)
        startup_times.done("models")
        for name, model in self._models().items():
            model.register(self.offload, name)
        self.set_engine_active("engine" in roles)
        watchdog.progress()
        if "engine" in roles:
            self.offload.to_host(*self.offload.names)  # before it measures the free memory
            tokenizer = AutoTokenizer.from_pretrained(self.config.model.path, trust_remote_code=False)
            choose_template(tokenizer, self.config.model.chat_template)
            self.rollout_role = self._build_rollout(tokenizer)
            if self.offload.names:
                self._colocated.sleep()  # A checkpoint may be loaded first; the sync wakes it.

    @implements(WorkerCalls.rollout)
    def rollout(
        self, tasks: Sequence[PromptTask], arguments: RolloutArguments, queue: RoundTasks | None = None
    ) -> Iterator[Progress | RolloutBatch]:
        yield from self._rollout.run(tasks, arguments, queue or NO_SHARED_TASKS)

    @implements(WorkerCalls.rollout_snapshot)
    def rollout_snapshot(self, end: bool) -> RolloutBatch:
        return self._rollout.snapshot(end=end, keep=self.spec.context.keeps)

    @implements(WorkerCalls.take_shard)
    def take_shard(self) -> list[ObjectRef[SampleShard] | None]:
        import ray

        shard = self._rollout.take_shard()
        return [None if shard is None else ray.put(shard)]

    @implements(WorkerCalls.texts)
    def texts(self, count: int) -> list[SampleRow]:
        return self._rollout.texts(count)

    @implements(WorkerCalls.release_rollout_memory)
    def release_rollout_memory(self) -> None:
        self._rollout.pause()
        self._cache_probe()
        self._colocated.sleep()
        self.set_engine_active(False)

    @implements(WorkerCalls.load)
    def load(self, bins: Sequence[Sequence[Bin]], step: TrainRows) -> None:
        import torch

        step = step if self.dims.leads(self.rank) else replace(step, recording=None)
        dtype = getattr(torch, self.spec.facts.dtype)
        self.batch = TrainBatch(bins, step, self.device, self.spec.facts.image_rule, dtype)
        if self.policy is not None:
            self.policy.begin(self.batch, step.version)
        self.recorder.begin(step, bins, self.batch, spare=self.rank == 0)

    @implements(WorkerCalls.drop_batch)
    def drop_batch(self) -> None:
        self.batch = None

    @implements(WorkerCalls.compute_old_log_probs)
    def compute_old_log_probs(self) -> None:
        self.offload.to_device("policy")
        self._policy.compute_old_log_probs(self._batch)

    @implements(WorkerCalls.compute_reference_log_probs)
    def compute_reference_log_probs(self) -> None:
        self.offload.to_device("policy" if self._policy.reference is None else "reference")
        self._policy.compute_reference_log_probs(self._batch)
        self.offload.to_host("reference")

    @implements(WorkerCalls.infer_critic)
    def infer_critic(self) -> None:
        self.offload.to_device("critic")
        self._critic.infer(self._batch)

    @implements(WorkerCalls.infer_teachers)
    def infer_teachers(self) -> None:
        assert self.teacher is not None, "this group has no teacher"
        for number in range(len(self.teacher.models)):
            offloaded = [f"teacher-{number}"] if number in self.teacher.local else []
            self.offload.to_device(*offloaded)
            self.teacher.infer(self._batch, number)
            self.offload.to_host(*offloaded)

    @implements(WorkerCalls.compute_advantages)
    def compute_advantages(self, kl_coef: float) -> None:
        algorithm, ranks = self._policy.algorithm, self._policy.policy.ranks
        if algorithm.rejects:
            fill_kept(algorithm, self._batch, ranks)
        fill_advantages(algorithm, self._batch, ranks, kl_coef)
        if algorithm.token_selector is not None:
            fill_selected(algorithm, self._batch, ranks)
        if not algorithm.advantages_before_tokens:
            self.recorder.record_advantages(self._batch)

    @implements(WorkerCalls.update)
    def update(self, minibatch: int, coefficients: Coefficients) -> dict[str, float]:
        self.offload.to_device("policy")
        self.offload.to_device("policy.optimizer", prefetch=True)
        return self._policy.update(self._batch, minibatch, coefficients)

    @implements(WorkerCalls.update_critic)
    def update_critic(self, minibatch: int, lr: float) -> dict[str, float]:
        self.offload.to_device("critic")
        self.offload.to_device("critic.optimizer", prefetch=True)
        return self._critic.update(self._batch, minibatch, lr)

    @implements(WorkerCalls.save_minibatch)
    def save_minibatch(self, minibatch: int, path: str) -> str:
        try:
            self._batch.save(minibatch, Path(filled_path(path, "rank", self.rank)))
        except (OSError, RuntimeError) as error:
            return str(error).splitlines()[0]
        return ""

    @implements(WorkerCalls.export_tokens)
    def export_tokens(self, name: TokenColumn) -> list[ObjectRef[ExportedTokens]]:
        import ray

        return [ray.put(self._batch.export(name))]

    @implements(WorkerCalls.import_tokens)
    def import_tokens(self, name: TokenColumn, exported: list[list[ObjectRef[ExportedTokens]]]) -> None:
        import ray

        by_sample: ExportedTokens = {}
        for reference in exported:
            by_sample |= ray.get(reference[0], timeout=FETCH_TIMEOUT_S)
        self._batch.fill(name, by_sample)

    @implements(WorkerCalls.startup_moments)
    def startup_moments(self) -> dict[str, float]:
        return startup_times.moments()

    @implements(WorkerCalls.describe_engine)
    def describe_engine(self) -> str:
        return self.engine.describe() if isinstance(self.engine, Described) else ""

    @implements(WorkerCalls.start_profile)
    def start_profile(self) -> None:
        worker_profile.start()

    @implements(WorkerCalls.stop_profile)
    def stop_profile(self, path: str) -> str:
        try:
            worker_profile.stop(Path(filled_path(path, "rank", self.rank)))
        except OSError as error:
            return str(error)
        return ""

    @implements(WorkerCalls.save_state)
    def save_state(self, folder: str) -> None:
        from rlcli.model.io.model_state import copied, rng_state

        self.writer.wait()  # or two copies would be in memory at once
        state = {key: value for name, model in self._trained().items() for key, value in model.state(name).items()}
        if self.spec.facts.device == "cpu" and not room_for_copy(state, self.config.all_workers):
            self.writer.start(state, rng_state(), Path(folder))
            self.writer.wait()
        else:
            self.offload.forget_copies()  # they have been written
            self.writer.start(copied(state, self.offload.copied), rng_state(), Path(folder))

    @implements(WorkerCalls.state_saved)
    def state_saved(self, wait: bool) -> Files | None:
        if wait:
            self.recorder.flush()  # the record of the checkpoint's step is part of what a machine must not lose
        return self.writer.files(wait) if self.recorder.idle else None

    @implements(WorkerCalls.load_state)
    def load_state(self, folder: str) -> None:
        from rlcli.model.io.model_state import restore_rng_state

        self.recorder.flush()  # before the files of later steps are removed
        self.offload.to_device("policy", "policy.optimizer", "critic", "critic.optimizer")
        for name, model in self._trained().items():
            model.load_state(Path(folder), name)
        restore_rng_state(Path(folder), self.rank)

    @implements(WorkerCalls.write_waiting)
    def write_waiting(self, path: str, shards: list[list[ObjectRef[SampleShard] | None]]) -> Files:
        import ray

        fetched = [ray.get(shard, timeout=FETCH_TIMEOUT_S) for (shard,) in shards]
        return write_waiting(Path(path), fetched)

    @implements(WorkerCalls.read_waiting)
    def read_waiting(self, path: str) -> list[ObjectRef[SampleShard]]:
        import ray

        return [ray.put(shard) for shard in read_waiting(Path(path))]

    @implements(WorkerCalls.probe_log_probs)
    def probe_log_probs(self, tokens: list[int]) -> list[float]:
        import numpy as np

        self.offload.to_device("policy")
        log_probs: list[float] = self._policy.probe_log_probs(np.asarray(tokens, np.int32)).tolist()
        return log_probs

    @implements(WorkerCalls.recent_rows)
    def recent_rows(self, tokens: int) -> list[Row]:
        return self._policy.log_prob_record.recent(tokens)

    @implements(WorkerCalls.trainer_log_probs)
    def trainer_log_probs(self, rows: list[Row], unit: float = 0.0, seed: int = 0) -> list[Float32[np.ndarray, " R"]]:
        self.offload.to_device("policy")
        return self._policy.rows_log_probs(rows, unit, seed)

    @implements(WorkerCalls.engine_log_probs)
    def engine_log_probs(self, rows: list[Row]) -> list[Float32[np.ndarray, " R"]]:
        engine = self._rollout.engine
        return [engine.prompt_log_probs(tokens)[prompt - 1 :] for tokens, prompt in rows]

    @implements(WorkerCalls.step_report)
    def step_report(self) -> StepReport:
        self._finish_saving()
        peaks, (advantages, problem) = peak_memory.collect(), self.recorder.finish()
        counts: Mapping[str, float] = self.engine.counts() if isinstance(self.engine, Counting) else {}
        # Ranks that do not lead compute what another one does.
        leads = self.policy is not None and self.dims.leads(self.rank)
        compared = self._policy.log_prob_record.comparison() if leads else None
        return StepReport(peaks, busy_lanes.collect(), advantages, problem, counts, compared)

    @implements(WorkerCalls.busy_spans)
    def busy_spans(self) -> list[busy_lanes.Span]:
        return busy_lanes.collect()

    def close(self) -> None:
        """Close, in order: files, engine, scoring processes, process group, watchdog. All are closed even if one fails;
        then raises RunFailed with each failure and its consequence."""
        failures: list[str] = []
        for consequence, close in (
            ("the tokens that steps recorded for viewers may be incomplete", self._finish_recording),
            ("samples of the last rollout may not be saved", self._finish_saving),
            ("the engine may leave memory and servers behind", self._close_engine),
            ("environments and the connection to the verifiers end with this process", self._close_rollout),
            ("this worker stays registered on its machine", lambda: forget_worker(self.spec, self.rank)),
            ("the other ranks may wait for this one", _leave_group),
        ):
            try:
                close()
            except Exception as error:
                traceback.print_exc()  # to the rank's log
                failures.append(f"{consequence}: {type(error).__name__}: {error}")
        watchdog.stop()
        if failures:
            raise RunFailed("; ".join(failures))

    def _finish_recording(self) -> None:
        self.recorder.flush()
        if problem := self.recorder.problem():  # no report of a step follows
            raise RunFailed(problem)

    def _finish_saving(self) -> None:
        if self.rollout_role is not None:
            self.rollout_role.finish_saving()

    def _close_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def _trained(self) -> dict[str, TrainingBackend]:
        """Models that this worker trains, by name."""
        models: dict[str, TrainingBackend] = {}
        if self.policy is not None:
            models["policy"] = self.policy.policy
        if self.critic is not None:
            models["critic"] = self.critic.model
        return models

    def _models(self) -> dict[str, TrainingBackend]:
        """All models of this worker, by name."""
        frozen: dict[str, TrainingBackend] = (
            {} if self.teacher is None else {f"teacher-{n}": model for n, model in self.teacher.local.items()}
        )
        if self.policy is not None and self.policy.reference is not None:
            frozen["reference"] = self.policy.reference
        return self._trained() | frozen

    @property
    def _critic(self) -> CriticRole | ProcessRewardRole:
        assert self.critic is not None, "this group has no critic"
        return self.critic

    @property
    def _batch(self) -> TrainBatch:
        assert self.batch is not None, "no batch is loaded"
        return self.batch

    def _build_rollout(self, tokenizer: PreTrainedTokenizerBase) -> RolloutRole:
        if self.rollout_role is not None:
            self.rollout_role.discard_streaming()
        self._close_rollout()
        leads = self.rank % self.config.rollout.tensor_parallel == 0  # else another rank of this engine verifies
        scorer = scoring_service(self.spec, tokenizer) if leads else None  # loads in the background
        engine = self._build_engine()
        facts = self.spec.facts
        if facts.adapter:
            engine.load_adapter(facts.adapter)
        image_processor = None if facts.image_rule is None else ImageProcessor(facts.image_rule)
        environments = self._environments(tokenizer, image_processor) if leads and facts.environments else None
        if scorer is not None:
            scorer.wait_ready()
        return RolloutRole(
            self.rank,
            engine,
            scorer,
            thinking=facts.thinking,
            stop_token_ids=tuple(facts.stop_tokens),
            environments=environments,
            conversing=bool(facts.environments),
            ordered=self.config.train.deterministic or self.config.counts_steps,
            image_processor=image_processor,
            grouped=scorer.grouped if scorer is not None else (),
        )

    def _environments(
        self, tokenizer: PreTrainedTokenizerBase, image_processor: ImageProcessor | None
    ) -> Environments | AgentPool:
        """With the chat template as the driver has fixed it, for the same day."""
        facts, data = self.spec.facts, self.config.data
        chat_template.fix(tokenizer, data.chat_template_kwargs, facts.day)
        stops = tuple(facts.stop_tokens)
        if self.config.environment.is_command:
            return AgentPool(self.config, tokenizer, stops, thinking=facts.thinking, image_processor=image_processor)
        return Environments(
            self.config, facts.environments, tokenizer, stops, thinking=facts.thinking, image_processor=image_processor
        )

    def _build_engine(self) -> Engine:
        """The engine of `rollout.engine`; an existing one is used again."""
        engine_class, spec = engine_named(self.config.rollout.engine), self.spec.engine
        with peak_memory.base():
            engine_class.preload()
        startup_times.done("engine imported")
        if self.engine is None:
            self.engine = engine_class(spec)
        assert (type(self.engine), self.engine.spec) == (engine_class, spec), "needs new workers"
        self.engine.on_step = _engine_step
        if isinstance(self.engine, Described):
            sys.stderr.write(f"engine: {self.engine.describe()}\n")
        startup_times.done("engine")
        return self.engine

    def _close_rollout(self) -> None:
        """Disconnect from the scoring service, and end the environments' processes."""
        role = self.rollout_role
        if role is not None and role.scorer is not None:
            role.scorer.close()
        if role is not None and role.environments is not None:
            role.environments.close()


def _leave_group() -> None:
    """Leave the process group, unless vLLM's engine has done so when it closed."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _engine_step() -> None:
    watchdog.progress()
    startup_times.engine_step()


def _log_to(path: Path) -> None:
    """Redirect this process's output, including that of C libraries, to its own file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
