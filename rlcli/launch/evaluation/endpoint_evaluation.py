"""Evaluates a served model: the same prompts, verifiers and report, with responses over HTTP."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlcli.config.schema import RunConfig
from rlcli.data.messages import sample_seed
from rlcli.data.sample_files import PartWriter, SampleRow, sample_row
from rlcli.errors import EndpointError
from rlcli.evaluation.evaluation_report import PURPOSE
from rlcli.evaluation.responses import COLUMNS, Responses
from rlcli.launch.verifier_trial import check_verifiers, refuse_comparisons
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rollout.openai_client import ChatClient, ChatRequest, ChatResult
from rlcli.rollout.rollout_arguments import GREEDY
from rlcli.rollout.scheduler.dispatcher import OnProgress
from rlcli.support.files import filled_path
from rlcli.types import FinishReason, Prompt, Verdict

COLLECT_EVERY_S = 0.25


def served_name(client: ChatClient) -> str:
    """The model that will answer; if none was named, the only one that the endpoint serves. Raises EndpointError."""
    for _ in client.generate([]):  # only queries the model name
        pass
    assert client.model is not None
    return client.model


def scoring(config: RunConfig, prompts: Sequence[Prompt], on_note: Callable[[str], None]) -> Callable[[], ScoringPool]:
    """A function that starts the processes that verify responses to `prompts`. Checks first that the verifiers load."""
    verifiers, sandbox = check_verifiers(prompts, config.verifier, on_note, tried=[prompts])
    refuse_comparisons(verifiers, "--endpoint")
    processes = config.verifier.processes or len(os.sched_getaffinity(0))
    sandbox = sandbox or config.verifier.sandbox
    return lambda: ScoringPool(processes, config.verifier.deadline_s, verifiers, sandbox)


@dataclass(frozen=True)
class _Answered:
    """A response whose verification has started."""

    prompt: int
    """Index of the prompt."""
    sample: int
    """Index of the sample, or GREEDY."""
    result: ChatResult
    """The endpoint's response."""
    verdict: Future[Verdict]
    """Its verdict, once it is verified."""


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
    samples_by_key = {
        f"{index}:{sample}": (index, sample) for index, samples in enumerate(wanted) for sample in samples
    }
    requests = [_request(config, prompts[index], sample, key) for key, (index, sample) in samples_by_key.items()]
    writer = PartWriter(filled_path(save_as, "rank", 0), 0) if save_as else None
    waiting: list[_Answered] = []
    done: list[dict[str, Any]] = []
    prompt_indexes: list[int] = []
    texts: dict[int, list[int]] = defaultdict(list)  # prompt → a hash of each sample's text

    def collect(wait: bool) -> None:
        """Collect the rows whose verdict is ready. wait: for all verdicts."""
        nonlocal waiting
        still = []
        for answered in waiting:
            if not (wait or answered.verdict.done()):
                still.append(answered)
                continue
            row = _row(prompts[answered.prompt], answered)
            done.append({name: value for name, value in row.items() if name in COLUMNS})
            prompt_indexes.append(answered.prompt)
            if writer is not None:
                writer.add(row)
        waiting = still

    last_collected = time.monotonic()
    try:
        for number, result in enumerate(client.generate(requests), 1):
            index, sample = samples_by_key[result.key]
            if sample != GREEDY:
                texts[index].append(hash(result.text))
            waiting.append(_Answered(index, sample, result, _verify(scorer, prompts[index], result)))
            on_progress(number, len(samples_by_key))
            if time.monotonic() - last_collected > COLLECT_EVERY_S:
                collect(wait=False)
                last_collected = time.monotonic()
        collect(wait=True)
    except EndpointError:
        collect(wait=True)  # earlier answers are kept, however long their verification takes
        raise
    finally:
        if writer is not None:
            writer.flush()
    _note_equal_samples(texts.values(), config.evaluation.temperature, on_note)
    return Responses.of(prompt_indexes, *([row[name] for row in done] for name in COLUMNS))


def _note_equal_samples(texts: Iterable[Sequence[int]], temperature: float, on_note: Callable[[str], None]) -> None:
    """Note if no two samples of any prompt differ. texts: for each prompt a hash of each sample's text."""
    several = [hashes for hashes in texts if len(hashes) > 1]
    if several and temperature > 0 and all(len({*hashes}) == 1 for hashes in several):
        on_note(
            f"all samples of a prompt are equal, for each of {len(several)} prompts, at temperature "
            f"{temperature:g}: the server may ignore the temperature or the seed that it is sent"
        )


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
            **(
                {"chat_template_kwargs": dict(template_kwargs)}
                if (template_kwargs := config.data.chat_template_kwargs)
                else {}
            ),
            **({"stop_token_ids": list(stops)} if (stops := config.rollout.stop_token_ids) else {}),
        },
    )


def _verify(scorer: ScoringPool, prompt: Prompt, result: ChatResult) -> Future[Verdict]:
    reason: FinishReason = "length" if result.finish_reason == "length" else "stop"
    return scorer.submit(prompt.verifier, prompt.request(result.text, reason))


def _row(prompt: Prompt, answered: _Answered) -> SampleRow:
    return sample_row(
        prompt,
        answered.sample,
        answered.result.text,
        answered.verdict.result(),
        prompt_tokens=None,
        response_tokens=answered.result.completion_tokens,
        finish_reason=answered.result.finish_reason,
        group=answered.prompt,
    )
