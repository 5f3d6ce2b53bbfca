"""The interface of an inference server, for all kinds: ids in, ids and log-probs out; weights in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rlcli.rollout.engine import EngineSpec
from rlcli.support.json_link import Link

if TYPE_CHECKING:
    from rlcli.model.weight_check.checksum import TensorChecksum
    from rlcli.model.weight_check.engine_weights import Verified
    from rlcli.types import FinishReason

ATTACH_S = 60.0
"""Timeout of the first requests to a server."""


@dataclass(frozen=True)
class ServerRequest:
    """One response for a server to generate."""

    name: str
    """Unique name among all requests of this run."""
    tokens: Sequence[int]
    """Ids of the prompt and of the response so far."""
    most: int
    """Maximum number of new tokens."""
    temperature: float
    """0: greedy."""
    top_p: float
    """As `Sampling.top_p`."""
    seed: int
    """Seed of the response."""
    salt: str
    """Salt of the prefix cache: prompts with different salts share no cached prefix."""
    position: int = 0
    """Number of `tokens` that belong to the response."""
    prompt_log_probs: bool = False
    """True if the answer has the log-probs of `tokens`."""


@dataclass(frozen=True)
class Answer:
    """One response of a server."""

    ids: list[int]
    """Ids of the new tokens."""
    log_probs: list[float]
    """Log-probs of the new tokens."""
    reason: FinishReason | None
    """Why it ended; None if it was aborted."""
    cached: int = 0
    """Prompt tokens from the prefix cache."""
    prompt_log_probs: list[float] = field(default_factory=list)
    """Log-prob of each token of the prompt after the first, if requested."""


class ServerKind(Protocol):
    """One server. All methods raise `ServerFault`."""

    kind: str
    """Name of the kind, for records."""

    def __init__(self, link: Link, spec: EngineSpec) -> None: ...

    @staticmethod
    async def is_there(link: Link) -> bool:
        """True if the server that answers is one of this kind."""
        ...

    async def attach(self) -> None:
        """Check that it serves the run's model, by ids, and prepare it. Raises `Refused` if it does not."""
        ...

    async def generate(self, ask: ServerRequest, timeout_s: float) -> Answer:
        """Generate one response."""
        ...

    async def abort(self, names: Sequence[str], timeout_s: float) -> None:
        """Abort requests, which are then answered with their tokens so far. Requests that have not reached the server
        are not aborted."""
        ...

    async def alive(self, timeout_s: float) -> None:
        """Return if the server answers, without using the model."""
        ...

    async def load(self, folder: str, version: str, timeout_s: float) -> None:
        """Replace the weights by those of the safetensors files in a folder that the server sees, while no request
        runs."""
        ...

    async def verify(self, sent: Mapping[str, TensorChecksum], timeout_s: float) -> Verified:
        """Compare its weights with those that were sent."""
        ...

    async def sleep(self, timeout_s: float) -> None:
        """Release the memory of its devices."""
        ...

    async def wake(self, tag: str, timeout_s: float) -> None:
        """Allocate memory again. tag: `weights` or `kv_cache`."""
        ...


ROUNDING = 1e-3
"""Rounding error of a log-prob in 16 bits, which may therefore be above 0."""


def checked_answer(
    link: Link,
    path: str,
    ask: ServerRequest,
    vocabulary: int,
    ids: object,
    log_probs: object,
    reason: object,
    *,
    cached: int,
    prompt_log_probs: list[float],
) -> Answer:
    """Validate an answer: ids of the model's vocabulary, no more than requested, and a log-prob for each. Raises
    `Refused`."""
    if not isinstance(ids, list) or not all(type(value) is int for value in ids):
        raise link.out_of_protocol(path, "it has no token ids")
    if not isinstance(log_probs, list) or not all(isinstance(value, float | int) for value in log_probs):
        raise link.out_of_protocol(path, "it has no log-probs")
    if any(not 0 <= value < vocabulary for value in ids):
        raise link.out_of_protocol(path, f"the model has no token {next(i for i in ids if not 0 <= i < vocabulary)}")
    if len(ids) > ask.most:
        raise link.out_of_protocol(path, f"{len(ids)} tokens where {ask.most} were asked for")
    if any(not -math.inf < value <= ROUNDING for value in log_probs):
        wrong = next(value for value in log_probs if not -math.inf < value <= ROUNDING)
        raise link.out_of_protocol(path, f"{wrong} is no log-prob")
    if len(ids) != len(log_probs):
        raise link.out_of_protocol(path, f"{len(ids)} tokens with {len(log_probs)} log-probs")
    if reason is not None and reason != "stop" and reason != "length":
        raise link.out_of_protocol(path, f"finish reason '{reason}'")
    return Answer(ids, log_probs, reason, cached, prompt_log_probs)
