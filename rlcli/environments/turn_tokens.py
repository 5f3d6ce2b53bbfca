"""The tokens between two turns of the policy.

A conversation is never tokenized again: its tokens are those that the engine saw and drew, and what follows a turn is
appended. What to append is the difference of two renderings behind a fixed prefix, which has the conversation's roles
and none of its text: T(prefix + new messages) − T(prefix). It begins behind the token that closes the prefix's last
turn, so that no token of the tokenizer spans the junction.

A template may render the past differently once a message follows: it drops the reasoning of earlier turns, for example.
The policy's own tokens stay as they were drawn.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rlcli.data.prompts import chat_template
from rlcli.environments.message_images import in_parts
from rlcli.errors import ModelError

Messages = Sequence[Mapping[str, Any]]
"""Messages as a chat template takes them: `role` and `content`, of an assistant also `reasoning_content` and
`tool_calls`, of a tool also `name` and `tool_call_id`."""


class Appended(NamedTuple):
    """What follows a turn: so many of its last tokens are dropped, then these follow, none of them drawn."""

    dropped: int
    tokens: list[int]


class TurnTemplate:
    """What a tokenizer's chat template writes between turns. stops: the ids that end a response
    (`chat_template.stop_tokens`). tools: JSON schemas of the functions that the policy may call. never: ids that stand
    for pictures."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Collection[int],
        tools: Sequence[Mapping[str, Any]] = (),
        never: Collection[int] = (),
    ) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        end = chat_template.end_of_turn(tokenizer)
        self._stops = frozenset(stops) if end is None else frozenset(stops) | {end}
        self._markers = chat_template.control_tokens(tokenizer)
        self._shown = chat_template.any_of([str(tokenizer.convert_ids_to_tokens(token)) for token in never])
        text = str(tokenizer.chat_template)
        self._written = {token for token in self._stops if str(tokenizer.convert_ids_to_tokens(token)) in text}
        self._special = frozenset(tokenizer.added_tokens_decoder)
        _, _, tail = chat_template.render(tokenizer, _prefix([], "", {}), opened=False).rpartition("y")
        ids: list[int] = tokenizer(tail, add_special_tokens=False)["input_ids"]
        self._tail = ids if self._stops.isdisjoint(ids) else []
        """The plain text by which a turn is closed, if it is."""
        self.arguments: Mapping[str, Any] | str = {}
        """Of a call without any, as the template takes them: some take the JSON text."""
        result = {"role": "tool", "name": "tool", "tool_call_id": "call00001", "content": "x"}
        for self.arguments in ({}, "{}"):
            with contextlib.suppress(ModelError):
                self._ids([*_prefix([result], "", self.arguments), result], opened=True)
                break

    def first(self, messages: Messages) -> list[int]:
        """The prompt: the first messages, with the policy's turn opened. Raises `ModelError` if the template fails."""
        return self._ids(messages, opened=True)

    def prepared(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message of the past: what users and tools wrote cannot become control tokens, and the arguments of calls
        are as the template takes them. What the policy has spelled stands for no picture."""
        if message["role"] in ("user", "tool"):
            return self.harmless(message)
        if self._shown is not None:
            message = _broken(message, self._shown)
        if not message.get("tool_calls") or not isinstance(self.arguments, str):
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    def trimmed(self, messages: Messages) -> list[int]:
        """The tokens of a conversation that ends with a turn of the policy, as an engine leaves them: up to the token
        that closes the turn."""
        ids = self._ids(messages, opened=False)
        return ids[: self._closed(ids, messages) or len(ids) - len(self._tail)]

    def append(self, turn: Sequence[int], messages: Messages) -> Appended:
        """What follows the turn `turn`, before the policy's next turn. messages: those of the environment, whose text
        cannot become control tokens. Raises `ModelError` if the template fails, or does not append."""
        new = [self.harmless(message) for message in messages]
        closing, delta = self._delta(new)
        if closing is not None:
            # A turn that was cut off, or ended by a token that the template never writes, is closed first.
            is_closed = bool(turn) and turn[-1] in self._stops and turn[-1] in {closing, *self._written}
            return Appended(0, delta if is_closed else [closing, *delta])
        if self._tail or not turn or turn[-1] not in self._stops:
            return Appended(0, self._tail + delta)
        # Nothing closes a turn but the token that opens the next one (GLM), which the policy may have drawn.
        return Appended(0, delta[1:]) if delta[:1] == [turn[-1]] else Appended(1, delta)

    def _delta(self, new: Messages) -> tuple[int | None, list[int]]:
        """The token that closes a turn, if there is one, and what follows it: `new`, and the policy's turn opened."""
        prefixes = [_prefix(new, text, self.arguments) for text in REASONING]
        rendered = [(p, self._ids(p, opened=False), self._ids([*p, *new], opened=True)) for p in prefixes]
        for prefix, without_new, with_new in rendered:
            closed = self._closed(without_new, prefix)
            length = closed or len(without_new)
            if with_new[:length] == without_new[:length]:
                return without_new[closed - 1] if closed else None, with_new[length:]
            if closed and with_new[: closed - 1] == without_new[: closed - 1] and with_new[closed - 1] in self._special:
                return with_new[closed - 1], with_new[closed:]  # the past's turns are closed by another token (gpt-oss)
        # The past is rendered differently now. It has as many ends of turns as before.
        for prefix, without_new, with_new in rendered:
            closed = self._closed(without_new, prefix)
            ends = [index for index, token in enumerate(with_new) if token in self._stops]
            turns = sum(token in self._stops for token in without_new[:closed])
            if closed and len(ends) >= turns:
                return without_new[closed - 1], with_new[ends[turns - 1] + 1 :]
        raise ModelError(
            f"the chat template of {self._tokenizer.name_or_path or 'the model'} does not append a message of the "
            f"{new[0]['role']}: it renders the conversation before it differently",
            "rlcli doctor --template MODEL shows where; use a model whose template appends",
        )

    def _closed(self, ids: list[int], messages: Messages) -> int:
        """Where the last turn of `messages`, whose tokens are `ids`, is closed; 0 if nothing but what opens the next
        turn closes it."""
        start = len(self._ids(messages[:-1], opened=False))
        return 1 + max(
            (index for index, token in enumerate(ids) if index >= start and token in self._stops), default=-1
        )

    def _ids(self, messages: Messages, opened: bool) -> list[int]:
        roles = ", ".join(str(message["role"]) for message in messages)
        shown = [in_parts(message) for message in messages]
        text = chat_template.render(
            self._tokenizer, shown, what=f"a conversation of {roles}", opened=opened, tools=self._tools
        )
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def harmless(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message as a template takes it, with a zero-width space in each marker that its text contains, such as
        `<|im_end|>`: written by an environment, it must not end a turn, open another one, or stand for a picture."""
        message = in_parts(message)
        content = message.get("content")
        if isinstance(content, list):
            return {**message, "content": [_broken(part, self._markers) for part in content]}
        return _broken(message, self._markers) if isinstance(content, str) else message


REASONING = ("z", "")
"""Of the prefix's turn. Some templates render a turn without reasoning differently once another one follows, others
drop it then."""


def _broken(value: Any, markers: re.Pattern[str] | None) -> Any:
    """A value of JSON with a zero-width space in each marker in its texts."""
    if markers is None:
        return value
    if isinstance(value, str):
        return markers.sub(lambda match: f"{match[0][0]}\u200b{match[0][1:]}", value)
    if isinstance(value, Mapping):
        return {key: _broken(item, markers) for key, item in value.items()}
    return [_broken(item, markers) for item in value] if isinstance(value, list) else value


def _prefix(new: Messages, reasoning: str, arguments: Mapping[str, Any] | str) -> list[Mapping[str, Any]]:
    """A conversation that `new` may follow. A tool's result follows a call with its name and id."""
    calls = [
        {
            "id": message.get("tool_call_id", "call00001"),
            "type": "function",
            "function": {"name": message.get("name", "tool"), "arguments": arguments},
        }
        for message in new
        if message["role"] == "tool"
    ]
    turn = {"role": "assistant", "content": "" if calls else "y"}
    turn |= {"reasoning_content": reasoning} if reasoning else {}
    return [{"role": "user", "content": "x"}, turn | ({"tool_calls": calls} if calls else {})]
