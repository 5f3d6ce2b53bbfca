"""The specification of a worker: the run, and this worker's part in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlcli.config.schema import RunConfig
from rlcli.context import RunContext, RunFacts
from rlcli.data.messages import Role
from rlcli.rollout.engine import EngineSpec, shared_memory_prefix
from rlcli.support.served_models import ENGINE_KEY, publish


@dataclass(frozen=True)
class WorkerSpec:
    """The specification that all workers of a group are built from. An engine without a policy reads the weights from
    `config.model.path` itself, unless they follow from the policy's workers."""

    context: RunContext
    """The run."""
    roles: frozenset[Role]
    """Roles that the worker hosts."""
    name: str
    """Name of the worker group, and prefix of the ranks' logs: `name`-0.log and so on."""
    logs: str
    """Folder of the logs."""
    group_id: str
    """Id of the run's processes and shared memory on this machine."""
    hub_token: str = field(default="", repr=False)
    """The driver's, for workers on other machines; passed here, since Ray logs the environment variables that it is
    given."""
    served: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses of the models that are served for verifiers."""
    served_key: str = field(default="", repr=False)
    """Key of their servers."""
    engine_key: str = field(default="", repr=False)
    """Key of the servers of `rollout.servers`."""

    @property
    def config(self) -> RunConfig:
        return self.context.config

    @property
    def facts(self) -> RunFacts:
        return self.context.facts

    @property
    def engine(self) -> EngineSpec:
        """The specification of its engine."""
        return EngineSpec.of(self.context, self.group_id, self.logs)

    def log_in(self) -> None:
        """Let this process read the same hub repositories as the driver, and find the served models."""
        if self.hub_token:
            os.environ.setdefault("HF_TOKEN", self.hub_token)
        if self.engine_key:
            os.environ.setdefault(ENGINE_KEY, self.engine_key)
        if self.served:
            publish(self.served, self.served_key)

    @property
    def replicate(self) -> int:
        """Copies of the trained models in this group: a critic in separate workers has one."""
        return self.config.parallel.replicate if "policy" in self.roles else 1

    @property
    def context_ranks(self) -> int:
        """Workers that divide a micro-batch's tokens: engines alone train nothing."""
        return self.config.parallel.context if self.roles - {"engine"} else 1

    @property
    def expert(self) -> int:
        """Workers that divide the experts of each layer of the trained models in this group."""
        return self.config.parallel.expert if "policy" in self.roles else 1

    @property
    def adapter_prefix(self) -> str:
        """Prefix of the folders in /dev/shm that an adapter passes through on its way to an engine."""
        return f"{shared_memory_prefix(self.group_id)}adapter-"
