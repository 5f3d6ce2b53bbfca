"""The actor: one process on one device that hosts the roles. Its methods are thin; the work is in the roles."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlcli.cluster import watchdog
from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.process import busy_lanes, peak_memory, startup_times, worker_profile
from rlcli.cluster.rendezvous import meeting_place, store_at
from rlcli.data.messages import Coefficients, Collected, Progress, PromptTask, StepWork
from rlcli.data.packer import Bin
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.template_choice import choose_template
from rlcli.data.sample_shard import FETCH_TIMEOUT_S
from rlcli.environments.environment_pool import Environments
from rlcli.environments.gateway.agent_pool import AgentPool
from rlcli.images.image_processor import Sight
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.rollout.engine import Counting, Described, engine_named, shared_memory_prefix
from rlcli.rollout.rollout_call import RolloutCall
from rlcli.rollout.worker.rollout_role import RolloutRole
from rlcli.rollout.worker.work_queue import NO_QUEUE, Queue
from rlcli.support.files import filled_path
from rlcli.support.importing import trust_imports
from rlcli.support.machine.gpus import GROUPS, capability
from rlcli.support.redact import redact_output
from rlcli.training.worker.backend import TrainingBackend
from rlcli.training.worker.critic_role import CriticRole, ProcessRewardRole
from rlcli.training.worker.fsdp_backend import FsdpLoader
from rlcli.training.worker.policy_role import PolicyRole
from rlcli.training.worker.rank_step_recorder import StepRecorder, StepReport
from rlcli.training.worker.state_writer import Files, StateWriter, read_waiting, room_for_copy, write_waiting
from rlcli.training.worker.teacher import TeacherRole
from rlcli.training.worker.token_advantages import fill_advantages, fill_kept, fill_selected
from rlcli.training.worker.train_batch import TrainBatch
from rlcli.training.worker.weight_sync.weight_sync import WeightSync
from rlcli.training.worker.worker_scoring import forget_worker, note_worker, scoring_service
from rlcli.training.worker.worker_spec import WorkerSpec, engine_spec

COLLECTIVE_MARGIN_S = 120.0
"""Extra time that a rank waits for others beyond the watchdog, which names the rank at fault."""


class Worker(WeightSync):
    """Rank `rank` of `world`. For debugging without Ray, build one with world 1 and call the same methods."""

    def __init__(self, rank: int, world: int, spec: WorkerSpec | None = None) -> None:
        """spec: passed to `begin` if it is not known yet."""
        super().__init__()
        self.rank = rank
        self.world = world
        self.policy: PolicyRole | None = None
        self.critic: CriticRole | ProcessRewardRole | None = None
        self.teacher: TeacherRole | None = None
        self.engine: Any = None
        self.rollout_role: RolloutRole | None = None
        self.batch: TrainBatch | None = None
        self.writer = StateWriter()
        self.recorder = StepRecorder(rank)
        if spec is not None:
            self.begin(spec)

    @dispatch()
    def preload(self, engine: str) -> None:
        """Import what `build` needs, for the engine of that name too if there is one: most of the startup time of a
        small model."""
        with startup_times.few_collections():
            import rlcli.model.io.loading  # noqa: F401

            redact_output()  # before an engine creates loggers that write there
            if engine:
                engine_named(engine).preload()
        startup_times.done("preloaded")

    @dispatch()
    def begin(self, spec: WorkerSpec) -> None:
        """Become a worker of this run."""
        self.spec, self.config = spec, spec.config
        spec.log_in()
        redact_output()
        trust_imports()
        note_worker(spec, self.rank)
        _log_to(Path(spec.logs) / f"{spec.name}-{self.rank}.log")
        watchdog.start(Path(spec.logs) / f"{spec.name}-{self.rank}.stack", spec.config.fault_tolerance.stall_s)

    @dispatch(collect="first")
    def rendezvous(self) -> tuple[str, int]:
        """Where the ranks of a process group find each other: see `meeting_place`."""
        import ray

        return meeting_place(ray.util.get_node_ip_address(), f"{shared_memory_prefix(self.spec.group_id)}stores")

    @dispatch()
    def join(self, place: str, port: int) -> None:
        """Form the process group of all ranks. place, port: the result of `rendezvous`."""
        import torch
        import torch.distributed as dist

        on_gpu = self.spec.device == "cuda"
        # Ray shows each worker only its own GPU, so its index is 0 everywhere.
        local = 0 if on_gpu else self.rank
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.world), "LOCAL_RANK": str(local)}
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.accelerator.set_device_index(self.device)
            # Not enforced: vLLM shares this process and has kernels for which torch has no deterministic version.
            torch.use_deterministic_algorithms(self.config.train.deterministic, warn_only=True)
            # On by default, it fills each new tensor, vLLM's too: slow, and NaN reaches what kernels read as padding.
            torch.utils.deterministic.fill_uninitialized_memory = False
        timeout = timedelta(seconds=2 * self.config.fault_tolerance.stall_s + COLLECTIVE_MARGIN_S)
        store = store_at(place, port, self.rank, self.world, timeout)
        backend = GROUPS if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=timeout)
        startup_times.done("joined")
        peak_memory.start(self.device.type)

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims.of(self.world, self.spec.replicate, self.spec.context, self.spec.expert)

    @dispatch()
    def data_rank(self) -> int:
        """Which part of a step's rows this rank computes. The group asks once."""
        return self.dims.data_rank(self.rank)

    @dispatch()
    @startup_times.few_collections()
    def build(self, spec: WorkerSpec | None = None) -> None:
        """Build the roles: those that train first (their memory is known), then the engine, then the verifiers'
        processes. Given another `spec`, for another run on the same ranks, rebuild them, except for the engine, which
        must match the first one's: vLLM destroys torch's process groups when it closes."""
        import numpy as np
        import torch
        from transformers import AutoTokenizer
        from transformers.utils import logging

        self.spec = spec or self.spec
        self.config = self.spec.config
        note_worker(self.spec, self.rank)
        self.writer.wait()
        self._begin_syncs()
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
        load = FsdpLoader(self.config, getattr(torch, self.spec.dtype), self.device, self.dims)
        if "policy" in roles:
            self.policy = PolicyRole(self.config, self.device, load, self.spec.images)
            self.policy.on_outputs = self.recorder.saw_outputs
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
        self.engine_takes_part("engine" in roles)
        watchdog.progress()
        if "engine" in roles:
            self.offload.to_host(*self.offload.names)  # before it measures the free memory
            tokenizer = AutoTokenizer.from_pretrained(self.config.model.path, trust_remote_code=False)
            choose_template(tokenizer, self.config.model.chat_template)
            self.rollout_role = self._build_rollout(tokenizer)
            if self.offload.names:
                self.engine.sleep()  # A checkpoint may be loaded first; the sync wakes it.

    @dispatch(send="scatter", collect="stream")
    def rollout(
        self, tasks: list[PromptTask], call: RolloutCall, queue: Queue = NO_QUEUE
    ) -> Iterator[Progress | Collected]:
        """Generate and verify; yields Progress now and then, and what there is last."""
        yield from self._rollout.run(tasks, call, queue)

    @dispatch()
    def interrupted_rollout(self, end: bool) -> Collected:
        """What the calls of `rollout` with slices have so far; its tokens by `take_shard`. end: they do not go on."""
        return self._rollout.interrupted(end=end, keep=self.spec.keeps)

    @dispatch()
    def take_shard(self) -> list[Any]:
        """A reference, in a list, to the SampleShard of the last rollout; None if this worker generated nothing.

        It is not in the rollout's report: Ray may drop the count of a reference within a generator's output before the
        receiver is registered, and then a `get` waits indefinitely (ray-project/ray#58080).
        """
        import ray

        shard = self._rollout.take_shard()
        return [None if shard is None else ray.put(shard)]

    @dispatch()
    def texts(self, count: int) -> list[dict[str, Any]]:
        """The first `count` samples of this worker's last rollout."""
        return self._rollout.texts(count)

    @dispatch()
    def release_rollout_memory(self) -> None:
        self._rollout.pause()
        self._cache_probe()
        self._colocated.sleep()
        self.engine_takes_part(False)

    @dispatch(send="data")
    def load(self, bins: Sequence[Sequence[Bin]], step: StepWork) -> None:
        """Fetch this data rank's samples, [minibatch][micro-batch], from the shards and pack them."""
        import torch

        step = step if self.dims.leads(self.rank) else replace(step, recording=None)
        dtype = getattr(torch, self.spec.dtype)
        self.batch = TrainBatch(bins, step, self.device, self.spec.images, dtype)
        if self.policy is not None:
            self.policy.begin(self.batch, step.version)
        self.recorder.begin(step, bins, self.batch, spare=self.rank == 0)

    @dispatch()
    def drop_batch(self) -> None:
        """Free the batch: its memory is needed, or its step is over."""
        self.batch = None

    @dispatch()
    def compute_old_log_probs(self) -> None:
        self.offload.to_device("policy")
        self._policy.compute_old_log_probs(self._batch)

    @dispatch()
    def compute_reference_log_probs(self) -> None:
        self.offload.to_device("policy" if self._policy.reference is None else "reference")
        self._policy.compute_reference_log_probs(self._batch)
        self.offload.to_host("reference")

    @dispatch()
    def infer_critic(self) -> None:
        """Compute the critic's output for the batch's tokens: values, or process rewards."""
        self.offload.to_device("critic")
        self._critic.infer(self._batch)

    @dispatch()
    def infer_teachers(self) -> None:
        """Compute the teachers' log-probs of the batch's tokens, and of their likeliest tokens."""
        assert self.teacher is not None, "this group has no teacher"
        for number in range(len(self.teacher.models)):
            held = [f"teacher-{number}"] if number in self.teacher.held else []
            self.offload.to_device(*held)
            self.teacher.infer(self._batch, number)
            self.offload.to_host(*held)

    @dispatch()
    def compute_advantages(self, kl_coef: float) -> None:
        """Fill in the tokens' advantages and returns and, if the loss treats some differently or the correction rejects
        some, which."""
        algorithm, ranks = self._policy.algorithm, self._policy.policy.ranks
        if algorithm.rejects:
            fill_kept(algorithm, self._batch, ranks)
        fill_advantages(algorithm, self._batch, ranks, kl_coef)
        if algorithm.token_selector is not None:
            fill_selected(algorithm, self._batch, ranks)
        if not algorithm.advantages_before_tokens:
            self.recorder.saw_advantages(self._batch)

    @dispatch(collect="sum")
    def update(self, minibatch: int, coefficients: Coefficients) -> dict[str, float]:
        """One optimizer step of the policy; sums over all ranks' tokens."""
        self.offload.to_device("policy")
        self.offload.to_device("policy.optimizer", ahead=True)
        return self._policy.update(self._batch, minibatch, coefficients)

    @dispatch(collect="sum")
    def update_critic(self, minibatch: int, lr: float) -> dict[str, float]:
        """One optimizer step of the critic; sums over all ranks' tokens."""
        self.offload.to_device("critic")
        self.offload.to_device("critic.optimizer", ahead=True)
        return self._critic.update(self._batch, minibatch, lr)

    @dispatch()
    def save_minibatch(self, minibatch: int, path: str) -> str:
        """Write what this rank trains on in a minibatch to `path`, with `{rank}` in its name. Returns the error, or
        "": a batch saved for inspection must not stop the run."""
        try:
            self._batch.save(minibatch, Path(filled_path(path, "rank", self.rank)))
        except (OSError, RuntimeError) as error:
            return str(error).splitlines()[0]
        return ""

    @dispatch()
    def export_tokens(self, name: str) -> Any:
        """A reference, in a list, to this rank's values under `name`, for another group."""
        import ray

        return [ray.put(self._batch.export(name))]

    @dispatch()
    def import_tokens(self, name: str, exported: list[list[Any]]) -> None:
        """Fill in what all ranks of another group exported."""
        import ray

        by_sample: dict[int, Any] = {}
        for reference in exported:
            by_sample |= ray.get(reference[0], timeout=FETCH_TIMEOUT_S)
        self._batch.fill(name, by_sample)

    @dispatch()
    def startup_moments(self) -> dict[str, float]:
        return startup_times.moments()

    @dispatch(send="first", collect="first")
    def describe_engine(self) -> str:
        """What generates the responses; empty if nothing here does, or it does not say."""
        return self.engine.describe() if isinstance(self.engine, Described) else ""

    @dispatch()
    def start_profile(self) -> None:
        worker_profile.start()

    @dispatch()
    def stop_profile(self, path: str) -> str:
        """Write the recording to `path`, with `{rank}` in its name. Returns the error, or ""."""
        try:
            worker_profile.stop(Path(filled_path(path, "rank", self.rank)))
        except OSError as error:
            return str(error)
        return ""

    @dispatch()
    def save_state(self, folder: str) -> None:
        """Copy all state that training has changed here (trained parameters of policy and critic, their optimizers,
        random states), then write it to the new folder `folder` in the background of training; on a CPU without room
        for a copy, write it before training goes on. Collective. Waits for an earlier one first."""
        from rlcli.model.io.model_state import copied, rng_state

        self.writer.wait()  # or two copies would be in memory at once
        state = {key: value for name, model in self._trained().items() for key, value in model.state(name).items()}
        if self.spec.device == "cpu" and not room_for_copy(state, self.config.all_workers):
            self.writer.start(state, rng_state(), Path(folder))
            self.writer.wait()
        else:
            self.offload.forget_copies()  # they have been written
            self.writer.start(copied(state, self.offload.copied), rng_state(), Path(folder))

    @dispatch()
    def state_saved(self, wait: bool) -> Files | None:
        """Files that this rank wrote in the last `save_state`, name (below the folder's parent) → `{"size",
        "sha256"}`; None while it still writes. RunFailed if writing failed, on any rank: the next one may succeed.
        """
        if wait:
            self.recorder.flush()  # the record of the checkpoint's step is part of what a machine must not lose
        return self.writer.files(wait) if self.recorder.idle else None

    @dispatch()
    def load_state(self, folder: str) -> None:
        """Load what `save_state` wrote, on this number of ranks or another. CheckpointError if the folder is of other
        models. A rank that did not exist then keeps the random state of its seed."""
        from rlcli.model.io.model_state import restore_rng_state

        self.recorder.flush()  # before the files of later steps are removed
        self.offload.to_device("policy", "policy.optimizer", "critic", "critic.optimizer")
        for name, model in self._trained().items():
            model.load_state(Path(folder), name)
        restore_rng_state(Path(folder), self.rank)

    @dispatch(send="first", collect="first")
    def write_waiting(self, path: str, shards: list[list[Any]]) -> Files:
        """Write the shards behind these references, each in its own list, to one file; returns its size and hash, under
        its name."""
        import ray

        found = [ray.get(shard, timeout=FETCH_TIMEOUT_S) for (shard,) in shards]
        return write_waiting(Path(path), found)

    @dispatch(send="first", collect="first")
    def read_waiting(self, path: str) -> list[Any]:
        """References to the shards that `write_waiting` wrote, in their order."""
        import ray

        return [ray.put(shard) for shard in read_waiting(Path(path))]

    @dispatch(collect="first")
    def probe_log_probs(self, tokens: list[int]) -> list[float]:
        """The trainer's log-probs of `tokens` from the second on, at temperature 1. Collective."""
        import numpy as np

        self.offload.to_device("policy")
        found: list[float] = self._policy.probe_log_probs(np.asarray(tokens, np.int32)).tolist()
        return found

    @dispatch(collect="first")
    def recent_rows(self, tokens: int) -> list[tuple[Any, int]]:
        """Samples of the step with about so many drawn tokens, each its tokens and how many are the prompt."""
        return self._policy.log_prob_record.recent(tokens)

    @dispatch(collect="first")
    def trainer_log_probs(self, rows: list[tuple[Any, int]], unit: float = 0.0, seed: int = 0) -> list[Any]:
        """See `PolicyRole.rows_log_probs`. Collective."""
        self.offload.to_device("policy")
        return self._policy.rows_log_probs(rows, unit, seed)

    @dispatch()
    def engine_log_probs(self, rows: list[tuple[Any, int]]) -> list[Any]:
        """The engine's log-probs of the tokens behind each row's prompt, float32, at temperature 1."""
        return [self.engine.prompt_log_probs(tokens)[prompt - 1 :] for tokens, prompt in rows]

    @dispatch()
    def step_report(self) -> StepReport:
        """What this worker measured and recorded of a step, once it is over and the device is idle. Peak memory is of
        each phase since the last call (see `rlcli.cluster.process.peak_memory`). Raises `RunFailed` if the step's
        samples cannot be written."""
        if self.rollout_role is not None:
            self.rollout_role.finish_saving()
        peaks, (advantages, problem) = peak_memory.collect(), self.recorder.finish()
        counts = self.engine.counts() if isinstance(self.engine, Counting) else {}
        # Ranks that do not lead compute what another one does.
        leads = self.policy is not None and self.dims.leads(self.rank)
        compared = self._policy.log_prob_record.comparison() if leads else None
        return StepReport(peaks, busy_lanes.collect(), advantages, problem, counts, compared)

    @dispatch()
    def busy_spans(self) -> list[busy_lanes.Span]:
        """The calls since they were collected last."""
        return busy_lanes.collect()

    def close(self) -> None:
        """Close what this process holds, in order: files, engine, scoring processes, process group, watchdog."""
        import torch.distributed as dist

        self.recorder.flush()
        with contextlib.suppress(Exception):
            if self.rollout_role is not None:
                self.rollout_role.finish_saving()
        with contextlib.suppress(Exception):
            if self.engine is not None:
                self.engine.close()
        with contextlib.suppress(Exception):
            self._close_rollout()
            forget_worker(self.spec, self.rank)
        if dist.is_initialized():
            dist.destroy_process_group()
        watchdog.stop()

    def _trained(self) -> dict[str, TrainingBackend]:
        """Models trained here, by name."""
        policy = {"policy": self.policy.policy} if self.policy is not None else {}
        return policy | ({"critic": self.critic.model} if self.critic is not None else {})

    def _models(self) -> dict[str, TrainingBackend]:
        """All models here, by name."""
        frozen = {} if self.teacher is None else {f"teacher-{n}": one for n, one in self.teacher.held.items()}
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

    def _build_rollout(self, tokenizer: Any) -> RolloutRole:
        if self.rollout_role is not None:
            self.rollout_role.forget()
        self._close_rollout()
        leads = self.rank % self.config.rollout.tensor_parallel == 0  # else another rank of this engine verifies
        scorer = scoring_service(self.spec, tokenizer) if leads else None  # loads in the background
        self._build_engine()
        if self.spec.adapter:
            self.engine.load_adapter(self.spec.adapter)
        sight = None if self.spec.images is None else Sight(self.spec.images)
        environments = self._environments(tokenizer, sight) if leads and self.spec.environments else None
        if scorer is not None:
            scorer.wait_ready()
        return RolloutRole(
            self.rank,
            self.engine,
            scorer,
            thinking=self.spec.thinking,
            stop_token_ids=self.spec.stop_token_ids,
            environments=environments,
            conversing=bool(self.spec.environments),
            ordered=self.config.train.deterministic or self.config.counts_steps,
            sight=sight,
            grouped=scorer.grouped if scorer is not None else (),
        )

    def _environments(self, tokenizer: Any, sight: Sight | None) -> Environments | AgentPool:
        """With the chat template as the driver has fixed it, for the same day."""
        spec, data = self.spec, self.config.data
        chat_template.fix(tokenizer, data.chat_template_kwargs, spec.day)
        given = tokenizer, spec.stop_token_ids
        if self.config.environment.is_command:
            return AgentPool(self.config, *given, opened=spec.thinking, sight=sight)
        return Environments(self.config, spec.environments, *given, opened=spec.thinking, sight=sight)

    def _build_engine(self) -> None:
        engine = engine_named(self.config.rollout.engine)
        with peak_memory.base():
            engine.preload()
        startup_times.done("engine imported")
        spec = engine_spec(self.spec)
        assert self.engine is None or (type(self.engine), self.engine.spec) == (engine, spec), "needs new workers"
        self.engine = self.engine or engine(spec)
        self.engine.on_step = _engine_step
        if isinstance(self.engine, Described):
            sys.stderr.write(f"engine: {self.engine.describe()}\n")
        startup_times.done("engine")

    def _close_rollout(self) -> None:
        """Disconnect from the scoring service, and end the environments' processes."""
        role = self.rollout_role
        if role is not None and role.scorer is not None:
            role.scorer.close()
        if role is not None and role.environments is not None:
            role.environments.close()


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
