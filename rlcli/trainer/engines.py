"""The engines, wherever they are placed: in the policy's workers, or in workers of their own (`rollout.workers`)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlcli.workers.dispatch import Shared
from rlcli.workers.group import WorkerGroup
from rlcli.workers.transfer import Synced


class Engines:
    """policy: the workers that train. own: those of the engines, if they have any. workers: those that generate."""

    def __init__(self, policy: WorkerGroup, own: WorkerGroup | None) -> None:
        self.policy, self.own = policy, own
        self.workers = own or policy

    def release_memory(self) -> None:
        """Give the trainer the memory of engines that share its devices."""
        if self.own is None:
            self.policy.release_rollout_memory()

    def sync(self, probe: Any, version: int) -> Synced:
        """Hand the policy's weights over, as `version`, check that the engines hold them, and compare engines and
        trainer on `probe` (int32 ids)."""
        if self.own is None:
            return Synced.of_all(self.policy.sync_weights(probe, version))
        began, received = time.perf_counter(), 0
        # The next bucket is gathered while the engines load the last one: two are in memory at most.
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
