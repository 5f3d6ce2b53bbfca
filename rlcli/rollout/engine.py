"""The interface between the trainer and an inference engine: one protocol, tokens in, tokens and log-probs out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlcli.types import FinishReason

if TYPE_CHECKING:
    import numpy as np

    from rlcli.model.weight_check.checksum import Sent
    from rlcli.model.weight_check.engine_weights import Verified

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a batch of responses. temperature 0 is greedy; max_tokens limits the response, end token
    included; top_p: sample from the smallest set of most likely tokens with this total probability (1: from all)."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to generate. key: the caller's own index. prompt: int32 token ids. seed: of this response alone, so
    that its samples do not depend on what else is in the batch. greedy: take the most likely token each time, whatever
    the temperature of the batch. begun: int32 ids of the response so far, if it was aborted: only what follows them is
    returned, and they count towards `Sampling.max_tokens`."""

    key: int
    prompt: np.ndarray
    seed: int
    greedy: bool = False
    begun: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One response. tokens: int32 `[n]`, including the end token if there is one. log_probs: float32 `[n]`, of those
    tokens under the distribution that was sampled from: after temperature (at 1 if the response is greedy) and after
    top-p, which gives the tokens that it keeps a higher probability than the model does. finish_reason: None if it was
    aborted."""

    key: int
    tokens: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason | None


def shared_memory_prefix(group_id: str) -> str:
    """Prefix of everything that a run leaves in /dev/shm, to distinguish it from other runs' and to remove it."""
    return f"rlcli-{group_id}-"


class RolloutEngine(Protocol):
    """Interface of an engine to its worker. Workers that share one engine (tensor parallel) make the same calls in the
    same order with the same arguments.

    One step: `begin`, `add` and `step` until nothing is `unfinished`, or `abort` → `sleep` (the trainer uses the
    memory) → `wake_weights` → `load_weights` or `load_adapter` → `verify` → `wake_cache` → `probe`.
    """

    @property
    def unfinished(self) -> int:
        """Responses that were added and have not been returned."""
        ...

    @property
    def slots(self) -> int:
        """Responses that are generated at once; others wait within the engine."""
        ...

    def begin(self, sampling: Sampling) -> None:
        """Start a generation with these sampling parameters for all responses added from now on."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Generate this response too."""
        ...

    def step(self) -> Sequence[Generation]:
        """Generate one token or more for each running response; returns those that finished, in any order."""
        ...

    def abort(self) -> Sequence[Generation]:
        """Abort everything unfinished; returns the tokens so far of each, possibly none."""
        ...

    def agree(self, value: T) -> T:
        """The value of the first of the workers that share this engine."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        """Yield each response as it finishes, in any order."""
        ...

    def prompt_log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """float32 `[len(tokens) - 1]`: log-prob of each token after the first, at temperature 1."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load full tensors under checkpoint names, in any order, and forget all cached prefixes."""
        ...

    def load_adapter(self, folder: str) -> None:
        """Load a LoRA adapter from a folder in peft's format; later calls replace it."""
        ...

    def verify(self, sent: Mapping[str, Sent]) -> Verified:
        """Compare the weights in use with what was sent: all weights, or the adapter's. Called after a load, by all
        workers that share the engine."""
        ...

    def cached_tokens(self, prompt: np.ndarray) -> int:
        """Make the prefix cache hold one block, which repeats `prompt`; returns how many of its tokens were cached
        already. 0 if the engine sleeps."""
        ...

    def probe(self, tokens: np.ndarray) -> tuple[int, np.ndarray]:
        """`cached_tokens` and `prompt_log_probs` of `tokens`, in one step of the engine."""
        ...

    def sleep(self) -> None:
        """Release the accelerator's memory. A no-op on CPUs."""
        ...

    def wake_weights(self) -> None:
        """Allocate the memory of the weights again."""
        ...

    def wake_cache(self) -> None:
        """Allocate the memory of the KV cache again."""
        ...

    def close(self) -> None:
        """Free everything; the engine is not used again."""
        ...
