"""Calls of a judge or a served reward model: an endpoint, with limits and retries."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, NamedTuple, TypeVar

import httpx

from rlcli.errors import EndpointError
from rlcli.registry import near
from rlcli.support.served_models import KEY, address_of, identity, served_model
from rlcli_verifiers.judge_limits import Limits
from rlcli_verifiers.judge_prompt import Unparsed, response_format

TRIES = 8
"""Tries of a call that fails (a broken connection, 5xx, an answer out of protocol): about a minute, for a server that
restarts. Waits for 429 are not tries."""

BACKOFF_S, LONGEST_WAIT_S, CONNECT_S, LISTING_S = 0.5, 30.0, 10.0, 20.0
CHARS_A_TOKEN = 3
"""For the estimate of a prompt's tokens before the endpoint has counted them; low, so that estimates are high."""

NEUTRAL: Mapping[str, float] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling values that nobody chooses for a judge, each without an effect. They are sent because a server takes values
that are missing from the defaults of the model's generation config. OpenAI's own protocol does not have them: an
endpoint that refuses them is asked without."""
FIELDS = ("model", "messages", "temperature", "top_p", *NEUTRAL, "max_tokens", "seed", "response_format")
"""The fields of a request, which the options omit and rename may name."""

_KEY_NAME = re.compile(r"[A-Z_][A-Z0-9_]*(?:KEY|TOKEN|SECRET)[A-Z0-9_]*")
_DEFAULT_KEY = "OPENAI_API_KEY"


T = TypeVar("T")


class CallFailed(Exception):
    """No reply: the call was refused or kept failing."""


@dataclass(frozen=True)
class Endpoint:
    """key: the environment variable with the API key. seed: None sends none. structured: ask for structured output
    unless the endpoint has refused it. omit: those of `FIELDS` that are not sent. rename: one of `FIELDS` → its name in
    requests. extra: further fields of each request. served: the identity of a model that the run serves: its server is
    started again where it dies, so calls are tried until the caller's time is over."""

    url: str
    model: str
    key: str = _DEFAULT_KEY
    call_s: float = 60.0
    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    structured: bool = True
    omit: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict, hash=False)
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    limits: Limits = field(default_factory=lambda: Limits("", 16))
    served: str = ""

    @property
    def base(self) -> str:
        """The address up to the version. Raises `EndpointError` for what is no address, or holds a password."""
        return versioned(self.url)

    @property
    def place(self) -> str:
        """What it is known by: the address, which changes with each run for a model that the run serves."""
        return self.served or self.base

    @property
    def headers(self) -> dict[str, str]:
        secret = secret_of(self.key)
        return {"Authorization": f"Bearer {secret}"} if secret else {}


@dataclass
class Spent:
    """What one verdict has cost so far. cached: calls that were not made. trouble: of the last call."""

    calls: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    trouble: str = ""


def versioned(url: str) -> str:
    """`http://host:8000` as `http://host:8000/v1`. Raises `EndpointError`."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise EndpointError(f"the option url is '{url}', which is no URL", "give one like http://localhost:8000/v1")
    if parsed.userinfo:
        raise EndpointError("the option url holds a password", "set the key in an environment variable: option key")
    return url.rstrip("/") if parsed.path.rstrip("/") else f"{url.rstrip('/')}/v1"


def served_at(serve: str | Mapping[str, Any], about: str) -> dict[str, Any]:
    """The fields of the `Endpoint` of a model that the run serves (option `serve`). about: what requests to one server
    share. Raises `VerifierError` if nobody serves it."""
    model = served_model(serve).model
    return {"url": address_of(model, about), "model": model, "key": KEY, "served": identity(model)}


def secret_of(name: str) -> str:
    """The API key in the environment variable `name`; empty only for the default's, if it is not set.

    Raises `EndpointError` for a name that is not one of a secret: those are removed from logs by their name, and a key
    written in place of the name would be in the configuration.
    """
    if not _KEY_NAME.fullmatch(name):
        raise EndpointError(
            "the option key is not the name of an environment variable with KEY, TOKEN or SECRET in it",
            "put the key into such a variable, for example JUDGE_API_KEY, and give key=JUDGE_API_KEY",
        )
    secret = os.environ.get(name, "").strip()
    if not secret and name != _DEFAULT_KEY:
        raise EndpointError(f"the environment variable {name} (option key) is not set", f"export {name}=…")
    if not secret.isascii() or not secret.isprintable():
        raise EndpointError(f"{name} holds characters that no API key has", "set it again")
    return secret


def check(endpoint: Endpoint) -> None:
    """Ask the endpoint for its models. Raises `EndpointError` if it cannot be reached, refuses the key, does not serve
    the model or is no such endpoint; one that has no list of models is asked nothing more."""
    where = f"the endpoint {endpoint.base}"
    try:
        answer = httpx.get(f"{endpoint.base}/models", headers=endpoint.headers, timeout=LISTING_S)
    except httpx.HTTPError as error:
        raise EndpointError(
            f"{where} cannot be reached ({_line(str(error) or type(error).__name__)})", "check url"
        ) from None
    if answer.status_code in (401, 403):
        had = f"the key in {endpoint.key}" if endpoint.headers else "access without a key"
        raise EndpointError(f"{where} refuses {had} ({answer.status_code})", "check the option key") from None
    if answer.status_code in (404, 405, 501):
        return
    if answer.status_code != 200:
        raise EndpointError(f"{where} answers {answer.status_code}: {_line(answer.text)}", "check that it works")
    try:
        names = [str(model["id"]) for model in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise EndpointError(
            f"{where} answers /models out of protocol: {_line(answer.text) or '(nothing)'}",
            "give url up to and with /v1 of an OpenAI-compatible server",
        ) from None
    if endpoint.model not in names:
        raise EndpointError(f"{where} serves no model '{endpoint.model}'", near(endpoint.model, names))


class _Trouble(NamedTuple):
    """Why a call brought no reply. status: 0 if there was no answer. asked_s: by the header Retry-After. refused:
    fields of the request that the answer names."""

    text: str
    status: int = 0
    asked_s: float = 0.0
    refused: tuple[str, ...] = ()

    @property
    def refuses(self) -> bool:
        """Whether the endpoint does not take the request as it is."""
        return self.status in (400, 422)


async def ask(endpoint: Endpoint, messages: list[dict[str, str]], points: int, spent: Spent) -> str:
    """The judge's reply. Raises `CallFailed`, and `Unparsed` for one that was cut off; the caller limits the time. What
    the calls have cost is added to `spent`."""
    structured = endpoint.structured and endpoint.place not in _unstructured
    neutral = endpoint.place not in _without_neutral

    async def attempt() -> str | _Trouble:
        body = _body(endpoint, messages, points if structured else None, neutral=neutral)
        estimate = sum(len(one["content"]) for one in messages) // CHARS_A_TOKEN + endpoint.max_tokens
        answer = await _call(endpoint, f"{endpoint.base}/chat/completions", body, estimate, spent)
        return (
            answer if isinstance(answer, _Trouble) else _or_trouble(_reply(endpoint, answer, spent, estimate), answer)
        )

    async def reply() -> str | _Trouble:
        nonlocal structured, neutral
        found = await attempt()
        # It may not support one of these; if it does, the next answer is the same.
        while isinstance(found, _Trouble) and found.refuses and (structured or neutral):
            if neutral and (not structured or set(found.refused) & set(NEUTRAL)):
                neutral = False
            else:
                structured = False
            found = await attempt()
        return found

    text = await _retried(endpoint, spent, reply)
    if endpoint.structured and not structured:
        _unstructured.add(endpoint.place)
    if not neutral:
        _without_neutral.add(endpoint.place)
    return text


async def classify(endpoint: Endpoint, ids: Sequence[int], spent: Spent) -> float:
    """The logit of a served sequence classifier with one label, for these tokens. Raises `CallFailed`."""
    url = f"{endpoint.base.removesuffix('/v1')}/classify"
    body = {"model": endpoint.model, "input": [list(ids)], "use_activation": False}

    async def logit() -> float | _Trouble:
        answer = await _call(endpoint, url, body, len(ids), spent)
        return answer if isinstance(answer, _Trouble) else _or_trouble(_logit(answer, spent), answer)

    return await _retried(endpoint, spent, logit)


async def _retried(endpoint: Endpoint, spent: Spent, attempt: Callable[[], Awaitable[T | _Trouble]]) -> T:
    """What an attempt brings. Raises `CallFailed` when the endpoint refuses, or keeps failing."""
    tries, waits = 0, 0
    while isinstance(found := await attempt(), _Trouble):
        spent.trouble = f"the endpoint {found.text}"
        if 400 <= found.status < 500 and found.status not in (408, 429):
            raise CallFailed(spent.trouble + _advice(found.refused))
        tries, waits = tries + (found.status != 429), waits + (found.status == 429)
        if tries >= TRIES and not endpoint.served:
            raise CallFailed(f"{spent.trouble} ({tries} tries)")
        backoff_s = min(BACKOFF_S * 2.0 ** min(tries + waits - 1, TRIES), LONGEST_WAIT_S)
        await asyncio.sleep(max(found.asked_s, backoff_s) * random.uniform(1.0, 1.25))
    spent.trouble = ""
    return found


def _or_trouble(found: T | None, answer: httpx.Response) -> T | _Trouble:
    return _Trouble(f"answers out of protocol: {_line(answer.text) or '(nothing)'}") if found is None else found


async def _call(
    endpoint: Endpoint, url: str, body: Mapping[str, Any], estimate: int, spent: Spent
) -> httpx.Response | _Trouble:
    """One call, within the limits of the endpoint. estimate: its tokens."""
    await endpoint.limits.pace(estimate)
    async with endpoint.limits.slot():
        spent.calls += 1
        try:
            async with asyncio.timeout(endpoint.call_s):
                client = _http(direct=bool(endpoint.served))
                answer = await client.post(url, json=body, headers=endpoint.headers)
        except TimeoutError:
            return _Trouble(f"gave no answer in {endpoint.call_s:g} s")
        except httpx.RequestError as error:
            return _Trouble(f"cannot be reached ({_line(str(error) or type(error).__name__)})")
    if answer.status_code != 200:
        asked_s = _retry_after(answer.headers.get("retry-after", ""))
        fields = [endpoint.rename.get(name, name) for name in FIELDS if name not in ("model", "messages")]
        refused = tuple(name for name in fields if name in body and _has_word(answer.text, name))
        return _Trouble(f"answers {answer.status_code}: {_line(answer.text)}", answer.status_code, asked_s, refused)
    return answer


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", text) is not None


def _advice(refused: Sequence[str]) -> str:
    """How to make a request without the fields that an answer names, to follow the answer; empty if it names none."""
    if not refused:
        return ""
    listed = ", ".join(f'"{name}"' for name in refused)
    return f'; the option omit=[{listed}] leaves it out, rename={{{refused[0]} = "…"}} gives it another name'


def _body(
    endpoint: Endpoint, messages: list[dict[str, str]], points: int | None, *, neutral: bool = True
) -> dict[str, Any]:
    """The fields of a request. points: ask for JSON with so many; None: for text. neutral: send the values of
    `NEUTRAL`."""
    fields = {
        "model": endpoint.model,
        "messages": messages,
        "temperature": endpoint.temperature,
        "top_p": endpoint.top_p,
        **(NEUTRAL if neutral else {}),
        "max_tokens": endpoint.max_tokens,
        **({} if endpoint.seed is None else {"seed": endpoint.seed}),
        **({"response_format": response_format(points)} if points is not None else {}),
    }
    named = {endpoint.rename.get(name, name): value for name, value in fields.items() if name not in endpoint.omit}
    return {**named, **endpoint.extra}


def _reply(endpoint: Endpoint, answer: httpx.Response, spent: Spent, estimate: int) -> str | None:
    """The reply's text; None if the answer is out of protocol."""
    try:
        found = answer.json()
        choice = found["choices"][0]
        text, usage = choice["message"].get("content") or "", found.get("usage") or {}
        used = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        if not isinstance(text, str):
            return None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    spent.prompt_tokens += used[0]
    spent.completion_tokens += used[1]
    endpoint.limits.correct(sum(used) - estimate if any(used) else 0)
    if choice.get("finish_reason") == "length":
        raise Unparsed(f"the judge's reply was cut off at max_tokens = {endpoint.max_tokens}")
    return text


def _logit(answer: httpx.Response, spent: Spent) -> float | None:
    """The logit; None if the answer is out of protocol."""
    try:
        found = answer.json()
        (logit,) = found["data"][0]["probs"]
        spent.prompt_tokens += int((found.get("usage") or {}).get("prompt_tokens") or 0)
        return float(logit)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def _retry_after(value: str) -> float:
    """Seconds of a Retry-After header: a number or a date; 0 for anything else."""
    if re.fullmatch(r"\d{1,6}(?:\.\d+)?", value):
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return 0.0


def _line(text: str) -> str:
    """Text from the server as one short printable line."""
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= 200 else line[:199] + "…"


_unstructured: set[str] = set()
"""Places of endpoints that have refused structured output."""
_without_neutral: set[str] = set()
"""Places of endpoints that have refused a request with the values of `NEUTRAL` and taken it without them."""


@cache
def _http(direct: bool) -> httpx.AsyncClient:
    """One of each a process: a scoring process has one event loop. direct: past the environment's proxies."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_S), limits=httpx.Limits(max_connections=None), trust_env=not direct
    )
