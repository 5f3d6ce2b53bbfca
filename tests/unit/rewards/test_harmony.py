"""Responses in GPT-OSS's chat format, as verifiers read them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.rewards.harmony import MARKERS, plain, speaks
from rlcli.types import VerifyRequest

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "shown", "answer"),
    [
        (f"{ANALYSIS}6 · 7<|end|>{FINAL}42<|return|>", "<think>6 · 7</think>42", "42"),
        (f"{ANALYSIS}6 · 7<|end|>{FINAL}42", "<think>6 · 7</think>42", "42"),
        (f"{ANALYSIS}6 · 7", "<think>6 · 7", None),
        (f"{ANALYSIS}6 · 7<|end|>", "<think>6 · 7</think>", ""),
        (f"{ANALYSIS}6 · 7{FINAL}42", "<think>6 · 7</think>42", "42"),
        ("<|channel|>final<|message|>42<|return|>", "42", "42"),
        (f"{ANALYSIS}one<|end|>{FINAL}41<|end|><|start|>assistant{ANALYSIS}no", "<think>one</think>41<think>no", None),
        (f"{ANALYSIS}</think>42", "<think>42", None),
        ("<|channel|>commentary<|message|>Wait.<|end|>", "Wait.", "Wait."),
        ("42<|return|>", "42", "42"),
        ("<|channel|>final", "", ""),
        ("", "", ""),
    ],
)
def test_the_analysis_is_reasoning_and_the_rest_is_text(text: str, shown: str, answer: str | None) -> None:
    assert plain(text) == shown
    assert VerifyRequest(shown, "42").answer_text() == answer


@given(st.lists(st.sampled_from([*MARKERS, "<|call|>", "analysis", "final", "<think>", "</think>", "4", " "])))
def test_nothing_of_an_analysis_reaches_the_answer(pieces: list[str]) -> None:
    text = f"{ANALYSIS}secret{''.join(pieces)}"
    assert "secret" not in (VerifyRequest(plain(text), "").answer_text() or "")
    assert not any(marker in plain(text) for marker in MARKERS)


def test_hostile_text_takes_linear_time() -> None:
    began = time.process_time()
    for text in ("<|channel|>" * 50_000, ANALYSIS * 20_000, "<|message|>" * 50_000, "<|" * 200_000):
        plain(text)
    assert time.process_time() - began < 5


def test_a_tokenizer_with_the_markers_speaks_the_format() -> None:
    assert speaks(dict.fromkeys(MARKERS, 1))
    assert not speaks({"<|start|>": 1, "<|end|>": 2})
