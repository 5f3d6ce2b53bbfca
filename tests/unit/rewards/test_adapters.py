"""Functions written for other frameworks, in their own style, run by the pool as verifiers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from rlcli.errors import ConfigError, VerifierError
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.types import Outcome, Verdict, VerifyRequest

MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7 = ?"})


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with ScoringPool(1, 5.0) as scoring_pool:
        yield scoring_pool


def ask(pool: ScoringPool, function: str, completion: str = "", truth: str = "42", **overrides: Any) -> Verdict:
    fields: dict[str, Any] = {"prompt": MESSAGES, "data_source": "toy", "extra_info": {"index": 7}} | overrides
    return pool.submit(f"foreign_rewards:{function}", VerifyRequest(completion, truth, **fields)).result()


def said(verdict: Verdict) -> tuple[float, Outcome]:
    return verdict.score, verdict.outcome


def test_verls_compute_score_gives_a_number(pool: ScoringPool) -> None:
    assert said(ask(pool, "compute_score", "so #### 42")) == (1.0, Outcome.OK)
    assert said(ask(pool, "compute_score", "so #### 41")) == (0.0, Outcome.WRONG)
    assert said(ask(pool, "compute_score(format_score=0.1, score=2)", "so #### 41")) == (0.1, Outcome.OK)
    unknown = ask(pool, "compute_score", data_source="elsewhere")
    assert unknown.outcome is Outcome.CRASH
    assert "NotImplementedError: Reward function is not implemented for data_source='elsewhere'" in unknown.detail


def test_of_a_tuple_the_first_item_counts_as_in_verl(pool: ScoringPool) -> None:
    verdict = ask(pool, "compute_score_with_notes")
    assert (verdict.score, verdict.outcome) == (1.0, Outcome.OK)


def test_verls_dict_gives_parts_answer_and_whether_it_is_right(pool: ScoringPool) -> None:
    wrong = ask(pool, "compute_score_dapo(strict_box_verify=true)", "Answer: 41")
    assert (*said(wrong), wrong.answer) == (-1.0, Outcome.WRONG, "41")
    assert wrong.parts == {"index": 7.0, "s": 1.0}
    assert said(ask(pool, "compute_score_dapo", "Answer: 42")) == (1.0, Outcome.OK)
    assert said(ask(pool, "compute_score_judged")) == (0.5, Outcome.OK)
    broken = ask(pool, "compute_score_broken")
    assert broken.outcome is Outcome.CRASH
    assert "returned {'reward': 1.0}, expected a dict with 'score'" in broken.detail


def test_trls_function_is_given_text_and_only_what_it_asks_for(pool: ScoringPool) -> None:
    assert said(ask(pool, "reward_len", "x" * 17)) == (-3.0, Outcome.WRONG)
    assert said(ask(pool, "math_rows_only", "it is 42", extra_info={"task": "math"})) == (1.0, Outcome.OK)
    assert said(ask(pool, "reward_awaited", "it is 42")) == (1.0, Outcome.OK)


@pytest.mark.parametrize("completion", ["<think>x</think>", ""])
def test_trls_function_that_reads_messages_is_given_messages(pool: ScoringPool, completion: str) -> None:
    verdict = ask(pool, "accuracy_reward", completion, extra_info={"solution": "think"})
    assert verdict.score == (1.0 if completion else 0.0)
    assert ask(pool, "format_reward_func", completion).score == (0.5 if completion else 0.0)


def test_trls_none_passes_the_row(pool: ScoringPool) -> None:
    for verdict in (
        ask(pool, "math_rows_only", "it is 42", extra_info={"task": "code"}),
        ask(pool, "accuracy_reward", "x", extra_info={"solution": "unreadable"}),
    ):
        assert said(verdict) == (0.0, Outcome.NO_ANSWER)
        assert verdict.detail.startswith("no verifier of foreign_rewards:")


def test_trls_function_reads_tokens_and_takes_options_that_have_a_default(pool: ScoringPool) -> None:
    assert ask(pool, "soft_overlong", completion_ids=array("i", range(12))).score == -1.0
    assert ask(pool, "soft_overlong(max_completion_len=12)", completion_ids=array("i", range(12))).score == 0.0


def test_trls_function_gets_what_its_trainer_passes_and_logs_it(pool: ScoringPool) -> None:
    verdict = ask(pool, "unique_in_group", "x", step=3, steps=10)
    assert said(verdict) == (1.0, Outcome.OK)
    assert verdict.parts == {"log/step": 2.0, "log/share": 0.5}
    assert verdict.extra == {"calls": "1 for 1", "place": "0"}
    combined = pool.submit(
        "foreign_rewards:reward_len + 0.5 * foreign_rewards:unique_in_group", VerifyRequest("x", "1")
    ).result()
    assert combined.parts["log/share"] == 0.5
    assert combined.parts["unique_in_group"] == 1.0
    assert combined.extra["place"] == "0"


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("epoch", "trainer_state has global_step and max_steps here, and no epoch"),
        ("short log", "calls log_extra('calls') with [1, 2, 3, 4, 5], expected 1 values"),
        ("text metric", "returned 'high', expected a number for log_metric('share')"),
    ],
)
def test_what_trls_function_logs_wrongly_is_a_crash(pool: ScoringPool, completion: str, says: str) -> None:
    verdict = ask(pool, "unique_in_group", completion)
    assert verdict.outcome is Outcome.CRASH
    assert says in verdict.detail


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("accuracy_reward", "column 'solution', which the rows lack (they have data_source, ground_truth, index)"),
        ("reward_nan", "returned nan, expected a finite number for each completion"),
        ("reward_short", "returned a list of 2, expected a list of 1 number"),
        ("reward_typo", "AttributeError: 'str' object has no attribute 'contents'"),
    ],
)
def test_trls_function_that_fails_is_a_crash(pool: ScoringPool, function: str, says: str) -> None:
    verdict = ask(pool, function, "x")
    assert said(verdict) == (0.0, Outcome.CRASH)
    assert says in verdict.detail


def test_prime_intellects_functions_are_given_arguments_by_name(pool: ScoringPool) -> None:
    assert said(ask(pool, "correct_answer", "it is 42")) == (1.0, Outcome.OK)
    assert said(ask(pool, "correct_answer", "it is 41")) == (0.0, Outcome.WRONG)
    assert said(ask(pool, "exact_match", " 42 ")) == (1.0, Outcome.OK)
    assert said(ask(pool, "from_state", "it is 42")) == (1.0, Outcome.OK)


def test_prime_intellects_rubric_is_a_weighted_sum(pool: ScoringPool) -> None:
    verdict = ask(pool, "rubric", "<answer>42</answer>")
    assert verdict.score == pytest.approx(1.0 + 0.2 * 1.0)
    assert verdict.outcome is Outcome.OK
    assert verdict.parts == {"parsed": 1.0, "exact_match": 0.0, "from_state": 1.0}
    assert said(ask(pool, "older_rubric", "42")) == (2.0, Outcome.OK)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("no_convention", r"parameters \(text, gold\) fit no convention.*compute_score.*TRL.*Prime Intellect"),
        ("number", "of type int, not a function"),
        ("Rubric", "a class, not a function"),
        ("uneven_rubric", "1 funcs and 2 weights"),
        ("lost_rubric", "function parsed asks for 'parser'"),
        ("exact_mach", "has no 'exact_mach'; did you mean exact_match"),
    ],
)
def test_what_fits_no_convention_is_refused_with_those_that_there_are(
    pool: ScoringPool, function: str, says: str
) -> None:
    with pytest.raises(VerifierError, match=rf"'foreign_rewards:{function}' does not load: .*{says}"):
        ask(pool, function)


@pytest.mark.parametrize(
    ("function", "completion", "verdict"),
    [
        ("is_truth", "42", (1.0, Outcome.OK)),
        ("is_truth", "41", (0.0, Outcome.WRONG)),
        ("is_truth_to_numpy", "42", (1.0, Outcome.OK)),
        ("share_of_digits", "a4b2", (0.5, Outcome.OK)),
        ("length_awaited", "abc", (-3.0, Outcome.WRONG)),
        ("lengths", "abc", (3.0, Outcome.OK)),
    ],
)
def test_a_number_of_our_own_functions_is_a_score(
    pool: ScoringPool, function: str, completion: str, verdict: tuple[float, Outcome]
) -> None:
    assert said(ask(pool, function, completion)) == verdict


def test_options_reach_the_verifier_as_it_annotates_them(pool: ScoringPool) -> None:
    verdict = ask(
        pool, "native(need=ab, times=2, among=[ab, cd], loud=true)".replace("[ab, cd]", '["ab", "cd"]'), "xabab"
    )
    assert verdict.answer == repr(("ab", 2, ("ab", "cd"), True))
    assert said(verdict) == (1.0, Outcome.OK)
    assert ask(pool, "native_with_defaults").answer == "a"
    assert ask(pool, "native_with_defaults(need=b, times=2)").answer == "bb"


@pytest.mark.parametrize("verifier", ["ranked(other_responses=2)", "ranked(rivals=2)", "ranked_before(rivals=2)"])
def test_other_responses_are_read_under_their_old_name(pool: ScoringPool, verifier: str) -> None:
    request = VerifyRequest("c", "", other_responses=["a", "b"])
    verdict = pool.submit(f"bad_verifiers:{verifier}", request).result()
    assert (verdict.score, verdict.answer) == (2.0, "['a', 'b']")


def test_an_option_under_its_old_and_its_new_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="ranked takes no option 'rivals'; known: other_responses"):
        ScoringPool(1, 5.0, ["bad_verifiers:ranked(other_responses=3, rivals=2)"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", r"native must be given its option need: native\(need=…\)"),
        ("(ned=x)", "native takes no option 'ned'; did you mean need"),
        ("(need=x, times=two)", 'the option times of native is "two" and should be a valid integer'),
        ("(need=x, times=true)", "the option times of native is true and should be a valid integer"),
        ("(need=x, among=ab)", 'the option among of native is "ab" and should be a valid array'),
        ("(need=x, loud=1)", "the option loud of native is 1 and should be a valid boolean"),
    ],
)
def test_options_that_the_verifier_does_not_take_are_refused(pool: ScoringPool, options: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask(pool, f"native{options}")
    with pytest.raises(ConfigError, match=says):
        ScoringPool(1, 5.0, [f"foreign_rewards:native{options}"])
