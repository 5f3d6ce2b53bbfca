"""OpenAI's chat protocol: validation of requests, and the form of answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NotRequired, TypedDict

from rlcli.environments.chat_messages import Message, ToolCall, ToolSchema
from rlcli.environments.message_images import extract_images
from rlcli.images.row_images import BadImage
from rlcli.support.json_types import JsonValue
from rlcli.types import image_digest

NAMELESS_CALL = "a tool call has no function's name"
TEXT_ONLY = "response_format: only text is supported"
KINDS = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error"}


class ErrorDetail(TypedDict):
    """Why a request was refused."""

    message: str
    """The reason, for people."""
    type: str
    """Kind of the error."""
    param: None
    """Name of a parameter, which rlcli does not give."""
    code: str | None
    """The reason, for programs."""


class ErrorBody(TypedDict):
    """Body of an answer to a refused request."""

    error: ErrorDetail
    """The reason."""


class SentFunction(TypedDict):
    """The function of a tool call, as clients get it."""

    name: str
    """Name of the tool."""
    arguments: str
    """Value of each parameter, as JSON text."""


class SentToolCall(TypedDict):
    """A tool call, as clients get it."""

    index: NotRequired[int]
    """Number of the call, from 0; in chunks only."""
    id: str
    """Identifies it in the session."""
    type: Literal["function"]
    """A constant."""
    function: SentFunction
    """Function that is called."""


class SentMessage(TypedDict, total=False):
    """A turn of the policy, as clients get it; in a chunk, a part of it."""

    role: str
    """"assistant"."""
    content: str | None
    """Text; None if the turn has only tool calls."""
    reasoning_content: str
    """Reasoning."""
    tool_calls: list[SentToolCall]
    """Tool calls."""


class TokenLogProb(TypedDict):
    """The log-prob of one token."""

    token: str
    """Its text."""
    logprob: float
    """Its log-prob."""
    bytes: list[int]
    """Its text in UTF-8."""
    top_logprobs: list[object]
    """Log-probs of other tokens, which are unknown: empty."""


class LogProbs(TypedDict):
    """The log-probs of a turn."""

    content: list[TokenLogProb]
    """Log-prob of each token."""
    refusal: None
    """Always None: the policy has no refusals."""


class Choice(TypedDict):
    """The only choice of a completion."""

    index: int
    """0."""
    message: SentMessage
    """The turn."""
    logprobs: LogProbs | None
    """Log-probs of its tokens, if requested."""
    finish_reason: str
    """Why it ended."""


class ChunkChoice(TypedDict, total=False):
    """The only choice of a chunk."""

    index: int
    """0."""
    delta: SentMessage
    """The part of the turn that is new."""
    finish_reason: str | None
    """Why the turn ended; None before the last chunk."""
    logprobs: LogProbs | None
    """Log-probs of all tokens, if requested, in the chunk before the last one."""


class Usage(TypedDict):
    """Numbers of tokens."""

    prompt_tokens: int
    """Tokens before the turn."""
    completion_tokens: int
    """Tokens of the turn."""
    total_tokens: int
    """Their sum."""


class Head(TypedDict):
    """Fields that every body of an answer begins with."""

    id: str
    """Id of the completion."""
    object: str
    """Kind of the body."""
    created: int
    """Unix time in seconds."""
    model: str
    """Name of the model."""


class Completion(Head):
    """Body of an answer that is sent at once."""

    choices: list[Choice]
    """One choice."""
    usage: Usage
    """Numbers of tokens."""


class Chunk(Head):
    """Body of one event of an answer that is streamed."""

    choices: list[ChunkChoice]
    """One choice; none in a `UsageChunk`."""


class UsageChunk(Chunk):
    """Body of the event that ends a streamed answer with its numbers of tokens."""

    usage: Usage
    """Numbers of tokens."""


class Refused(Exception):
    """A request that gets an error. status: of HTTP. code: for programs."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> ErrorBody:
        """In OpenAI's shape."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code or None}}


@dataclass(frozen=True)
class ChatRequest:
    """A chat request of a client."""

    messages: list[Message]
    """Messages with text as their content, and arguments of calls as mappings where they are JSON objects; those with
    images describe them in `images`."""
    tools: list[ToolSchema]
    """JSON schemas of the tools."""
    max_tokens: int | None
    """Maximum number of tokens of the turn; None: not limited by the request."""
    stop: tuple[str, ...]
    """Texts at which a turn ends."""
    stream: bool
    """True if the answer is sent as events."""
    include_usage: bool
    """True if the events end with the numbers of tokens."""
    logprobs: bool
    """True if the answer has log-probs."""
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


def read_chat(body: JsonValue) -> ChatRequest:
    """Raises `Refused` (400) for what cannot be answered as it was asked. Sampling parameters are the run's own: those
    of the request have no effect."""
    fields = _object(body, "the body is no JSON object")
    _only(fields.get("n") in (None, 1), f"n = {fields.get('n')!r:.20}: only one choice is generated")
    _only(not fields.get("top_logprobs"), "top_logprobs: only the log-probs of the sampled tokens are known")
    form = _object(fields.get("response_format") or {"type": "text"}, TEXT_ONLY)
    _only(form.get("type") == "text", TEXT_ONLY)
    options = _object(fields.get("stream_options") or {}, "stream_options is no JSON object")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages is no list with a message")
    tools = [_tool(tool) for tool in _list(fields.get("tools"), "tools")]
    stop = _stop_texts(fields.get("stop") or [])
    read = [read_message(message) for message in messages]
    return ChatRequest(
        messages=[message for message, _ in read],
        tools=[] if fields.get("tool_choice") == "none" else tools,
        max_tokens=read_max_tokens(fields, "max_completion_tokens", "max_tokens"),
        stop=stop,
        stream=bool(fields.get("stream")),
        include_usage=bool(options.get("include_usage")),
        logprobs=bool(fields.get("logprobs")),
        model=str(fields.get("model") or ""),
        images={image_digest(image): image for _, images in read for image in images},
    )


def read_max_tokens(body: Mapping[str, JsonValue], *names: str) -> int | None:
    """The first of the fields `names` that is given. Raises `Refused` unless it is a number from 1."""
    value = next((body[name] for name in names if body.get(name) is not None), None)
    if value is None or (type(value) is int and value >= 1):
        return value
    raise Refused(400, f"{names[0]} = {value!r:.20} is no number from 1")


def read_message(message: JsonValue) -> tuple[Message, tuple[bytes, ...]]:
    """A message as a chat template takes it, and its images. Raises `Refused`."""
    fields = _object(message, "a message is no JSON object")
    role = "system" if fields.get("role") == "developer" else fields.get("role")
    _only(role in ("system", "user", "assistant", "tool"), f"a message has the role {role!r:.40}, which is unknown")
    content = fields.get("content")
    if not (content is None or isinstance(content, str | list)):
        raise Refused(400, "a message's content is neither a text nor a list")
    try:
        parsed_message, images = extract_images({"role": role}, content or "")
    except BadImage as error:
        raise Refused(400, str(error)) from error
    if role == "tool":
        if isinstance(name := fields.get("name"), str):
            parsed_message["name"] = name
        if isinstance(call_id := fields.get("tool_call_id"), str):
            parsed_message["tool_call_id"] = call_id
    reasoning = fields.get("reasoning_content") or fields.get("reasoning")
    if role == "assistant" and isinstance(reasoning, str):
        parsed_message["reasoning_content"] = reasoning
    calls = [_call(call) for call in _list(fields.get("tool_calls"), "tool_calls")] if role == "assistant" else []
    if calls:
        parsed_message["tool_calls"] = calls
    return parsed_message, images


def same(known: Message, sent: Message) -> bool:
    """True if a client sent a message back that is known. An assistant's may differ in white space around its text and
    in its calls' JSON, in the calls' ids, and may lack its reasoning."""
    if known["role"] != "assistant" or sent["role"] != "assistant":
        return all(known.get(name) == sent.get(name) for name in ("role", "content", "images"))
    calls = [[call["function"] for call in message.get("tool_calls", ())] for message in (known, sent)]
    reasoning = [message.get("reasoning_content", "").strip() for message in (known, sent)]
    same_content = known["content"].strip() == sent["content"].strip() and known.get("images") == sent.get("images")
    return bool(same_content and calls[0] == calls[1] and reasoning[1] in ("", reasoning[0]))


def completion(answer: Answer) -> Completion:
    """The body of an answer that is sent at once."""
    calls = _calls(answer)
    message: SentMessage = {"role": "assistant", "content": answer.message["content"] or (None if calls else "")}
    if "reasoning_content" in answer.message:
        message["reasoning_content"] = answer.message["reasoning_content"]
    if calls:
        message["tool_calls"] = calls
    choice: Choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(answer),
        "finish_reason": answer.finish_reason,
    }
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def chunks(answer: Answer, include_usage: bool) -> Iterator[str]:
    """The events of an answer that is streamed."""
    deltas: list[SentMessage] = [{"role": "assistant", "content": ""}]
    if reasoning := answer.message.get("reasoning_content"):
        deltas.append({"reasoning_content": reasoning})
    if content := answer.message["content"]:
        deltas.append({"content": content})
    if calls := _calls(answer, numbered=True):
        deltas.append({"tool_calls": calls})
    head = _head(answer, "chat.completion.chunk")
    deltas.append({})
    for index, delta in enumerate(deltas):
        is_last = index == len(deltas) - 1
        choice: ChunkChoice = {
            "index": 0,
            "delta": delta,
            "finish_reason": answer.finish_reason if is_last else None,
            "logprobs": _logprobs(answer) if index == len(deltas) - 2 else None,
        }
        yield _event({**head, "choices": [choice]})
    if include_usage:
        usage: UsageChunk = {**head, "choices": [], "usage": _usage(answer)}
        yield _event(usage)
    yield "data: [DONE]\n\n"


def logprobs_content(pairs: Sequence[tuple[str, float]]) -> LogProbs:
    """Log-probs of tokens in OpenAI's shape."""
    content: list[TokenLogProb] = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
    ]
    return {"content": content, "refusal": None}


def _only(is_right: bool, message: str) -> None:
    if not is_right:
        raise Refused(400, message)


def _object(value: JsonValue, problem: str) -> Mapping[str, JsonValue]:
    if not isinstance(value, Mapping):
        raise Refused(400, problem)
    return value


def _list(value: JsonValue, name: str) -> list[JsonValue]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise Refused(400, f"{name} is no list")
    return value


def _stop_texts(value: JsonValue) -> tuple[str, ...]:
    """The texts at which a turn ends, of a text or a list."""
    values = [value] if isinstance(value, str) else _list(value, "stop")
    texts = tuple(text for text in values if isinstance(text, str) and text)
    _only(len(texts) == len(values), "stop is neither a text nor a list of texts")
    return texts


def _tool(tool: JsonValue) -> ToolSchema:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(400, "a tool is no function with a name")
    fields = ("name", "description", "parameters")
    return {"type": "function", "function": {name: function[name] for name in fields if function.get(name) is not None}}


def _call(call: JsonValue) -> ToolCall:
    fields = call if isinstance(call, dict) else {}
    function = _object(fields.get("function"), NAMELESS_CALL)
    name = function.get("name")
    if not isinstance(name, str):
        raise Refused(400, NAMELESS_CALL)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    identifier = str(fields.get("id") or "call00001")
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def _calls(answer: Answer, numbered: bool = False) -> list[SentToolCall]:
    calls: list[SentToolCall] = []
    for index, call in enumerate(answer.message.get("tool_calls", ())):
        function = call["function"]
        sent: SentToolCall = {
            "id": call["id"],
            "type": call["type"],
            "function": {"name": function["name"], "arguments": json.dumps(function["arguments"])},
        }
        calls.append({"index": index, **sent} if numbered else sent)
    return calls


def _head(answer: Answer, kind: str) -> Head:
    return {"id": answer.id, "object": kind, "created": int(time.time()), "model": answer.model}


def _usage(answer: Answer) -> Usage:
    total = answer.prompt_tokens + answer.response_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.response_tokens,
        "total_tokens": total,
    }


def _logprobs(answer: Answer) -> LogProbs | None:
    return None if answer.logprobs is None else logprobs_content(answer.logprobs)


def _event(body: Chunk) -> str:
    return f"data: {json.dumps(body)}\n\n"
