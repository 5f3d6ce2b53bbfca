"""The calls from the controller to workers: parameters, result and dispatch of each, in one place.

    workers.call(WorkerCalls.update, 0, coefficients)      # → the sums of all ranks

`Worker` implements it. The loop knows these calls alone, and so no engine, no backend and no parallel dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.rollout.worker_calls import RolloutCalls

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32, Int32, UInt8
    from ray import ObjectRef

    from rlcli.cluster.process.busy_lanes import Span
    from rlcli.data.messages import Coefficients
    from rlcli.data.packer import Bin
    from rlcli.data.sample_files import SampleRow
    from rlcli.data.sample_shard import SampleShard
    from rlcli.data.train_rows import TrainRows
    from rlcli.model.weight_check.checksum import TensorChecksum
    from rlcli.training.worker.rank_step_recorder import StepReport
    from rlcli.training.worker.state_writer import Files
    from rlcli.training.worker.train_batch import TokenColumn
    from rlcli.training.worker.weight_sync.weight_transfer import Header, Synced
    from rlcli.training.worker.worker_spec import WorkerSpec

    Row = tuple[Int32[np.ndarray, " T"], int]
    """Tokens of a sample, and how many of them are the prompt."""
    ExportedTokens = dict[int, np.ndarray]
    """Sample → values of its response tokens."""
    Bucket = tuple[Header, UInt8[np.ndarray, " bytes"]]
    """Header and bytes of weights, as `packed` of `rlcli.training.worker.weight_sync.weight_transfer` makes them."""


class WorkerCalls(RolloutCalls, Protocol):
    """Methods of a worker for its controller, in the order of a run: start, training, weight sync, checkpoints, checks
    and reports; those of generation are `RolloutCalls`. References are passed in lists: Ray would
    replace a plain one by its value."""

    @dispatch()
    def preload(self, engine: str) -> None:
        """Import the modules that `build` needs, also for the engine of this name, if any: most of the startup time of
        a small model."""

    @dispatch()
    def begin(self, spec: WorkerSpec) -> None:
        """Become a worker of this run."""

    @dispatch(collect="first")
    def rendezvous(self) -> tuple[str, int]:
        """Address of the store of a process group's ranks: see `rendezvous_address`."""

    @dispatch()
    def join(self, host: str, port: int) -> None:
        """Form the process group of all ranks. host, port: the result of `rendezvous`."""

    @dispatch()
    def data_rank(self) -> int:
        """The part of a step's rows that this rank computes. The group calls it once."""

    @dispatch()
    def build(self, spec: WorkerSpec | None = None) -> None:
        """Build the roles: those that train first (their memory is known), then the engine, then the verifiers'
        processes. Given another `spec`, for another run on the same ranks, rebuild them, except for the engine, which
        must match the first one's: vLLM destroys torch's process groups when it closes."""

    @dispatch()
    def texts(self, count: int) -> list[SampleRow]:
        """The first `count` samples of this worker's last rollout, as rows of their table."""

    @dispatch()
    def release_rollout_memory(self) -> None:
        """Free the memory of an engine that shares the trainer's device."""

    @dispatch(send="data", shared=["step"])
    def load(self, bins: Sequence[Sequence[Bin]], step: TrainRows) -> None:
        """Fetch this data rank's samples, [minibatch][micro-batch], from the shards and pack them."""

    @dispatch()
    def drop_batch(self) -> None:
        """Free the batch: its memory is needed, or its step is over."""

    @dispatch()
    def compute_old_log_probs(self) -> None:
        """Compute the log-probs of the batch's tokens under the policy before the step's updates."""

    @dispatch()
    def compute_reference_log_probs(self) -> None:
        """Compute the same under the reference model."""

    @dispatch()
    def infer_critic(self) -> None:
        """Compute the critic's output for the batch's tokens: values, or process rewards."""

    @dispatch()
    def infer_teachers(self) -> None:
        """Compute the teachers' log-probs of the batch's tokens, and of their likeliest tokens."""

    @dispatch()
    def compute_advantages(self, kl_coef: float) -> None:
        """Fill in the tokens' advantages and returns and, if the loss treats some differently or the correction rejects
        some, the masks of these."""

    @dispatch(collect="sum")
    def update(self, minibatch: int, coefficients: Coefficients) -> dict[str, float]:
        """One optimizer step of the policy; sums over all ranks' tokens."""

    @dispatch(collect="sum")
    def update_critic(self, minibatch: int, lr: float) -> dict[str, float]:
        """One optimizer step of the critic; sums over all ranks' tokens."""

    @dispatch()
    def save_minibatch(self, minibatch: int, path: str) -> str:
        """Write this rank's rows of a minibatch to `path`, with `{rank}` in its name. Returns the error, or
        "": a batch saved for inspection must not stop the run."""

    @dispatch()
    def export_tokens(self, name: TokenColumn) -> list[ObjectRef[ExportedTokens]]:
        """A reference to this rank's values under `name`, for another group: sample → array."""

    @dispatch(shared=["exported"])
    def import_tokens(self, name: TokenColumn, exported: list[list[ObjectRef[ExportedTokens]]]) -> None:
        """Fill in the values that all ranks of another group exported."""

    @dispatch()
    def sync_weights(self, probe: Int32[np.ndarray, " T"], version: int) -> Synced:
        """Stream the policy into the engine, and check that it holds what was sent; then compare both on `probe` (int32
        token ids). version: of the weights, recorded with each sample that they generate. RunFailed if the engine holds
        anything else, or old prefixes."""

    @dispatch()
    def join_engines(self, host: str, port: int, engines: int) -> str:
        """Form the process group over which the trainers' rank 0 broadcasts weights to `engines` workers (see
        `Broadcast`). host, port: of its store. Called in both groups of workers at once. Returns the error, or ""."""

    @dispatch()
    def broadcast_weights(self, resend_all: bool = False) -> None:
        """Broadcast the policy's weights to engines in other workers. Collective, and at the same time as
        `receive_broadcast` in the engines' workers, which with `rollout.sync = ahead` receive by themselves.
        resend_all: unchanged weights too."""

    @dispatch()
    def receive_broadcast(self) -> int:
        """Receive from `broadcast_weights`, and load the weights or keep them as a copy. Returns the bytes."""

    @dispatch(collect="first")
    def next_weight_bucket(self, first: bool, resend_all: bool = False) -> list[ObjectRef[Bucket]]:
        """A reference to the next bucket of weights for engines in other workers, from the `first` on; an
        empty list after the last. Collective; rank 0 sends. resend_all: unchanged weights too."""

    @dispatch(collect="first")
    def sent_checksums(self) -> dict[str, TensorChecksum]:
        """Checksums of all weights that `next_weight_bucket` returned, or that engines have with what it returned."""

    @dispatch(collect="first")
    def changed_share(self) -> float:
        """Share of the values that differed from those sent before, in the last sync; 1 if all were sent unseen."""

    @dispatch()
    def load_weight_bucket(self, bucket: list[ObjectRef[Bucket]]) -> int:
        """Load the result of another group's `next_weight_bucket`, and wait until the engine has read it; or keep it as
        a copy. Returns its bytes."""

    @dispatch(shared=["sent"])
    def corrupted_tensors(self, sent: dict[str, TensorChecksum]) -> list[str]:
        """Names of the tensors of this worker's copy that differ from `sent`. The engine computes with the
        earlier weights until `activate_weights`."""

    @dispatch(shared=["sent"])
    def activate_weights(
        self, probe: Int32[np.ndarray, " T"], log_probs: list[float], version: int, sent: dict[str, TensorChecksum]
    ) -> Synced:
        """After the last bucket: activate the weights, and check and compare them as `sync_weights` does. log_probs:
        the trainer's, of `probe`. sent: the result of its `sent_checksums`."""

    @dispatch()
    def save_state(self, folder: str) -> None:
        """Copy all state that training has changed here (trained parameters of policy and critic, their optimizers,
        random states), then write it to the new folder `folder` in the background of training; on a CPU without room
        for a copy, write it before training continues. Collective. Waits for an earlier one first."""

    @dispatch()
    def state_saved(self, wait: bool) -> Files | None:
        """Files that this rank wrote in the last `save_state`, name (below the folder's parent) → `{"size",
        "sha256"}`; None while it still writes. RunFailed if writing failed, on any rank: the next one may succeed."""

    @dispatch()
    def load_state(self, folder: str) -> None:
        """Load the state that `save_state` wrote, on any number of ranks. CheckpointError if the folder is of other
        models. An additional rank keeps the random state of its seed."""

    @dispatch(send="first", collect="first")
    def write_waiting(self, path: str, shards: list[list[ObjectRef[SampleShard] | None]]) -> Files:
        """Write the shards behind these references, each in its own list, to one file; returns its size and hash, under
        its name."""

    @dispatch(send="first", collect="first")
    def read_waiting(self, path: str) -> list[ObjectRef[SampleShard]]:
        """References to the shards that `write_waiting` wrote, in their order."""

    @dispatch(collect="first")
    def probe_log_probs(self, tokens: list[int]) -> list[float]:
        """The trainer's log-probs of `tokens` from the second on, at temperature 1. Collective."""

    @dispatch(collect="first")
    def recent_rows(self, tokens: int) -> list[Row]:
        """Samples of the step with about this many response tokens."""

    @dispatch(collect="first")
    def trainer_log_probs(self, rows: list[Row], unit: float = 0.0, seed: int = 0) -> list[Float32[np.ndarray, " R"]]:
        """See `PolicyRole.rows_log_probs`. Collective."""

    @dispatch()
    def engine_log_probs(self, rows: list[Row]) -> list[Float32[np.ndarray, " R"]]:
        """The engine's log-probs of the tokens behind each row's prompt, float32, at temperature 1."""

    @dispatch()
    def step_report(self) -> StepReport:
        """Measurements and records of a step, once it is over and the device is idle. Peak memory is of each
        phase since the last call (see `rlcli.cluster.process.peak_memory`). Raises `RunFailed` if the step's
        samples cannot be written."""

    @dispatch()
    def busy_spans(self) -> list[Span]:
        """The calls since the last collection."""

    @dispatch()
    def startup_moments(self) -> dict[str, float]:
        """Times at which the parts of this worker's start were done: name → seconds since 1970."""

    @dispatch(send="first", collect="first")
    def describe_engine(self) -> str:
        """Library and version of the engine; empty without an engine, or if it reports none."""

    @dispatch()
    def start_profile(self) -> None:
        """Start to profile this process."""

    @dispatch()
    def stop_profile(self, path: str) -> str:
        """Write the profile to `path`, with `{rank}` in its name. Returns the error, or ""."""


Workers = WorkerGroup[WorkerCalls]
"""A group of workers, as the controller knows them."""
