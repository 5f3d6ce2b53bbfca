"""The critic and the teachers: in the policy's workers, or in separate workers.

Separate workers have their own batch, planned for their ranks. Values, returns and teachers' log-probs are passed by
reference, through the object store, from the ranks that made them to the ranks that need them.
"""

from __future__ import annotations

from rlcli.algorithms.algorithm import Algorithm
from rlcli.config.schema import RunConfig
from rlcli.training.loop.batch_selection import SelectedSamples, plan_step, step_work
from rlcli.training.worker.calls import WorkerCalls, Workers
from rlcli.training.worker.teacher import OF_TOKENS, OF_TOP


class Beside:
    """Models that compute values for the policy's batch. own: their separate workers, if any."""

    def __init__(self, config: RunConfig, policy: Workers, own: Workers | None) -> None:
        self.config, self.policy, self.own = config, policy, own
        self.workers = own or policy

    def load(self, chosen: SelectedSamples, seed: int) -> None:
        """Fetch the rows, planned for the ranks of separate workers, if they are not there already."""
        if self.own is not None:
            plan = plan_step(chosen, self.config, self.own.data_ranks)
            bins = [plan.of_rank(rank) for rank in range(self.own.data_ranks)]
            self.own.call(WorkerCalls.load, bins, step_work(plan, chosen, seed))

    def drop_batch(self) -> None:
        if self.own is not None:
            self.own.call(WorkerCalls.drop_batch)


class Critic(Beside):
    """A value model (gae, vapo), a process reward model (prime), or nothing."""

    def __init__(self, algorithm: Algorithm, config: RunConfig, policy: Workers, own: Workers | None) -> None:
        super().__init__(config, policy, own)
        self.needed = algorithm.needs_critic or algorithm.needs_process_rewards

    def infer(self) -> None:
        """Fill the policy's batch with values or process rewards."""
        if self.needed:
            self.workers.call(WorkerCalls.infer_critic)
        if self.own is not None:
            self.policy.call(WorkerCalls.import_tokens, "values", self.own.call(WorkerCalls.export_tokens, "values"))

    def share_returns(self) -> None:
        """Send the critic the returns computed in the policy's batch."""
        if self.own is not None:
            self.own.call(WorkerCalls.import_tokens, "returns", self.policy.call(WorkerCalls.export_tokens, "returns"))

    def update(self, minibatch: int, lr: float) -> dict[str, float]:
        """One optimizer step; sums over all ranks."""
        return self.workers.call(WorkerCalls.update_critic, minibatch, lr)


class Teachers(Beside):
    """The teachers of a distillation, or nothing."""

    def __init__(self, algorithm: Algorithm, config: RunConfig, policy: Workers, own: Workers | None) -> None:
        super().__init__(config, policy, own)
        self.needed = algorithm.needs_teacher

    def infer(self) -> None:
        """Fill the policy's batch with the teachers' log-probs."""
        self.workers.call(WorkerCalls.infer_teachers)
        if self.own is not None:
            for name in OF_TOKENS + OF_TOP * (self.config.teacher.top_k > 0):
                self.policy.call(WorkerCalls.import_tokens, name, self.own.call(WorkerCalls.export_tokens, name))
