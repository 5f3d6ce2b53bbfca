"""Signals in the text of a response: its answers, the ground truth in it, repetition, language, refusals, phrases."""

from __future__ import annotations

import pytest
from rlcli_inspect.signals.response_text import (
    answers_in,
    has_truth,
    is_foreign,
    is_refusal,
    phrases_in,
    repetition,
    truth_of,
)


@pytest.mark.parametrize(
    ("response", "truth", "answers"),
    [
        ("6+9=15#### 42", "42", ["42"]),
        ("#### 41, 42, 43", "42", ["41", "42", "43"]),
        ("#### 42 or maybe 43", "42", ["42"]),  # the second part is a sentence
        ("\\boxed{6} and so \\boxed{7}", "7", ["6", "7"]),
        ("\\boxed{7}, as said: \\boxed{7.0}", "7", ["7"]),
        ("<think>#### 3, 4</think><answer>5</answer>", "5", ["5"]),
        ("The answer is $1,042.00$.", "1042", ["1042"]),
        ("The answer is 5, since 2 and 3 make 5 and nothing is left", "5", ["5"]),
        ("The answer is (A) or (B)", "(a)", ["(a)", "(b)"]),
        ("I do not know", "42", []),
    ],
)
def test_answers_of_a_response(response: str, truth: str, answers: list[str]) -> None:
    assert answers_in(response, truth) == answers


def test_the_truth_is_found_in_other_notation_and_not_within_a_number() -> None:
    assert has_truth("it is 1,042.00 in all", "1042")
    assert has_truth("so $\\frac{1}{2}$", truth_of("\\frac12") or "")
    assert has_truth("It is  Paris.", "paris")
    assert not has_truth("it is 142 or 421", "42")
    assert truth_of("working #### 72") == "72"
    assert truth_of('{"inputs": []}' * 20) is None
    assert truth_of("") is None


def test_repetition_counts_words_or_characters() -> None:
    assert repetition("now add both numbers " * 10) > 0.8
    assert repetition("8+7+0=15,5+6+1=12#### 125") == 0.0
    assert repetition("9" * 200) > 0.9
    assert repetition("one and two and three are the numbers that we add to find what the whole sum is") == 0.0


def test_language_is_that_of_the_prompt() -> None:
    prompt = "What is the sum of the numbers that are in the list?"
    assert is_foreign("答案是四十二因为六乘七", prompt)
    assert is_foreign(
        "Die Summe ist das Ergebnis von der Liste und wir sind mit dem Rest nicht fertig, das ist", prompt
    )
    assert is_foreign("The sum of the list is 42, and that is what we want", prompt) is False
    assert is_foreign("\\alpha = 42, \u03b1 + \u03b2", prompt) is False
    assert is_foreign("42", prompt) is None
    assert is_foreign("forty-two is it", "6*7=") is None


def test_refusals_are_phrases_of_refusing() -> None:
    assert is_refusal("I'm sorry, but I can't help with that.")
    assert is_refusal("I cannot answer this question")
    assert not is_refusal("We cannot divide by zero, so x = 2")


def test_phrases_have_letters_and_no_numbers_and_are_bounded() -> None:
    assert phrases_in("Sure: 42, sure") == {"sure", "sure :", ", sure"}
    assert phrases_in("#### 42") == set()
    assert len(phrases_in("word%d " * 5000)) < 500
