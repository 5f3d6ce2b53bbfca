"""OpenAI's chat protocol: validation of requests, and the form of answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcli.environments.message_images import with_pictures
from rlcli.images.row_images import BadImage
from rlcli.types import image_digest

Message = dict[str, Any]

KINDS = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error"}


class Refused(Exception):
    """A request that gets an error. status: of HTTP. code: for programs."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code or None}}


@dataclass(frozen=True)
class ChatRequest:
    """A chat request of a client."""

    messages: list[Message]
    """Messages with text as their content, and arguments of calls as mappings where they are JSON objects; those with
    images describe them in `images`."""
    tools: list[dict[str, Any]]
    """JSON schemas of the tools."""
    max_tokens: int | None
    """Maximum number of tokens of the turn; None: not limited by the request."""
    stop: tuple[str, ...]
    """Texts at which a turn ends."""
    stream: bool
    """Whether the answer is sent as events."""
    include_usage: bool
    """Whether the events end with the numbers of tokens."""
    logprobs: bool
    """Whether the answer has log-probs."""
    model: str
    """Name of the model, which the answer repeats."""
    images: Mapping[str, bytes] = field(default_factory=dict)
    """Digest → encoded image."""


@dataclass(frozen=True)
class Answer:
    """A turn for the client."""

    id: str
    """Id of the completion."""
    model: str
    """Name of the model."""
    message: Message
    """The policy's message, with arguments of calls as mappings."""
    finish_reason: str
    """In OpenAI's terms."""
    prompt_tokens: int
    """Tokens before the turn."""
    response_tokens: int
    """Tokens of the turn."""
    logprobs: Sequence[tuple[str, float]] | None
    """Text and log-prob of each token, if requested."""


def read_chat(body: Any) -> ChatRequest:
    """Raises `Refused` (400) for what cannot be answered as it was asked. Sampling parameters are the run's own: those
    of the request have no effect."""
    _only(isinstance(body, dict), "the body is no JSON object")
    _only(body.get("n") in (None, 1), f"n = {body.get('n')!r:.20}: only one choice is drawn")
    _only(not body.get("top_logprobs"), "top_logprobs: only the log-probs of the drawn tokens are known")
    form = body.get("response_format") or {"type": "text"}
    _only(isinstance(form, dict) and form.get("type") == "text", "response_format: only text is supported")
    options = body.get("stream_options") or {}
    _only(isinstance(options, dict), "stream_options is no JSON object")
    messages = body.get("messages")
    _only(isinstance(messages, list) and bool(messages), "messages is no list with a message")
    tools = [_tool(tool) for tool in _list(body.get("tools"), "tools")]
    stop = body.get("stop") or []
    stop = (stop,) if isinstance(stop, str) else tuple(_list(stop, "stop"))
    _only(all(isinstance(text, str) and text for text in stop), "stop is neither a text nor a list of texts")
    read = [read_message(message) for message in messages]
    return ChatRequest(
        messages=[message for message, _ in read],
        tools=[] if body.get("tool_choice") == "none" else tools,
        max_tokens=read_max_tokens(body, "max_completion_tokens", "max_tokens"),
        stop=stop,
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        model=str(body.get("model") or ""),
        images={image_digest(image): image for _, images in read for image in images},
    )


def read_max_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of the fields `names` that is given. Raises `Refused` unless it is a number from 1."""
    value = next((body[name] for name in names if body.get(name) is not None), None)
    _only(value is None or (type(value) is int and value >= 1), f"{names[0]} = {value!r:.20} is no number from 1")
    return value


def read_message(message: Any) -> tuple[Message, tuple[bytes, ...]]:
    """A message as a chat template takes it, and its pictures. Raises `Refused`."""
    _only(isinstance(message, dict), "a message is no JSON object")
    role = {"developer": "system"}.get(message.get("role"), message.get("role"))
    _only(role in ("system", "user", "assistant", "tool"), f"a message has the role {role!r:.40}, which is unknown")
    content = message.get("content")
    _only(content is None or isinstance(content, str | list), "a message's content is neither a text nor a list")
    try:
        parsed_message, images = with_pictures({"role": role, "content": content or ""})
    except BadImage as error:
        raise Refused(400, str(error)) from error
    if role == "tool":
        parsed_message |= {
            name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)
        }
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(reasoning, str):
        parsed_message["reasoning_content"] = reasoning
    calls = [_call(call) for call in _list(message.get("tool_calls"), "tool_calls")] if role == "assistant" else []
    return parsed_message | ({"tool_calls": calls} if calls else {}), images


def same(known: Message, sent: Message) -> bool:
    """Whether a client sent a message back that is known. An assistant's may differ in white space around its text and
    in its calls' JSON, in the calls' ids, and may lack its reasoning."""
    if known["role"] != "assistant" or sent["role"] != "assistant":
        return all(known.get(name) == sent.get(name) for name in ("role", "content", "images"))
    calls = [[call["function"] for call in message.get("tool_calls", ())] for message in (known, sent)]
    reasoning = [message.get("reasoning_content", "").strip() for message in (known, sent)]
    same_content = known["content"].strip() == sent["content"].strip() and known.get("images") == sent.get("images")
    return bool(same_content and calls[0] == calls[1] and reasoning[1] in ("", reasoning[0]))


def completion(answer: Answer) -> dict[str, Any]:
    """The body of an answer that is sent at once."""
    message = {**answer.message, **_calls(answer)}
    message["content"] = answer.message["content"] or (None if "tool_calls" in message else "")
    choice = {"index": 0, "message": message, "logprobs": _logprobs(answer), "finish_reason": answer.finish_reason}
    return _head(answer, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def chunks(answer: Answer, include_usage: bool) -> Iterator[str]:
    """The events of an answer that is streamed."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: text} for name in ("reasoning_content", "content") if (text := answer.message.get(name))]
    deltas += [_calls(answer, numbered=True)] if answer.message.get("tool_calls") else []
    head = _head(answer, "chat.completion.chunk")
    for index, delta in enumerate([*deltas, {}]):
        is_last = index == len(deltas)
        choice = {"index": 0, "delta": delta, "finish_reason": answer.finish_reason if is_last else None}
        choice["logprobs"] = _logprobs(answer) if index == len(deltas) - 1 else None
        yield _event(head | {"choices": [choice]})
    if include_usage:
        yield _event(head | {"choices": [], "usage": _usage(answer)})
    yield "data: [DONE]\n\n"


def logprobs_content(pairs: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Log-probs of tokens in OpenAI's shape."""
    tokens = ({"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in pairs)
    return {"content": [{**token, "top_logprobs": []} for token in tokens], "refusal": None}


def _only(is_right: bool, message: str) -> None:
    if not is_right:
        raise Refused(400, message)


def _list(value: Any, name: str) -> list[Any]:
    _only(value is None or isinstance(value, list), f"{name} is no list")
    return value or []


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    _only(isinstance(function, dict) and isinstance(function.get("name"), str), "a tool is no function with a name")
    assert isinstance(function, dict)
    fields = ("name", "description", "parameters")
    return {"type": "function", "function": {name: function[name] for name in fields if function.get(name) is not None}}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    _only(isinstance(function, dict) and isinstance(function.get("name"), str), "a tool call has no function's name")
    assert isinstance(function, dict)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    parsed_message = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or "call00001"), "type": "function", "function": parsed_message}


def _calls(answer: Answer, numbered: bool = False) -> dict[str, Any]:
    calls = [
        ({"index": index} if numbered else {})
        | call
        | {"function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for index, call in enumerate(answer.message.get("tool_calls", ()))
    ]
    return {"tool_calls": calls} if calls else {}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": int(time.time()), "model": answer.model}


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.response_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.response_tokens,
        "total_tokens": total,
    }


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    return None if answer.logprobs is None else logprobs_content(answer.logprobs)


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
