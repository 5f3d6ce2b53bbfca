"""The critic: in the policy's workers, or in separate workers.

Separate workers have their own batch, planned for their ranks. Values and returns are passed by reference, through
the object store, from the ranks that made them to the ranks that need them.
"""

from __future__ import annotations

from rlcli.algorithms.algorithm import Algorithm
from rlcli.cluster.dispatch import Shared
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.config.schema import RunConfig
from rlcli.orchestrator.train_batch import SelectedSamples, plan_step, step_work


class Critic:
    """A value model (gae, vapo), a process reward model (prime), or nothing. own: its separate workers, if any."""

    def __init__(self, algorithm: Algorithm, config: RunConfig, policy: WorkerGroup, own: WorkerGroup | None) -> None:
        self.config = config
        self.needed = algorithm.needs_critic or algorithm.needs_process_rewards
        self.policy, self.own = policy, own
        self.workers = own or policy

    def load(self, chosen: SelectedSamples, seed: int) -> None:
        """Fetch the rows if they are not there already."""
        if self.own is not None:
            plan = plan_step(chosen, self.config, self.own.data_ranks)
            bins = [plan.of_rank(rank) for rank in range(self.own.data_ranks)]
            self.own.load(bins, step_work(plan, chosen, seed))

    def infer(self) -> None:
        """Fill the policy's batch with values or process rewards."""
        if self.needed:
            self.workers.infer_critic()
        if self.own is not None:
            self.policy.import_tokens("values", Shared(self.own.export_tokens("values")))

    def share_returns(self) -> None:
        """Send the critic the returns computed in the policy's batch."""
        if self.own is not None:
            self.own.import_tokens("returns", Shared(self.policy.export_tokens("returns")))

    def update(self, minibatch: int, lr: float) -> dict[str, float]:
        """One optimizer step; sums over all ranks."""
        sums: dict[str, float] = self.workers.update_critic(minibatch, lr)
        return sums

    def drop_batch(self) -> None:
        if self.own is not None:
            self.own.drop_batch()
