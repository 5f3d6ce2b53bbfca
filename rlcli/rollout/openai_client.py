"""A client of served models with the OpenAI chat protocol (vLLM, SGLang, llama.cpp, a hosted service)."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import random
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import httpx
from anyio.from_thread import start_blocking_portal

from rlcli.errors import EndpointError
from rlcli.registry import near
from rlcli.support.json_types import JsonValue
from rlcli.types import Message

TRIES = 6
"""Tries of a request that fails temporarily."""
BACKOFF_S = 0.5
"""First wait between two tries; it doubles each time."""
LONGEST_WAIT_S = 30.0
"""Longest wait between two tries."""
CONNECT_S = 10.0
"""Timeout of a connection."""
LISTING_S = 30.0
"""Timeout of the list of models."""
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "seed"),
)
"""The sampling values of a request. All of them are sent: a server takes missing ones from the model's generation
config, so that four samples at temperature 1 may be equal."""
BEYOND_OPENAI = ("top_k", "min_p", "repetition_penalty")
"""Sampling values that vLLM, SGLang and others support, but OpenAI's own protocol does not."""
TEMPORARY = frozenset({408, 429, 500, 502, 503, 504, 529})
"""HTTP statuses that are retried."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One requested response. By default all tokens are sampled from, and none is penalised.

    >>> request = ChatRequest(key="gsm8k:0/1", messages=[{"role": "user", "content": "2+2?"}], max_tokens=64, seed=1)
    """

    key: str
    """Key that the caller chooses; the result has it too."""
    messages: Sequence[Message]
    """The conversation so far."""
    temperature: float = 0.0
    """0: greedy."""
    max_tokens: int = 1024
    """Maximum number of tokens of the response."""
    seed: int | None = None
    """None: no seed is sent."""
    top_p: float = 1.0
    """Sample from the most likely tokens with this total probability."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the request, which not every server supports."""


@dataclass(frozen=True, slots=True)
class ChatResult:
    """One response."""

    key: str
    """Key of the request."""
    text: str
    """Text of the response."""
    finish_reason: str
    """As reported by the server: `stop`, `length`, …"""
    completion_tokens: int | None
    """None if the server sends none."""
    latency_s: float
    """Seconds from the successful request to its answer, without failed tries and the waits between them."""


class ChatClient:
    """A synchronous client of one endpoint.

    base_url: `http://host:8000` or `http://host:8000/v1`. model: if unset, the only one that the endpoint serves.
    timeout_s: longest time for one response. concurrency: number of concurrent requests. omit: those of `SAMPLING` that
    are not sent, for a server that refuses them. The API key is OPENAI_API_KEY; no message contains it.

        for result in ChatClient("http://localhost:8000").generate(requests):
            print(result.key, result.text)

    Raises `EndpointError` for an invalid address, an endpoint that does not answer, refuses, does not serve the
    model, or answers out of protocol. An endpoint that keeps failing is an error, never an empty response.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        timeout_s: float = 600.0,
        concurrency: int = 32,
        omit: Collection[str] = (),
    ) -> None:
        assert set(omit) <= set(SAMPLING), omit
        self.base_url = _versioned(base_url)
        self.model = model
        self.timeout_s = timeout_s
        self.concurrency = concurrency
        self.omit = frozenset(omit)
        self._api_key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not self._api_key.isascii() or not self._api_key.isprintable():
            raise EndpointError("OPENAI_API_KEY holds characters that no API key has", "set it again")
        self._reached = False

    @property
    def sends_key(self) -> bool:
        """True if the value of OPENAI_API_KEY is sent to the endpoint."""
        return bool(self._api_key)

    def generate(self, requests: Iterable[ChatRequest]) -> Iterator[ChatResult]:
        """Yield each result as it finishes, in any order.

        Requests run in a separate thread, so that they continue while the caller processes a result; `requests` is read
        there, at most `concurrency` in advance. Leaving the loop early, or an error, cancels running requests.
        """
        results: queue.SimpleQueue[ChatResult | None] = queue.SimpleQueue()
        with start_blocking_portal(name="rlcli-endpoint") as portal:
            running: Future[None] = portal.start_task_soon(self._run, iter(requests), results)
            running.add_done_callback(lambda _: results.put(None))
            while (result := results.get()) is not None:
                yield result
            running.result()

    async def _run(self, requests: Iterator[ChatRequest], results: queue.SimpleQueue[ChatResult | None]) -> None:
        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        # `timeout_s` limits a whole request (see `_send`); httpx would limit each read of it.
        timeout = httpx.Timeout(None, connect=CONNECT_S)

        async def work(http: httpx.AsyncClient) -> None:
            for request in requests:
                results.put(await self._complete(http, request))

        try:
            async with httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout) as http:
                if self.model is None:
                    self.model = await self._only_model(http)
                async with asyncio.TaskGroup() as group:
                    for _ in range(self.concurrency):
                        group.create_task(work(http))
        except BaseExceptionGroup as failures:
            raise _first(failures) from None

    async def _complete(self, http: httpx.AsyncClient, request: ChatRequest) -> ChatResult:
        sampling = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": -1,  # all tokens: vLLM takes 0 too, SGLang does not
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": request.max_tokens,
            **({} if request.seed is None else {"seed": request.seed}),
        }
        body: dict[str, object] = {
            "model": self.model,
            "messages": [dict(message) for message in request.messages],
            **{name: value for name, value in sampling.items() if name not in self.omit},
            **request.extra,
        }
        answer, latency_s = await self._send(http, "POST", "chat/completions", body)
        try:
            completion = _object(answer)
            choice = _object(_array(completion["choices"])[0])
            text = _object(choice["message"]).get("content") or ""
            usage = _object(completion.get("usage") or {})
            tokens = usage.get("completion_tokens")
            reason = choice.get("finish_reason") or "stop"
            if not isinstance(text, str) or not isinstance(reason, str) or not isinstance(tokens, int | None):
                raise TypeError
        except (KeyError, IndexError, TypeError):
            raise self._out_of_protocol("chat/completions", json.dumps(answer)) from None
        return ChatResult(request.key, text, reason, tokens, latency_s)

    async def _models(self, http: httpx.AsyncClient) -> list[str]:
        answer, _ = await self._send(http, "GET", "models")
        try:
            return [str(_object(model)["id"]) for model in _array(_object(answer)["data"])]
        except (KeyError, TypeError):
            raise self._out_of_protocol("models", json.dumps(answer)) from None

    async def _only_model(self, http: httpx.AsyncClient) -> str:
        names = await self._models(http)
        if len(names) != 1:
            served = self._line(", ".join(names)) or "no model"
            raise EndpointError(f"endpoint {self.base_url} serves {served}", "name one with --model")
        return names[0]

    async def _send(
        self, http: httpx.AsyncClient, method: str, path: str, body: dict[str, object] | None = None
    ) -> tuple[JsonValue, float]:
        """Send a request; returns the endpoint's JSON answer and its latency in seconds. Temporary failures are
        retried."""
        limit_s = min(self.timeout_s, LISTING_S) if method == "GET" else self.timeout_s
        tries, remaining = 0, TRIES
        while True:
            tries, start = tries + 1, time.monotonic()
            retry_after_s = 0.0
            try:
                async with asyncio.timeout(limit_s):
                    response = await http.request(method, f"{self.base_url}/{path}", json=body)
                if response.status_code == 200:
                    self._reached = True
                    return self._json(path, response), time.monotonic() - start
                if response.status_code not in TEMPORARY:
                    raise await self._refusal(http, path, response, body or {})
                remaining -= 1
                trouble = f"answers {response.status_code} {self._detail(response)}".rstrip()
                retry_after = response.headers.get("retry-after", "")
                # Its other form, a date, counts as none.
                retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
            except TimeoutError:
                remaining -= TRIES // 2  # a request that was too slow once will rarely be faster: one more try
                trouble = f"gave no answer in {limit_s:g} s"
            except httpx.RequestError as error:
                # No answer so far means no server: fail at once.
                remaining = remaining - 1 if self._reached else 0
                trouble = f"cannot be reached ({self._line(str(error) or type(error).__name__)})"
            if remaining <= 0:
                times = f" ({tries} tries)" if tries > 1 else ""
                raise EndpointError(
                    f"endpoint {self.base_url} {trouble}{times}", "check that the server runs and is not overloaded"
                )
            await asyncio.sleep(_wait_s(tries, retry_after_s))

    async def _refusal(
        self, http: httpx.AsyncClient, path: str, response: httpx.Response, body: Mapping[str, object]
    ) -> EndpointError:
        """The error for a request that the endpoint refuses."""
        status, detail = response.status_code, self._detail(response)
        endpoint = f"endpoint {self.base_url}"
        if status in (401, 403):
            denied, hint = (
                ("the API key", "check OPENAI_API_KEY") if self._api_key else ("access", "set OPENAI_API_KEY")
            )
            return EndpointError(f"{endpoint} refuses {denied} ({status} {detail})", hint)
        if status == 404 and path == "chat/completions":
            try:
                names = await self._models(http)
            except EndpointError:
                return EndpointError(f"{endpoint} has no /{path} (404 {detail})", "give --endpoint up to and with /v1")
            return EndpointError(
                f"{endpoint} serves no model '{self._line(str(self.model))}'",
                self._line(near(str(self.model), names)),
            )
        if status in (400, 422) and (names := _refused_values(response, body)):
            values = ", ".join(f"{name} = {body[name]}" for name in names)
            return EndpointError(f"{endpoint} refuses {values} ({status} {detail})", _omit_hint(names, body))
        hint = "give --endpoint up to and with /v1" if status == 404 else "change the request or the server"
        return EndpointError(f"{endpoint} answers {status} to /{path}: {detail}", hint)

    def _json(self, path: str, response: httpx.Response) -> JsonValue:
        try:
            answer: JsonValue = response.json()
            return answer
        except ValueError:  # JSON and Unicode errors
            raise self._out_of_protocol(path, response.text) from None

    def _out_of_protocol(self, path: str, answer: str) -> EndpointError:
        return EndpointError(
            f"endpoint {self.base_url} answers /{path} out of protocol: {self._line(answer) or '(nothing)'}",
            "check that it is an OpenAI-compatible server",
        )

    def _detail(self, response: httpx.Response) -> str:
        """The server's error message, in any of the usual formats."""
        try:
            answer = response.json()
            error = answer.get("error", answer)
            text = error if isinstance(error, str) else error.get("message") or response.text
        except (ValueError, AttributeError):
            text = response.text
        return self._line(str(text))

    def _line(self, text: str) -> str:
        """Text from the server as one short printable line, without the API key if the server repeats it."""
        if self._api_key:
            text = text.replace(self._api_key, "…")
        line = "".join(character if character.isprintable() else " " for character in text)
        line = " ".join(line.split())
        return line if len(line) <= 200 else line[:199] + "…"


def _object(value: JsonValue) -> Mapping[str, JsonValue]:
    """Raises TypeError for JSON that is no object."""
    if not isinstance(value, Mapping):
        raise TypeError
    return value


def _array(value: JsonValue) -> Sequence[JsonValue]:
    """Raises TypeError for JSON that is no array."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError
    return value


def _refused_values(response: httpx.Response, body: Mapping[str, object]) -> list[str]:
    """The sampling values of a request that the server's error is about: those that it names as a parameter (OpenAI) or
    by their location (FastAPI), else those that its text has as a word."""
    sent = [name for name in SAMPLING if name in body]
    try:
        answer = response.json()
        error = answer.get("error", answer)
        locations = [detail["loc"][-1] for detail in answer.get("detail", ()) if isinstance(detail, dict)]
        parameters = [error.get("param") if isinstance(error, dict) else None, *locations]
        text = json.dumps(error.get("message") or error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, LookupError, TypeError):
        parameters, text = [], response.text
    return [name for name in sent if name in parameters] or [
        name for name in sent if re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", text)
    ]


def _omit_hint(names: Sequence[str], body: Mapping[str, object]) -> str:
    """The options that leave these sampling values out of a request."""
    if set(names) & set(BEYOND_OPENAI):
        names = [*dict.fromkeys([*names, *(name for name in BEYOND_OPENAI if name in body)])]
    options = " ".join(f"--omit {name}" for name in names)
    return f"give another value, or leave it to the server's own default with {options}"


def _versioned(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise EndpointError(f"endpoint '{base_url}' is not a URL", "give one like http://localhost:8000/v1")
    if url.userinfo:
        raise EndpointError("the endpoint's address holds a password", "set the key in OPENAI_API_KEY instead")
    address = base_url.rstrip("/")
    return address if url.path.rstrip("/") else f"{address}/v1"


def _wait_s(tries: int, retry_after_s: float) -> float:
    """Seconds before the next try: exponential backoff, or the server's value; with jitter, so that requests spread
    out."""
    return min(max(retry_after_s, BACKOFF_S * 2.0 ** (tries - 1)), LONGEST_WAIT_S) * random.uniform(1.0, 1.25)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """From the failures of a group of tasks, one that shows the cause."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
