"""Evaluation of a served model: the same prompts, verifiers and report, with responses that come over HTTP."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlcli.config.schema import RunConfig
from rlcli.data.prompts import read_prompts
from rlcli.data.samples import write_samples
from rlcli.rollout.openai_client import ChatClient, ChatRequest, ChatResult
from rlcli.scoring.pool import ScoringPool
from rlcli.trainer.collect import OnProgress
from rlcli.trainer.evaluate import EvalReport, report_of
from rlcli.trainer.verifying import check_verifiers
from rlcli.types import Prompt, Verdict, VerifyRequest
from rlcli.workers.cluster import worker_threads
from rlcli.workers.work import sample_seed


def evaluate_served(
    endpoint: str,
    config: RunConfig,
    *,
    save_as: Path | None,
    on_progress: OnProgress = lambda done, total: None,
) -> EvalReport:
    """Ask the model at `endpoint` (config.model.path is its served name, or empty for the only one) and verify.

    Needs neither torch nor ray. Raises EndpointError where the model cannot be reached.
    """
    settings = config.evaluation
    prompts = read_prompts(settings.data, "test", config.verifier.name)[: settings.max_prompts or None]
    total = len(prompts) * settings.samples
    asked = {
        f"{index}:{sample}": (index, sample) for index in range(len(prompts)) for sample in range(settings.samples)
    }
    requests = [
        ChatRequest(
            key=key,
            messages=prompts[index].messages,
            temperature=settings.temperature,
            max_tokens=config.rollout.max_response_tokens,
            # Servers take 32-bit seeds at least.
            seed=sample_seed(config.train.seed, "eval", 0, prompts[index].id, sample) & 0x7FFFFFFF,
        )
        for key, (index, sample) in asked.items()
    ]
    verifiers, sandbox = check_verifiers(prompts, config.verifier)
    processes = config.verifier.processes or worker_threads(1)
    client = ChatClient(endpoint, config.model.path or None, concurrency=config.rollout.max_concurrent)
    pending: list[tuple[ChatResult, Future[Verdict]]] = []
    with ScoringPool(processes, config.verifier.deadline_s, verifiers, sandbox or config.verifier.sandbox) as scorer:
        for result in client.generate(requests):
            prompt = prompts[asked[result.key][0]]
            request = VerifyRequest(
                result.text, prompt.ground_truth, prompt.messages, prompt.data_source, prompt.extra_info
            )
            pending.append((result, scorer.submit(prompt.verifier, request)))
            on_progress(len(pending), total)
        done = [(*asked[result.key], result, verdict.result()) for result, verdict in pending]
    done.sort(key=lambda one: one[:2])
    if save_as:
        rows = [_record(prompts[index], sample, result, verdict) for index, sample, result, verdict in done]
        write_samples(save_as, 0, rows)
    return report_of(
        [
            (index, verdict, result.completion_tokens, result.finish_reason == "length")
            for index, _, result, verdict in done
        ],
        len(prompts),
    )


def _record(prompt: Prompt, sample: int, result: ChatResult, verdict: Verdict) -> dict[str, Any]:
    return {
        "prompt_id": prompt.id,
        "sample": sample,
        "response": result.text,
        "answer": verdict.answer,
        "score": verdict.score,
        "outcome": str(verdict.outcome),
        "detail": verdict.detail,
        "response_tokens": result.completion_tokens,
        "finish_reason": result.finish_reason,
    }
