from __future__ import annotations

import ast
import gzip
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlcli_verifiers import latex, symbolic
from rlcli_verifiers.latex import equal
from rlcli_verifiers.math import extract, preload, verify
from rlcli_verifiers.notation import clean, number

from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.processes.scoring_worker import OVERRAN
from rlcli.types import Outcome, VerifyRequest
from tests.cpu_limit import cpu_limit
from tests.shared_data import shared_data
from tests.unit.hostile_math import ANSWERS, FACTORIALS, TOWERS
from tests.unit.hostile_math import GOLD as HOSTILE_GOLD


def outcome(completion: str, ground_truth: str) -> Outcome:
    verdict = verify(VerifyRequest(completion, ground_truth))
    assert verdict.score == float(verdict.outcome is Outcome.OK)
    return verdict.outcome


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{42}.", "42"),
        (r"\boxed{41}, wait, no. Finally \boxed{42}", "42"),
        (r"\boxed{42} and then it was cut off at \boxed{4", "42"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\fbox{7}", "7"),
        (r"The answer is 41. No: \boxed{42}. The answer is clear.", "42"),
        ("I think so. The answer is 42.", "42"),
        ("The final answer is: $\\frac{1}{2}$, as wanted.", r"\frac{1}{2}"),
        ("**Answer:** 42", "42"),
        ("The answer is 41.\nLet me check.\nThe answer is 42 apples.", "42"),
        ("The answer is $1,234.50 in all", "1,234.50"),
        ("6 × 7\n#### 42", "42"),
        ("First 6 × 7.\n\n$$x = 42$$\n", "x = 42"),
        (r"\(x+1\)", "x+1"),
        ("42", "42"),
        ("", None),
        ("I do not know", None),
        (r"\boxed{}", None),
        (r"\boxed{", None),
        ("There were 42 apples, and 3 rotted.", None),
    ],
)
def test_the_final_answer_is_read(text: str, answer: str | None) -> None:
    assert extract(text) == ([] if answer is None else [answer])


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "42.0"),
        ("42", "042"),
        ("1000", "1,000"),
        ("1000", "1{,}000"),
        ("42", r"42\%"),
        (r"42\%", "42"),
        ("0.42", r"42\%"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac12", "1/2"),
        (r"-\frac{3}{4}", "-.75"),
        ("0.3333", "1/3"),
        (r"\dfrac{\pi}{4}", r"\frac{\pi}{4}"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        ("5", "x = 5"),
        ("10", r"10\text{ cm}"),
        ("90", r"90^\circ"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("(1,2)", r"\left( 1, 2 \right)"),
        ("[0,1)", r"\left[0, 1\right)"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\,\pi/2)"),
        (r"(f(1,2), \{3,4\})", r"(f(1, 2),\{4,3\})"),
        (r"(-\infty,-2]\cup(3,5)", r"(3,5) \cup (-\infty, -2]"),
        (r"\text{Evelyn}", "evelyn"),
        (r"\text{(A)}", "A"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
        ("2^{4950}", r"4^{2475}"),
    ],
)
def test_equal_forms_are_equal(gold: str, answer: str) -> None:
    assert equal(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "41"),
        ("42", "-42"),
        ("42", "420"),
        ("42%", "4200%"),
        ("0.5%", "50%"),
        ("1/3", "0.333"),
        ("1/3", "0.333333333333"),
        ("2000", "2"),
        ("42", "41, 42"),
        ("42", r"42 \text{ or } 43"),
        ("(1,2)", "(2,1)"),
        ("[0,1)", "(0,1)"),
        ("[0,1)", "[0,1]"),
        (r"(3,\frac{\pi}{2})", r"(3,\frac{\pi}{3})"),
        ("(1,2)", "(1,2,3)"),
        ("(1,2)", "(1,2"),
        ("(1,2)", "(,)"),
        (r"(0,1)\cup(2,3)", r"(0,1)\cup(2,4)"),
        ("x^2", "x^3"),
        (r"\text{Evelyn}", r"\text{nylevE}"),
        (r"\text{(A)}", "B"),
        ("odd", "dod"),
        ("1", "1/0"),
        ("5", r"\frac{5}{0}"),
    ],
)
def test_near_misses_are_not_equal(gold: str, answer: str) -> None:
    assert not equal(gold, answer)


@pytest.mark.parametrize("gold", [r"\sqrt{x}", r"\sqrt{2x}+1", r"\ln x"])
@pytest.mark.parametrize("answer", [r"\begin{pmatrix} \sqrt{x} \\ 1 \end{pmatrix}", r"\sqrt{x} < 1", "(1, x)"])
def test_what_cannot_be_subtracted_from_a_formula_is_wrong(gold: str, answer: str) -> None:
    assert outcome(rf"\boxed{{{answer}}}", gold) is Outcome.WRONG
    assert not symbolic.same(gold, answer)
    assert not symbolic.same(answer, gold)


def test_outcomes() -> None:
    assert outcome(r"\boxed{42}", "42") is Outcome.OK
    assert outcome(r"\boxed{43}", "42") is Outcome.WRONG
    assert outcome(r"\boxed{][ \oops}", "42") is Outcome.WRONG
    assert outcome("no idea", "42") is Outcome.NO_ANSWER
    assert outcome("", "42") is Outcome.NO_ANSWER
    assert verify(VerifyRequest(r"\boxed{1}, no, \boxed{ 2 }", "3")).answer == "2"
    assert outcome(r"\boxed{\frac12}", r"We find \boxed{0.5}.") is Outcome.OK


@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_plain_fractions_are_equal_as_rationals_are(left: Fraction, right: Fraction) -> None:
    latex = rf"{'-' if right < 0 else ''}\frac{{{abs(right.numerator)}}}{{{right.denominator}}}"
    assert equal(str(left), str(left))
    assert equal(str(right), latex)
    assert equal(str(left), latex) == (left == right)


@given(st.text(max_size=200))
def test_any_text_gets_a_verdict(text: str) -> None:
    assert outcome(text, r"\text{never this}") in (Outcome.WRONG, Outcome.NO_ANSWER)


@pytest.mark.parametrize("answer", [*TOWERS, *FACTORIALS, "9" * 399, "7" * 62], ids=lambda answer: answer[:20])
def test_what_would_take_for_ever_never_reaches_sympy(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(symbolic, "MAX_CHARS", 1 << 21)  # it is not for being long
    monkeypatch.setattr(latex, "MAX_CHARS", 1 << 21)
    monkeypatch.setattr(symbolic, "_parse", lambda text, _: pytest.fail(text) if text == clean(answer) else None)
    refused = not symbolic.is_tame(clean(answer)) or number(clean(answer)) is not None
    assert refused or answer in HARMLESS
    if refused:
        assert outcome(rf"\boxed{{{answer}}}", "42") is Outcome.WRONG
        assert outcome(rf"\boxed{{{answer}}}", answer) is Outcome.OK  # as text it may still be right


HARMLESS = ["((9^9)^9)^9", r"\sqrt[99999999]{2}", "99999999e99999999", "1e999999999"]


def test_many_hostile_answers_score_nothing_and_leave_the_pool_working(pool: ScoringPool) -> None:
    assert len(ANSWERS) >= 140
    submitted = [
        (answer, truth, pool.submit("math", VerifyRequest(rf"\boxed{{{answer}}}", truth)))
        for answer in ANSWERS
        for truth in (HOSTILE_GOLD, "42")
    ]
    verdicts = [(answer, truth, future.result()) for answer, truth, future in submitted]
    assert [(answer, truth) for answer, truth, verdict in verdicts if verdict.score != 0.0] == []
    crashed = [(answer, verdict.detail) for answer, _, verdict in verdicts if verdict.outcome is Outcome.CRASH]
    assert crashed == []
    assert sum(verdict.detail.startswith(OVERRAN) for _, _, verdict in verdicts) <= 4
    assert pool.submit("math", VerifyRequest(r"\boxed{1+x^2}", "x^2+1")).result().score == 1.0


@pytest.mark.parametrize("ground_types", ["python", "gmpy"])
def test_hostile_answers_score_nothing_with_either_kind_of_integers(ground_types: str) -> None:
    if ground_types == "gmpy" and importlib.util.find_spec("gmpy2") is None:
        pytest.skip("gmpy2 is not installed")
    environment = {**os.environ, "SYMPY_GROUND_TYPES": ground_types, "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parents[1] / "hostile_math.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment)
    report = json.loads(done.stdout)
    assert report["ground_types"] == ground_types
    assert report["alarms"] == 0
    assert len(report["rows"]) == 2 * len(ANSWERS)
    assert {score for score, _, _ in report["rows"]} == {0.0}
    assert {outcome for _, outcome, _ in report["rows"]} <= {"wrong", "no_answer"}


DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def pool() -> Any:
    with ScoringPool(1, DEADLINE_S, ["math"]) as scoring_pool:
        yield scoring_pool


@pytest.mark.parametrize("prefix", [r"\boxed{5}", "The answer is 5", "The answer is $5$"])
def test_long_white_space_around_an_alternative_takes_linear_time(prefix: str) -> None:
    gap = " " * 3900
    with cpu_limit():
        for between in ("", "or", ",", ", or"):
            extract(f"{prefix}{gap}{between}{gap}x"[-8000:])


@pytest.mark.parametrize(
    "unit",
    [
        "answer ",
        "answer" + " " * 400,
        "it ",
        "A:",
        "42 ",
        "\\\\text{",
        "$",
        "\\\\boxed{4} or ",
        "not A ",
        "is ",
        "= ",
        "5 or ",
        "(",
        "((1",
        "{",
        "\\\\frac{",
        "$5 $",
        "x=",
        "1,",
        "$1 ",
        "\\\\begin{align}",
        "a.\\n",
    ],
)
def test_no_text_makes_the_search_for_an_answer_long(unit: str) -> None:
    with cpu_limit():
        for tail in ("", "x", "42"):
            extract((unit * 8000)[:8000] + tail)


def test_it_works_off_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(equal, r"\frac{x}{2}", "0.5x").result()


def test_the_module_imports_nothing_heavy() -> None:
    script = (
        "import sys, rlcli_verifiers.math; print([m for m in ('sympy', 'math_verify', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []


def test_the_model_text_is_never_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    preload()
    evaluated = []
    for module in ("math_verify.parser", "sympy.parsing.sympy_parser", "latex2sympy2_extended.latex2sympy2"):
        monkeypatch.setattr(
            importlib.import_module(module), "parse_expr", lambda text, *_, **__: evaluated.append(text)
        )
    code = "__import__('os')"
    for wrapped in (code, rf"\text{{{code}}}", rf"\mathrm{{{code}}}", rf"\operatorname{{{code}}}", f"x_{{{code}}}"):
        for form in ("%s", r"\{%s, 1\}", "(%s, 1)", "x=%s", r"%s \in \{1\}", r"\frac{%s}{2}", "9**%s"):
            verify(VerifyRequest(rf"\boxed{{{form % wrapped}}}", r"\{1, x\}"))
            verify(VerifyRequest(f"The answer is {form % wrapped}", "(x, 1)"))
    assert evaluated == []  # not even for the numbers


def test_math500_gold_passes_and_neighbours_do_not() -> None:
    with gzip.open(shared_data("math/math500.jsonl.gz"), "rt") as lines:
        rows = [json.loads(line) for line in lines][::2]
    failed = [row["unique_id"] for row in rows if outcome(row["solution"], row["answer"]) is not Outcome.OK]
    assert failed == []
    spaced = [row["answer"] for row in rows if not equal(row["answer"], rf"\left. {row['answer']} ")]
    assert spaced == []
    equal_pairs = [(a["answer"], b["answer"]) for a, b in pairwise(rows) if equal(a["answer"], b["answer"])]
    assert all(a.replace(" ", "") == b.replace(" ", "") for a, b in equal_pairs), equal_pairs


def test_math_test_solutions_agree_with_themselves() -> None:
    with gzip.open(shared_data("math/math_test_5000.jsonl.gz"), "rt") as lines:
        rows = [json.loads(line) for line in lines][::10]
    assert [row["problem"] for row in rows if outcome(row["solution"], row["solution"]) is not Outcome.OK] == []


@pytest.mark.parametrize(
    ("truth", "response", "right"),
    [
        ("-7", "Therefore $x = -7$.\n\nThis matches the check by substitution.", True),
        ("-7", "Therefore $x = 7$.\n\nThis matches the check by substitution.", False),
        ("-7", "Therefore $x = -7$.\n\nThis does not match the check.", False),
        (r"2.5 \text{ m}", "The plank is 2.5 meters long.\n\nThis agrees with the picture.", True),
        (r"2.5 \text{ m}", "The plank is 2.5 centimeters long.\n\nThis agrees with the picture.", False),
        (r"\text{red}", "The last ball is **red**.", True),
        (r"\text{red}", "The last ball is not red.", False),
        (r"\text{red}", "The last ball is red or blue.", False),
        (r"\text{Tuesday}", "So that day is a **Tuesday**.\n\nHope this helps!", True),
        (r"\text{Yes}", "**Yes**, it converges.", True),
        (r"\text{Yes}", "No, it diverges.", False),
        (r"\text{no solution}", "There is **no solution**.", True),
        ("18", "Tom is 12 years old, while his sister is 18.", False),
        (r"\pm 3", "$x = 3$ or $x = -3$", True),
        ("3", "$x = 3$ or $x = -3$", False),
    ],
)
def test_last_sentences_are_read_as_a_careful_reader_does(truth: str, response: str, right: bool) -> None:
    assert (verify(VerifyRequest(response, truth)).score == 1.0) == right
