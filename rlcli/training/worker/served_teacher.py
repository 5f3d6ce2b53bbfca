"""A teacher that a server of vLLM serves: it scores given tokens (`prompt_logprobs` of `/v1/completions`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from rlcli.cluster.watchdog import progress
from rlcli.errors import ModelError, RunFailed
from rlcli.support.json_link import Link, Refused, ServerFault

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy as np
    from jaxtyping import Bool, Float32, Int32, Int64
    from transformers import PreTrainedTokenizerBase

    Masked = tuple[Int32[np.ndarray, " T"], Bool[np.ndarray, " T"]]
    """Tokens of a sequence, and the mask of its response tokens."""

AT_ONCE = 32
"""Concurrent requests of a rank: the server queues what it cannot run."""
ANSWER_S, FIRST_S = 600.0, 60.0
PAUSES_S = (1.0, 4.0, 16.0)
"""Pauses before retries: a server takes a while to restart."""
IDS_AT_ONCE = 4096


Entry = Mapping[str, Mapping[str, float]]
"""Id → log-prob and rank, as the server lists them for a position."""


class Scores(NamedTuple):
    """Scores of response tokens."""

    log_probs: Float32[np.ndarray, " R"]
    """log ν of each token."""
    agrees: Bool[np.ndarray, " R"]
    """True where no token is likelier."""
    ids: Int64[np.ndarray, "R K"]
    """The likeliest tokens, most likely first."""
    top: Float32[np.ndarray, "R K"]
    """Their log ν."""


class ServedTeacher:
    """Scores tokens through a server. url: of the server. top_k: K. below: size of the policy's vocabulary; other ids
    are left out. Log-probs are at temperature 1."""

    def __init__(self, url: str, top_k: int, below: int) -> None:
        self._url, self._top_k, self._below = url, top_k, below
        self._name = ""  # of the model

    def score(self, sequences: Sequence[Masked]) -> list[Scores]:
        """sequences: the tokens of each, and the mask of its response tokens, which never has the first. Raises
        `RunFailed` if the server does not answer, or not with scores."""
        try:
            return asyncio.run(self._score(sequences))
        except ServerFault as error:
            raise RunFailed(f"teacher.path = '{self._url}': {error}", who="the teacher", retry=True) from None

    async def _score(self, sequences: Sequence[Masked]) -> list[Scores]:
        free = asyncio.Semaphore(AT_ONCE)
        async with _linked(self._url) as link:
            name = self._name = self._name or (await _model(link))[0]

            async def scored(tokens: Int32[np.ndarray, " T"], response_mask: Bool[np.ndarray, " T"]) -> Scores:
                async with free:
                    listed = await _patiently(link, name, tokens.tolist(), self._top_k)
                    progress()
                    return _scores(link, listed, tokens, response_mask, self._top_k, self._below)

            return list(await asyncio.gather(*(scored(tokens, mask) for tokens, mask in sequences)))


def check_served_teacher(url: str, model: str, positions: int, top_k: int) -> None:
    """Raise `ModelError` if the server at `url` does not answer, or its model cannot score the tokens of the policy at
    `model`: another vocabulary, sequences shorter than `positions`, fewer than `top_k` log-probs at a position."""
    from transformers import AutoTokenizer

    async def check() -> None:
        async with _linked(url) as link:
            name, longest = await _model(link)
            if longest is not None and longest <= positions:  # one token is generated after those that are scored
                raise Refused(
                    f"it serves sequences of {longest} tokens, samples have up to {positions}, and one is generated: "
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
    """The name of the served model, and the longest sequence."""
    answer = await link.get("/v1/models", FIRST_S)
    try:
        first = answer["data"][0]
        return str(first["id"]), first.get("max_model_len")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise link.out_of_protocol("/v1/models", answer) from None


async def _patiently(link: Link, name: str, tokens: list[int], top_k: int) -> list[Entry]:
    for pause_s in PAUSES_S:
        try:
            return await _listed(link, name, tokens, top_k)
        except Refused:
            raise
        except ServerFault:
            await asyncio.sleep(pause_s)
            progress()
    return await _listed(link, name, tokens, top_k)


async def _listed(link: Link, name: str, tokens: list[int], top_k: int) -> list[Entry]:
    """The server's candidates for each position."""
    body = {"model": name, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}
    answer = await link.post("/v1/completions", body, ANSWER_S)
    try:
        listed: list[Entry] = answer["choices"][0]["prompt_logprobs"]
        if len(listed) != len(tokens):
            raise TypeError
    except (KeyError, IndexError, TypeError):
        raise link.out_of_protocol("/v1/completions", "it has no log-prob for each token of the prompt") from None
    return listed


def _scores(
    link: Link,
    listed: list[Entry],
    tokens: Int32[np.ndarray, " T"],
    response_mask: Bool[np.ndarray, " T"],
    top_k: int,
    below: int,
) -> Scores:
    import numpy as np

    positions = np.flatnonzero(response_mask)
    count = len(positions)
    scores = Scores(
        np.zeros(count, np.float32),
        np.zeros(count, bool),
        np.zeros((count, top_k), np.int64),
        np.zeros((count, top_k), np.float32),
    )
    for row, position in enumerate(positions.tolist()):
        target = int(tokens[position])
        known = _entries(link, listed[position], [target], top_k)
        scores.log_probs[row], scores.agrees[row] = known[target][0], known[target][1] == 1
        best = sorted((rank, token, value) for token, (value, rank) in known.items() if rank <= top_k and token < below)
        if len(best) < top_k:
            raise Refused(f"{link.url} finds tokens likeliest that are not in the policy's vocabulary")
        scores.ids[row], scores.top[row] = [token for _, token, _ in best], [value for _, _, value in best]
    return scores


def _entries(link: Link, listed: Entry, needed: Sequence[int], top_k: int) -> dict[int, tuple[float, int]]:
    """The candidates for one position: id → (log-prob, rank, from 1). needed: ids that must be among them."""
    try:
        entries = {int(token): (float(entry["logprob"]), int(entry["rank"])) for token, entry in listed.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        entries = {}
    if not entries.keys() >= set(needed) or len(entries) < top_k:
        raise link.out_of_protocol("/v1/completions", f"it does not list {max(top_k, 1)} log-probs at a position")
    return entries


async def _check_vocabulary(link: Link, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `Refused` with the first id that has another text in the server's vocabulary."""
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
