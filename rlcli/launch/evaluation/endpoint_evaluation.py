"""Evaluates a served model: the same prompts, verifiers and report, with responses over HTTP."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlcli.config.schema import RunConfig
from rlcli.data.messages import sample_seed
from rlcli.data.sample_files import PartWriter, sample_row
from rlcli.errors import EndpointError
from rlcli.evaluation.evaluation_report import PURPOSE
from rlcli.evaluation.responses import COLUMNS, Responses
from rlcli.launch.verifier_trial import check_verifiers, refuse_rivals
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rollout.openai_client import ChatClient, ChatRequest, ChatResult
from rlcli.rollout.rollout_call import GREEDY
from rlcli.rollout.scheduler.dispatcher import OnProgress
from rlcli.support.files import filled_path
from rlcli.types import FinishReason, Prompt, Verdict

SETTLE_EVERY_S = 0.25


def served_name(client: ChatClient) -> str:
    """The model that will answer; if none was named, the only one that the endpoint serves. Raises EndpointError."""
    for _ in client.generate([]):  # only queries the model name
        pass
    assert client.model is not None
    return client.model


def scoring(config: RunConfig, prompts: Sequence[Prompt], on_note: Callable[[str], None]) -> Callable[[], ScoringPool]:
    """A function that starts the processes that verify responses to `prompts`. Checks first that the verifiers load."""
    verifiers, sandbox = check_verifiers(prompts, config.verifier, on_note, tried=[prompts])
    refuse_rivals(verifiers, "--endpoint")
    processes = config.verifier.processes or len(os.sched_getaffinity(0))
    sandbox = sandbox or config.verifier.sandbox
    return lambda: ScoringPool(processes, config.verifier.deadline_s, verifiers, sandbox)


@dataclass(frozen=True)
class _Answered:
    prompt: int
    sample: int
    result: ChatResult
    verdict: Future[Verdict]


def ask(
    client: ChatClient,
    scorer: ScoringPool,
    config: RunConfig,
    prompts: Sequence[Prompt],
    wanted: Sequence[tuple[int, ...]],
    *,
    save_as: str,
    on_progress: OnProgress,
    on_note: Callable[[str], None] = lambda text: None,
) -> Responses:
    """Responses with their verdicts. wanted: for each prompt, the indexes of the samples to ask for; GREEDY means a
    greedy one. save_as: the path to save them to as they finish, with `{part}` in it; empty: not saved. on_note:
    receives a line if no two samples of any prompt differ."""
    asked = {f"{index}:{sample}": (index, sample) for index, samples in enumerate(wanted) for sample in samples}
    requests = [_request(config, prompts[index], sample, key) for key, (index, sample) in asked.items()]
    writer = PartWriter(filled_path(save_as, "rank", 0), 0) if save_as else None
    waiting: list[_Answered] = []
    done: list[dict[str, Any]] = []
    places: list[int] = []
    texts: dict[int, list[int]] = defaultdict(list)  # prompt → a hash of each sample's text

    def settle(all_of_them: bool) -> None:
        """Collect those whose verdict is ready, or wait for all."""
        nonlocal waiting
        still = []
        for one in waiting:
            if not (all_of_them or one.verdict.done()):
                still.append(one)
                continue
            row = _row(prompts[one.prompt], one)
            done.append({name: row[name] for name in COLUMNS})
            places.append(one.prompt)
            if writer is not None:
                writer.add(row)
        waiting = still

    settled = time.monotonic()
    try:
        for number, result in enumerate(client.generate(requests), 1):
            index, sample = asked[result.key]
            if sample != GREEDY:
                texts[index].append(hash(result.text))
            waiting.append(_Answered(index, sample, result, _verify(scorer, prompts[index], result)))
            on_progress(number, len(asked))
            if time.monotonic() - settled > SETTLE_EVERY_S:
                settle(all_of_them=False)
                settled = time.monotonic()
        settle(all_of_them=True)
    except EndpointError:
        settle(all_of_them=True)  # earlier answers are kept, however long their verification takes
        raise
    finally:
        if writer is not None:
            writer.flush()
    several = [hashes for hashes in texts.values() if len(hashes) > 1]
    if several and config.evaluation.temperature > 0 and all(len({*hashes}) == 1 for hashes in several):
        on_note(
            f"all samples of a prompt are equal, for each of {len(several)} prompts, at temperature "
            f"{config.evaluation.temperature:g}: the server may ignore the temperature or the seed that it is sent"
        )
    return Responses.of(places, *([row[name] for row in done] for name in COLUMNS))


def _request(config: RunConfig, prompt: Prompt, sample: int, key: str) -> ChatRequest:
    return ChatRequest(
        key=key,
        messages=prompt.messages,
        temperature=0.0 if sample == GREEDY else config.evaluation.temperature,
        max_tokens=config.rollout.max_response_tokens,
        top_p=1.0 if sample == GREEDY else config.evaluation.top_p,
        # Servers accept at least 32-bit seeds.
        seed=sample_seed(config.train.seed, PURPOSE, 0, prompt.id, sample) & 0x7FFFFFFF,
        # vLLM, SGLang and others accept both; other servers return an error if they are given.
        extra={
            **({"chat_template_kwargs": dict(given)} if (given := config.data.chat_template_kwargs) else {}),
            **({"stop_token_ids": list(stops)} if (stops := config.rollout.stop_token_ids) else {}),
        },
    )


def _verify(scorer: ScoringPool, prompt: Prompt, result: ChatResult) -> Future[Verdict]:
    reason: FinishReason = "length" if result.finish_reason == "length" else "stop"
    return scorer.submit(prompt.verifier, prompt.request(result.text, reason))


def _row(prompt: Prompt, one: _Answered) -> dict[str, Any]:
    return sample_row(
        prompt,
        one.sample,
        one.result.text,
        one.verdict.result(),
        prompt_tokens=None,
        response_tokens=one.result.completion_tokens,
        finish_reason=one.result.finish_reason,
        group=one.prompt,
    )
