"""A run that has passed every check that needs no worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date

from rlcli.cluster.ray_session import policy_pool
from rlcli.config.schema import RunConfig
from rlcli.data.messages import Role
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.images.image_rule import ImageRule
from rlcli.support.served_models import ServedModel


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check that needs no worker. dtype: of compute, resolved. max_length: prompt and
    response, tokens. kv_cache_bytes: of one engine; None if vLLM measures it. roles: what the workers of a training run
    host. adapter: folder of the LoRA adapter to evaluate on top of `config.model.path`, or empty. sandbox: the backend
    in which verifiers run programs; empty if none does. stop_tokens: id → text of what ends a response. thinking:
    prompts end within an open <think>. day: the date that the chat template uses as today; None if it uses none.
    environments: names of those that samples converse with. served: the models that are served for the verifiers →
    whether they are classifiers. images: how the model sees pictures, if it does; pictures: the most that a prompt
    has."""

    config: RunConfig
    device: str
    dtype: str
    prompts: TokenizedPrompts
    held_out: TokenizedPrompts | None
    verifiers: tuple[str, ...]
    max_length: int
    kv_cache_bytes: int | None
    parameters: int | None
    roles: frozenset[Role]
    adapter: str = ""
    sandbox: str = ""
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    thinking: bool = False
    day: date | None = None
    environments: tuple[str, ...] = ()
    served: Mapping[ServedModel, bool] = field(default_factory=dict)
    images: ImageRule | None = None
    pictures: int = 0

    @property
    def threads(self) -> int:
        """Per worker on CPUs. With 1, the order of sums, and so every bit, is the same on any number of cores."""
        return policy_pool(self.config, self.device).threads
