"""Rows of verl's files: the verifier that verl's own table names by `data_source`, and ground truths of any type."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rlcli.support.value_text import value_text

VERIFIERS = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math",
    "math": "math",
    "math_dapo_reasoning": "math",
    "numina_aops_forum": "math",
    "numina_synthetic_math": "math",
    "numina_amc_aime": "math",
    "numina_synthetic_amc": "math",
    "numina_cn_k12": "math",
    "numina_olympiads": "math",
    "hiyouga/geometry3k": "math",
    "codecontests": "code(score=share)",
    "apps": "code(score=share)",
    "codeforces": "code(score=share)",
    "taco": "code(score=share)",
    "countdown": "countdown",
}
"""A row's `data_source` → the verifier that does what verl's `default_compute_score` does for it; countdown is
TinyZero's. Any name that begins with aime is mathematics too."""


def is_verls_style(style: str) -> bool:
    """True if `reward_model.style` is one of verl's: the kind of the reward (by a rule, by a model), not the name of a
    verifier."""
    return style in ("", "rule", "model") or style.startswith("rule-")


def verifier_of(style: str, data_source: str) -> str:
    """The verifier of a row with a style of verl's; empty if its table has none, or if a model scores the row.

    >>> verifier_of("rule", "openai/gsm8k"), verifier_of("rule", "aime2025"), verifier_of("model", "math")
    ('gsm8k', 'math', '')
    """
    if style == "model":
        return ""
    return "math" if data_source.startswith("aime") else VERIFIERS.get(data_source, "")


def ground_truth_text(value: object) -> str | None:
    """A ground truth as text: numbers and dates as a person writes them, structs and lists as JSON. None if there is
    none, or no text for it.

    >>> ground_truth_text({"target": 24, "numbers": [4, 6]})
    '{"target": 24, "numbers": [4, 6]}'
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | list):
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return None
    return value_text(value)
