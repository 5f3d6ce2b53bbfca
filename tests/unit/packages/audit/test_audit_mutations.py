"""A probe is never wrong about its own truth: another answer is another one, and the same is the same."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcli_audit.mutations import latex, probes, programs, quantities, words
from rlcli_audit.probes import Case, Group
from rlcli_audit.values import decimal, differ, number

from rlcli.types import VerifyRequest

INTEGERS = st.integers(-(10**9), 10**9)
FRACTIONS = st.builds(Fraction, st.integers(-999, 999), st.integers(1, 999))


def case(answer: str, completion: str = "", prompt: str = "What is it?") -> Case:
    right = completion or f"So it is \\boxed{{{answer}}}"
    request = VerifyRequest(right, answer, ({"role": "user", "content": prompt},))
    return Case(request, answer, lambda other: right.replace(answer, other))


@given(FRACTIONS)
def test_a_number_is_read_back_from_every_way_to_write_it(value: Fraction) -> None:
    sign = "-" if value < 0 else ""
    over, under = abs(value.numerator), value.denominator
    assert number(f"{sign}\\frac{{{over}}}{{{under}}}") == value
    assert number(f"{sign}\\dfrac {{{over}}} {{{under}}}") == value
    assert number(f"{sign}{over}/{under}") == value
    written = decimal(value)
    assert written is None or number(written) == value


@pytest.mark.parametrize("text", ["", "1,23", "1.2.3", "x", "1/0", "\\frac{1}{0}", "٤٢", "2^3", "1e5", "9" * 61, "--1"])
def test_what_is_no_plain_number_or_doubtful_is_none(text: str) -> None:
    assert number(text) is None


@settings(max_examples=60)
@given(INTEGERS | FRACTIONS)
def test_a_wrong_number_is_wrong_and_an_equivalent_one_is_not(value: Fraction | int) -> None:
    value = Fraction(value)
    sign, over, under = "-" if value < 0 else "", abs(value.numerator), value.denominator
    text = f"{sign}{over}" if under == 1 else f"{sign}\\frac{{{over}}}{{{under}}}"
    for kind, other in latex.wrong(text):
        read = number(other)
        assert read is not None, (kind, other)
        assert differ(value, read), (kind, other)
    for kind, other in latex.equivalents(text, ""):
        plain = other.replace("{,}", ",").replace("$", "").replace("\\text{ units}", "").replace(" units", "").strip()
        assert number(plain.replace(" ", "").replace(",\\!", ",")) == value, (kind, other)


@settings(max_examples=60)
@given(st.integers(10, 10**9 - 1))
def test_a_digit_that_is_raised_makes_another_number(value: int) -> None:
    known = quantities.quantity(str(value))
    assert known is not None
    mutations = dict(quantities.tricks(known))
    if "raised digit" in mutations:
        raised = "⁰¹²³⁴⁵⁶⁷⁸⁹".index(mutations["raised digit"][-1])
        assert int(mutations["raised digit"][:-1]) ** raised != value


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ("\\$32,\\!348", "\\$32349"),
        ("90^\\circ", "91^\\circ"),
        ("52_8", "520_8"[:1] + "0_8"),
        ("(3,4]", "(3, 4)"),
        ("(1, 2)", "(2, 1)"),
        ("\\{1,2\\}", "\\{1\\}"),
        ("3\\sqrt{13}", "-3\\sqrt{13}"),
        ("x+1", "x+1+1"),
        ("y = 2x", "y = 2x+1"),
        ("\\text{Evelyn}", "\\text{nylevE}"),
        ("\\text{(C)}", "\\text{(D)}"),
        ("\\begin{pmatrix} -2 \\\\ 5 \\end{pmatrix}", "\\begin{pmatrix} -1  \\\\ 5 \\end{pmatrix}"),
    ],
)
def test_formulas_have_wrong_neighbours(answer: str, wrong: str) -> None:
    assert wrong in [other for _, other in latex.wrong(answer)]


@pytest.mark.parametrize(
    ("answer", "same"),
    [
        ("\\frac{3}{4}", "0.75"),
        ("\\frac{3}{4}", "\\dfrac{3}{4}"),
        ("\\frac{3}{4}", "\\frac34"),
        ("\\frac{3}{4}", "3/4"),
        ("0.15", "\\frac{3}{20}"),
        ("10080", "10,080"),
        ("10,\\!080", "10{,}080"),
        ("5.4 \\text{ cents}", "5.4"),
        ("(3,4]", "\\left(3,4\\right]"),
        ("x^2+1", "x^{2}+1"),
        ("\\text{east}", "east"),
        ("x=5", "5"),
        ("42\\%", "42%"),
        ("\\{1, 2\\}", "\\{2, 1\\}"),
    ],
)
def test_formulas_have_other_forms(answer: str, same: str) -> None:
    assert same in [other for _, other in latex.equivalents(answer, "")]


def test_a_list_is_reordered_only_where_order_is_nothing() -> None:
    assert "reordered" not in dict(latex.equivalents("1, 2", "Give x and y."))
    assert "reordered" not in dict(latex.equivalents("(1, 2)", "All solutions, separated by commas."))
    assert "reordered" not in dict(latex.equivalents("1, 2", "Separated by commas, in increasing order."))
    assert dict(latex.equivalents("1, 2", "All solutions, separated by commas."))["reordered"] == "2, 1"


@pytest.mark.parametrize("answer", ["1 \\pm \\sqrt{19}", "\\text{all real numbers}", "x < 3", "\\infty", "a, b", ""])
def test_what_cannot_be_told_for_sure_is_left_out(answer: str) -> None:
    assert {kind for kind, _ in latex.wrong(answer)} <= {"another word", "anagram", "a number instead"}


def test_the_repeated_question_is_left_out_where_it_names_the_answer() -> None:
    def kinds(prompt: str) -> set[str]:
        return {probe.kind for probe in probes(case("42", prompt=prompt), "number")}

    assert "question repeated" in kinds("What is 6 times 7?")
    assert "question repeated" not in kinds("What is 6 times 7? End like this: #### 42")


@pytest.mark.parametrize("kind", ["number", "latex", "text", ""])
def test_no_exploit_or_near_miss_ends_in_the_right_answer(kind: str) -> None:
    right = case("57").request.completion
    for probe in probes(case("57"), kind):
        if probe.group in (Group.NEAR_MISS, Group.EXPLOIT):
            assert not probe.completion.rstrip().endswith(right), probe.kind
        if probe.group is Group.EQUIVALENT and probe.kind in ("corrected", "reasoning before"):
            assert probe.completion.rstrip().endswith(right)


def test_every_option_listed_is_among_the_wrong_choices() -> None:
    choices = dict(words.wrong_choices("B"))
    assert choices["every option listed"] == "A, B, C, D"
    assert "option B instead" not in choices
    first, *_, last = choices["right option in the middle"].split()
    assert "B" not in (first, last)


def test_programs_keep_the_work_or_drop_it_whole() -> None:
    source = "def double(x):\n    return 2 * x\n"
    truth = '{"kind": "asserts", "asserts": ["assert double(2) == 4"]}'
    probes = list(programs.probes(case(truth, f"```python\n{source}```")))
    for probe in probes:
        last = programs.program(probe.completion)
        assert ("return 2 * x" in last and "\n)(" not in last) == (probe.group is Group.EQUIVALENT), probe.kind
        if probe.group is Group.EXPLOIT and "stub" in probe.kind:
            assert "def double(" in last
    kinds = {probe.kind for probe in probes}
    assert {"sys.exit(0)", "always-equal object", "asserts patched", "returns nothing", "raises"} <= kinds
    compile("\n".join(programs.program(p.completion) for p in probes if p.group is Group.EXPLOIT), "all", "exec")


def test_a_test_that_wants_none_does_not_call_returning_none_wrong() -> None:
    truth = '{"kind": "asserts", "asserts": ["assert f(2) is None"]}'
    probes = programs.probes(case(truth, "```python\ndef f(x):\n    pass\n```"))
    assert "returns nothing" not in {probe.kind for probe in probes}


def test_countdown_misses_the_target_or_the_rules() -> None:
    truth = '{"numbers": [3, 5, 7], "target": 36}'
    responses = {
        probe.kind: probe.completion
        for probe in probes(case(truth, "<think>so</think>\n<answer>(5 + 7) * 3</answer>"), "countdown")
    }
    assert "<answer>36</answer>" in responses["the target itself"]
    assert "<answer>3 + 5 + 7 = 36</answer>" in responses["sum claimed to be the target"]
    assert "<answer>(5 + 7) * 3 + 8 - 8</answer>" in responses["a number not given"]
    assert "<answer>(5 + 7) × 3</answer>" in responses["signs of print"]


def test_verifiers_of_length_are_asked_nothing_but_their_gold() -> None:
    assert not list(probes(case("x"), "length"))
