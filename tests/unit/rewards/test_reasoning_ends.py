"""Where the reasoning of a response ends: one that is still open holds no answer, whoever opened it."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from rlcli_port.rewards.conventions import prime
from rlcli_verifiers import countdown, exact, format, gsm8k, math, multiple_choice, regex
from rlcli_verifiers.code import verify as verify_code

from rlcli.errors import DataError
from rlcli.rewards.response_files import as_fields, read_rows
from rlcli.types import Outcome, VerifyRequest
from tests.cpu_limit import cpu_limit

RIGHT = {
    "math": (math.verify, r"\boxed{42}", "42"),
    "gsm8k": (gsm8k.verify, "#### 42", "42"),
    "multiple_choice": (multiple_choice.verify, r"\boxed{B}", "B"),
    "countdown": (countdown.verify, "<answer>3 * 14</answer>", '{"numbers": [3, 14], "target": 42}'),
    "exact": (exact.verify, "42", "42"),
    "regex": (regex.verify, "42", "4."),
    "code": (verify_code, "```python\nprint(42)\n```", json.dumps({"kind": "asserts", "asserts": ["True"]})),
}
"""Verifier, a response that is right, and its ground truth."""


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize(
    ("prefix", "suffix", "thinking"),
    [
        ("<think>maybe ", "? wait …", False),
        ("maybe ", "? wait …", True),
        ("<think>a</think> so <think>or ", "", False),
        ("<think>a <think> b </think> maybe ", "? wait", False),
        ("<think>\n", "", True),
    ],
)
def test_reasoning_that_is_still_open_is_no_answer(name: str, prefix: str, suffix: str, thinking: bool) -> None:
    verify, right, truth = RIGHT[name]
    verdict = verify(VerifyRequest(prefix + right + suffix, truth, thinking=thinking))
    assert verdict is not None
    assert (verdict.outcome, verdict.score) == (Outcome.NO_ANSWER, 0.0)
    assert "<think> is still open" in verdict.detail


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "code"])
@pytest.mark.parametrize(
    ("prefix", "thinking"),
    [
        ("", False),
        ("<think>so</think>\n", False),
        ("so</think>\n", True),
        ("so</think>\n", False),  # the prompt opened it, and nobody knew
        ("<think>\nso</think>\n", True),  # the prompt's own tag, repeated
        ("<think>1</think> no: <think>2</think>\n", False),
        ("<think>a <think> b </think> c</think>\n", False),
    ],
)
def test_what_follows_the_reasoning_is_the_answer(name: str, prefix: str, thinking: bool) -> None:
    verify, right, truth = RIGHT[name]
    verdict = verify(VerifyRequest(prefix + right, truth, thinking=thinking))
    assert verdict is not None
    assert verdict.outcome is Outcome.OK


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("```python\nprint('</think>')\n```", False, "```python\nprint('</think>')\n```"),
        ("<think>a</think>\n~~~\n<think>\n~~~\nb", False, "\n~~~\n<think>\n~~~\nb"),
        ("<think>a</think> the tag `<think>` opens", False, " the tag `<think>` opens"),
        ("<think>print('</think>')", False, "')"),  # within reasoning a closing tag closes, wherever it stands
        ("<think>```\n</think> 42", False, " 42"),
        ("``` </think>\n42", False, "\n42"),  # a block without an end is none
        ("a</think>b</think>c", False, "c"),
        ("", True, None),
        ("", False, ""),
        ("</think>", True, ""),
    ],
)
def test_tags_in_code_outside_of_reasoning_are_text(text: str, thinking: bool, answer: str | None) -> None:
    assert VerifyRequest(text, "", thinking=thinking).answer_text() == answer


@pytest.mark.parametrize("text", ["~~~x\n", "```x\n", "`", "<think>", "</think>", "<think>`", "\n\n", "~~~\n`\n"])
def test_hostile_texts_take_linear_time(text: str) -> None:
    with cpu_limit():
        VerifyRequest(text * (1_000_000 // len(text)), "").answer_text()


def test_the_end_of_a_long_response_knows_that_it_is_reasoning() -> None:
    request = VerifyRequest("<think>" + "x" * 50 + r"\boxed{42}", "42")
    assert request.tail(10).completion == r"\boxed{42}"
    assert math.verify(request.tail(10)).outcome is Outcome.NO_ANSWER
    assert (
        math.verify(replace(request, completion="<think>a</think>" + "x" * 9 + r"\boxed{42}").tail(10)).outcome
        is Outcome.OK
    )
    assert request.tail(1000) is request


@pytest.mark.parametrize(
    ("text", "thinking", "right"),
    [
        ("so</think><answer>42</answer>", True, True),
        ("<think>so</think><answer>42</answer>", True, True),
        ("so</think><answer>42</answer>", False, False),
        ("so <answer>42</answer>", True, False),
        ("so</think></think><answer>42</answer>", True, False),
    ],
)
def test_format_counts_a_think_that_the_prompt_opened(text: str, thinking: bool, right: bool) -> None:
    request = VerifyRequest(text, "42", thinking=thinking)
    assert (format.verify(request).outcome is Outcome.OK) == right
    pattern = r"<think>\n?.*?</think><answer>(?P<answer>[^<]*)</answer>"
    assert (format.verify(request, pattern=pattern).outcome is Outcome.OK) == (right or "</think></think>" in text)


def test_rows_of_a_file_say_how_the_response_ended_and_began(tmp_path: Any) -> None:
    rows = [
        {"completion": r"\boxed{42}", "ground_truth": "42", "finish_reason": "length", "thinking": True},
        {"completion": r"\boxed{42}", "ground_truth": "42", "finish_reason": "eos"},
        {"completion": r"\boxed{42}", "ground_truth": "42"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read, _ = read_rows(str(file))
    assert [(row.request.finish_reason, row.request.thinking) for row in read] == [
        ("length", True),
        ("stop", False),
        ("", False),
    ]
    written = [as_fields(row, math.verify(row.request)) for row in read]
    assert [row.get("finish_reason") for row in written] == ["length", "eos", None]
    assert [row["outcome"] for row in written] == ["no_answer", "ok", "ok"]
    file.write_text(json.dumps({**rows[0], "thinking": "yes"}) + "\n")
    with pytest.raises(DataError, match="'thinking' is text, and should be true or false"):
        read_rows(str(file))


def test_the_state_of_a_rubric_function_says_whether_it_was_cut_off() -> None:
    loaded = prime(lambda state: float(state["is_truncated"]), {})
    cut = VerifyRequest("a", "b", finish_reason="length")
    scores = [v.score for v in loaded.verify([cut, replace(cut, finish_reason="stop")]) if v]
    assert scores == [1.0, 0.0]


def test_a_field_that_a_request_lacks_is_answered_with_those_it_has() -> None:
    with pytest.raises(AttributeError, match="no field 'response'; it has completion, ground_truth, prompt"):
        VerifyRequest("4", "4").response  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(VerifyRequest("4", "4"), "text")
    assert pickle.loads(pickle.dumps(VerifyRequest("4", "4"))) == copy.copy(VerifyRequest("4", "4"))
