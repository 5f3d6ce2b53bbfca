"""The pools of workers in a run."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.training.worker.calls import Workers
from rlcli.training.worker.worker_spec import WorkerSpec

POLICY, CRITIC, TEACHERS, ENGINES = "rank", "critic", "teacher", "engine"
"""Names of the log files of each pool's workers."""


@dataclass(frozen=True)
class WorkerPools:
    """The workers of a run."""

    policy: Workers
    """Workers that train the policy, and generate unless `engines` do."""
    critic: Workers | None
    """Dedicated workers of a value model, if any."""
    engines: Workers | None
    """Dedicated workers of engines, if any."""
    spec: WorkerSpec
    """The spec of the policy's workers."""
    teachers: Workers | None = None
    """Dedicated workers of teachers, if any."""

    @property
    def by_name(self) -> dict[str, Workers]:
        """The existing pools, by the names of their logs."""
        pools = {POLICY: self.policy, CRITIC: self.critic, TEACHERS: self.teachers, ENGINES: self.engines}
        return {name: group for name, group in pools.items() if group is not None}
