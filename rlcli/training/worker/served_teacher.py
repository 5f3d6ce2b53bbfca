"""A teacher that a server of vLLM serves: it scores given tokens (`prompt_logprobs` of `/v1/completions`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rlcli.cluster.watchdog import progress
from rlcli.errors import ModelError, RunFailed
from rlcli.support.json_link import Link, Refused, ServerFault

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy as np

AT_ONCE = 32
"""Sequences that a rank has scored at a time: the server queues what it cannot run."""
ANSWER_S, FIRST_S = 600.0, 60.0
PAUSES_S = (1.0, 4.0, 16.0)
"""Before a question is asked again: a server that starts again takes a while."""
IDS_AT_ONCE = 4096


class Scores(NamedTuple):
    """Of D drawn tokens: log_probs float32 `[D]`; agrees bool `[D]`, whether no token is likelier; ids int64 and top
    float32 `[D, K]`, the likeliest tokens, most likely first, and their log-probs."""

    log_probs: np.ndarray
    agrees: np.ndarray
    ids: np.ndarray
    top: np.ndarray


class ServedTeacher:
    """url: of the server. top_k: K. below: ids that are the policy's; a likelier one of the teacher's others is left
    out. Log-probs are at temperature 1."""

    def __init__(self, url: str, top_k: int, below: int) -> None:
        self._url, self._top_k, self._below = url, top_k, below
        self._name = ""  # of the model: the same for as long as the server is asked

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Scores]:
        """Of each sequence: its tokens, int32 `[T]`, and which of them were drawn, bool `[T]`, but never the first.
        Raises `RunFailed` if the server does not answer, or not with that."""
        try:
            return asyncio.run(self._score(sequences))
        except ServerFault as error:
            raise RunFailed(f"teacher.path = '{self._url}': {error}", who="the teacher", retry=True) from None

    async def _score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Scores]:
        free = asyncio.Semaphore(AT_ONCE)
        async with _linked(self._url) as link:
            name = self._name = self._name or (await _model(link))[0]

            async def scored(tokens: np.ndarray, drawn: np.ndarray) -> Scores:
                async with free:
                    found = await _patiently(link, name, tokens.tolist(), self._top_k)
                    progress()
                    return _scores(link, found, tokens, drawn, self._top_k, self._below)

            return list(await asyncio.gather(*(scored(*one) for one in sequences)))


def check_served_teacher(url: str, model: str, positions: int, top_k: int) -> None:
    """Raise `ModelError` if the server at `url` does not answer, or its model cannot score the tokens of the policy at
    `model`: another vocabulary, sequences shorter than `positions`, fewer than `top_k` log-probs at a position."""
    from transformers import AutoTokenizer

    async def check() -> None:
        async with _linked(url) as link:
            name, longest = await _model(link)
            if longest is not None and longest <= positions:  # one token is drawn after those that are scored
                raise Refused(
                    f"it serves sequences of {longest} tokens, and samples have up to {positions}, and one is drawn: "
                    f"start it with --max-model-len {positions + 1}"
                )
            await _check_vocabulary(link, name, AutoTokenizer.from_pretrained(model, trust_remote_code=False))
            listed = await _listed(link, name, [0, 0], top_k)
            _entries(link, listed[1], [0], top_k)

    try:
        asyncio.run(check())
    except ServerFault as error:
        raise ModelError(
            f"teacher.path = '{url}': {error}",
            "give the URL of a server of vLLM (vllm serve MODEL) whose model has the policy's tokenizer"
            + (f"; it needs --max-logprobs {top_k}" if top_k > 20 else ""),
        ) from None


@asynccontextmanager
async def _linked(url: str) -> AsyncIterator[Link]:
    link = Link(url)
    try:
        yield link
    finally:
        await link.close()


async def _model(link: Link) -> tuple[str, int | None]:
    """The name of the model that it serves, and the longest sequence."""
    found = await link.get("/v1/models", FIRST_S)
    try:
        first = found["data"][0]
        return str(first["id"]), first.get("max_model_len")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise link.out_of_protocol("/v1/models", found) from None


async def _patiently(link: Link, name: str, tokens: list[int], top_k: int) -> Any:
    for pause_s in PAUSES_S:
        try:
            return await _listed(link, name, tokens, top_k)
        except Refused:
            raise
        except ServerFault:
            await asyncio.sleep(pause_s)
            progress()
    return await _listed(link, name, tokens, top_k)


async def _listed(link: Link, name: str, tokens: list[int], top_k: int) -> Any:
    """For each token, what could be there: the server's answer."""
    body = {"model": name, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}
    found = await link.post("/v1/completions", body, ANSWER_S)
    try:
        listed = found["choices"][0]["prompt_logprobs"]
        if len(listed) != len(tokens):
            raise TypeError
    except (KeyError, IndexError, TypeError):
        raise link.out_of_protocol("/v1/completions", "it has no log-prob for each token of the prompt") from None
    return listed


def _scores(link: Link, listed: Any, tokens: np.ndarray, drawn: np.ndarray, top_k: int, below: int) -> Scores:
    import numpy as np

    places = np.flatnonzero(drawn)
    count = len(places)
    scores = Scores(
        np.zeros(count, np.float32),
        np.zeros(count, bool),
        np.zeros((count, top_k), np.int64),
        np.zeros((count, top_k), np.float32),
    )
    for row, place in enumerate(places.tolist()):
        own = int(tokens[place])
        known = _entries(link, listed[place], [own], top_k)
        scores.log_probs[row], scores.agrees[row] = known[own][0], known[own][1] == 1
        best = sorted((rank, one, value) for one, (value, rank) in known.items() if rank <= top_k and one < below)
        if len(best) < top_k:
            raise Refused(f"{link.url} finds tokens likeliest that are not in the policy's vocabulary")
        scores.ids[row], scores.top[row] = [one for _, one, _ in best], [value for _, _, value in best]
    return scores


def _entries(link: Link, listed: Any, needed: Sequence[int], top_k: int) -> dict[int, tuple[float, int]]:
    """Of one place: id → (log-prob, rank, the likeliest's is 1). needed: ids that must be among them."""
    try:
        found = {int(one): (float(entry["logprob"]), int(entry["rank"])) for one, entry in listed.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        found = {}
    if not found.keys() >= set(needed) or len(found) < top_k:
        raise link.out_of_protocol("/v1/completions", f"it does not list {max(top_k, 1)} log-probs at a position")
    return found


async def _check_vocabulary(link: Link, name: str, tokenizer: Any) -> None:
    """Raises `Refused` with the first id that is another text there."""
    for part in _ranges(len(tokenizer)):
        if await _text(link, name, part) == tokenizer.decode(part):
            continue
        while len(part) > 1:
            half = part[: len(part) // 2]
            part = part[len(half) :] if await _text(link, name, half) == tokenizer.decode(half) else half
        theirs = await _text(link, name, part)
        raise Refused(
            f"its vocabulary is not the policy's: the id {part[0]} is {theirs[:20]!r} there, and "
            f"{tokenizer.decode(part)[:20]!r} is the policy's"
        )


def _ranges(size: int) -> Iterator[list[int]]:
    for first in range(0, size, IDS_AT_ONCE):
        yield list(range(first, min(first + IDS_AT_ONCE, size)))


async def _text(link: Link, name: str, ids: list[int]) -> str:
    try:
        return str((await link.post("/detokenize", {"model": name, "tokens": ids}, FIRST_S))["prompt"])
    except (KeyError, TypeError):
        raise link.out_of_protocol("/detokenize", "it has no text") from None
