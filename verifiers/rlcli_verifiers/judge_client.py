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
from typing import NamedTuple, NotRequired, TypedDict, TypeVar

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
"""Sampling values without an effect. They are sent because a server takes missing values from the model's generation
config. OpenAI's own protocol does not have them: an endpoint that refuses them gets requests without them."""
FIELDS = ("model", "messages", "temperature", "top_p", *NEUTRAL, "max_tokens", "seed", "response_format")
"""The fields of a request, which the options omit and rename may name."""

_KEY_NAME = re.compile(r"[A-Z_][A-Z0-9_]*(?:KEY|TOKEN|SECRET)[A-Z0-9_]*")
_DEFAULT_KEY = "OPENAI_API_KEY"


T = TypeVar("T")


class CallFailed(Exception):
    """No reply: the call was refused or kept failing."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint, and the settings of its requests."""

    url: str
    """Address, with or without the version."""
    model: str
    """Name of the model."""
    key: str = _DEFAULT_KEY
    """Environment variable with the API key."""
    call_s: float = 60.0
    """Maximum time of one call, in seconds."""
    max_tokens: int = 1024
    """Maximum length of a reply."""
    temperature: float = 0.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus sampling."""
    seed: int | None = None
    """Sampling seed; None sends none."""
    structured: bool = True
    """Ask for structured output, unless the endpoint has refused it."""
    omit: tuple[str, ...] = ()
    """Fields of `FIELDS` that are not sent."""
    rename: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Field of `FIELDS` → its name in requests."""
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Further fields of each request."""
    limits: Limits = field(default_factory=lambda: Limits("", 16))
    """Limits of concurrency and rate."""
    served: str = ""
    """Identity of a model that the run serves. Its server is restarted if it dies, so calls are retried until the
    caller's deadline."""

    @property
    def base(self) -> str:
        """The address up to the version. Raises `EndpointError` if it is no address, or holds a password."""
        return versioned(self.url)

    @property
    def identity(self) -> str:
        """Identity across runs: the address, or `served` for a model whose address changes with each run."""
        return self.served or self.base

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers, with the API key if there is one."""
        secret = secret_of(self.key)
        return {"Authorization": f"Bearer {secret}"} if secret else {}


@dataclass
class Spent:
    """Cost of one verdict so far."""

    calls: int = 0
    """Calls made."""
    cached: int = 0
    """Calls saved by the cache."""
    prompt_tokens: int = 0
    """Tokens of all prompts."""
    completion_tokens: int = 0
    """Tokens of all replies."""
    trouble: str = ""
    """Failure of the last call; empty if it succeeded."""


class Address(TypedDict):
    """The fields of an `Endpoint` that name its server."""

    url: str
    """As `Endpoint.url`."""
    model: str
    """As `Endpoint.model`."""
    key: str
    """As `Endpoint.key`."""
    served: NotRequired[str]
    """As `Endpoint.served`."""


def versioned(url: str) -> str:
    """Add the version: `http://host:8000` becomes `http://host:8000/v1`. Raises `EndpointError`."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise EndpointError(f"the option url is '{url}', which is no URL", "give one like http://localhost:8000/v1")
    if parsed.userinfo:
        raise EndpointError("the option url holds a password", "set the key in an environment variable: option key")
    return url.rstrip("/") if parsed.path.rstrip("/") else f"{url.rstrip('/')}/v1"


def served_at(serve: str | Mapping[str, object], about: str) -> Address:
    """The address of a model that the run serves (option `serve`). about: text that requests to one server share, such
    as a prompt. Raises `VerifierError` if the model is not served."""
    model = served_model(serve).model
    return {"url": address_of(model, about), "model": model, "key": KEY, "served": identity(model)}


def secret_of(name: str) -> str:
    """The API key in the environment variable `name`; empty only for the default's, if it is not set.

    Raises `EndpointError` for a name that does not look like one of a secret: secrets are removed from logs by their
    name, and a key written in place of the name would be in the configuration.
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
    """Check that the endpoint lists the model. Raises `EndpointError` if it cannot be reached, refuses the key, does
    not serve the model or is no such endpoint; one without a list of models passes."""
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


class _Failure(NamedTuple):
    """A call without a reply."""

    text: str
    """The reason, for messages."""
    status: int = 0
    """HTTP status; 0 if there was no answer."""
    retry_after_s: float = 0.0
    """Seconds of the header Retry-After."""
    refused: tuple[str, ...] = ()
    """Fields of the request that the answer names."""

    @property
    def refuses(self) -> bool:
        """True if the endpoint refuses the request's fields."""
        return self.status in (400, 422)


async def ask(endpoint: Endpoint, messages: list[dict[str, str]], points: int, spent: Spent) -> str:
    """The judge's reply. Raises `CallFailed`, and `Unparsed` for one that was cut off; the caller limits the time. The
    calls' cost is added to `spent`."""
    structured = endpoint.structured and endpoint.identity not in _unstructured
    neutral = endpoint.identity not in _without_neutral

    async def attempt() -> str | _Failure:
        body = _body(endpoint, messages, points if structured else None, neutral=neutral)
        estimate = sum(len(message["content"]) for message in messages) // CHARS_A_TOKEN + endpoint.max_tokens
        answer = await _call(endpoint, f"{endpoint.base}/chat/completions", body, estimate, spent)
        return (
            answer if isinstance(answer, _Failure) else _or_failure(_reply(endpoint, answer, spent, estimate), answer)
        )

    async def reply() -> str | _Failure:
        nonlocal structured, neutral
        result = await attempt()
        # It may not support one of these; if it does, the next answer is the same.
        while isinstance(result, _Failure) and result.refuses and (structured or neutral):
            if neutral and (not structured or set(result.refused) & set(NEUTRAL)):
                neutral = False
            else:
                structured = False
            result = await attempt()
        return result

    text = await _retried(endpoint, spent, reply)
    if endpoint.structured and not structured:
        _unstructured.add(endpoint.identity)
    if not neutral:
        _without_neutral.add(endpoint.identity)
    return text


async def classify(endpoint: Endpoint, ids: Sequence[int], spent: Spent) -> float:
    """The logit of a served sequence classifier with one label, for these tokens. Raises `CallFailed`."""
    url = f"{endpoint.base.removesuffix('/v1')}/classify"
    body = {"model": endpoint.model, "input": [list(ids)], "use_activation": False}

    async def logit() -> float | _Failure:
        answer = await _call(endpoint, url, body, len(ids), spent)
        return answer if isinstance(answer, _Failure) else _or_failure(_logit(answer, spent), answer)

    return await _retried(endpoint, spent, logit)


async def _retried(endpoint: Endpoint, spent: Spent, attempt: Callable[[], Awaitable[T | _Failure]]) -> T:
    """The result of an attempt, repeated after failures. Raises `CallFailed` when the endpoint refuses, or keeps
    failing."""
    tries, waits = 0, 0
    while isinstance(result := await attempt(), _Failure):
        spent.trouble = f"the endpoint {result.text}"
        if 400 <= result.status < 500 and result.status not in (408, 429):
            raise CallFailed(spent.trouble + _advice(result.refused))
        tries, waits = tries + (result.status != 429), waits + (result.status == 429)
        if tries >= TRIES and not endpoint.served:
            raise CallFailed(f"{spent.trouble} ({tries} tries)")
        backoff_s = min(BACKOFF_S * 2.0 ** min(tries + waits - 1, TRIES), LONGEST_WAIT_S)
        await asyncio.sleep(max(result.retry_after_s, backoff_s) * random.uniform(1.0, 1.25))
    spent.trouble = ""
    return result


def _or_failure(result: T | None, answer: httpx.Response) -> T | _Failure:
    return _Failure(f"answers out of protocol: {_line(answer.text) or '(nothing)'}") if result is None else result


async def _call(
    endpoint: Endpoint, url: str, body: Mapping[str, object], estimate: int, spent: Spent
) -> httpx.Response | _Failure:
    """One call, within the limits of the endpoint. estimate: its tokens."""
    await endpoint.limits.pace(estimate)
    async with endpoint.limits.slot():
        spent.calls += 1
        try:
            async with asyncio.timeout(endpoint.call_s):
                client = _http(direct=bool(endpoint.served))
                answer = await client.post(url, json=body, headers=endpoint.headers)
        except TimeoutError:
            return _Failure(f"gave no answer in {endpoint.call_s:g} s")
        except httpx.RequestError as error:
            return _Failure(f"cannot be reached ({_line(str(error) or type(error).__name__)})")
    if answer.status_code != 200:
        retry_after_s = _retry_after(answer.headers.get("retry-after", ""))
        fields = [endpoint.rename.get(name, name) for name in FIELDS if name not in ("model", "messages")]
        refused = tuple(name for name in fields if name in body and _has_word(answer.text, name))
        return _Failure(
            f"answers {answer.status_code}: {_line(answer.text)}", answer.status_code, retry_after_s, refused
        )
    return answer


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", text) is not None


def _advice(refused: Sequence[str]) -> str:
    """A hint that follows an answer: the options that omit or rename the fields it names; empty if it names none."""
    if not refused:
        return ""
    listed = ", ".join(f'"{name}"' for name in refused)
    return f'; the option omit=[{listed}] leaves it out, rename={{{refused[0]} = "…"}} gives it another name'


def _body(
    endpoint: Endpoint, messages: list[dict[str, str]], points: int | None, *, neutral: bool = True
) -> dict[str, object]:
    """The fields of a request. points: maximum of the JSON's score; None: ask for text. neutral: send the values of
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
    renamed = {endpoint.rename.get(name, name): value for name, value in fields.items() if name not in endpoint.omit}
    return {**renamed, **endpoint.extra}


def _reply(endpoint: Endpoint, answer: httpx.Response, spent: Spent, estimate: int) -> str | None:
    """The reply's text; None if the answer is out of protocol."""
    try:
        document = answer.json()
        choice = document["choices"][0]
        text, usage = choice["message"].get("content") or "", document.get("usage") or {}
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
        document = answer.json()
        (logit,) = document["data"][0]["probs"]
        spent.prompt_tokens += int((document.get("usage") or {}).get("prompt_tokens") or 0)
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
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= 200 else line[:199] + "…"


_unstructured: set[str] = set()
"""Identities of endpoints that have refused structured output."""
_without_neutral: set[str] = set()
"""Identities of endpoints that have refused a request with the values of `NEUTRAL` and accepted it without them."""


@cache
def _http(direct: bool) -> httpx.AsyncClient:
    """The process's HTTP client; a scoring process has one event loop. direct: ignore the environment's proxies."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_S), limits=httpx.Limits(max_connections=None), trust_env=not direct
    )
