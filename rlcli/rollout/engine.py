"""The seam between the trainer and whatever generates: one protocol, tokens in, tokens and log-probs out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlcli.types import FinishReason

if TYPE_CHECKING:
    import numpy as np

    from rlcli.model.checksum import Sent
    from rlcli.model.held import Verified

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a batch of responses is drawn. temperature 0 is greedy; max_tokens bounds the response, end token
    included; top_p: from the fewest likeliest tokens that hold this probability (1: from all)."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to generate. key: the caller's own index. prompt: int32 token ids. seed: of this response alone, so
    that what it draws does not depend on what else is in the batch. greedy: take the likeliest token each time,
    whatever the temperature of the batch. begun: int32 ids of the response so far, where it was broken off: what comes
    back is what follows them, and they count towards `Sampling.max_tokens`."""

    key: int
    prompt: np.ndarray
    seed: int
    greedy: bool = False
    begun: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One response. tokens: int32 `[n]`, the end token included where there is one. log_probs: float32 `[n]`, of those
    tokens under the distribution that was sampled from: after temperature (at 1 where the response is greedy) and after
    top-p, which gives the tokens that it leaves a higher probability than the model does. finish_reason: None where it
    was broken off."""

    key: int
    tokens: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason | None


def shared_memory_prefix(group_id: str) -> str:
    """How the names of all that a run leaves in /dev/shm begin, so that it can be told from other runs' and removed."""
    return f"rlcli-{group_id}-"


class RolloutEngine(Protocol):
    """What the worker asks of an engine. Workers that share one engine (tensor parallel) make the same calls in the
    same order with the same arguments.

    The life of a step: `begin`, `add` and `step` until nothing is `unfinished`, or `abort` → `sleep` (the trainer takes
    the memory) → `wake_weights` → `load_weights` or `load_adapter` → `verify` → `wake_cache` → `probe`.
    """

    @property
    def unfinished(self) -> int:
        """Responses that were added and have not come back."""
        ...

    @property
    def slots(self) -> int:
        """Responses that are generated at once; others wait within the engine."""
        ...

    def begin(self, sampling: Sampling) -> None:
        """Start a generation: what is added from now on is drawn like this."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Generate this response too."""
        ...

    def step(self) -> Sequence[Generation]:
        """Draw a token or more of each response under way; those that this finished, in any order."""
        ...

    def abort(self) -> Sequence[Generation]:
        """Break off all that is unfinished: what there is of each, which may be nothing."""
        ...

    def agree(self, value: T) -> T:
        """Of the workers that share this engine, the first one's value."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        """Yield each response as it finishes, in any order."""
        ...

    def prompt_log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """float32 `[len(tokens) - 1]`: log-prob of each token after the first, at temperature 1."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Take full tensors in checkpoint names, as they come, and forget all cached prefixes."""
        ...

    def load_adapter(self, folder: str) -> None:
        """Take a LoRA adapter from a folder in peft's format; later calls replace it."""
        ...

    def verify(self, sent: Mapping[str, Sent]) -> Verified:
        """Compare what the engine computes with to what was sent: all weights, or the adapter's. After a load; by all
        workers that share the engine."""
        ...

    def cached_tokens(self, prompt: np.ndarray) -> int:
        """Have the prefix cache hold one block, which is `prompt` over and over; how many tokens of it were there
        already. 0 where the engine sleeps."""
        ...

    def probe(self, tokens: np.ndarray) -> tuple[int, np.ndarray]:
        """`cached_tokens` and `prompt_log_probs` of `tokens`, in one step of the engine."""
        ...

    def sleep(self) -> None:
        """Give the accelerator's memory back. A no-op on CPUs."""
        ...

    def wake_weights(self) -> None:
        """Take back the memory of the weights."""
        ...

    def wake_cache(self) -> None:
        """Take back the memory of the KV cache."""
        ...

    def close(self) -> None:
        """Free everything; the engine is not used again."""
        ...
