"""The worker's part in a weight sync: stream the policy to the engine, local or in other workers, and check it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.cluster.dispatch import implements
from rlcli.cluster.process import peak_memory
from rlcli.cluster.watchdog import progress
from rlcli.data.sample_shard import FETCH_TIMEOUT_S
from rlcli.rollout.engine import Colocated
from rlcli.rollout.worker.rollout_role import RolloutRole
from rlcli.support.daemon_thread import in_background
from rlcli.training.worker.calls import WorkerCalls
from rlcli.training.worker.policy_role import PolicyRole
from rlcli.training.worker.train_batch import TrainBatch
from rlcli.training.worker.weight_sync.sync_checks import QuantizedSyncCheck, check_prefixes, check_verified
from rlcli.training.worker.weight_sync.weight_broadcast import BUCKET_BYTES as BROADCAST_BYTES
from rlcli.training.worker.weight_sync.weight_broadcast import Broadcast
from rlcli.training.worker.weight_sync.weight_transfer import (
    BUCKET_BYTES,
    Incoming,
    NamedTensor,
    Synced,
    largest,
    load_files,
    outgoing,
    packed,
    record_sizes,
    save_adapter,
    unpacked,
)
from rlcli.training.worker.worker_spec import WorkerSpec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from jaxtyping import Float32, Int32
    from ray import ObjectRef

    from rlcli.model.parallel.host_memory import HostMemory
    from rlcli.model.parallel.offload import Offload
    from rlcli.model.parallel.weight_delta import LastSent, WeightCopy
    from rlcli.model.weight_check.checksum import Checksums, TensorChecksum
    from rlcli.training.worker.calls import Bucket


ANNOUNCED_EVERY_S = 0.1
"""Interval at which an engine's worker checks whether new weights are announced."""


class WeightSync:
    """The weight sync methods of `Worker`."""

    rank: int
    """Rank of the worker in its group."""
    device: torch.device
    """Its device."""
    spec: WorkerSpec
    """The specification that it is built from."""
    offload: Offload
    """Moves models and optimizers between device and host."""
    policy: PolicyRole | None
    """The policy, if it trains one."""
    rollout_role: RolloutRole | None
    """The engine's role, if it generates."""
    batch: TrainBatch | None
    """The rows of the current step; freed by a sync."""
    probe: Int32[np.ndarray, " T"] | None = None
    """Tokens of the last sync's probe."""
    sent: Mapping[str, TensorChecksum]
    """Checksums of the weights of the last sync."""
    copy: WeightCopy | None
    """In an engine's worker: all weights as they were received, with any `rollout.sync` but `full`."""
    last_sent: LastSent | None
    """In the trainer: the weights that were sent last, with `rollout.sync = delta`."""
    _receiving: Future[int] | None
    """The broadcast that is received in the background, with `rollout.sync = ahead`: its bytes."""
    _host_buffer: HostMemory | None = None
    """Host memory of a bucket between a GPU and Ray's object store."""

    def __init__(self) -> None:
        self.buckets: Iterator[list[NamedTensor]] = iter(())
        self.incoming: Incoming | None = None
        self.broadcast: Broadcast | None = None
        self.checksums: Checksums | LastSent | None = None
        self._reset_sync_state()

    @implements(WorkerCalls.sync_weights)
    def sync_weights(self, probe: Int32[np.ndarray, " T"], version: int) -> Synced:
        from rlcli.model.weight_check.checksum import Checksums

        engine, policy, sums = self._rollout.engine, self._policy.policy, Checksums()
        self.batch = None
        self.offload.to_host("policy.optimizer", "critic.optimizer", "critic")
        self.offload.to_device("policy")
        self.set_engine_active(True)
        peak_memory.mark()
        self._colocated.wake_weights()
        start, sizes = time.perf_counter(), list[int]()
        if self.spec.context.separate_adapter:
            # Each rank writes its own copy: ranks of other machines do not see this folder.
            with tempfile.TemporaryDirectory(prefix=self.spec.adapter_prefix, dir=_fast_folder()) as folder:
                self._add_base(sums)
                save_adapter(policy, Path(folder), sums, policy.dtype)
                sizes += [file.stat().st_size for file in Path(folder).iterdir()]
                engine.load_adapter(folder)
        else:
            self._load(record_sizes(sums.of(policy.stream_weights()), sizes))
        self._await_device()
        seconds = time.perf_counter() - start
        log_probs = self._policy.probe_log_probs(probe)
        self.offload.to_host("policy")
        peak_memory.mark()
        return self._verify_and_activate(probe, log_probs, version, sums.sent())._replace(
            bytes=sum(sizes), seconds=seconds
        )

    @implements(WorkerCalls.join_engines)
    def join_engines(self, host: str, port: int, engines: int) -> str:
        sends = self.policy is not None
        if sends and self.rank:
            return ""
        timeout_s = 2 * self.spec.config.fault_tolerance.stall_s
        try:
            self.broadcast = self._receiving = None  # of an earlier run on these workers
            rank = 0 if sends else 1 + self.rank
            self.broadcast = Broadcast(host, port, rank, 1 + engines, self.device, timeout_s)
        except (OSError, RuntimeError) as error:
            return str(error).splitlines()[0]
        return ""

    @implements(WorkerCalls.broadcast_weights)
    def broadcast_weights(self, resend_all: bool = False) -> None:
        buckets = self._stream_buckets(BROADCAST_BYTES, resend_all)
        if self.broadcast is not None:
            self.broadcast.send(buckets)
        for _ in buckets:  # the other ranks only gather
            progress()

    @implements(WorkerCalls.receive_broadcast)
    def receive_broadcast(self) -> int:
        assert self.broadcast is not None, "join_engines comes first"
        if self.spec.config.copies_weights:
            receiving, self._receiving = self._receiving, None
            return receiving.result() if receiving is not None else self._receive_copy(self.broadcast)
        self._pause()
        sizes = list[int]()
        self._load(record_sizes(self.broadcast.received(), sizes))
        self._await_device()
        return sum(sizes)

    @implements(WorkerCalls.next_weight_bucket)
    def next_weight_bucket(self, first: bool, resend_all: bool = False) -> list[ObjectRef[Bucket]]:
        import ray
        import torch

        if first:
            self.buckets = self._stream_buckets(BUCKET_BYTES, resend_all)
        bucket = next(self.buckets, None)
        if bucket is None or self.rank:
            return []
        if self.device.type == "cuda":
            from rlcli.model.parallel.host_memory import HostMemory

            self._host_buffer = self._host_buffer or HostMemory()
        header, values = packed(bucket, torch.device("cpu"), self._host_buffer)
        return [ray.put((header, values.numpy()))]

    @implements(WorkerCalls.sent_checksums)
    def sent_checksums(self) -> dict[str, TensorChecksum]:
        assert self.checksums is not None, "nothing was sent"
        sent, self.checksums = self.checksums.sent(), None
        return sent

    @implements(WorkerCalls.changed_share)
    def changed_share(self) -> float:
        last = self.last_sent
        return last.changed / max(last.total, 1) if last is not None else 1.0

    @implements(WorkerCalls.load_weight_bucket)
    def load_weight_bucket(self, bucket: list[ObjectRef[Bucket]]) -> int:
        import ray
        import torch

        sizes: list[int] = []
        header, values = ray.get(bucket[0], timeout=FETCH_TIMEOUT_S)
        if self.spec.config.copies_weights:
            self._weight_copy.take(record_sizes(unpacked(header, torch.from_numpy(values)), sizes))
            return sum(sizes)
        if self.incoming is None:
            self._pause()
            self.incoming = Incoming(self._load)
        self.incoming.give(record_sizes(unpacked(header, torch.from_numpy(values)), sizes))
        self._await_device()
        return sum(sizes)

    @implements(WorkerCalls.corrupted_tensors)
    def corrupted_tensors(self, sent: dict[str, TensorChecksum]) -> list[str]:
        return self._weight_copy.differences(sent)

    @implements(WorkerCalls.activate_weights)
    def activate_weights(
        self, probe: Int32[np.ndarray, " T"], log_probs: list[float], version: int, sent: dict[str, TensorChecksum]
    ) -> Synced:
        import numpy as np

        if self.incoming is not None:
            self.incoming.end()
            self.incoming = None
        start = time.perf_counter()
        if self.spec.config.copies_weights:
            self._pause()
            self._load(self._weight_copy.named())
        self._await_device()
        seconds = time.perf_counter() - start
        loaded = self._verify_and_activate(probe, np.asarray(log_probs), version, sent)._replace(seconds=seconds)
        if "ahead" in self.spec.config.rollout.sync and self.broadcast is not None:
            self._receiving = in_background(partial(self._receive_announced, self.broadcast))
        return loaded

    @property
    def _weight_copy(self) -> WeightCopy:
        from rlcli.model.parallel.weight_delta import WeightCopy

        if self.copy is None:
            self.copy = WeightCopy()
        return self.copy

    def _receive_copy(self, broadcast: Broadcast) -> int:
        """Receive a broadcast into the copy; returns its bytes."""
        sizes = list[int]()
        self._weight_copy.take(record_sizes(broadcast.received(), sizes))
        return sum(sizes)

    def _receive_announced(self, broadcast: Broadcast) -> int:
        """As `_receive_copy`, once the sender has begun; while the engine generates."""
        while not broadcast.is_announced():
            if self.broadcast is not broadcast:
                return 0  # another run has started on these workers
            time.sleep(ANNOUNCED_EVERY_S)
        return self._receive_copy(broadcast)

    def _stream_buckets(self, bucket_bytes: int, resend_all: bool = False) -> Iterator[list[NamedTensor]]:
        """The weights for engines in other workers, in buckets; afterwards `checksums` has those of all weights that
        they must hold. resend_all: unchanged weights too. Collective."""
        from rlcli.model.parallel.weight_delta import LastSent
        from rlcli.model.weight_check.checksum import Checksums

        policy = self._policy.policy
        if "delta" in self.spec.config.rollout.sync:
            self.last_sent = self.last_sent or LastSent()
            if resend_all:
                self.last_sent.forget()
            self.batch, self.checksums = None, self.last_sent
            return policy.stream_changes(self.last_sent, bucket_bytes)
        self.batch, self.checksums = None, Checksums()
        adapter = (
            (_fast_folder(), self.spec.adapter_prefix, policy.dtype) if self.spec.context.separate_adapter else None
        )
        if adapter is not None:
            self._add_base(self.checksums)
        return outgoing(policy, self.checksums, adapter, bucket_bytes)

    def _load(self, weights: Iterator[NamedTensor]) -> None:
        """Load weights, or an adapter's files, into the engine."""
        engine = self._rollout.engine
        if self.spec.context.separate_adapter:
            load_files(engine, _fast_folder(), self.spec.adapter_prefix, weights)
        else:
            engine.load_weights(weights)
        for _ in weights:  # also those that the engine does not read
            pass

    def _reset_sync_state(self) -> None:
        """Drop the checksums, copies and references of earlier weights."""
        self.quantized_check, self.sent, self.base_added = QuantizedSyncCheck(), {}, False
        self.copy = self.last_sent = self._receiving = None

    def _verify_and_activate(
        self,
        probe: Int32[np.ndarray, " T"],
        log_probs: Float32[np.ndarray, " R"],
        version: int,
        sent: dict[str, TensorChecksum],
    ) -> Synced:
        """Check the loaded weights, then let the engine generate with them as `version`. Raises RunFailed."""
        engine, start = self._rollout.engine, time.perf_counter()
        verified = engine.verify(sent)
        check_verified(verified, len(sent), self.rank)
        check_s = time.perf_counter() - start
        if isinstance(engine, Colocated):
            engine.wake_cache()
        cached, generates = engine.probe(probe)
        check_prefixes(cached, self.rank)
        self._rollout.version, self.probe = version, probe
        if verified.unchecked:
            self.quantized_check.check(log_probs, generates, self.rank)
        difference = largest(log_probs - generates)
        changed = sum(self.sent.get(name) != checksum for name, checksum in sent.items())
        self.sent = sent
        return Synced(difference, 0, 0.0, verified.tensors, verified.unchecked, check_s, changed)

    def _add_base(self, sums: Checksums) -> None:
        """Add to `sums` the base weights besides an adapter, which the engine read from the checkpoint itself. Only at
        the first sync: they never change. Collective."""
        if not self.base_added:
            for _ in sums.of(self._policy.policy.stream_base()):
                pass
        self.base_added = True

    def _pause(self) -> None:
        """Prepare the engine for new weights: it aborts its requests, or keeps them (`async.on_update = keep`)."""
        if not self.spec.context.keeps:
            self._rollout.pause()
        self._cache_probe()
        if self.spec.context.keeps:  # the engine has generated more meanwhile
            self._rollout.pause(keep=True)

    def _cache_probe(self) -> None:
        """Have the engine cache the probe of the last sync as a prefix: the next sync looks for it."""
        if self.probe is not None:
            self._rollout.engine.cached_tokens(self.probe)

    def set_engine_active(self, active: bool) -> None:
        """Set whether an engine uses memory of this GPU, for torch's allocator (see `growing_segments`). An engine that
        never sleeps always does, and has no pool beside torch's."""
        if self.device.type == "cuda":
            from rlcli.model.parallel.offload import growing_segments

            stays_awake = "engine" in self.spec.roles and self.spec.engine.sleep == "none"
            growing_segments(not active and not stays_awake)

    def _await_device(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.accelerator.synchronize()

    @property
    def _policy(self) -> PolicyRole:
        assert self.policy is not None, "this group only generates"
        return self.policy

    @property
    def _rollout(self) -> RolloutRole:
        assert self.rollout_role is not None, "this group does not generate"
        return self.rollout_role

    @property
    def _colocated(self) -> Colocated:
        engine = self._rollout.engine
        assert isinstance(engine, Colocated), "refused before the run starts"
        return engine


def _fast_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
