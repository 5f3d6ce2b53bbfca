"""Check that conversations in tokens (`TurnTemplate`) agree with the chat template of a tokenizer."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rlcli.environments.chat_messages import Message, ToolCall, ToolSchema
from rlcli.environments.turn_tokens import TurnTemplate
from rlcli.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS: list[ToolSchema] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "integer", "description": "a number"} for name in ("a", "b")},
                "required": ["a", "b"],
            },
        },
    }
]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(text: str, reasoning: str = "") -> Message:
    if reasoning:
        return {"role": "assistant", "content": text, "reasoning_content": reasoning}
    return {"role": "assistant", "content": text}


def _call(*numbers: int, reasoning: str = "") -> Message:
    """A turn that calls `add` once for each number."""
    calls: list[ToolCall] = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": "add", "arguments": {"a": number, "b": 2}}}
        for number in numbers
    ]
    return {**_said("", reasoning), "tool_calls": calls}


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05}", "content": text}


SYSTEM: Message = {"role": "system", "content": "Be brief."}
BOUNDARIES: dict[str, tuple[list[Message], list[Message]]] = {
    "a user's answer": ([_user("1+1?"), _said("2")], [_user("Sure?")]),
    "a user's answer, with a system message": ([SYSTEM, _user("1+1?"), _said("2")], [_user("Sure?")]),
    "a user's answer to a turn that reasons": ([_user("1+1?"), _said("2", "one and one")], [_user("Sure?")]),
    "a user's second answer": ([_user("1+1?"), _said("2"), _user("Sure?"), _said("Yes.")], [_user("Why?")]),
    "a user's answer with space around it": ([_user("1+1?"), _said("2")], [_user("\n  Sure?\n\n")]),
    "a user's answer in other scripts": ([_user("1+1?"), _said("zwei")], [_user("véritable? 真的吗？🙂")]),
    "a tool's result": ([_user("1+2?"), _call(1)], [_result(1, "3")]),
    "a tool's result to a turn that reasons": ([SYSTEM, _user("1+2?"), _call(1, reasoning="add")], [_result(1, "3")]),
    "two tools' results": ([_user("1+2, 3+2?"), _call(1, 3)], [_result(1, "3"), _result(3, "5")]),
    "a second tool's result": ([_user("1+2+2?"), _call(1), _result(1, "3"), _call(3)], [_result(3, "5")]),
    "a tool's result in several lines": ([_user("1+2?"), _call(1)], [_result(1, '{"sum":\n  3}\n')]),
    "a user's question after a tool": ([_user("1+2?"), _call(1), _result(1, "3"), _said("3")], [_user("And 2+2?")]),
}
"""Name → the conversation up to a turn of the policy, and the messages that follow it."""


class Agreement(StrEnum):
    """EXACT: the tokens are those of one rendering of the whole conversation. PAST: they are from the turn on; the
    template renders what was before it differently, and the conversation keeps its tokens. BROKEN: they are not.
    NONE: the template refuses such messages."""

    EXACT = "exact"
    PAST = "past differs"
    BROKEN = "broken"
    NONE = "unsupported"


@dataclass(frozen=True)
class Boundary:
    """Result of the check at one boundary between a turn and the messages that follow it."""

    name: str
    """Key of `BOUNDARIES`."""
    agreement: Agreement
    """The result."""
    detail: str = ""
    """Tokens that differ, as text, or the reason why it is unsupported."""


def check(tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> list[Boundary]:
    """Compare at each of `BOUNDARIES` the appended tokens with one rendering of the whole conversation."""
    return [_checked(tokenizer, stops, name, past, new) for name, (past, new) in BOUNDARIES.items()]


def _checked(
    tokenizer: PreTrainedTokenizerBase, stops: Collection[int], name: str, past: list[Message], new: list[Message]
) -> Boundary:
    turns = TurnTemplate(tokenizer, stops, TOOLS if any("tool_calls" in message for message in past) else ())
    if turns.arguments == "{}":
        past = _with_text_arguments(past)
    try:
        rendered = turns.first([*past, *new])
        turn = turns.trimmed(past)
        appended = turns.append(turn, new)
    except ModelError as error:
        return Boundary(name, Agreement.NONE, str(error))
    text = tokenizer.decode(rendered)
    missing = [word for message in new for word in re.findall(r"\w+", message["content"]) if word not in text]
    if missing:
        return Boundary(name, Agreement.NONE, f"the template leaves out the {new[0]['role']}'s message")
    ours = turn[: len(turn) - appended.dropped] + appended.tokens
    if ours == rendered:
        return Boundary(name, Agreement.EXACT)
    tail = len(appended.tokens)
    if tail and rendered[-tail:] == appended.tokens:
        return Boundary(name, Agreement.PAST, _difference(tokenizer, ours, rendered))
    return Boundary(name, Agreement.BROKEN, _difference(tokenizer, ours, rendered))


def _with_text_arguments(messages: list[Message]) -> list[Message]:
    """The same messages, with the arguments of calls as JSON text."""
    changed = copy.deepcopy(messages)
    for call in (call for message in changed for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return changed


def _difference(tokenizer: PreTrainedTokenizerBase, ours: list[int], rendered: list[int]) -> str:
    """Both texts from the first token that differs on."""
    same = next(
        (i for i, (a, b) in enumerate(zip(ours, rendered, strict=False)) if a != b), min(len(ours), len(rendered))
    )
    our_text, rendered_text = (tokenizer.decode(ids[same : same + 12]) for ids in (ours, rendered))
    return f"{our_text!r} in place of {rendered_text!r}"
