"""The worker's part in a weight sync: stream the policy to the engine, local or in other workers, and check it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.process import memory
from rlcli.cluster.watchdog import progress
from rlcli.rollout.engine import Colocated
from rlcli.workers.roles.batch import FETCH_TIMEOUT_S, TrainBatch
from rlcli.workers.roles.policy import PolicyRole
from rlcli.workers.roles.rollout import RolloutRole
from rlcli.workers.roles.weight_broadcast import BUCKET_BYTES as BROADCAST_BYTES
from rlcli.workers.roles.weight_broadcast import Broadcast
from rlcli.workers.roles.weight_transfer import (
    BUCKET_BYTES,
    Incoming,
    Named,
    Synced,
    counted,
    largest,
    load_files,
    outgoing,
    packed,
    save_adapter,
    unpacked,
)
from rlcli.workers.spec import WorkerSpec
from rlcli.workers.synced import Follows, check_prefixes, check_verified

if TYPE_CHECKING:
    import torch

    from rlcli.model.parallel.offload import Offload
    from rlcli.model.weight_check.checksum import Checksums, Sent


class WeightSync:
    """The weight sync methods of `Worker`. probe: of the last sync. sent: what it sent."""

    rank: int
    device: torch.device
    spec: WorkerSpec
    offload: Offload
    policy: PolicyRole | None
    rollout_role: RolloutRole | None
    batch: TrainBatch | None
    probe: Any = None
    sent: Mapping[str, Sent]

    def __init__(self) -> None:
        self.outgoing: Iterator[list[Named]] = iter(())
        self.incoming: Incoming | None = None
        self.broadcast: Broadcast | None = None
        self.sums: Checksums | None = None
        self._begin_syncs()

    @dispatch()
    def sync_weights(self, probe: Any, version: int) -> Synced:
        """Stream the policy into the engine, and check that it holds what was sent; then compare both on `probe` (int32
        token ids); the controller applies its tolerance. version: of the weights, recorded with each sample that they
        generate. RunFailed if the engine holds anything else, or old prefixes."""
        from rlcli.model.weight_check.checksum import Checksums

        engine, policy, sums = self._rollout.engine, self._policy.policy, Checksums()
        self.batch = None
        self.offload.to_host("policy.optimizer", "critic.optimizer", "critic")
        self.offload.to_device("policy")
        self.engine_takes_part(True)
        memory.mark()
        self._colocated.wake_weights()
        began, sizes = time.perf_counter(), list[int]()
        if self.spec.separate_adapter:
            # Each rank writes its own copy: ranks of other machines do not see this folder.
            with tempfile.TemporaryDirectory(prefix=self.spec.adapter_prefix, dir=_fast_folder()) as folder:
                self._add_base(sums)
                save_adapter(policy, Path(folder), sums, policy.dtype)
                sizes += [file.stat().st_size for file in Path(folder).iterdir()]
                engine.load_adapter(folder)
        else:
            self._load(counted(sums.of(policy.stream_weights()), sizes))
        self._await_device()
        seconds = time.perf_counter() - began
        log_probs = self._policy.probe_log_probs(probe)
        self.offload.to_host("policy")
        memory.mark()
        return self._loaded(probe, log_probs, version, sums.sent())._replace(bytes=sum(sizes), seconds=seconds)

    @dispatch()
    def join_engines(self, address: str, port: int, engines: int) -> str:
        """Form the process group over which the trainers' rank 0 broadcasts weights to `engines` workers (see
        `Broadcast`), at a free port of rank 0. Called in both groups of workers at once. Returns the error, or ""."""
        sends = self.policy is not None
        if sends and self.rank:
            return ""
        timeout_s = 2 * self.spec.config.fault_tolerance.stall_s
        try:
            self.broadcast = None  # of an earlier run on these workers
            place = 0 if sends else 1 + self.rank
            self.broadcast = Broadcast(address, port, place, 1 + engines, self.device, timeout_s)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""

    @dispatch()
    def broadcast_weights(self) -> None:
        """Broadcast what engines in other workers need of the policy. Collective, and at the same time as
        `receive_broadcast` in the engines' workers."""
        buckets = self._outgoing(BROADCAST_BYTES)
        if self.broadcast is not None:
            self.broadcast.send(buckets)
        for _ in buckets:  # the other ranks only gather
            progress()

    @dispatch()
    def receive_broadcast(self) -> int:
        """Load what `broadcast_weights` sends. Returns its bytes."""
        assert self.broadcast is not None, "join_engines comes first"
        self._cache_probe()
        sizes = list[int]()
        self._load(counted(self.broadcast.received(), sizes))
        self._await_device()
        return sum(sizes)

    @dispatch(collect="first")
    def send_weights(self, first: bool) -> list[Any]:
        """A reference, in a list, to the next bucket that engines in other workers need of the policy, from the `first`
        on; an empty list after the last. Collective; rank 0 sends."""
        import ray
        import torch

        if first:
            self.outgoing = self._outgoing(BUCKET_BYTES)
        bucket = next(self.outgoing, None)
        if bucket is None or self.rank:
            return []
        header, values = packed(bucket, torch.device("cpu"))
        return [ray.put((header, values.numpy()))]

    @dispatch(collect="first")
    def sent_weights(self) -> dict[str, Sent]:
        """Checksums of everything that `send_weights` returned."""
        assert self.sums is not None, "nothing was sent"
        sent, self.sums = self.sums.sent(), None
        return sent

    @dispatch()
    def receive_weights(self, bucket: list[Any]) -> int:
        """Load the result of another group's `send_weights`, and wait until the engine has read it. Returns its
        bytes."""
        import ray
        import torch

        if self.incoming is None:
            self._cache_probe()
            self.incoming = Incoming(self._load)
        sizes: list[int] = []
        header, values = ray.get(bucket[0], timeout=FETCH_TIMEOUT_S)
        self.incoming.give(counted(unpacked(header, torch.from_numpy(values)), sizes))
        self._await_device()
        return sum(sizes)

    @dispatch()
    def weights_received(self, probe: Any, log_probs: list[float], version: int, sent: dict[str, Sent]) -> Synced:
        """After the last bucket: activate the weights, and check and compare them as `sync_weights` does. log_probs:
        the trainer's, of `probe`. sent: the result of its `sent_weights`."""
        import numpy as np

        if self.incoming is not None:
            self.incoming.end()
            self.incoming = None
        self._await_device()
        return self._loaded(probe, np.asarray(log_probs), version, sent)

    def _outgoing(self, most_bytes: int) -> Iterator[list[Named]]:
        """Everything that engines in other workers need of the policy, in buckets; its checksums are in `sums` then.
        Collective."""
        from rlcli.model.weight_check.checksum import Checksums

        self.batch, self.sums = None, Checksums()
        policy = self._policy.policy
        place = (_fast_folder(), self.spec.adapter_prefix, policy.dtype) if self.spec.separate_adapter else None
        if place is not None:
            self._add_base(self.sums)
        return outgoing(policy, self.sums, place, most_bytes)

    def _load(self, weights: Iterator[Named]) -> None:
        """Load weights, or an adapter's files, into the engine."""
        engine = self._rollout.engine
        if self.spec.separate_adapter:
            load_files(engine, _fast_folder(), self.spec.adapter_prefix, weights)
        else:
            engine.load_weights(weights)
        for _ in weights:  # What the engine has not read was sent too.
            pass

    def _begin_syncs(self) -> None:
        """Forget the history of earlier weights."""
        self.follows, self.sent, self.base_added = Follows(), {}, False

    def _loaded(self, probe: Any, log_probs: Any, version: int, sent: dict[str, Sent]) -> Synced:
        """Have the engine generate with the weights it received, once the checks have passed."""
        engine, began = self._rollout.engine, time.perf_counter()
        verified = engine.verify(sent)
        check_verified(verified, len(sent), self.rank)
        check_s = time.perf_counter() - began
        if isinstance(engine, Colocated):
            engine.wake_cache()
        cached, generates = engine.probe(probe)
        check_prefixes(cached, self.rank)
        self._rollout.version, self.probe = version, probe
        if verified.unchecked:
            self.follows.check(log_probs, generates, self.rank)
        difference = largest(log_probs - generates)
        changed = sum(self.sent.get(name) != one for name, one in sent.items())
        self.sent = sent
        return Synced(difference, 0, 0.0, verified.tensors, verified.unchecked, check_s, changed)

    def _add_base(self, sums: Checksums) -> None:
        """Add to `sums` what the engine must hold besides an adapter, which it read from the checkpoint itself. Only
        at the first sync, since it never changes. Collective."""
        if not self.base_added:
            for _ in sums.of(self._policy.policy.stream_base()):
                pass
        self.base_added = True

    def _cache_probe(self) -> None:
        """Have the engine cache the probe of the last sync as a prefix: the next sync looks for it."""
        if self.probe is not None:
            self._rollout.engine.cached_tokens(self.probe)

    def engine_takes_part(self, yes: bool) -> None:
        """Whether an engine uses memory of this GPU from here on: otherwise torch allocates its memory in another way
        (see `growing_segments`)."""
        if self.device.type == "cuda":
            from rlcli.model.parallel.offload import growing_segments

            growing_segments(not yes)

    def _await_device(self) -> None:
        if self.spec.device == "cuda":
            import torch

            torch.cuda.synchronize()

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
