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
from rlcli.rollout.engine import Colocated
from rlcli.workers.roles.batch import FETCH_TIMEOUT_S, TrainBatch
from rlcli.workers.roles.offload import OffloadManager
from rlcli.workers.roles.policy import PolicyRole
from rlcli.workers.roles.rollout import RolloutRole
from rlcli.workers.roles.weight_transfer import (
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
    from rlcli.model.weight_check.checksum import Checksums, Sent


class WeightSync:
    """The weight sync methods of `Worker`. probe: of the last sync. sent: what it sent."""

    rank: int
    spec: WorkerSpec
    offload_manager: OffloadManager
    policy: PolicyRole | None
    rollout_role: RolloutRole | None
    batch: TrainBatch | None
    probe: Any = None
    sent: Mapping[str, Sent]

    def __init__(self) -> None:
        self.outgoing: Iterator[list[Named]] = iter(())
        self.incoming: Incoming | None = None
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
        self.offload_manager.send("policy.optimizer", "critic.optimizer", "critic")
        self.offload_manager.bring("policy")
        self.offload_manager.engine_takes_part(True)
        memory.mark()
        self._colocated.wake_weights()
        began, sizes = time.perf_counter(), list[int]()
        if self.spec.adapter_apart:
            # Each rank writes its own copy: ranks of other machines do not see this folder.
            with tempfile.TemporaryDirectory(prefix=self.spec.adapter_prefix, dir=_fast_folder()) as folder:
                self._add_base(sums)
                save_adapter(policy, Path(folder), sums, policy.dtype)
                sizes += [file.stat().st_size for file in Path(folder).iterdir()]
                engine.load_adapter(folder)
        else:
            weights = counted(sums.of(policy.stream_weights()), sizes)
            engine.load_weights(weights)
            for _ in weights:  # What it has not read was sent too.
                pass
        self._await_device()
        seconds = time.perf_counter() - began
        log_probs = self._policy.probe_log_probs(probe)
        self.offload_manager.send("policy")
        memory.mark()
        return self._loaded(probe, log_probs, version, sums.sent())._replace(bytes=sum(sizes), seconds=seconds)

    @dispatch(collect="first")
    def send_weights(self, first: bool) -> list[Any]:
        """A reference, in a list, to the next bucket that engines in other workers need of the policy, from the `first`
        on; an empty list after the last. Collective; rank 0 sends."""
        import ray

        from rlcli.model.weight_check.checksum import Checksums

        if first:
            self.batch, self.sums = None, Checksums()
            policy = self._policy.policy
            place = (_fast_folder(), self.spec.adapter_prefix, policy.dtype) if self.spec.adapter_apart else None
            if place is not None:
                self._add_base(self.sums)
            self.outgoing = outgoing(policy, self.sums, place)
        bucket = next(self.outgoing, None)
        return [] if bucket is None or self.rank else [ray.put(packed(bucket))]

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

        engine = self._rollout.engine
        if self.incoming is None:
            self._cache_probe()
            adapter = load_files(engine, _fast_folder(), self.spec.adapter_prefix)
            self.incoming = Incoming(adapter if self.spec.adapter_apart else engine.load_weights)
        sizes: list[int] = []
        self.incoming.give(counted(unpacked(ray.get(bucket[0], timeout=FETCH_TIMEOUT_S)), sizes))
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
