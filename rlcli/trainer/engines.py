"""The engines: in the policy's workers, or in separate workers (`rollout.workers`)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlcli.cluster.dispatch import Shared
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.workers.roles.weight_transfer import Synced


class Engines:
    """policy: the workers that train. own: separate workers of the engines, if any. workers: those that generate."""

    def __init__(self, policy: WorkerGroup, own: WorkerGroup | None) -> None:
        self.policy, self.own = policy, own
        self.workers = own or policy

    def release_memory(self) -> None:
        """Free the memory of engines that share the trainer's devices."""
        if self.own is None:
            self.policy.release_rollout_memory()

    def sync(self, probe: Any, version: int) -> Synced:
        """Sync the policy's weights as `version`, check that the engines hold them, and compare engines and trainer on
        `probe` (int32 ids)."""
        if self.own is None:
            return Synced.of_all(self.policy.sync_weights(probe, version))
        began, received = time.perf_counter(), 0
        # The next bucket is gathered while the engines load the last one: at most two are in memory.
        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(self.policy.send_weights, True)
            while bucket := coming.result():
                coming = ahead.submit(self.policy.send_weights, False)
                received += max(self.own.receive_weights(bucket))
        seconds = time.perf_counter() - began
        sent = Shared(self.policy.sent_weights())
        log_probs = self.policy.probe_log_probs(probe.tolist())
        loaded = Synced.of_all(self.own.weights_received(probe, log_probs, version, sent))
        return loaded._replace(bytes=received, seconds=seconds)
