"""The engines, wherever they are placed: in the policy's workers, or in workers of their own (`rollout.workers`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlcli.workers.group import WorkerGroup


class Engines:
    """policy: the workers that train. own: those of the engines, if they have any. workers: those that generate."""

    def __init__(self, policy: WorkerGroup, own: WorkerGroup | None) -> None:
        self.policy, self.own = policy, own
        self.workers = own or policy

    def release_memory(self) -> None:
        """Give the trainer the memory of engines that share its devices."""
        if self.own is None:
            self.policy.release_rollout_memory()

    def sync(self, probe: Any, version: int) -> float:
        """Hand the policy's weights over, as `version`. Returns the largest difference, of any engine to the trainer,
        of a log-prob of `probe` (int32 token ids)."""
        if self.own is None:
            return float(max(self.policy.sync_weights(probe, version)))
        # The next bucket is gathered while the engines load the last one: two are in memory at most.
        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(self.policy.send_weights, True)
            while bucket := coming.result():
                coming = ahead.submit(self.policy.send_weights, False)
                self.own.receive_weights(bucket)
        log_probs = self.policy.probe_log_probs(probe.tolist())
        return float(max(self.own.weights_received(probe, log_probs, version)))
