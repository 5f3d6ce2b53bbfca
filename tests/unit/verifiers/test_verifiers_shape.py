"""The verifiers `length`, `overlong`, `repetition` and `reasoning_gym`, and the two-number rule of `gsm8k`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlcli_verifiers import gsm8k, length, overlong, reasoning_gym, repetition

from rlcli.errors import SetupError
from rlcli.types import Outcome, VerifyRequest


def tokens(count: int, **extra: int) -> VerifyRequest:
    return VerifyRequest("x" * count, "", completion_ids=range(count), extra_info=extra)


@pytest.mark.parametrize(("count", "score"), [(0, 1.0), (100, 1.0), (150, 0.5), (200, 0.0), (999, 0.0)])
def test_length_falls_from_the_target_to_twice_the_target(count: int, score: float) -> None:
    assert length.verify(tokens(count), target=100).score == score
    assert length.verify(tokens(count), target=100, shape="cosine").score == pytest.approx(score)
    assert length.verify(tokens(count, target_length=100)).score == score


def test_length_with_slack_and_by_words() -> None:
    assert length.verify(tokens(105), target=100, slack=10).score == 0.5
    assert length.verify(tokens(125), target=100, shape="cosine").score == pytest.approx(0.853553, abs=1e-6)
    assert length.verify(VerifyRequest("one two three", ""), target=2, unit="words").score == 0.5
    assert "3 words" in length.verify(VerifyRequest("one two three", ""), target=2, unit="words").detail


def test_a_row_may_have_its_own_target_or_none() -> None:
    for target_length, score in ((4, 1.0), (2, 0.0), (None, 0.0)):
        request = VerifyRequest("a b c d", "", extra_info={"target_length": target_length})
        assert length.verify(request, target=2, unit="words").score == score


@pytest.mark.parametrize("module", [length, overlong])
def test_tokens_that_nobody_counted_are_an_error(module: object) -> None:
    with pytest.raises(ValueError, match="give unit=words"):
        module.verify(VerifyRequest("one two", ""))  # type: ignore[attr-defined]
    assert module.verify(VerifyRequest("", "")).outcome is Outcome.OK  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options", [{"target": 0}, {"slack": -1}, {"shape": "round"}, {"unit": "letters"}], ids=lambda option: str(option)
)
def test_length_options_out_of_bounds(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="|".join(options)):
        length.verify(tokens(5), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "score"), [(0, 0.0), (15, 0.0), (16, -0.2), (18, -0.6), (20, -1.0), (90, -1.0)])
def test_overlong_is_the_soft_punishment_of_dapo(count: int, score: float) -> None:
    assert overlong.verify(tokens(count), max_tokens=20, buffer=5).score == pytest.approx(score)


def test_overlong_wants_a_buffer_within_the_limit() -> None:
    for buffer in (0, 21):
        with pytest.raises(ValueError, match="buffer"):
            overlong.verify(tokens(5), max_tokens=20, buffer=buffer)


def test_repetition_counts_distinct_n_grams() -> None:
    def score(text: str, **options: float) -> float:
        return repetition.verify(VerifyRequest(text, ""), **options).score  # type: ignore[arg-type]

    assert score("one two three four") == 0.0
    assert score("one two") == score("") == 0.0
    assert score("so so so so so") == pytest.approx(-2 / 3)
    assert score("So so SO so so", max_penalty=0.3) == pytest.approx(-0.2)
    assert score("a b a b a b", n=2) == pytest.approx(-(1 - 2 / 5))
    assert score("好" * 100) == pytest.approx(-(1 - 1 / 98))
    for options in ({"n": 0}, {"max_penalty": -1}):
        with pytest.raises(ValueError, match="at least"):
            score("x y z", **options)


@given(st.text(max_size=100), st.integers(1, 4))
def test_repetition_stays_within_its_bounds(text: str, n: int) -> None:
    assert -0.5 <= repetition.verify(VerifyRequest(text, ""), n=n, max_penalty=0.5).score <= 0.0


@pytest.mark.parametrize("module", [length, overlong, repetition])
def test_gold_is_short(module: object) -> None:
    text = module.gold(VerifyRequest("", "forty two"))  # type: ignore[attr-defined]
    request = VerifyRequest(text, "forty two", completion_ids=range(len(text.split())))
    assert module.verify(request).score == (1.0 if module is length else 0.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("completion", ["#### 42 or 43", "#### 42, 43", "#### 42 and maybe 43", "#### 42 / 43"])
def test_gsm8k_two_numbers_to_choose_from_are_not_right(completion: str) -> None:
    for truth in ("42", "43"):
        assert gsm8k.verify(VerifyRequest(completion, truth)).score == 0.0
        assert gsm8k.verify(VerifyRequest(completion, "42"), mode="flexible").score == 0.0


def test_gsm8k_takes_its_mode_from_the_option_first() -> None:
    row = VerifyRequest("it is 42", "42", extra_info={"answer_format": "flexible"})
    assert gsm8k.verify(row).score == 1.0
    assert gsm8k.verify(row, mode="strict").outcome is Outcome.NO_ANSWER
    assert gsm8k.verify(VerifyRequest("#### ٤٢", "42"), mode="strict").outcome is Outcome.NO_ANSWER
    assert gsm8k.verify(VerifyRequest(gsm8k.gold(row), "42")).score == 1.0
    with pytest.raises(ValueError, match="neither strict nor flexible"):
        gsm8k.verify(row, mode="loose")  # type: ignore[arg-type]


needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed"
)


def ask(task: str, entry: object, answer: str) -> VerifyRequest:
    return VerifyRequest(f"<answer>{answer}</answer>", "", extra_info={"task": task, "entry": entry})


def test_reasoning_gym_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    reasoning_gym.scorer.cache_clear()
    with pytest.raises(SetupError, match=r"rlcli\[reasoning-gym\]"):
        reasoning_gym.verify(ask("chain_sum", {}, "1"))
    for extra in ({}, {"task": "chain_sum"}, {"task": "chain_sum", "entry": "{"}, {"task": 1, "entry": {}}):
        with pytest.raises(ValueError, match="entry"):
            reasoning_gym.verify(VerifyRequest("1", "", extra_info=extra))


@needs_reasoning_gym
def test_reasoning_gym_scores_by_the_tasks_own_verifier() -> None:
    import reasoning_gym as package

    for task in ("chain_sum", "leg_counting", "spell_backward", "n_queens", "binary_matrix"):
        entry = package.create_dataset(task, size=1, seed=3)[0]
        right = ask(task, json.dumps(entry), entry["answer"])
        assert reasoning_gym.verify(right).score == 1.0, task
        gold = reasoning_gym.gold(right)
        assert reasoning_gym.verify(VerifyRequest(gold, "", extra_info=right.extra_info)).score == 1.0
        assert reasoning_gym.verify(ask(task, entry, "no such thing")).score < 1.0
    with pytest.raises(ValueError, match="no task 'no_such'"):
        reasoning_gym.verify(ask("no_such", {}, "1"))


REFUSED = (
    "countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration",
)  # fmt: skip
"""Tasks whose scorers use sympy's parser, which evaluates Python."""


def with_code(value: Any, code: str) -> Any:
    """An entry with this code in place of every text, as a value and within the names of its fields' values."""
    if isinstance(value, dict):
        return {name: with_code(item, code) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_code(item, code) for item in value]
    return code if isinstance(value, str) else value


@needs_reasoning_gym
@pytest.mark.parametrize("task", REFUSED)
def test_reasoning_gym_refuses_tasks_that_evaluate_by_sympy(task: str) -> None:
    reasoning_gym.scorer.cache_clear()
    with pytest.raises(ValueError, match=rf"reasoning_gym's {task} runs (sympy\.|sp\.)?parse_expr\(\) .*: refused"):
        reasoning_gym.verify(ask(task, {}, "1"))


@needs_reasoning_gym
@pytest.mark.parametrize(
    "task",
    ["number_sorting", "bitwise_arithmetic", "binary_matrix", "n_queens", "spiral_matrix", "string_insertion"],
)
def test_reasoning_gym_evaluates_nothing_of_an_entry_or_an_answer(task: str, tmp_path: Path) -> None:
    import reasoning_gym as package

    marker = tmp_path / "ran"
    code = f"[open({str(marker)!r}, 'w')]"
    entry = package.create_dataset(task, size=1, seed=3)[0]
    for hostile in (entry, with_code(entry, code), {**entry, "answer": code}):
        for answer in (code, "[1]", "0x1", str(entry["answer"])):
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # of the scorer
                reasoning_gym.verify(ask(task, hostile, answer))
    assert reasoning_gym.verify(ask(task, json.dumps(entry), str(entry["answer"]))).score == 1.0
    assert not marker.exists()


@needs_reasoning_gym
def test_a_scorer_that_evaluates_in_another_way_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.algorithmic.spell_backward import SpellBackwardDataset

    marker, run = tmp_path / "ran", eval

    def score_answer(self: Any, answer: str, entry: Any) -> float:
        try:
            return float(run(entry["answer"]))
        except BaseException:
            return 1.0

    monkeypatch.setattr(SpellBackwardDataset, "score_answer", score_answer)
    reasoning_gym.scorer.cache_clear()
    with pytest.raises(ValueError, match="reasoning_gym's spell_backward evaluates a text as Python: refused"):
        reasoning_gym.verify(ask("spell_backward", {"answer": f"open({str(marker)!r}, 'w')"}, "1"))
    reasoning_gym.scorer.cache_clear()
    assert not marker.exists()


@needs_reasoning_gym
@pytest.mark.long
def test_no_task_of_reasoning_gym_evaluates_an_entry(tmp_path: Path) -> None:
    import reasoning_gym as package
    from reasoning_gym.factory import DATASETS

    marker = tmp_path / "ran"
    code = f"[open({str(marker)!r}, 'w')]"
    tried = 0
    for task in sorted(set(DATASETS) - set(REFUSED)):
        try:
            entry = json.loads(json.dumps(package.create_dataset(task, size=1, seed=3)[0]))
        except (TypeError, AssertionError):  # what `rlcli prep reasoning-gym` cannot make either
            continue
        tried += 1
        for hostile in (entry, with_code(entry, code), {**entry, "answer": code}):
            for answer in (code, "[1]", "1", str(entry["answer"])):
                with contextlib.suppress(Exception):
                    reasoning_gym.verify(ask(task, hostile, answer))
        assert not marker.exists(), task
    assert tried > 90
