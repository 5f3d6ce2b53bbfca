"""The pools of workers in a run."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.training.worker.calls import Workers
from rlcli.training.worker.worker_spec import WorkerSpec

POLICY, CRITIC, TEACHERS, ENGINES = "rank", "critic", "teacher", "engine"
"""Names of the log files of each pool's workers."""


@dataclass(frozen=True)
class Groups:
    """The workers of a run. policy: those that train, and generate unless `engines` do. critic: those of a separately
    placed value model; engines: those of separate engines; teachers: those of separately placed teachers. spec: what
    the policy's workers were built from."""

    policy: Workers
    critic: Workers | None
    engines: Workers | None
    spec: WorkerSpec
    teachers: Workers | None = None

    @property
    def by_name(self) -> dict[str, Workers]:
        """The existing pools, by the names of their logs."""
        pools = {POLICY: self.policy, CRITIC: self.critic, TEACHERS: self.teachers, ENGINES: self.engines}
        return {name: group for name, group in pools.items() if group is not None}
