"""The verifiers `gsm8k` and `format`, and the list of verifiers."""

from __future__ import annotations

import gzip
import json
from importlib.metadata import EntryPoint

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rlcli_verifiers import format, gsm8k
from typer.testing import CliRunner

from rlcli.cli.verifiers.verifiers import app
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.verifier_registry import VERIFIERS
from rlcli.types import Outcome, Verdict, VerifyRequest
from tests.cpu_limit import cpu_limit
from tests.shared_data import shared_data

FLEXIBLE = {"answer_format": "flexible"}


def score(completion: str, ground_truth: str = "42", **extra_info: str) -> Verdict:
    return gsm8k.verify(VerifyRequest(completion, ground_truth, extra_info=extra_info))


@pytest.mark.parametrize(
    "completion",
    [
        "6 × 7\n#### 42",
        "####42",
        "#### 42.",
        "#### 42.00",
        "#### $42",
        r"#### \$42",
        "#### 42 apples",
        "#### 41\nno\n#### 42",
        "#### 042",
    ],
)
def test_gsm8k_reads_the_number_after_the_last_mark(completion: str) -> None:
    assert score(completion).outcome is Outcome.OK


@pytest.mark.parametrize(
    "completion", ["#### 43", "#### -42", "#### 4.2", "#### 42\n#### 41", "#### 42,000", "#### 420"]
)
def test_gsm8k_wrong_numbers(completion: str) -> None:
    verdict = score(completion)
    assert (verdict.score, verdict.outcome) == (0.0, Outcome.WRONG)


@pytest.mark.parametrize(
    "completion",
    ["", "42", "the answer is 42", r"\boxed{42}", "#### x", "#### 42/2", "#### 6*7", "#### 42\n####", "####"],
)
def test_gsm8k_strict_wants_its_form(completion: str) -> None:
    verdict = score(completion)
    assert (verdict.score, verdict.outcome, verdict.answer) == (0.0, Outcome.NO_ANSWER, None)


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("so 6 × 7 = 42.", "42"),
        (r"\boxed{42}", "42"),
        ("first 41, then 42 apples", "42"),
        ("it costs $1,234.50!", "1234.5"),
        ("10 - 3 = -7? no: 50-8 is what? 50-8", "8"),
        ("it fell to -7 degrees", "-7"),
        ("#### 41 and so 42", "42"),
    ],
)
def test_gsm8k_flexible_takes_the_last_number(completion: str, gold: str) -> None:
    assert score(completion, gold, **FLEXIBLE).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("truth", "marked"),
    [
        ("42", "**42**"),
        ("42", r"\boxed{42}"),
        ("42", r"$\boxed{42}$"),
        ("42", "42 apples left"),
        ("42", "42 square meters"),
        ("42", "42 because 6*7=42"),
        ("42", "42 (six sevens)"),
        ("42", "42 times"),
        ("-5", "−5"),
        ("-5", "**–5**"),
        ("42000000", "42 million"),
        ("42000000", "42 million dollars"),
    ],
)
def test_gsm8k_reads_markup_minus_signs_and_scales(truth: str, marked: str) -> None:
    assert score(f"#### {marked}", truth).outcome is Outcome.OK
    assert score(f"so it is {marked}", truth, answer_format="strict").outcome is Outcome.NO_ANSWER


PARTS = [
    " million",
    " x 10",
    "!",
    "²",
    " 1/2",
    "÷2",
    " and a half",
    "×10",
    " times 10",
    " times ten",
    " minus one",
    " thousand dollars",
    "√2",
    " hundred",
    " dozen",
    "·10",
    " plus 1",
    ":30",
    " squared",
    " percent of 10",
    " divided by 2",
    " choose 2",
    "x",
    "k",
    " - 1",
    " − 1",
    " factorial",
    " point five",
    "^2",
    "=43",
    " 3",
]


@pytest.mark.parametrize("suffix", PARTS)
@pytest.mark.parametrize("mode", ["strict", "flexible"])
def test_gsm8k_reads_no_part_of_another_number(mode: str, suffix: str) -> None:
    verdict = score(f"#### 42{suffix}", "42", answer_format=mode)
    assert verdict.outcome is not Outcome.OK, verdict
    assert score(f"#### 5{suffix}", "5", answer_format=mode).outcome is not Outcome.OK


@pytest.mark.parametrize(
    ("completion", "truth", "right"),
    [
        (r"\boxed{42} since 6*7", "42", 1),
        (r"So $\boxed{42}$. Check: 6 * 7 = 42, 100 - 58", "42", 1),
        (r"\boxed{42 \text{ apples}} 7", "42", 1),
        (r"\boxed{\$1,234} 7", "1234", 1),
        (r"\boxed{\frac{84}{2}}", "42", 1),
        ("\\boxed{42}\n#### 41", "41", 1),
        (r"\boxed{41} or \boxed{42}", "42", 0),
        (r"\boxed{41}, \boxed{42}", "42", 0),
        (r"\boxed{42\text{ million}}", "42", 0),
        (r"\boxed{x} 42", "42", 0),
        ("so 5 1/2", "2", 0),
        ("it is 6 × 7", "7", 0),
        ("so −42", "-42", 1),
    ],
)
def test_gsm8k_flexible_prefers_a_box(completion: str, truth: str, right: float) -> None:
    assert score(completion, truth, **FLEXIBLE).score == right


def test_gsm8k_ground_truths() -> None:
    assert score("#### 1,234", "He has <<2+2=4>>4.\n#### 1,234").score == 1.0
    assert score("#### 1234", "1,234").score == 1.0
    assert score("#### -3", "-3").score == 1.0
    assert score("#### 42", " 42 apples ").score == score("#### 42", r"42\%").score == 1.0


@pytest.mark.parametrize(
    "truth", ["none", "1/2", "3 1/2", "10^5", "1e5", "3:30", r"\sqrt{2}", r"5\pi", "2 hours 15", ""]
)
def test_gsm8k_takes_no_number_out_of_a_ground_truth_that_is_another(truth: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        score("#### 2", truth)


def test_gsm8k_reads_no_number_of_the_reasoning() -> None:
    for extra in ({}, FLEXIBLE):
        assert score("<think>#### 42</think> I do not know", **extra).outcome is Outcome.NO_ANSWER
        assert score("<think>#### 41</think>\n#### 42", **extra).score == 1.0


def test_gsm8k_reads_a_long_row_of_groups_in_no_time() -> None:
    with cpu_limit():  # a search that tries each beginning takes minutes
        assert score("1," + "111," * 100_000 + "1111", **FLEXIBLE).outcome is not Outcome.OK


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "{}.00", "{}."]), st.booleans())
def test_gsm8k_reads_back_any_integer(number: int, form: str, flexible: bool) -> None:
    text = f"we see 17\n#### {form.format(number)}"
    assert score(text, str(number), **(FLEXIBLE if flexible else {})).score == 1.0
    assert score(text, str(number + 1), **(FLEXIBLE if flexible else {})).score == 0.0


@given(st.text(alphabet="#0123456789.,-$ \n/", max_size=80))
def test_gsm8k_any_text_gets_a_verdict(text: str) -> None:
    for extra in ({}, FLEXIBLE):
        assert score(text, "123456789123", **extra).outcome in (Outcome.WRONG, Outcome.NO_ANSWER, Outcome.OK)


def test_gsm8k_gold_passes() -> None:
    for split in ("train", "test"):
        with gzip.open(shared_data(f"gsm8k/{split}.jsonl.gz"), "rt") as lines:
            answers = [json.loads(line)["answer"] for line in lines][::20]
        for answer in answers:
            number = answer.split("####")[1].strip()
            assert score(answer, answer).score == 1.0
            assert score(answer, number).score == 1.0
            assert score(answer, number, **FLEXIBLE).score == 1.0
            assert score(f"#### {number}1", number).score == 0.0


def form(completion: str, **extra_info: str) -> Verdict:
    return format.verify(VerifyRequest(completion, "", extra_info=extra_info))


def test_format_wants_both_blocks_once_and_in_order() -> None:
    right = form("<think>6 × 7\nis</think>\n<answer> 42 </answer>\n")
    assert (right.score, right.outcome, right.answer) == (1.0, Outcome.OK, "42")
    for wrong in (
        "",
        "42",
        "<answer>42</answer>",
        "<think>a</think>",
        "<answer>42</answer><think>a</think>",
        "<think>a</think><answer></answer>",
        "<think>a</think><answer> \n</answer>",
        "<think>a</think><answer>42",
        "<think>a<think>b</think><answer>42</answer>",
        "<think>a</think><answer>41</answer><answer>42</answer>",
        "<think>a</think> so <answer>42</answer>",
        "<think>a</think><answer>42</answer> I am sure",
        "<think>a<answer>42</answer></think>",
    ):
        verdict = form(wrong)
        assert (verdict.score, verdict.outcome) == (0.0, Outcome.NO_ANSWER), wrong


BLANKS = ["\u200b", "\u2060\ufeff", "\u00ad", "\u3164", "\u2800", "\u180e", "\u034f", "\ufe0f", "\0", "\u202e"]


@pytest.mark.parametrize("blank", BLANKS, ids=ascii)
def test_format_takes_nothing_invisible_for_an_answer(blank: str) -> None:
    assert form(f"<think>a</think><answer>{blank}</answer>").outcome is Outcome.NO_ANSWER
    assert form(f"</think>{blank}", format=r"</think>(?P<answer>.*)").outcome is Outcome.NO_ANSWER
    assert form(f"<think>a</think><answer>{blank}0</answer>").outcome is Outcome.OK


def test_format_takes_a_regex_of_the_row() -> None:
    pattern = r"(.*)</think>\s*(?P<answer>\S*)"
    assert form("step\nstep</think> 42", format=pattern).answer == "42"
    assert form("step\nstep</think> ", format=pattern).outcome is Outcome.NO_ANSWER
    assert form("step 42", format=pattern).outcome is Outcome.NO_ANSWER
    with pytest.raises(ValueError, match="does not compile"):
        form("x", format="(")


@pytest.mark.long
def test_a_catastrophic_regex_is_killed() -> None:
    with ScoringPool(1, 0.2, ["format"]) as pool:
        request = VerifyRequest("a" * 50, "", extra_info={"format": "(a+)+b"})
        assert pool.submit("format", request).result().outcome is Outcome.WRONG
        assert pool.submit("format", VerifyRequest("ab", "", extra_info={"format": "a+b"})).result().score == 1.0
        assert (
            "does not compile"
            in pool.submit("format", VerifyRequest("", "", extra_info={"format": "("})).result().detail
        )


def test_the_list_names_each_verifier_with_its_source() -> None:
    cli = typer.Typer()
    cli.add_typer(app, name="verifiers")
    done = CliRunner().invoke(cli, ["verifiers", "list", "--json"])
    assert done.exit_code == 0, done.output
    verifiers = {verifier["name"]: verifier for verifier in json.loads(done.output)}
    assert {"math", "gsm8k", "format"} <= set(verifiers)
    assert verifiers["gsm8k"]["source"].startswith("rlcli ")
    assert verifiers["gsm8k"]["summary"].startswith("The number after the last ####")
    assert "gsm8k" in CliRunner().invoke(cli, ["verifiers", "list"]).output


def test_the_list_shows_a_verifier_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken-import", "no_such_package.verifier:verify", VERIFIERS.group)
    monkeypatch.setattr(VERIFIERS, "_published", {**VERIFIERS._published, broken.name: broken})
    cli = typer.Typer()
    cli.add_typer(app, name="verifiers")
    done = CliRunner().invoke(cli, ["verifiers", "list", "--json"])
    assert done.exit_code == 0, done.output
    summaries = {verifier["name"]: verifier["summary"] for verifier in json.loads(done.output)}
    assert "no_such_package" in summaries["broken-import"]
    assert summaries["gsm8k"].startswith("The number")


@pytest.mark.parametrize(
    "completion",
    [
        "<reasoning>9*2=18</reasoning>\n<answer>18</answer>",
        "<SOLUTION>18</SOLUTION>",
        "The total is <b>18</b>",
        "<answer>$18 </answer>",
        "is 18 < 20? The total is 18<br/>",
    ],
)
def test_gsm8k_flexible_reads_a_number_before_a_tag(completion: str) -> None:
    assert score(completion, "18", **FLEXIBLE).outcome is Outcome.OK
    assert score(completion, "19", **FLEXIBLE).outcome is Outcome.WRONG


@pytest.mark.parametrize("mode", ["strict", "flexible"])
@pytest.mark.parametrize("other", [r"\frac{1}{3}", "−3", "$4$", "$$4$$", r"\pi", "4 cm", "(maybe 4)"])
def test_gsm8k_pays_for_no_alternative_of_any_form(other: str, mode: str) -> None:
    assert score(f"#### 3 or {other}", "3", answer_format=mode).score == 0.0


def test_gsm8k_reads_no_number_inside_a_fraction_or_a_power() -> None:
    for text in (r"it is \frac{1}{3}", r"\frac{1}{3} or 3", "it is 2^{3}", r"\sqrt{3}"):
        assert score(text, "3", **FLEXIBLE).score == 0.0
