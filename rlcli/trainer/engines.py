"""The engines: in the policy's workers, or in separate workers (`rollout.workers`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import Any

from rlcli.cluster.dispatch import Shared
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.orchestrator.prefetch import GONE_S, in_background
from rlcli.workers.roles.weight_transfer import Synced


class Engines:
    """policy: the workers that train. own: separate workers of the engines, if any. workers: those that generate.
    on_note: receives a note if weights cannot be broadcast, and so take the slower way."""

    def __init__(
        self, policy: WorkerGroup, own: WorkerGroup | None, on_note: Callable[[str], None] = lambda text: None
    ) -> None:
        self.policy, self.own, self.on_note = policy, own, on_note
        self.workers = own or policy
        self.broadcasts: bool | None = None

    def release_memory(self) -> None:
        """Free the memory of engines that share the trainer's devices."""
        if self.own is None:
            self.policy.release_rollout_memory()

    def sync(self, probe: Any, version: int) -> Synced:
        """Sync the policy's weights as `version`, check that the engines hold them, and compare engines and trainer on
        `probe` (int32 ids)."""
        if self.own is None:
            return Synced.of_all(self.policy.sync_weights(probe, version))
        if self.broadcasts is None:
            self.broadcasts = self._joined(self.own)
        began = time.perf_counter()
        received = self._by_broadcast(self.own) if self.broadcasts else self._by_object_store(self.own)
        seconds = time.perf_counter() - began
        sent = Shared(self.policy.sent_weights())
        log_probs = self.policy.probe_log_probs(probe.tolist())
        loaded = Synced.of_all(self.own.weights_received(probe, log_probs, version, sent))
        return loaded._replace(bytes=received, seconds=seconds)

    def _joined(self, own: WorkerGroup) -> bool:
        """Whether trainers and engines could form a process group."""
        place = (*self.policy.rendezvous(), len(own))
        joins = self._both(lambda: self.policy.join_engines(*place), lambda: own.join_engines(*place))
        problem = next((error for errors in joins for error in errors if error), "")
        if problem:
            self.on_note(f"weights go to the engines through Ray's object store: no process group ({problem})")
        return not problem

    def _by_broadcast(self, own: WorkerGroup) -> int:
        """Bytes that each engine received."""
        _, received = self._both(self.policy.broadcast_weights, own.receive_broadcast)
        return int(max(received))

    def _by_object_store(self, own: WorkerGroup) -> int:
        """Bytes that each engine received."""
        received = 0
        # The next bucket is gathered while the engines load the last one: at most two are in memory.
        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(self.policy.send_weights, True)
            while bucket := coming.result():
                coming = ahead.submit(self.policy.send_weights, False)
                received += max(own.receive_weights(bucket))
        return received

    def _both(self, trainers: Callable[[], Any], engines: Callable[[], Any]) -> tuple[Any, Any]:
        """Call both groups at once. The first error of either is raised; the other group, which may wait for the
        failed one, is ended with it."""
        calls: list[Future[Any]] = [in_background(trainers), in_background(engines)]
        try:
            for call in as_completed(calls):
                call.result()
        except BaseException:
            self.policy.kill()
            self.workers.kill()
            wait(calls, GONE_S)
            raise
        return calls[0].result(), calls[1].result()
