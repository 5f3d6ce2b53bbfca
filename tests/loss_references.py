"""Policy losses as plain float64 loops over responses, written from the papers; and batches to try them on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Response(NamedTuple):
    """log-probs of one response's tokens under three policies, its advantage, its pair, and the selected tokens."""

    new: list[float]
    old: list[float]
    reference: list[float]
    advantage: float
    pair: int
    selected: list[bool]


class Term(NamedTuple):
    loss: float
    clipped_low: bool = False
    clipped_high: bool = False


Responses = list[Response]
Reference = Callable[..., list[list[Term]]]
REFERENCES: dict[str, Reference] = {}


def packed(responses: Responses, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The columns of `LossInputs`, by name, of these responses laid end to end."""

    def floats(name: str) -> Tensor:
        return torch.tensor([value for response in responses for value in getattr(response, name)], dtype=dtype)

    def of_tokens(values: list[Any], dtype: torch.dtype) -> Tensor:
        pairs = zip(values, responses, strict=True)
        return torch.tensor([value for value, response in pairs for _ in response.new], dtype=dtype)

    new = floats("new").requires_grad_()
    return {
        "log_probs": new,
        "candidate_log_probs": torch.stack([new - 1.0, new - 2.0], dim=1),
        "teacher_top_log_probs": torch.stack([floats("reference") - 0.5, floats("reference") - 1.5], dim=1),
        "old_log_probs": floats("old"),
        "reference_log_probs": floats("reference"),
        "advantages": of_tokens([response.advantage for response in responses], dtype),
        "sequence": of_tokens(list(range(len(responses))), torch.int64),
        "lengths": torch.tensor([len(response.new) for response in responses], dtype=torch.int64),
        "pairs": torch.tensor([response.pair for response in responses], dtype=torch.int64),
        "weights": torch.ones(len(new), dtype=dtype),
        "selected": torch.tensor([s for response in responses for s in response.selected], dtype=torch.bool),
    }


def rho_of(new: float, old: float) -> float:
    return math.exp(min(20.0, max(-20.0, new - old)))


def of_tokens(function: Callable[..., Term]) -> Reference:
    """The reference of a loss in which each token stands alone: function(new, old, A, selected, **options)."""

    def reference(responses: Responses, **options: Any) -> list[list[Term]]:
        return [
            [
                function(new, old, response.advantage, selected, **options)
                for new, old, selected in zip(response.new, response.old, response.selected, strict=True)
            ]
            for response in responses
        ]

    REFERENCES[function.__name__] = reference
    return reference


def of_sequences(function: Reference) -> Reference:
    REFERENCES[function.__name__] = function
    return function


def surrogate(rho: float, advantage: float, low: float, high: float, dual: float | None = None) -> Term:
    if advantage >= 0:
        return Term(-advantage * min(rho, 1 + high), False, advantage > 0 and rho > 1 + high)
    if dual is not None and rho > dual:
        return Term(-advantage * dual, False, True)
    return Term(-advantage * max(rho, 1 - low), rho < 1 - low, False)


@of_tokens
def ppo(
    new: float,
    old: float,
    advantage: float,
    _: bool,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Term:
    return surrogate(rho_of(new, old), advantage, clip_low, clip_high, dual_clip)


@of_tokens
def cispo(new: float, old: float, advantage: float, _: bool, clip_low: float = 1.0, clip_high: float = 0.2) -> Term:
    rho = rho_of(new, old)
    weight = 1 - clip_low if rho < 1 - clip_low else 1 + clip_high if rho > 1 + clip_high else rho
    return Term(-weight * advantage * new, rho < 1 - clip_low, rho > 1 + clip_high)


@of_tokens
def sapo(
    new: float, old: float, advantage: float, _: bool, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Term:
    tau = tau_positive if advantage > 0 else tau_negative
    return Term(-advantage * 4 / tau / (1 + math.exp(min(700.0, -tau * (rho_of(new, old) - 1)))))


@of_tokens
def dppo_tv(new: float, old: float, advantage: float, _: bool, clip_low: float = 0.15, clip_high: float = 0.15) -> Term:
    change, rho = math.exp(new) - math.exp(old), rho_of(new, old)
    if advantage > 0 and rho > 1 and abs(change) > clip_high:
        return Term(0.0, False, True)
    if advantage < 0 and rho < 1 and abs(change) > clip_low:
        return Term(0.0, True, False)
    return Term(-advantage * rho)


@of_tokens
def clip_cov(
    new: float,
    old: float,
    advantage: float,
    selected: bool,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    dual_clip: float | None = None,
) -> Term:
    return Term(0.0) if selected else surrogate(rho_of(new, old), advantage, clip_low, clip_high, dual_clip)


@of_tokens
def kl_cov(new: float, old: float, advantage: float, selected: bool, cov_coef: float = 1.0) -> Term:
    return Term(-advantage * rho_of(new, old) + (cov_coef * abs(new - old) if selected else 0.0))


@of_tokens
def gpg(new: float, old: float, advantage: float, _: bool) -> Term:
    return Term(-advantage * new)


@of_tokens
def dro(new: float, old: float, advantage: float, _: bool, beta: float) -> Term:
    return Term(beta / 2 * (new - old) ** 2 - advantage * new)


@of_sequences
def gspo(responses: Responses, clip_low: float = 3e-4, clip_high: float = 4e-4) -> list[list[Term]]:
    terms = []
    for response in responses:
        differences = [new - old for new, old in zip(response.new, response.old, strict=True)]
        s = rho_of(math.fsum(differences) / max(1, len(differences)), 0.0)
        terms.append([surrogate(s, response.advantage, clip_low, clip_high)] * len(differences))
    return terms


@of_sequences
def gmpo(responses: Responses, clip_low: float = 0.4, clip_high: float = 0.4) -> list[list[Term]]:
    terms = []
    for response in responses:
        held, flags = [], []
        for new, old in zip(response.new, response.old, strict=True):
            low = response.advantage < 0 and new - old < -clip_low
            high = response.advantage > 0 and new - old > clip_high
            held.append(-clip_low if low else clip_high if high else new - old)
            flags.append((low, high))
        ratio = rho_of(math.fsum(held) / max(1, len(held)), 0.0)
        terms.append([Term(-response.advantage * ratio, *flag) for flag in flags])
    return terms


@of_sequences
def dpo(responses: Responses, beta: float = 0.1) -> list[list[Term]]:
    terms = []
    for response in responses:
        pair = [other for other in responses if other.pair == response.pair]
        margin = 0.0
        for other in pair:
            h = math.fsum(other.new) - math.fsum(other.reference)
            margin += h if other.advantage > 0 else -h if other.advantage < 0 else 0.0
        x = beta * margin
        loss = math.log1p(math.exp(-x)) if x > 0 else -x + math.log1p(math.exp(x))
        alone = any(not other.new for other in pair)
        terms.append([Term(loss * (2.0 if alone else 1.0))] * len(response.new))
    return terms


@of_sequences
def sppo(responses: Responses, eta: float = 1e3) -> list[list[Term]]:
    terms = []
    for response in responses:
        log_ratio = math.fsum(response.new) - math.fsum(response.old)
        terms.append([Term((log_ratio - eta * response.advantage) ** 2)] * len(response.new))
    return terms


def kl_with_rest(first: list[float], second: list[float], least: float) -> float:
    """KL of two distributions of which some log-probs are given; the others are one event, at least that likely."""

    def whole(log_probs: list[float]) -> list[float]:
        return [*map(math.exp, log_probs), max(1.0 - math.fsum(map(math.exp, log_probs)), least)]

    return math.fsum(p * (math.log(p) - math.log(q)) for p, q in zip(whole(first), whole(second), strict=True))


DISTILLATIONS: dict[str, Callable[[list[float], list[float], float], float]] = {
    "opd_forward": lambda policy, teacher, least: kl_with_rest(teacher, policy, least),
    "opd_reverse": lambda policy, teacher, least: kl_with_rest(policy, teacher, least),
}
"""Losses over the teacher's likeliest tokens, of one token: the log-probs of policy and teacher."""
