"""The verifiers `multiple_choice`, `exact`, `regex` and `countdown`."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcli_verifiers import countdown, exact, multiple_choice, regex

from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.types import Outcome, Verdict, VerifyRequest

CITIES = {"choices": ["London", "Paris", "Rome", "Oslo"]}


def choose(completion: str, truth: str = "B") -> Verdict:
    verdict = multiple_choice.verify(VerifyRequest(completion, truth, extra_info=CITIES))
    assert verdict.score == float(verdict.outcome is Outcome.OK)
    return verdict


@pytest.mark.parametrize(
    "completion",
    [
        "B",
        "(B)",
        "(b)",
        "B.",
        "**B**",
        "B) Paris",
        "Answer: B",
        "**Answer:** **B**",
        "**Answer: (B) Paris**",
        "The answer is Paris.",
        "So it must be Paris.\n\nParis",
        r"\boxed{B}",
        r"\boxed{\text{(B)}}",
        r"The final answer is $\boxed{B}$",
        "<think>A or C?</think><answer>B</answer>",
        "The correct answer is (B) because A is wrong.",
        "The answer is B, not A",
        "The answer is A. No wait, the answer is B",
        "The answer is A.\nActually, it's B.",
        "I choose option B.",
        "The answer is C. No wait, B.",
        "The answer is A. Scratch that: (B)",
        "The answer is B. No doubt about it.",
        "The answer is B. Wait times do not matter.",
        "A. London\nB. Paris\nC. Rome\nD. Oslo\nB",
        "A. London\nB. Paris\nC. Rome\nD. Oslo\n\nB. Paris",
        r"\boxed{A} is what I had, but it is \boxed{B}",
        r"\boxed{B} \boxed{B}",
        r"<answer>\boxed{B}</answer>",
    ],
)
def test_the_last_choice_stated_is_read(completion: str) -> None:
    assert choose(completion).outcome is Outcome.OK


@pytest.mark.parametrize(
    "completion",
    [
        "A",
        "A or B",
        "A, B",
        "B, C",
        "ABCD",
        "A B C D",
        r"\boxed{A, B}",
        "Answer: A/B",
        "The answer is (B) or (C)",
        "The answer is (B), or maybe (C)",
        "B. London",
        "The answer is London.",
        "The answer is B. Actually, it's C.",
        "The answer is B. The answer is C.",
        r"\boxed{B} \boxed{C}",
        r"$\boxed{C}$, $\boxed{B}$",
        "<answer>A</answer>\n<answer>B</answer>",
        "The answer is B. No wait, C.",
        "(A)\n(B)",
        "A. London\nB. Paris",
        "London\nParis",
        "E",
    ],
)
def test_another_choice_and_several_are_wrong(completion: str) -> None:
    assert choose(completion).outcome is Outcome.WRONG


@pytest.mark.parametrize("completion", ["", "I do not know", "A dog", "Be sure.", "The answer is A dog", r"\boxed{}"])
def test_what_states_no_choice_is_no_answer(completion: str) -> None:
    assert choose(completion).outcome is Outcome.NO_ANSWER


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("for sure D, it can't be A", 1),
        ("The answer is for sure D, it can't be A", 1),
        ("It's D for sure, it can't be A.", 1),
        ("It can't be A, so it must be D.", 1),
        ("not A but D", 1),
        ("The answer is D, it can’t be A", 1),
        ("D, not A or B", 1),
        ("(D), for sure", 1),
        ("for sure D, or A", 0),
        ("D for sure, or maybe A", 0),
        ("definitely D or C", 0),
        ("D or A, it can't be B", 0),
        ("It can't be D", 0),
        ("for sure A, it can't be D", 0),
        ("Not D, A", 0),
        ("neither A nor D", 0),
        ("D is wrong, so A", 0),
        ("it isn't D", 0),
    ],
)
def test_choices_that_are_ruled_out_are_no_answers(completion: str, score: float) -> None:
    assert choose(completion, "D").score == score


def test_the_ground_truth_may_be_a_letter_a_text_or_an_index() -> None:
    for truth in ("B", "(b)", "Paris", " paris. "):
        assert choose("B", truth).score == 1.0
    request = VerifyRequest("C", "2", extra_info=CITIES)
    assert multiple_choice.verify(request, truth="index0").score == 1.0
    assert multiple_choice.verify(request, truth="index1").score == 0.0
    assert multiple_choice.verify(VerifyRequest("J", "J"), count=10).score == 1.0
    for truth in ("E", "Berlin", "", "4"):
        with pytest.raises(ValueError, match="none of the choices"):
            choose("B", truth)
    assert choose(multiple_choice.gold(VerifyRequest("", "Rome", extra_info=CITIES)), "C").score == 1.0


@given(st.text(max_size=60))
@settings(deadline=None)
def test_any_text_gets_a_verdict(text: str) -> None:
    assert choose(text).outcome in (Outcome.OK, Outcome.WRONG, Outcome.NO_ANSWER)
    assert countdown.verify(VerifyRequest(text, '{"numbers": [1], "target": 2}')).score == 0.0


def test_exact_wants_the_very_text() -> None:
    def score(completion: str, truth: str = "Straße 1", **options: object) -> float:
        return exact.verify(VerifyRequest(completion, truth), **options).score  # type: ignore[arg-type]

    assert score(" Straße 1\n") == 1.0
    assert score("<think>so</think> Straße 1") == 1.0
    assert score("Straße 1, I think") == 0.0
    assert score("STRASSE 1") == 0.0
    assert score("STRASSE 1", ignore_case=True) == 1.0
    assert score(" Straße 1", strip=False) == 0.0
    assert score("so\nStraße 1\n\n", extract="line") == 1.0
    assert score("<answer>Paris</answer> no: <answer> Straße 1 </answer>.", extract="tag") == 1.0
    assert score(r"it is \boxed{Straße 1}!", extract="box") == 1.0
    assert exact.verify(VerifyRequest("it is Straße 1", "Straße 1"), extract="tag").outcome is Outcome.NO_ANSWER
    for answer_format, text in (
        ("tag", "<answer>Straße 1</answer>"),
        ("box", r"\boxed{Straße 1}"),
        ("line", "Straße 1"),
    ):
        assert score(f"<think>{text}</think>", extract=answer_format) == 0.0
    with pytest.raises(ValueError, match="extract='page' is none of all, tag, line, box"):
        score("x", extract="page")
    with pytest.raises(ValueError, match="empty"):
        score("x", truth=" ")
    for answer_format in ("all", "tag", "line", "box"):
        request = VerifyRequest("", "forty-two", extra_info={"answer_format": answer_format})
        right = VerifyRequest(exact.gold(request), "forty-two", extra_info=request.extra_info)
        assert exact.verify(right).score == 1.0


def test_regex_matches_all_of_the_response_or_a_part() -> None:
    request = VerifyRequest("<think>42</think> It is\n42 apples", r"\d+ \w+")
    assert regex.verify(request).score == 0.0  # type: ignore[union-attr]
    assert regex.verify(request, match="search").answer == "42 apples"  # type: ignore[union-attr]
    assert regex.verify(request, pattern=r".*(?P<answer>\d\d).*").answer == "42"  # type: ignore[union-attr]
    assert regex.verify(VerifyRequest("x", "")) is None
    with pytest.raises(ValueError, match="does not compile"):
        regex.verify(VerifyRequest("x", "("))
    with pytest.raises(ValueError, match="neither full nor search"):
        regex.verify(request, match="part")  # type: ignore[arg-type]


def test_a_text_that_a_pattern_takes_for_ever_over_is_killed() -> None:
    with ScoringPool(1, 0.2, ["regex"]) as pool:
        assert pool.submit("regex", VerifyRequest("a" * 60 + "c", "(a+)+b")).result().outcome is Outcome.WRONG
        assert pool.submit("regex", VerifyRequest("aab", "(a+)+b")).result().score == 1.0


def count(completion: str, numbers: list[int] | None = None, target: int = 9, **options: bool) -> Verdict:
    truth = json.dumps({"numbers": numbers or [1, 2, 3], "target": target})
    return countdown.verify(VerifyRequest(completion, truth), **options)


@pytest.mark.parametrize(
    "completion",
    [
        "<think>1*2*3?</think><answer>(1+2)*3</answer>",
        "So we get\n(1 + 2) × 3",
        "3*(2+1) = 9",
        "3*(2+1) = 9.",
        r"\boxed{(1+2)\times 3}",
        "(((((1+2)))))*3",
        "[1+2]*3",
    ],
)
def test_countdown_accepts_what_makes_the_target(completion: str) -> None:
    assert count(completion).outcome is Outcome.OK


@pytest.mark.parametrize(
    "completion",
    ["1+2*3", "3*3", "3*2+1+1+1", "12-3", "3*(2+1) = 10", "1/0+2+3", "9", "1+2+3+3", "3*(2+1)*1", "4+5"],
)
def test_countdown_wrong(completion: str) -> None:
    assert count(completion).outcome is Outcome.WRONG


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "I give up",
        "3**2*1",
        "3^2*1",
        "1.5*6",
        "((1+2)*3",
        "(1+2)*3)",
        "1 2 + 3",
        "(" * 200 + "1" + ")" * 200,
        "-" * 200 + "1",
        "9" * 250,
        "+".join(["1"] * 400),
        "__import__('os').system('true')",
        "(lambda: 9)()",
        "３*(2+1)",
        "٩",
        "1+2*3 = 7 = 9",
    ],
)
def test_countdown_reads_nothing_but_arithmetic(completion: str) -> None:
    assert count(completion).outcome is Outcome.NO_ANSWER


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (r"\boxed{\frac{8}{3-\frac{8}{3}}}", 1),
        (r"<answer>\dfrac{8}{3-\tfrac{8}{3}}</answer>", 1),
        (r"\boxed{8 \div \left(3-\frac83\right)}", 1),
        (r"\boxed{\cfrac{8}{\bigl(3-\frac{8}{3}\bigr)} = 24}", 1),
        (r"\boxed{\frac{8}{3-\frac{3}{8}}}", 0),
        (r"\boxed{\frac{8}{3-\frac{8}{}}}", 0),
        (r"\frac{" * 100, 0),
    ],
)
def test_countdown_reads_fractions_inside_fractions(completion: str, score: float) -> None:
    assert count(completion, [3, 3, 8, 8], 24).score == score


def test_countdown_is_exact_and_may_leave_numbers_out() -> None:
    assert count("8/(3-8/3)", [3, 3, 8, 8], 24).score == 1.0
    assert count("3*3", [3, 3, 8, 8], 9).score == 0.0
    assert count("3*3", [3, 3, 8, 8], 9, use_all=False).score == 1.0
    assert count("3*3*1", [3, 3, 8, 8], 9, use_all=False).score == 0.0
    row = VerifyRequest("3*3", "9", extra_info={"numbers": [3, 3]})
    assert countdown.verify(row).score == 1.0
    for truth in ("", "9", "x", '{"numbers": [1]}', '{"target": 1}', "[1]"):
        with pytest.raises(ValueError, match="numbers and target"):
            countdown.verify(VerifyRequest("1", truth))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.data())
@settings(max_examples=50, deadline=None)
def test_countdown_gold_reaches_whatever_can_be_reached(numbers: list[int], data: st.DataObject) -> None:
    reached = sorted({value for value, _ in countdown._search([(Fraction(n), str(n)) for n in numbers])})
    target = data.draw(st.sampled_from(reached))
    truth = json.dumps({"numbers": numbers, "target": str(target)})
    assert countdown.verify(VerifyRequest(countdown.gold(VerifyRequest("", truth)), truth)).score == 1.0


@pytest.mark.parametrize("target", ["1e999999999", "9" * 5000, "1/" + "9" * 5000, "1e-999999999"])
def test_countdown_refuses_a_target_that_would_fill_the_memory(target: str) -> None:
    for call in (countdown.gold, countdown.verify):
        with pytest.raises(ValueError, match="give no numbers and target"):
            call(VerifyRequest("1", json.dumps({"numbers": [1], "target": target})))


def test_countdown_gold_searches_few_numbers_and_takes_a_solution_for_more() -> None:
    row = {"numbers": [1] * 40, "target": 40}
    with pytest.raises(ValueError, match='40 numbers are too many to search: give extra_info "solution"'):
        countdown.gold(VerifyRequest("", json.dumps(row)))
    solved = VerifyRequest("", json.dumps(row), extra_info={"solution": "+".join("1" * 40)})
    assert countdown.verify(replace(solved, completion=countdown.gold(solved))).score == 1.0


def test_countdown_gold_refuses_what_cannot_be_reached() -> None:
    with pytest.raises(ValueError, match=r"\[1, 1\] cannot make 7"):
        countdown.gold(VerifyRequest("", '{"numbers": [1, 1], "target": 7}'))


@pytest.mark.parametrize(
    "completion",
    [
        "Answer: [B]",
        "[B]",
        r"So $\boxed{12}$. The answer is (B).",
        r"\boxed{12} (B)",
        r"So $x=\boxed{12}$, which is option (B).",
        "Antwort: B",
        "Die richtige Antwort ist B, nicht C.",
        "答案是B。",
        "答案：Ｂ",
        "故选（B）",
        "La respuesta es (B).",
        "Réponse : B",
        "ответ: B",
        "정답은 B",
        "正解は B です",
        "Đáp án là B",
    ],
)
def test_a_choice_is_read_after_a_value_in_brackets_and_in_other_languages(completion: str) -> None:
    assert multiple_choice.verify(VerifyRequest(completion, "B")).outcome is Outcome.OK
    assert multiple_choice.verify(VerifyRequest(completion, "D")).score == 0.0


@pytest.mark.parametrize(
    "suffix",
    [
        " which is not (B)",
        ". This is not option B",
        ", which rules out (B).",
        ". The answer is not B.",
        ", so it isn't B",
        ", so it isn’t (B)",
        ", unlike (B)",
        ", so never B",
        "; we can eliminate B",
        ", but not B",
        ", so [B] is impossible",
        " or B",
        "?\nIs it B?",
    ],
)
def test_a_letter_that_the_text_after_a_box_rules_out_is_no_answer(suffix: str) -> None:
    assert multiple_choice.verify(VerifyRequest(rf"\boxed{{12}}{suffix}", "B")).outcome is Outcome.NO_ANSWER


@pytest.mark.parametrize(
    "completion",
    [
        r"\boxed{12}, so (B), not (C)",
        r"$\boxed{12}$ (B)",
        r"\(\boxed{12}\), i.e. **B**.",
        "\\[\\boxed{12}\\]\nThis corresponds to option **(B)**.",
        r"$\boxed{12}$ $\Rightarrow$ B",
        r"\boxed{12}. So the correct answer choice is B",
        r"\boxed{12}, which matches choice [B].",
    ],
)
def test_a_letter_after_a_box_and_a_connective_is_the_answer(completion: str) -> None:
    assert multiple_choice.verify(VerifyRequest(completion, "B")).outcome is Outcome.OK
    assert multiple_choice.verify(VerifyRequest(completion, "C")).outcome is Outcome.WRONG


@pytest.mark.parametrize(
    "completion",
    [
        r"\boxed{12}, so (B) or (C)",
        r"\boxed{B} or (C)",
        "The answer is [A] or [B]",
        r"\boxed{12} hence (C)",
        "答案是A或B",
    ],
)
def test_several_choices_in_these_forms_are_no_answer(completion: str) -> None:
    assert multiple_choice.verify(VerifyRequest(completion, "B")).score == 0.0
