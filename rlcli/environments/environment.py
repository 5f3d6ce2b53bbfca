"""What an environment is: the other side of a conversation.

A class with three methods, plain or async. It is published under the entry-point group `rlcli.environments`, or named
by its file: `env.py:Guess`. It runs in a process of its own and needs nothing of rlcli:

    class Guess:
        def reset(self, row, seed):
            self.number = random.Random(seed).randint(1, 10)
            return [{"role": "user", "content": "Guess my number, from 1 to 10."}]

        def step(self, message):
            right = message["content"].strip() == str(self.number)
            return [{"role": "user", "content": "no"}], float(right), right
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from rlcli.environments.message_images import with_pictures
from rlcli.images.row_images import BadImage
from rlcli.registry import Registry

if TYPE_CHECKING:
    import numpy as np

Message = Mapping[str, Any]
"""`role` and `content`; of an assistant also `reasoning_content` and `tool_calls`, of a tool `name` and
`tool_call_id`. One that shows pictures has a marker for each in its content, and describes them in `images`."""


class Environment(Protocol):
    """One conversation. Constructed with its options; used by one session from `reset` to `close`."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """The first messages, or these and the JSON schemas of the tools that the policy may call. row: of the
        dataset. The samples of a group get the same seed, and have to get the same messages."""
        ...

    def step(self, message: Message) -> Any:
        """What follows a turn of the policy: messages, reward, done; and, if it likes, a mapping of numbers and texts
        to record."""
        ...

    def close(self) -> None:
        """The conversation is over. May be missing."""
        ...


VERIFIER = "environment"
"""The verifier whose score is the sum of the rewards that the environment gave, or that an agent posted."""

ENVIRONMENTS: Registry[type[Environment]] = Registry("environment", "rlcli.environments")


@dataclass(frozen=True)
class Opening:
    """What `reset` returned. images: the encoded pictures of all messages. Once they are seen, these are empty;
    pictures: as the model sees them; copies: digest → a small copy, for people; fits: whether a conversation has room
    for them."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    images: tuple[bytes, ...] = field(default=(), repr=False)
    pictures: tuple[np.ndarray, ...] = field(default=(), repr=False)
    copies: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    fits: bool = True


@dataclass(frozen=True)
class Reply:
    """What `step` returned. images, pictures, copies, fits: as in `Opening`."""

    messages: Sequence[Message]
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[bytes, ...] = field(default=(), repr=False)
    pictures: tuple[np.ndarray, ...] = field(default=(), repr=False)
    copies: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    fits: bool = True


class Failure(StrEnum):
    """How a session failed. None of them is a reward: the sample is tried again, then left out.

    TIMEOUT: a call did not end in time. CRASH: it raised. DIED: the process ended, or was ended for another session's
    sake. PROTOCOL: it returned something else than it should. TOO_LARGE: it returned more than `MOST_TEXT_BYTES`.
    """

    TIMEOUT = "timeout"
    CRASH = "crash"
    DIED = "died"
    PROTOCOL = "protocol"
    TOO_LARGE = "too_large"


class Cause(StrEnum):
    """Whose call it was that ended a session."""

    OWN = "own"
    """The session's."""
    ANOTHER = "another"
    """That of another session of its process, or none: it costs the sample none of its tries."""
    UNKNOWN = "unknown"
    """One of several sessions whose calls the process was working at: the next try is alone (`Session`)."""


class EnvironmentFailed(Exception):
    """A session cannot go on."""

    def __init__(self, failure: Failure, detail: str, cause: Cause = Cause.OWN) -> None:
        super().__init__(f"{failure}: {detail}")
        self.failure, self.detail, self.cause = failure, detail, cause


def opening_of(returned: Any) -> Opening:
    """Check what `reset` returned, as it came through JSON. Raises `EnvironmentFailed` (PROTOCOL)."""
    pair = isinstance(returned, list) and len(returned) == 2 and isinstance(returned[0], list)
    messages, tools = returned if pair else (returned, [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _wrong("reset", "tools that are not a list of JSON schemas", tools)
    found, images = _messages("reset", messages)
    if not found:
        raise _wrong("reset", "no messages", returned)
    return Opening(found, tools, images)


MOST_TEXT_BYTES = 4 << 20
"""Maximum size of what a method returns, as JSON without its pictures. `environment.reply_chars` cuts what is within
it; more is a failure: the policy would answer for a text that has nothing to do with it."""


def check_size(method: str, returned: Any, line_bytes: int) -> None:
    """Raise `EnvironmentFailed` (TOO_LARGE) for a reply whose text is too large. line_bytes: of the whole reply."""
    if line_bytes <= MOST_TEXT_BYTES:
        return
    text = line_bytes - _picture_bytes(returned)
    if text > MOST_TEXT_BYTES:
        detail = f"{method} returned {text / 1e6:.1f} MB of text, more than {MOST_TEXT_BYTES / 1e6:.1f}"
        raise EnvironmentFailed(Failure.TOO_LARGE, detail)


def _picture_bytes(value: Any) -> int:
    """Bytes of the encoded pictures in messages."""
    if isinstance(value, list):
        return sum(map(_picture_bytes, value))
    if not isinstance(value, dict):
        return 0
    image = value.get("image")
    if value.get("type") == "image" and isinstance(image, dict) and isinstance(image.get("base64"), str):
        return len(image["base64"])
    return _picture_bytes(value["content"]) if isinstance(value.get("content"), list) else 0


MOST_REWARD = 1e30
"""Of one step; beyond this, sums of squares are not finite in float32."""


def reply_of(returned: Any) -> Reply:
    """Check what `step` returned, as it came through JSON. Raises `EnvironmentFailed` (PROTOCOL)."""
    if not isinstance(returned, list) or len(returned) not in (3, 4):
        raise _wrong("step", "not (messages, reward, done) or (messages, reward, done, info)", returned)
    messages, reward, done, *more = returned
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= MOST_REWARD:
        raise _wrong("step", "a reward that is no finite number", reward)
    if not isinstance(done, bool):
        raise _wrong("step", "a value for done that is neither True nor False", done)
    info = more[0] if more and more[0] is not None else {}
    if not isinstance(info, dict):
        raise _wrong("step", "an info that is no mapping", info)
    if not isinstance(info.get("failed_calls", 0), int):
        raise _wrong("step", "an info whose failed_calls is no whole number", info)
    found, images = _messages("step", messages)
    if not found and not done:
        raise _wrong("step", "no messages, and is not done", returned)
    return Reply(found, float(reward), done, info, images)


ROLES = ("system", "user", "tool", "assistant")


def _messages(method: str, messages: Any) -> tuple[list[Message], tuple[bytes, ...]]:
    """The messages, and the pictures that they have."""
    if not isinstance(messages, list):
        raise _wrong(method, "messages that are not a list", messages)
    found, images = list[Message](), list[bytes]()
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str | list):
            raise _wrong(method, "a message without a role and a text or a list of parts as its content", message)
        allowed = ROLES if method == "reset" else ("user", "tool", "system")
        if message.get("role") not in allowed:
            raise _wrong(method, f"a message whose role is none of {', '.join(allowed)}", message)
        try:
            taken, shown = with_pictures(message)
        except BadImage as error:
            raise EnvironmentFailed(Failure.PROTOCOL, f"{method} returned what cannot be shown: {error}") from error
        found.append(taken)
        images += shown
    return found, tuple(images)


def _wrong(method: str, what: str, value: Any) -> EnvironmentFailed:
    return EnvironmentFailed(Failure.PROTOCOL, f"{method} returned {what}: {str(value)[:200]}")
