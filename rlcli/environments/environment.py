"""The interface of an environment: the other side of a conversation.

A class with three methods, plain or async. It is published under the entry-point group `rlcli.environments`, or named
by its file: `env.py:Guess`. It runs in a separate process and needs no module of rlcli:

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
from typing import TYPE_CHECKING, Protocol

from rlcli.environments.chat_messages import Message as Message
from rlcli.environments.chat_messages import ToolSchema
from rlcli.environments.message_images import extract_images
from rlcli.images.row_images import BadImage
from rlcli.registry import Registry
from rlcli.support.json_types import JsonValue

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import UInt8


class Environment(Protocol):
    """One conversation. Constructed with its options; used by one session from `reset` to `close`."""

    def reset(self, row: Mapping[str, object], seed: int) -> object:
        """Return the first messages, or a pair of these and the JSON schemas of the tools that the policy may call.
        row: of the dataset (`EnvironmentRow`). The samples of a group get the same seed, and must get the same
        messages."""
        ...

    def step(self, message: Message) -> object:
        """Return the answer to a turn of the policy: messages, reward, done; optionally a mapping of numbers and texts
        to record."""
        ...

    def close(self) -> None:
        """Release resources at the end of the conversation. This method is optional."""
        ...


VERIFIER = "environment"
"""The verifier whose score is the sum of the rewards of the environment, or of those that an agent posted."""

ENVIRONMENTS: Registry[type[Environment]] = Registry("environment", "rlcli.environments")


@dataclass(frozen=True)
class Opening:
    """The result of `reset`."""

    messages: Sequence[Message]
    """The first messages."""
    tools: Sequence[ToolSchema] = ()
    """JSON schemas of the tools."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Encoded images of all messages; empty once they are preprocessed."""
    processed_images: tuple[UInt8[np.ndarray, "height width 3"], ...] = field(default=(), repr=False)
    """Images, preprocessed for the model."""
    copies: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Digest → small copy of an image, for people."""
    fits: bool = True
    """True if a conversation has room for the images."""


@dataclass(frozen=True)
class Reply:
    """The result of `step`."""

    messages: Sequence[Message]
    """Messages that follow the turn."""
    reward: float
    """Reward of the turn."""
    done: bool
    """True if the conversation ends."""
    info: Mapping[str, JsonValue] = field(default_factory=dict)
    """Numbers and texts to record."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """As in `Opening`."""
    processed_images: tuple[UInt8[np.ndarray, "height width 3"], ...] = field(default=(), repr=False)
    """As in `Opening`."""
    copies: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """As in `Opening`."""
    fits: bool = True
    """As in `Opening`."""

    @property
    def failed_calls(self) -> int:
        """`failed_calls` of its info: the tool calls that failed."""
        failed_calls = self.info.get("failed_calls", 0)
        return int(failed_calls) if isinstance(failed_calls, int) else 0


class Failure(StrEnum):
    """Kinds of failures of a session. A failure is never a reward: the sample is tried again, then excluded."""

    TIMEOUT = "timeout"
    """A call did not end in time."""
    CRASH = "crash"
    """A call raised an exception."""
    DIED = "died"
    """The process ended, or was killed because of another session."""
    PROTOCOL = "protocol"
    """A call returned an invalid value."""
    TOO_LARGE = "too_large"
    """A call returned more than `MOST_TEXT_BYTES`."""


class Cause(StrEnum):
    """The session whose call caused a failure."""

    OWN = "own"
    """This session."""
    ANOTHER = "another"
    """Another session of the process, or none: it does not count as a try of the sample."""
    UNKNOWN = "unknown"
    """One of several sessions whose calls were running: the next try is alone in its process (`Session`)."""


class EnvironmentFailed(Exception):
    """A session of an environment failed."""

    def __init__(self, failure: Failure, detail: str, cause: Cause = Cause.OWN) -> None:
        super().__init__(f"{failure}: {detail}")
        self.failure, self.detail, self.cause = failure, detail, cause


def opening_of(returned: JsonValue) -> Opening:
    """Validate the result of `reset`, decoded from JSON. Raises `EnvironmentFailed` (PROTOCOL)."""
    messages, tools = returned, list[JsonValue]()
    if isinstance(returned, list) and len(returned) == 2 and isinstance(returned[0], list):
        messages, tools = returned
    schemas = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if not isinstance(tools, list) or len(schemas) != len(tools):
        raise _invalid("reset", "tools that are not a list of JSON schemas", tools)
    checked, images = _messages("reset", messages)
    if not checked:
        raise _invalid("reset", "no messages", returned)
    return Opening(checked, schemas, images)


MOST_TEXT_BYTES = 4 << 20
"""Maximum size of a method's result, as JSON without its images. `environment.reply_chars` shortens texts within it; a
larger result is a failure, for which the policy must not be rewarded or punished."""


def check_size(method: str, returned: JsonValue, line_bytes: int) -> None:
    """Raise `EnvironmentFailed` (TOO_LARGE) for a reply whose text is too large. line_bytes: of the whole reply."""
    if line_bytes <= MOST_TEXT_BYTES:
        return
    text = line_bytes - _image_bytes(returned)
    if text > MOST_TEXT_BYTES:
        detail = f"{method} returned {text / 1e6:.1f} MB of text, more than {MOST_TEXT_BYTES / 1e6:.1f}"
        raise EnvironmentFailed(Failure.TOO_LARGE, detail)


def _image_bytes(value: JsonValue) -> int:
    """Size of the encoded images in messages."""
    if isinstance(value, list):
        return sum(map(_image_bytes, value))
    if not isinstance(value, dict):
        return 0
    image = value.get("image")
    if value.get("type") == "image" and isinstance(image, dict) and isinstance(image.get("base64"), str):
        return len(image["base64"])
    return _image_bytes(value["content"]) if isinstance(value.get("content"), list) else 0


MOST_REWARD = 1e30
"""Largest reward of one step: beyond it, sums of squares are not finite in float32."""


def reply_of(returned: JsonValue) -> Reply:
    """Validate the result of `step`, decoded from JSON. Raises `EnvironmentFailed` (PROTOCOL)."""
    if not isinstance(returned, list) or len(returned) not in (3, 4):
        raise _invalid("step", "not (messages, reward, done) or (messages, reward, done, info)", returned)
    messages, reward, done, *extra = returned
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= MOST_REWARD:
        raise _invalid("step", "a reward that is no finite number", reward)
    if not isinstance(done, bool):
        raise _invalid("step", "a value for done that is neither True nor False", done)
    info = extra[0] if extra and extra[0] is not None else {}
    if not isinstance(info, dict):
        raise _invalid("step", "an info that is no mapping", info)
    if not isinstance(info.get("failed_calls", 0), int):
        raise _invalid("step", "an info whose failed_calls is no whole number", info)
    checked, images = _messages("step", messages)
    if not checked and not done:
        raise _invalid("step", "no messages, and is not done", returned)
    return Reply(checked, float(reward), done, info, images)


ROLES = ("system", "user", "tool", "assistant")


def _messages(method: str, messages: JsonValue) -> tuple[list[Message], tuple[bytes, ...]]:
    """Validate messages; returns them with markers in place of their images, and the encoded images."""
    if not isinstance(messages, list):
        raise _invalid(method, "messages that are not a list", messages)
    checked, images = list[Message](), list[bytes]()
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(content, str | list):
            raise _invalid(method, "a message without a role and a text or a list of parts as its content", message)
        allowed = ROLES if method == "reset" else ("user", "tool", "system")
        if message.get("role") not in allowed:
            raise _invalid(method, f"a message whose role is none of {', '.join(allowed)}", message)
        try:
            with_markers, message_images = extract_images(message, content)
        except BadImage as error:
            raise EnvironmentFailed(Failure.PROTOCOL, f"{method} returned what cannot be shown: {error}") from error
        checked.append(with_markers)
        images += message_images
    return checked, tuple(images)


def _invalid(method: str, problem: str, value: object) -> EnvironmentFailed:
    return EnvironmentFailed(Failure.PROTOCOL, f"{method} returned {problem}: {str(value)[:200]}")
