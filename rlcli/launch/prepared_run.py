"""A run that has passed every check that needs no worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlcli.cluster.ray_session import policy_pool
from rlcli.config.schema import RunConfig
from rlcli.context import RunContext, RunFacts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.support.served_models import ServedModel


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check that needs no worker: its context, and data for the driver alone."""

    context: RunContext
    """Configuration and facts for all processes of the run."""
    prompts: TokenizedPrompts
    """Prompts to train on; in an evaluation, to evaluate on."""
    held_out: TokenizedPrompts | None
    """Prompts that a training run evaluates on, if any."""
    parameters: int | None
    """Number of parameters of the policy."""
    sandbox: str = ""
    """The backend in which verifiers run programs; empty if none does."""
    served: Mapping[ServedModel, bool] = field(default_factory=dict)
    """The models that are served for the verifiers → whether they are classifiers."""

    @property
    def config(self) -> RunConfig:
        return self.context.config

    @property
    def facts(self) -> RunFacts:
        return self.context.facts

    @property
    def threads(self) -> int:
        """Threads per worker on CPUs. With 1, the order of sums, and so every bit, is the same on any number of
        cores."""
        return policy_pool(self.config, self.facts.device).threads

    def changed(self, config: RunConfig, **facts: object) -> Prepared:
        """The same run with another configuration, and with these facts."""
        return replace(self, context=self.context.changed(config, **facts))
