"""A judge: a served model that scores responses by a rubric or against a reference (docs/judges.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from rlcli.errors import ConfigError
from rlcli.registry import near
from rlcli.types import USAGE, Outcome, Verdict, VerifyRequest
from rlcli_verifiers.answers import OPEN_THINK, no_answer
from rlcli_verifiers.judge_cache import Cache, key_of
from rlcli_verifiers.judge_client import FIELDS, Address, CallFailed, Endpoint, Spent, ask, check, served_at
from rlcli_verifiers.judge_compare import Judged, compared
from rlcli_verifiers.judge_limits import Limits, shared_folder
from rlcli_verifiers.judge_prompt import Graded, Unparsed, graded, messages

ANSWER_KIND = "judged"
ROW_OPTIONS = None

MAX_POINTS = 100


async def verify(
    request: VerifyRequest,
    *,
    url: str = "",
    model: str = "",
    serve: str | dict[str, Any] = "",
    rubric: str = "",
    points: int = 1,
    passing: float = 0.5,
    reasoning: bool = False,
    other_responses: int = 0,
    key: str = "OPENAI_API_KEY",
    temperature: float = 0.0,
    top_p: float = 1.0,
    max_tokens: int = 1024,
    seed: int | None = None,
    structured: bool = True,
    omit: list[str] = [],  # noqa: B006 - never changed
    rename: dict[str, str] = {},  # noqa: B006 - never changed
    extra: dict[str, Any] = {},  # noqa: B006 - never changed
    concurrency: int = 16,
    requests_per_minute: int = 0,
    tokens_per_minute: int = 0,
    call_s: float = 60.0,
    wait_s: float = 300.0,
    cache: bool = True,
    price_in: float = 0.0,
    price_out: float = 0.0,
) -> Verdict:
    """A served model gives the response at least `passing` of the points.

    It reads the question, the ground truth (if the row has one) and what follows </think>, and replies with a score
    from 0 to `points`; the reward is score / points. rubric: what to grade by; the row's extra_info["rubric"] takes
    precedence; without either, agreement with the ground truth. reasoning: show the judge the reasoning too.

    other_responses: compare the response with this number of others of its group (in a ring, at most all) rather than
    score it by itself: each pair in both orders, and the reward is the share of these comparisons that it wins, half of
    one for a draw. points is not used then. CRASH: there is no other response.

    url, model: of an OpenAI-compatible endpoint. serve: a model that the run serves instead, on separate
    devices: its folder or hub id, or {model = "…", workers = 2, tensor_parallel = 2} (devices in all, and of each
    server). key: the environment variable with its API key. temperature, top_p, max_tokens, seed: of its replies.
    structured: ask for JSON by a schema, as long as the endpoint accepts it. omit: fields of the request that are not
    sent, such as temperature. rename: other names for fields, such as {max_tokens = "max_completion_tokens"}. extra:
    further fields of each request. concurrency, requests_per_minute, tokens_per_minute: of this machine, 0: no limit.
    call_s: the longest call. wait_s: for all calls and waits of one verdict. cache: keep verdicts
    by content in the user's cache folder. price_in, price_out: of a million tokens, for the metric usage/cost.

    TIMEOUT: no verdict within wait_s. CRASH: the endpoint refused or kept failing. UNPARSED: its reply is no verdict.
    None of them is a reward. NO_ANSWER: the reasoning is still open, or nothing follows it; nobody is asked.
    """
    response = request.completion if reasoning else request.answer_text()
    if response is None or not response.strip():
        return no_answer(OPEN_THINK if response is None else "the response is empty")
    limits = Limits(f"{url} {key} {serve}", concurrency, requests_per_minute, tokens_per_minute)
    address: Address = {"url": url, "model": model, "key": key}
    if serve:
        address = served_at(serve, _question(request))
    endpoint = Endpoint(
        **address,
        call_s=call_s,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        structured=structured,
        omit=tuple(omit),
        rename=rename,
        extra=extra,
        limits=limits,
    )
    spent = Spent()
    score = partial(_score, endpoint, _cache() if cache else None, spent)
    try:
        async with asyncio.timeout(wait_s):
            if other_responses:
                judgement = await compared(score, request, response, rubric, other_responses, reasoning=reasoning)
            else:
                grade = await score(messages(request, response, rubric, points), points)
                judgement = Judged(grade.points / points, str(grade.points), grade.reason)
    except (TimeoutError, CallFailed, Unparsed) as failure:
        return _failed(failure, wait_s, spent.trouble, _usage(spent, price_in, price_out))
    outcome = Outcome.OK if judgement.share >= passing else Outcome.WRONG
    parts = _usage(spent, price_in, price_out) | {f"{USAGE}{name}": value for name, value in judgement.counts.items()}
    return Verdict(judgement.share, outcome, answer=judgement.answer, parts=parts, detail=judgement.reason)


def _question(request: VerifyRequest) -> str:
    return str(request.prompt[-1]["content"]) if request.prompt else ""


async def _score(
    endpoint: Endpoint, cache: Cache | None, spent: Spent, chat: list[dict[str, str]], points: int
) -> Graded:
    """The judge's grade: from the cache, or by a call."""
    key = key_of(
        endpoint.identity,
        endpoint.model,
        endpoint.max_tokens,
        endpoint.temperature,
        endpoint.top_p,
        endpoint.seed,
        endpoint.structured,
        endpoint.omit,
        dict(endpoint.rename),
        endpoint.extra,
        points,
        chat,
    )
    if cache and (cached := cache.get(key)):
        spent.cached += 1
        return cached
    grade = graded(await ask(endpoint, chat, points, spent), points)
    if cache:
        cache.put(key, grade)
    return grade


def preload(**options: Any) -> None:
    """Check the options, and that the endpoint answers, takes the key and serves the model. Raises `RlcliError`."""
    values: Mapping[str, Any] = {"points": 1, "concurrency": 1, "wait_s": 1.0, "call_s": 1.0, **options}
    if (count := values.get("other_responses", 0)) < 0:
        raise ConfigError(f"the option other_responses is {count}", "give how many to compare with; 0: none")
    if not 1 <= values["points"] <= MAX_POINTS:
        raise ConfigError(f"the option points is {values['points']}", f"give a number from 1 to {MAX_POINTS}")
    for name in ("concurrency", "wait_s", "call_s"):
        if values[name] <= 0:
            raise ConfigError(f"the option {name} is {values[name]:g}", "give a number above 0")
    _check_fields(values.get("omit", ()), values.get("rename", {}), values.get("extra", {}))
    url, model = values.get("url", ""), values.get("model", "")
    if bool(values.get("serve")) == bool(url or model) or bool(url) != bool(model):
        raise ConfigError(
            "a judge is either an endpoint or a model that the run serves",
            'give the options url and model, or serve="Qwen/Qwen3-8B"',
        )
    shared_folder()
    if not values.get("serve"):
        check(Endpoint(url, model, **({"key": values["key"]} if "key" in values else {})))


def _check_fields(omit: Sequence[str], rename: Mapping[str, str], extra: Mapping[str, object]) -> None:
    """Raise `ConfigError` for an option about a field that no request has, and for two fields of one name."""
    for option, names in (("omit", omit), ("rename", rename)):
        if unknown := next((name for name in names if name not in FIELDS), ""):
            raise ConfigError(f"the option {option} names '{unknown}', which no request has", near(unknown, FIELDS))
    if "messages" in omit:
        raise ConfigError("the option omit names messages, without which there is nothing to judge", "leave it out")
    sent = [name for name in FIELDS if name not in omit and name not in rename]
    if twice := next((name for name in rename.values() if name in (*sent, *extra)), ""):
        raise ConfigError(f"the option rename gives a field the name {twice}, which another one has", "give another")


@cache
def _cache() -> Cache:
    return Cache()


def _failed(failure: Exception, wait_s: float, trouble: str, usage: dict[str, float]) -> Verdict:
    outcome, detail = Outcome.CRASH, str(failure)
    if isinstance(failure, TimeoutError):
        outcome = Outcome.TIMEOUT
        detail = f"no verdict of the judge within {wait_s:g} s" + (f"; the last call: {trouble}" if trouble else "")
    elif isinstance(failure, Unparsed):
        outcome = Outcome.UNPARSED
    return Verdict(0.0, outcome, parts=usage, detail=detail)


def _usage(spent: Spent, price_in: float, price_out: float) -> dict[str, float]:
    counts: dict[str, float] = {
        "calls": spent.calls,
        "cached": spent.cached,
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.completion_tokens,
    }
    if price_in or price_out:
        counts["cost"] = (spent.prompt_tokens * price_in + spent.completion_tokens * price_out) / 1e6
    return {f"{USAGE}{name}": float(value) for name, value in counts.items()}
