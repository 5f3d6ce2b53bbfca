"""Reward functions as they are written for other frameworks, and verifiers of our own in every form. Loaded by name."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from rlcli.types import Outcome, Verdict, VerifyRequest

# --- verl -------------------------------------------------------------------------------------------------------------


def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.0, score=1.0):  # type: ignore[no-untyped-def]
    """As verl's gsm8k does it."""
    if data_source not in ["openai/gsm8k", "toy"]:
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    numbers = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
    if not numbers:
        return 0
    return score if numbers[-1] == ground_truth else format_score


def compute_score_dapo(data_source, solution_str, ground_truth, extra_info, **kwargs):  # type: ignore[no-untyped-def]
    """As verl's DAPO does it: a penalty for a wrong answer, with what it read."""
    answer = solution_str.rpartition("Answer: ")[2].strip() or "[INVALID]"
    correct = answer == ground_truth
    strict = bool(kwargs.get("strict_box_verify"))
    return {
        "score": 1.0 if correct else -1.0,
        "acc": correct,
        "pred": answer,
        "index": extra_info["index"],
        "s": strict,
    }


def compute_score_with_notes(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    return 1.0, {"notes": "verl takes the first"}


async def compute_score_judged(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0.05)
    return {"score": 0.5, "reason": "half right"}


def compute_score_broken(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    return {"reward": 1.0}


# --- TRL --------------------------------------------------------------------------------------------------------------


def reward_len(completions, **kwargs):  # type: ignore[no-untyped-def]
    """The first example of TRL's documentation, for text."""
    return [-abs(20 - len(completion)) for completion in completions]


def accuracy_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs: Any) -> list[float | None]:
    """In the style of trl.rewards: messages, a column, None where the gold answer cannot be read."""
    contents = [completion[0]["content"] for completion in completions]
    return [
        None if gold == "unreadable" else float(gold in text) for text, gold in zip(contents, solution, strict=True)
    ]


def format_reward_func(completions, **kwargs):  # type: ignore[no-untyped-def]
    """Messages, and no annotation that says so."""
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if re.match(r"<think>.*</think>", response) else 0.0 for response in responses]


def unique_in_group(completions, prompts, trainer_state, log_extra, log_metric, **kwargs):  # type: ignore[no-untyped-def]
    """As TRL lays groups out: a response that no other of the call repeats. With what TRL's trainer passes."""
    log_extra("calls", [f"{len(completions)} for {len(set(map(str, prompts)))}"] * len(completions))
    log_extra("place", range(len(completions)))
    log_metric("step", trainer_state.global_step)
    log_metric("share", 0.25)
    log_metric("share", 0.75)
    if "raise" in str(completions):
        raise ValueError("no such thing")
    if "epoch" in str(completions):
        return [float(trainer_state.epoch)]
    if "short log" in str(completions):
        log_extra("calls", [1, 2, 3, 4, 5])
    if "text metric" in str(completions):
        log_metric("share", "high")
    if "nan among" in completions:
        return [float("nan") if completion == "nan among" else 1.0 for completion in completions]
    return [float(completions.count(completion) == 1) for completion in completions]


def soft_overlong(completion_ids, max_completion_len=10, **kwargs):  # type: ignore[no-untyped-def]
    return [0.0 if len(ids) <= max_completion_len else -1.0 for ids in completion_ids]


def math_rows_only(prompts, completions, ground_truth, task, **kwargs):  # type: ignore[no-untyped-def]
    """TRL's way to train on several tasks: None for the rows of others."""
    assert all(isinstance(prompt, str) for prompt in prompts)
    return [
        float(truth in completion) if kind == "math" else None
        for completion, truth, kind in zip(completions, ground_truth, task, strict=True)
    ]


async def reward_awaited(prompts, completions, ground_truth, **kwargs):  # type: ignore[no-untyped-def]
    async def one(completion: str, truth: str) -> float:
        await asyncio.sleep(0.05)
        return 1.0 if truth in completion else 0.0

    return await asyncio.gather(*map(one, completions, ground_truth))


def reward_nan(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [float("nan")] * len(completions)


def reward_short(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0] * (len(completions) + 1)


def reward_typo(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [completion.contents for completion in completions]


# --- Prime Intellect --------------------------------------------------------------------------------------------------


async def correct_answer(completion, answer) -> float:  # type: ignore[no-untyped-def]
    return 1.0 if answer in completion[-1]["content"] else 0.0


def exact_match(completion, answer, **kwargs):  # type: ignore[no-untyped-def]
    return 1.0 if completion.strip() == answer else 0.0


def from_state(state, info, task):  # type: ignore[no-untyped-def]
    return 0.25 * (state["answer"] in state["completion"]) + 0.5 * (info["index"] == 7) + 0.25 * (task == "toy")


def parsed(parser, completion, answer):  # type: ignore[no-untyped-def]
    return 1.0 if parser.parse_answer(completion) == answer else 0.0


class XMLParser:
    def parse_answer(self, completion: Any) -> str | None:
        match = re.search(r"<answer>(.*?)</answer>", completion[-1]["content"])
        return match[1] if match else None


class Rubric:
    """As much of verifiers.Rubric as a function of rewards needs."""

    def __init__(self, funcs: list[Any], weights: list[float], parser: Any = None) -> None:
        self.funcs, self.weights, self.parser = funcs, weights, parser


class OlderRubric:
    def get_reward_funcs(self) -> list[Any]:
        return [exact_match]

    def get_reward_weights(self) -> list[float]:
        return [2.0]


rubric = Rubric([parsed, exact_match, from_state], [1.0, 0.0, 0.2], XMLParser())
older_rubric = OlderRubric()
uneven_rubric = Rubric([exact_match], [1.0, 2.0])
lost_rubric = Rubric([parsed], [1.0])

# --- ours -------------------------------------------------------------------------------------------------------------


def native(request: VerifyRequest, *, need: str, times: int = 1, among: tuple[str, ...] = (), loud=False) -> Verdict:  # type: ignore[no-untyped-def]
    right = need * times in request.completion and (not among or need in among)
    return Verdict(float(right), Outcome.OK if right else Outcome.WRONG, answer=repr((need, times, among, loud)))


def native_with_defaults(request: VerifyRequest, need: str = "a", *, times: int = 1) -> Verdict:
    """Its options may be positional, as long as they may be left out."""
    return Verdict(1.0, Outcome.OK, answer=need * times)


def choosy(request: VerifyRequest) -> Verdict | None:
    """Takes the rows that say so."""
    if request.ground_truth != "mine":
        return None
    return Verdict(1.0, Outcome.OK, answer="mine", parts={"inner": 3.0}, detail="taken")


def half(request: VerifyRequest) -> Verdict:
    return Verdict(0.5, Outcome.WRONG, answer="half", detail="half")


def is_truth(request: VerifyRequest) -> bool:
    return request.completion == request.ground_truth


def share_of_digits(request: VerifyRequest) -> float:
    import numpy as np

    return np.float32(np.mean([letter.isdigit() for letter in request.completion]))  # type: ignore[return-value]


def is_truth_to_numpy(request: VerifyRequest) -> bool:
    import numpy as np

    return np.array(request.completion) == request.ground_truth  # type: ignore[no-any-return]


async def length_awaited(request: VerifyRequest) -> float:
    return -len(request.completion)


def lengths(requests: Sequence[VerifyRequest]) -> list[int]:
    return [len(request.completion) for request in requests]


def unreadable(request: VerifyRequest) -> Verdict:
    raise ValueError(f"the ground truth {request.ground_truth!r} is no number")


UNDER_WAY: list[str] = []


async def awaited(request: VerifyRequest) -> Verdict:
    if request.completion == "raise":
        raise LookupError("no such thing")
    if request.completion == "exit":
        raise SystemExit(4)
    if request.completion == "hang":
        while True:
            pass
    UNDER_WAY.append(request.completion)
    parts = {"loop": float(id(asyncio.get_running_loop())), "under_way": float(len(UNDER_WAY))}
    await asyncio.sleep(0.2)
    UNDER_WAY.remove(request.completion)
    return Verdict(1.0, Outcome.OK, answer=request.completion, parts=parts)


def batch(requests: Sequence[VerifyRequest]) -> list[Verdict | None]:
    """Says how many it was given. One bad request brings the whole batch down."""
    deeds = {request.completion for request in requests}
    if "raise" in deeds:
        raise LookupError("no such thing")
    if "exit" in deeds:
        os._exit(3)
    if "hang" in deeds:
        while True:
            pass
    if "short" in deeds:
        return []
    time.sleep(0.02)
    return [
        None if r.completion == "pass" else Verdict(1.0, Outcome.OK, answer=r.completion, parts={"of": len(requests)})
        for r in requests
    ]


async def batch_awaited(requests: Sequence[VerifyRequest]) -> list[Verdict]:
    await asyncio.sleep(0)
    return [Verdict(1.0, Outcome.OK, answer=str(len(requests))) for _ in requests]


def no_convention(text, gold):  # type: ignore[no-untyped-def]
    return 1.0


number = 3


def sandboxed(request: VerifyRequest) -> Verdict:
    return Verdict(1.0, Outcome.OK, answer=os.environ.get("RLCLI_SANDBOX"))
