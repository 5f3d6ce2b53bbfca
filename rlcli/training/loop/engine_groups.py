"""The engines: in the policy's workers, or in separate workers (`rollout.workers`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from rlcli.errors import RunFailed
from rlcli.rollout.scheduler.prefetch import KILL_TIMEOUT_S
from rlcli.support.daemon_thread import in_background
from rlcli.training.worker.calls import WorkerCalls, Workers
from rlcli.training.worker.weight_sync.weight_transfer import Synced

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32

    from rlcli.model.weight_check.checksum import TensorChecksum

T = TypeVar("T")
E = TypeVar("E")
AnyCall: TypeAlias = Future[Any]
"""A call that is only waited for. Any: typeshed's `wait` and `as_completed` take futures of one type only."""


class Transfer(NamedTuple):
    """A transfer of weights to engines in other workers."""

    bytes: int
    """Received by each engine."""
    seconds: float
    """For sending and receiving; if the weights were sent ahead, for sending."""


class Engines:
    """Syncs weights from the policy's workers to the engines.

    policy: the workers that train. dedicated: separate workers of the engines, if any. on_note: receives a note if
    weights cannot be broadcast, and go through the object store, or are sent again. copies: engines' workers keep a
    copy of the weights, from which the engines load (any `rollout.sync` but `full`). overlaps: the copy is filled while
    the engines generate.
    """

    def __init__(
        self,
        policy: Workers,
        dedicated: Workers | None,
        on_note: Callable[[str], None] = lambda text: None,
        *,
        copies: bool = False,
        overlaps: bool = False,
    ) -> None:
        self.policy, self.dedicated, self.on_note = policy, dedicated, on_note
        self.copies, self.overlaps = copies, overlaps
        self.workers = dedicated or policy
        """The workers that generate."""
        self.broadcasts: bool | None = None
        """Weights are broadcast; None before the first sync."""
        self._sending: Future[float] | None = None

    def release_memory(self) -> None:
        """Free the memory of engines that share the trainer's devices."""
        if self.dedicated is None:
            self.policy.call(WorkerCalls.release_rollout_memory)

    def sync(self, probe: Int32[np.ndarray, " T"], version: int) -> Synced:
        """Sync the policy's weights as `version`, check that the engines hold them, and compare engines and trainer on
        the tokens `probe`."""
        if self.dedicated is None:
            return Synced.of_all(self.policy.call(WorkerCalls.sync_weights, probe, version))
        if self.broadcasts is None:
            self.broadcasts = self._join(self.dedicated)
        transfer = self._transfer(self.dedicated)
        sent = self.policy.call(WorkerCalls.sent_checksums)
        share = self.policy.call(WorkerCalls.changed_share)
        # The engines still compute with the earlier weights: nothing is sampled with corrupted ones.
        if self.copies and (tensor := self._corrupted_tensor(self.dedicated, sent)):
            self.on_note(f"all weights are sent again: {tensor} did not arrive as it was sent")
            resent = self._transfer(self.dedicated, resend_all=True)
            transfer = Transfer(transfer.bytes + resent.bytes, transfer.seconds + resent.seconds)
            sent = self.policy.call(WorkerCalls.sent_checksums)
            if tensor := self._corrupted_tensor(self.dedicated, sent):
                raise RunFailed(
                    f"{tensor} did not arrive at an engine's worker as it was sent, even with all weights sent again",
                    "the memory or the network of its machine is at fault: run rlcli doctor there",
                )
        log_probs = self.policy.call(WorkerCalls.probe_log_probs, probe.tolist())
        loaded = Synced.of_all(self.dedicated.call(WorkerCalls.activate_weights, probe, log_probs, version, sent))
        load_s = loaded.seconds if self.copies else 0.0  # without copies engines load during the transfer
        return loaded._replace(bytes=transfer.bytes, seconds=transfer.seconds + load_s, share=share)

    def send_ahead(self, generation: Future[None]) -> None:
        """Send the policy's weights to the copies while the engines generate: until that is done, or `generation` is.
        `sync` then has the engines load them. Nothing happens without `overlaps`, or before the first sync."""
        if self.overlaps and self.broadcasts and not generation.done():
            self._sending = in_background(self._send)
            either: list[AnyCall] = [self._sending, generation]
            wait(either, return_when=FIRST_COMPLETED)

    def _send(self) -> float:
        began = time.perf_counter()
        self.policy.call(WorkerCalls.broadcast_weights)
        return time.perf_counter() - began

    def _transfer(self, dedicated: Workers, *, resend_all: bool = False) -> Transfer:
        """Send the policy's weights, or receive those that were sent ahead. resend_all: unchanged weights too."""
        began = time.perf_counter()
        sending, self._sending = self._sending, None
        if sending is not None:
            send_s, received = self._call_both(sending.result, lambda: dedicated.call(WorkerCalls.receive_broadcast))
            return Transfer(max(received), send_s)
        send = self._by_broadcast if self.broadcasts else self._by_object_store
        return Transfer(send(dedicated, resend_all), time.perf_counter() - began)

    def _corrupted_tensor(self, dedicated: Workers, sent: dict[str, TensorChecksum]) -> str:
        """The first tensor that a copy does not hold as it was sent; empty if there is none."""
        return next((names[0] for names in dedicated.call(WorkerCalls.corrupted_tensors, sent) if names), "")

    def _join(self, dedicated: Workers) -> bool:
        """Form a process group of trainers and engines; returns whether that worked."""
        host, port = self.policy.call(WorkerCalls.rendezvous)
        joins = self._call_both(
            lambda: self.policy.call(WorkerCalls.join_engines, host, port, len(dedicated)),
            lambda: dedicated.call(WorkerCalls.join_engines, host, port, len(dedicated)),
        )
        problem = next((error for errors in joins for error in errors if error), "")
        if problem:
            self.on_note(f"weights go to the engines through Ray's object store: no process group ({problem})")
        return not problem

    def _by_broadcast(self, dedicated: Workers, resend_all: bool = False) -> int:
        """Bytes that each engine received."""
        _, received = self._call_both(
            lambda: self.policy.call(WorkerCalls.broadcast_weights, resend_all),
            lambda: dedicated.call(WorkerCalls.receive_broadcast),
        )
        return max(received)

    def _by_object_store(self, dedicated: Workers, resend_all: bool = False) -> int:
        """Bytes that each engine received."""
        received = 0
        # The next bucket is gathered while the engines load the last one: at most two are in memory.
        with ThreadPoolExecutor(1) as executor:
            coming = executor.submit(self.policy.call, WorkerCalls.next_weight_bucket, True, resend_all)
            while bucket := coming.result():
                coming = executor.submit(self.policy.call, WorkerCalls.next_weight_bucket, False)
                received += max(dedicated.call(WorkerCalls.load_weight_bucket, bucket))
        return received

    def _call_both(self, trainers: Callable[[], T], engines: Callable[[], E]) -> tuple[T, E]:
        """Call both groups at once. The first error of either is raised; both are killed then, since the other group
        may wait for the failed one."""
        trained, received = in_background(trainers), in_background(engines)
        calls: list[AnyCall] = [trained, received]
        try:
            for call in as_completed(calls):
                call.result()
        except BaseException:
            self.policy.kill()
            self.workers.kill()
            wait(calls, KILL_TIMEOUT_S)
            raise
        return trained.result(), received.result()
