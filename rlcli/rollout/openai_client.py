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
from typing import Any

import httpx
from anyio.from_thread import start_blocking_portal

from rlcli.errors import EndpointError
from rlcli.registry import near
from rlcli.types import Message

TRIES = 6
BACKOFF_S = 0.5
LONGEST_WAIT_S = 30.0
CONNECT_S = 10.0
LISTING_S = 30.0
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "seed"),
)
"""The sampling values of a request. Each is sent, since a server takes those that are missing from the defaults of the
model's generation config: then four samples at temperature 1 may be equal."""
BEYOND_OPENAI = ("top_k", "min_p", "repetition_penalty")
"""Those that vLLM, SGLang and others know, and OpenAI's own protocol does not."""
PASSING = frozenset({408, 429, 500, 502, 503, 504, 529})
"""HTTP statuses that are retried."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One requested response. `key` is the caller's own and is returned with the result; a seed of None sends none;
    top_p: sample from the most likely tokens with this total probability. All tokens are sampled from otherwise, and
    none is penalised. extra: further fields of the request, which not every server supports.

    >>> request = ChatRequest(key="gsm8k:0/1", messages=[{"role": "user", "content": "2+2?"}], max_tokens=64, seed=1)
    """

    key: str
    messages: Sequence[Message]
    temperature: float = 0.0
    max_tokens: int = 1024
    seed: int | None = None
    top_p: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatResult:
    """One response.

    finish_reason: as reported by the server (`stop`, `length`, …). completion_tokens: None if the server sends none.
    latency_s: seconds from the successful request to its answer; failed tries and the waits between are excluded.
    """

    key: str
    text: str
    finish_reason: str
    completion_tokens: int | None
    latency_s: float


class ChatClient:
    """A synchronous client of one endpoint.

    base_url: `http://host:8000` or `http://host:8000/v1`. model: if unset, the only one that the endpoint serves.
    timeout_s: the longest time for one response. concurrency: concurrent requests. omit: those of `SAMPLING` that are
    not sent, for a server that refuses them. The API key is OPENAI_API_KEY; it
    appears in no message.

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
        """Whether the value of OPENAI_API_KEY is sent to the endpoint."""
        return bool(self._api_key)

    def generate(self, requests: Iterable[ChatRequest]) -> Iterator[ChatResult]:
        """The results, each as it finishes, in any order.

        Requests run in a separate thread, so they continue while the caller processes a result, and `requests` is read
        there, at most `concurrency` ahead. Leaving the loop early, or an error, cancels running requests.
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
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [dict(message) for message in request.messages],
            **{name: value for name, value in sampling.items() if name not in self.omit},
            **request.extra,
        }
        answer, latency_s = await self._send(http, "POST", "chat/completions", body)
        try:
            choice = answer["choices"][0]
            text = choice["message"].get("content") or ""
            usage = answer.get("usage") or {}
            tokens = usage.get("completion_tokens")
            reason = choice.get("finish_reason") or "stop"
            if not isinstance(text, str) or not isinstance(reason, str) or not isinstance(tokens, int | None):
                raise TypeError
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._out_of_protocol("chat/completions", json.dumps(answer)) from None
        return ChatResult(request.key, text, reason, tokens, latency_s)

    async def _models(self, http: httpx.AsyncClient) -> list[str]:
        answer, _ = await self._send(http, "GET", "models")
        try:
            return [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError):
            raise self._out_of_protocol("models", json.dumps(answer)) from None

    async def _only_model(self, http: httpx.AsyncClient) -> str:
        names = await self._models(http)
        if len(names) != 1:
            served = self._line(", ".join(names)) or "no model"
            raise EndpointError(f"endpoint {self.base_url} serves {served}", "name one with --model")
        return names[0]

    async def _send(
        self, http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[Any, float]:
        """The endpoint's JSON answer and the seconds it took; temporary failures are retried."""
        limit_s = min(self.timeout_s, LISTING_S) if method == "GET" else self.timeout_s
        tries, left = 0, TRIES
        while True:
            tries, start = tries + 1, time.monotonic()
            asked_s = 0.0
            try:
                async with asyncio.timeout(limit_s):
                    response = await http.request(method, f"{self.base_url}/{path}", json=body)
                if response.status_code == 200:
                    self._reached = True
                    return self._json(path, response), time.monotonic() - start
                if response.status_code not in PASSING:
                    raise await self._refusal(http, path, response, body or {})
                left -= 1
                trouble = f"answers {response.status_code} {self._detail(response)}".rstrip()
                retry_after = response.headers.get("retry-after", "")
                # Its other form, a date, counts as none.
                asked_s = float(retry_after) if retry_after.isdecimal() else 0.0
            except TimeoutError:
                left -= TRIES // 2  # a request that was too slow once will rarely be faster: one more try
                trouble = f"gave no answer in {limit_s:g} s"
            except httpx.RequestError as error:
                # No answer so far means no server: do not keep the user waiting.
                left = left - 1 if self._reached else 0
                trouble = f"cannot be reached ({self._line(str(error) or type(error).__name__)})"
            if left <= 0:
                times = f" ({tries} tries)" if tries > 1 else ""
                raise EndpointError(
                    f"endpoint {self.base_url} {trouble}{times}", "check that the server runs and is not overloaded"
                )
            await asyncio.sleep(_wait_s(tries, asked_s))

    async def _refusal(
        self, http: httpx.AsyncClient, path: str, response: httpx.Response, body: Mapping[str, Any]
    ) -> EndpointError:
        status, detail = response.status_code, self._detail(response)
        where = f"endpoint {self.base_url}"
        if status in (401, 403):
            had, hint = ("the API key", "check OPENAI_API_KEY") if self._api_key else ("access", "set OPENAI_API_KEY")
            return EndpointError(f"{where} refuses {had} ({status} {detail})", hint)
        if status == 404 and path == "chat/completions":
            try:
                names = await self._models(http)
            except EndpointError:
                return EndpointError(f"{where} has no /{path} (404 {detail})", "give --endpoint up to and with /v1")
            return EndpointError(
                f"{where} serves no model '{self._line(str(self.model))}'", self._line(near(str(self.model), names))
            )
        if status in (400, 422) and (names := _refused_values(response, body)):
            values = ", ".join(f"{name} = {body[name]}" for name in names)
            return EndpointError(f"{where} refuses {values} ({status} {detail})", _without(names, body))
        hint = "give --endpoint up to and with /v1" if status == 404 else "change the request or the server"
        return EndpointError(f"{where} answers {status} to /{path}: {detail}", hint)

    def _json(self, path: str, response: httpx.Response) -> Any:
        try:
            return response.json()
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


def _refused_values(response: httpx.Response, body: Mapping[str, Any]) -> list[str]:
    """The sampling values of a request that the server's error is about: those that it names as a parameter (OpenAI) or
    by their place (FastAPI), else those that its text has as a word."""
    sent = [name for name in SAMPLING if name in body]
    try:
        answer = response.json()
        error = answer.get("error", answer)
        places = [one["loc"][-1] for one in answer.get("detail", ()) if isinstance(one, dict)]
        named = [error.get("param") if isinstance(error, dict) else None, *places]
        text = json.dumps(error.get("message") or error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, LookupError, TypeError):
        named, text = [], response.text
    return [name for name in sent if name in named] or [
        name for name in sent if re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", text)
    ]


def _without(names: Sequence[str], body: Mapping[str, Any]) -> str:
    """How a request is made without these sampling values."""
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


def _wait_s(tries: int, asked_s: float) -> float:
    """Seconds before the next try: doubling, or the server's value; with jitter, so that requests spread out."""
    return min(max(asked_s, BACKOFF_S * 2.0 ** (tries - 1)), LONGEST_WAIT_S) * random.uniform(1.0, 1.25)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """From the failures of a group of tasks, one that shows the cause."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
