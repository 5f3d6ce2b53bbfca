"""The context of a run, equal in all of its processes: its configuration, and facts found by the checks before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date

from rlcli.config.schema import RunConfig
from rlcli.data.messages import Role
from rlcli.images.image_rule import ImageRule


@dataclass(frozen=True)
class RunFacts:
    """Facts that depend on the model, the data and the machine. Determined once, before anything starts."""

    device: str
    """Device of the workers: `cpu` or `cuda`."""
    dtype: str
    """Compute precision: `float32`, `bfloat16` or `float16`."""
    max_length: int
    """Tokens of the longest prompt and response together."""
    kv_cache_bytes: int | None
    """Bytes of one engine's KV cache; None if vLLM measures it."""
    roles: frozenset[Role]
    """Roles of the policy's workers: in an evaluation an engine alone."""
    adapter: str = ""
    """Folder of the LoRA adapter to evaluate on top of `config.model.path`, or empty."""
    verifiers: tuple[str, ...] = ()
    """Names of the verifiers that the prompts use, to load early."""
    environments: tuple[str, ...] = ()
    """Names of the environments that samples use."""
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    """Tokens that end a response: id → text."""
    thinking: bool = False
    """True if prompts end within an open <think>."""
    day: date | None = None
    """The date that the chat template uses as today; None if it uses none."""
    image_rule: ImageRule | None = None
    """Image preprocessing of the model, if it takes images."""
    max_images: int = 0
    """Maximum number of images of a prompt."""


@dataclass(frozen=True)
class RunContext:
    """The configuration and the facts. Built once, by `prepare`, and passed on as it is: to the trainer, to each worker
    and to its engine."""

    config: RunConfig
    facts: RunFacts

    def changed(self, config: RunConfig, **facts: object) -> RunContext:
        """Copy with another configuration, and with these facts replaced."""
        return RunContext(config, replace(self.facts, **facts))  # type: ignore[arg-type]

    @property
    def trains(self) -> bool:
        """True if it is a training run, not an evaluation."""
        return "policy" in self.facts.roles

    @property
    def engine_alone(self) -> bool:
        """True if engines have separate workers, in which nothing trains."""
        return not self.trains or bool(self.config.rollout.workers)

    @property
    def separate_adapter(self) -> bool:
        """True if the engine gets a LoRA adapter separately, besides the base's weights, rather than merged weights.

        In float32 the merge is exact, and the engine, without the adapter's kernels, several times as fast. In bfloat16
        it would round most of a small adapter away. An adapter to be evaluated comes as a folder."""
        return bool(self.config.lora.rank) and (bool(self.facts.adapter) or self.facts.dtype != "float32")

    @property
    def keeps(self) -> bool:
        """True if responses stay in the engine, with their keys and values, while its weights change."""
        return self.config.in_flight and self.config.async_.on_update == "keep"
