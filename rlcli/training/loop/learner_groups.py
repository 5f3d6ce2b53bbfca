"""The critic and the teachers: in the policy's workers, or in separate workers.

Separate workers have their own batch, planned for their ranks. Values, returns and teachers' log-probs are passed by
reference, through the object store, from the ranks that computed them to the ranks that need them.
"""

from __future__ import annotations

from rlcli.algorithms.algorithm import Algorithm
from rlcli.config.schema import RunConfig
from rlcli.training.loop.batch_selection import SelectedSamples, build_train_rows, plan_step
from rlcli.training.worker.calls import WorkerCalls, Workers
from rlcli.training.worker.teacher import OF_TOKENS, OF_TOP


class AuxiliaryModels:
    """Models that compute columns for the policy's batch. dedicated: their separate workers, if any."""

    def __init__(self, config: RunConfig, policy: Workers, dedicated: Workers | None) -> None:
        self.config, self.policy, self.dedicated = config, policy, dedicated
        self.workers = dedicated or policy

    def load(self, selected: SelectedSamples, seed: int) -> None:
        """Load the rows in separate workers, planned for their ranks; the policy's workers have them already."""
        if self.dedicated is not None:
            plan = plan_step(selected, self.config, self.dedicated.data_ranks)
            bins = [plan.of_rank(rank) for rank in range(self.dedicated.data_ranks)]
            self.dedicated.call(WorkerCalls.load, bins, build_train_rows(plan, selected, seed))

    def drop_batch(self) -> None:
        if self.dedicated is not None:
            self.dedicated.call(WorkerCalls.drop_batch)


class Critic(AuxiliaryModels):
    """A value model (gae, vapo), a process reward model (prime), or nothing."""

    def __init__(self, algorithm: Algorithm, config: RunConfig, policy: Workers, dedicated: Workers | None) -> None:
        super().__init__(config, policy, dedicated)
        self.needed = algorithm.needs_critic or algorithm.needs_process_rewards

    def infer(self) -> None:
        """Fill the policy's batch with values or process rewards."""
        if self.needed:
            self.workers.call(WorkerCalls.infer_critic)
        if self.dedicated is not None:
            exported = self.dedicated.call(WorkerCalls.export_tokens, "values")
            self.policy.call(WorkerCalls.import_tokens, "values", exported)

    def share_returns(self) -> None:
        """Send the critic the returns computed in the policy's batch."""
        if self.dedicated is not None:
            exported = self.policy.call(WorkerCalls.export_tokens, "returns")
            self.dedicated.call(WorkerCalls.import_tokens, "returns", exported)

    def update(self, minibatch: int, lr: float) -> dict[str, float]:
        """One optimizer step; sums over all ranks."""
        return self.workers.call(WorkerCalls.update_critic, minibatch, lr)


class Teachers(AuxiliaryModels):
    """The teachers of a distillation, or nothing."""

    def __init__(self, algorithm: Algorithm, config: RunConfig, policy: Workers, dedicated: Workers | None) -> None:
        super().__init__(config, policy, dedicated)
        self.needed = algorithm.needs_teacher

    def infer(self) -> None:
        """Fill the policy's batch with the teachers' log-probs."""
        self.workers.call(WorkerCalls.infer_teachers)
        if self.dedicated is not None:
            for name in OF_TOKENS + OF_TOP * (self.config.teacher.top_k > 0):
                self.policy.call(WorkerCalls.import_tokens, name, self.dedicated.call(WorkerCalls.export_tokens, name))
