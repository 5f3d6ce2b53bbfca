"""A reward model that the run serves on separate devices (docs/judges.md)."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from rlcli.errors import ConfigError
from rlcli.support.served_models import served_model
from rlcli.types import USAGE, Outcome, Verdict, VerifyRequest
from rlcli_verifiers.judge_client import CallFailed, Endpoint, Spent, classify, served_at
from rlcli_verifiers.judge_limits import Limits
from rlcli_verifiers.reward_model import ids_of, tokenizer_of, verdict_of

ROW_OPTIONS = None


async def verify(
    request: VerifyRequest,
    *,
    serve: str | dict[str, Any],
    transform: Literal["none", "sigmoid"] = "none",
    max_tokens: int = 4096,
    concurrency: int = 64,
    call_s: float = 60.0,
    wait_s: float = 300.0,
) -> Verdict:
    """The logit of a sequence classifier with one label for the conversation; OK if it is above 0.

    serve: the model, which the run serves on separate devices: its folder or hub id, or {model = "…", workers = 2,
    tensor_parallel = 2} (devices in all, and of each server). Prompt and response are tokenised again by its own
    tokenizer and chat template; without a template, they are joined by an empty line. transform: the reward is the
    logit itself, or its sigmoid. max_tokens: of a longer conversation, the end is scored; not more than fits the model.
    concurrency: calls of this machine at once. call_s: the longest call. wait_s: for all calls and waits of a verdict.

    TIMEOUT: no logit within wait_s. CRASH: the server refused. Neither is a reward.
    """
    model = served_model(serve).model
    ids = ids_of(tokenizer_of(model, "serve"), request)[-max_tokens:]
    limits = Limits(f"served {model}", concurrency)
    endpoint = Endpoint(**served_at(serve, request.completion), call_s=call_s, limits=limits)
    spent = Spent()
    try:
        async with asyncio.timeout(wait_s):
            logit = await classify(endpoint, ids, spent)
    except TimeoutError:
        return Verdict(0.0, Outcome.TIMEOUT, detail=f"no logit of the reward model within {wait_s:g} s")
    except CallFailed as failure:
        return Verdict(0.0, Outcome.CRASH, detail=str(failure))
    verdict = verdict_of(logit, len(ids), transform)
    usage = {f"{USAGE}calls": float(spent.calls), f"{USAGE}prompt_tokens": float(spent.prompt_tokens)}
    return Verdict(verdict.score, verdict.outcome, parts=usage, detail=verdict.detail)


def preload(*, serve: str | dict[str, Any], **options: Any) -> None:
    """Load the tokenizer and check the options. Raises `ModelError` for a model that is no reward model."""
    for name in ("max_tokens", "concurrency", "call_s", "wait_s"):
        if options.get(name, 1) <= 0:
            raise ConfigError(f"the option {name} is {options[name]:g}", "give a number above 0")
    tokenizer_of(served_model(serve).model, "serve")
