"""What the pool asks of a server, whichever kind it is: ids in, ids and log-probs out; weights in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlcli.rollout.engine import EngineSpec
from rlcli.support.json_link import Link

if TYPE_CHECKING:
    from rlcli.model.weight_check.checksum import Sent
    from rlcli.model.weight_check.engine_weights import Verified

ATTACH_S = 60.0
"""For the answers to the first questions."""


@dataclass(frozen=True)
class Ask:
    """One response to draw. name: unique among all requests of this run. tokens: ids of prompt and what there is of
    the response. most: of new tokens. position: how many of the tokens are of the response. salt: prompts with another
    one share no cached prefix."""

    name: str
    tokens: Sequence[int]
    most: int
    temperature: float
    top_p: float
    seed: int
    salt: str
    position: int = 0
    prompt_log_probs: bool = False


@dataclass(frozen=True)
class Answer:
    """ids and log-probs of the new tokens. reason: `stop`, `length`, or None if it was aborted. cached: prompt tokens
    that were not computed again. prompt_log_probs: of each token of the prompt after the first."""

    ids: list[int]
    log_probs: list[float]
    reason: str | None
    cached: int = 0
    prompt_log_probs: list[float] = field(default_factory=list)


class ServerKind(Protocol):
    """One server. All methods raise `ServerFault`."""

    kind: str

    def __init__(self, link: Link, spec: EngineSpec) -> None: ...

    @staticmethod
    async def is_there(link: Link) -> bool:
        """Whether the server that answers is one of this kind."""
        ...

    async def attach(self) -> None:
        """Check that it serves the run's model, by ids, and prepare it. Raises `Refused` if it does not."""
        ...

    async def generate(self, ask: Ask, timeout_s: float) -> Answer: ...

    async def abort(self, names: Sequence[str], timeout_s: float) -> None:
        """Have these requests answer with what they have. One that the server does not know yet is not aborted."""
        ...

    async def alive(self, timeout_s: float) -> None:
        """Return if it answers, without the model."""
        ...

    async def load(self, folder: str, version: str, timeout_s: float) -> None:
        """Replace its weights by those of the safetensors files of a folder that it sees. Nothing runs on it."""
        ...

    async def verify(self, sent: Mapping[str, Sent], timeout_s: float) -> Verified:
        """Compare its weights with what was sent."""
        ...

    async def sleep(self, timeout_s: float) -> None: ...

    async def wake(self, what: str, timeout_s: float) -> None:
        """what: `weights` or `kv_cache`."""
        ...


ROUNDING = 1e-3
"""Of a log-prob in 16 bits, which may so be above 0."""


def checked_answer(
    link: Link, path: str, ask: Ask, vocabulary: int, ids: Any, log_probs: Any, reason: str | None, **more: Any
) -> Answer:
    """The answer, if it has ids of the model's vocabulary, no more than were asked for, and a log-prob for each. Raises
    `Refused`."""
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise link.out_of_protocol(path, "it has no token ids")
    if not isinstance(log_probs, list) or not all(isinstance(one, float | int) for one in log_probs):
        raise link.out_of_protocol(path, "it has no log-probs")
    if any(not 0 <= one < vocabulary for one in ids):
        raise link.out_of_protocol(path, f"the model has no token {next(i for i in ids if not 0 <= i < vocabulary)}")
    if len(ids) > ask.most:
        raise link.out_of_protocol(path, f"{len(ids)} tokens where {ask.most} were asked for")
    if any(not -math.inf < one <= ROUNDING for one in log_probs):
        wrong = next(one for one in log_probs if not -math.inf < one <= ROUNDING)
        raise link.out_of_protocol(path, f"{wrong} is no log-prob")
    if len(ids) != len(log_probs):
        raise link.out_of_protocol(path, f"{len(ids)} tokens with {len(log_probs)} log-probs")
    if reason not in ("stop", "length", None):
        raise link.out_of_protocol(path, f"finish reason '{reason}'")
    return Answer(ids, log_probs, reason, **more)
