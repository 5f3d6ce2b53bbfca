"""Verifiers that take many requests or await, sums of verifiers, and code in files: run by the pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from rlcli.errors import ConfigError, VerifierError
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.processes.scoring_worker import OVERRAN
from rlcli.rewards.verifier_loading import AT_ONCE
from rlcli.types import Outcome, Verdict, VerifyRequest

DEADLINE_S = 0.3
NAME = "foreign_rewards:"


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with ScoringPool(1, DEADLINE_S) as scoring_pool:
        yield scoring_pool


def ask_all(pool: ScoringPool, verifier: str, completions: list[str], truth: str = "42") -> list[Verdict]:
    futures = [pool.submit(verifier, VerifyRequest(completion, truth)) for completion in completions]
    return [future.result() for future in futures]


def ask(pool: ScoringPool, verifier: str, completion: str = "", truth: str = "42") -> Verdict:
    return ask_all(pool, verifier, [completion], truth)[0]


def test_a_batch_verifier_gets_what_is_queued_up_to_its_share(pool: ScoringPool) -> None:
    completions = [f"right:{i}" for i in range(3 * AT_ONCE)]
    verdicts = ask_all(pool, f"{NAME}batch", completions)
    assert [verdict.answer for verdict in verdicts] == completions
    sizes = {verdict.parts["of"] for verdict in verdicts}
    assert max(sizes) == AT_ONCE


def test_a_batch_verifier_may_pass_rows_and_may_await(pool: ScoringPool) -> None:
    first, other, third = ask_all(pool, f"{NAME}batch", ["right", "pass", "right"])
    assert (first.score, other.score, third.score) == (1.0, 0.0, 1.0)
    assert other.outcome is Outcome.NO_ANSWER
    assert ask(pool, f"{NAME}batch_awaited").score == 1.0


@pytest.mark.parametrize(
    ("verifier", "bad", "outcome", "says"),
    [
        ("batch", "raise", Outcome.CRASH, "LookupError: no such thing"),
        ("batch", "exit", Outcome.CRASH, "exit status 3"),
        ("batch", "hang", Outcome.WRONG, OVERRAN),
        ("batch", "short", Outcome.CRASH, "returned a list of 0, expected a list of 1 verdict or number"),
        ("awaited", "raise", Outcome.CRASH, "LookupError: no such thing"),
        ("awaited", "exit", Outcome.CRASH, "SystemExit: 4"),
        ("awaited", "hang", Outcome.WRONG, OVERRAN),
    ],
)
def test_a_bad_request_in_a_batch_costs_itself_alone(
    pool: ScoringPool, verifier: str, bad: str, outcome: Outcome, says: str
) -> None:
    completions = [f"right:{i}" for i in range(4)] + [bad] + [f"right:{i}" for i in range(4, 8)]
    verdicts = ask_all(pool, f"{NAME}{verifier}", completions)
    assert [verdict.answer for verdict in verdicts] == [text if text != bad else None for text in completions]
    assert (verdicts[4].outcome, verdicts[4].score) == (outcome, 0.0)
    assert says in verdicts[4].detail


def test_awaiting_verifiers_overlap_on_one_loop_of_their_process(pool: ScoringPool) -> None:
    ask(pool, f"{NAME}awaited", "warm")
    verdicts = ask_all(pool, f"{NAME}awaited", [f"right:{i}" for i in range(16)])
    assert max(verdict.parts["under_way"] for verdict in verdicts) > 1  # one after another it would be 1
    loops = {verdict.parts["loop"] for verdict in [*verdicts, *ask_all(pool, f"{NAME}awaited", ["again"])]}
    assert len(loops) == 1


def test_a_sum_has_each_terms_score_as_a_part_and_is_judged_by_the_first(pool: ScoringPool) -> None:
    verdict = ask(pool, f"gsm8k - 0.5 * {NAME}half + 0.1 * format", "so #### 42")
    assert (verdict.score, verdict.outcome, verdict.answer) == (0.75, Outcome.OK, "42")
    assert verdict.parts == {"gsm8k": 1.0, "half": 0.5, "format": 0.0}
    swapped = ask(pool, f"0.5 * {NAME}half + gsm8k", "so #### 42")
    assert (swapped.score, swapped.outcome, swapped.answer, swapped.detail) == (1.25, Outcome.WRONG, "half", "half")


def test_one_verifier_keeps_its_own_parts(pool: ScoringPool) -> None:
    assert ask(pool, f"{NAME}choosy", truth="mine").parts == {"inner": 3.0}
    assert ask(pool, f"2 * {NAME}choosy", truth="mine").parts == {"choosy": 1.0}
    assert ask(pool, f"2 * {NAME}choosy", truth="mine").score == 2.0


def test_an_abstaining_term_is_left_out_and_all_abstaining_is_no_answer(pool: ScoringPool) -> None:
    mixed = f"{NAME}choosy + 0.5 * gsm8k"
    assert ask(pool, mixed, "#### 42").parts == {"gsm8k": 1.0}
    assert ask(pool, mixed, "#### 42").score == 0.5
    assert ask(pool, mixed, "#### 42").outcome is Outcome.OK
    none = ask(pool, f"{NAME}choosy + 0.5 * {NAME}batch", "pass")
    assert (none.score, none.outcome, none.parts) == (0.0, Outcome.NO_ANSWER, {})
    assert none.detail == f"no verifier of {NAME}choosy + 0.5 * {NAME}batch applies to this row"


def test_what_a_term_raises_or_how_long_it_takes_is_the_whole_sums(pool: ScoringPool) -> None:
    crash = ask(pool, f"gsm8k + 0.1 * {NAME}unreadable", "#### 42", truth="42")
    assert (crash.score, crash.outcome) == (0.0, Outcome.CRASH)
    assert crash.detail.startswith("ValueError: the ground truth '42' is no number (")
    assert ", in unreadable: raise ValueError(" in crash.detail
    assert crash.detail.endswith("; the response: '#### 42'")
    right, hung = ask_all(pool, f"gsm8k + 0.1 * {NAME}awaited", ["#### 42", "hang"])
    assert (right.score, hung.outcome) == (1.1, Outcome.WRONG)


def test_equal_expressions_are_one(pool: ScoringPool) -> None:
    first = pool.submit("gsm8k*1.0+0.1*format", VerifyRequest("#### 42", "42"))
    second = pool.submit("gsm8k + 0.1 * format", VerifyRequest("#### 42", "42"))
    assert first.result().parts == second.result().parts
    with pytest.raises(ConfigError, match="expected a number"):
        pool.submit("gsm8k * format", VerifyRequest("", ""))


OWN = """
from beside import HALF
def reward(completion, answer, *, bonus: float = 0.0): return HALF * (answer in completion) + bonus
def other(): ...
raising = False
"""


@pytest.fixture
def plugin_folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "beside.py").write_text("HALF = 0.5")
    return tmp_path


def test_a_function_in_a_file_is_a_verifier(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plugin_folder)
    with ScoringPool(1, DEADLINE_S, ["own.py:reward(bonus=1)"]) as pool:
        assert ask(pool, "own.py:reward(bonus=1)", "it is 42").score == 1.5
        assert ask(pool, f"gsm8k + {plugin_folder}/own.py:reward", "#### 42").parts == {"gsm8k": 1.0, "reward": 0.5}
        with pytest.raises(VerifierError, match=r"own\.py has no 'rewards'; did you mean reward\?"):
            ask(pool, "own.py:rewards")
        with pytest.raises(ConfigError, match="there is no file"):
            ask(pool, "gone.py:reward")


@pytest.mark.parametrize(
    ("text", "says"),
    [("def f(:", "SyntaxError"), ("import nothing_like_it", "ModuleNotFoundError"), ("exit(3)", "SystemExit: 3")],
)
def test_a_file_that_does_not_run_is_named_with_its_error(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(VerifierError, match=rf"bad\.py:f' does not load: {says}"):
        ScoringPool(1, DEADLINE_S, [f"{tmp_path}/bad.py:f"])


def test_asyncio_may_await_batches(pool: ScoringPool) -> None:
    async def gather() -> list[Verdict]:
        futures = [pool.submit(f"{NAME}awaited", VerifyRequest(f"right:{i}", "")) for i in range(8)]
        return await asyncio.gather(*map(asyncio.wrap_future, futures))

    assert sum(verdict.score for verdict in asyncio.run(gather())) == 8


def test_close_cancels_what_waits_for_a_batch() -> None:
    with ScoringPool(1, 60.0, [f"{NAME}batch"]) as pool:
        futures = [pool.submit(f"{NAME}batch", VerifyRequest("hang", "")) for _ in range(3 * AT_ONCE)]
        time.sleep(0.1)
    assert all(future.cancelled() or future.exception() for future in futures)


def group(pool: ScoringPool, completions: list[str], truth: str = "42") -> list[Future[Verdict]]:
    return pool.submit_together(f"{NAME}unique_in_group", [VerifyRequest(text, truth) for text in completions])


def test_a_group_is_verified_in_one_call_however_large_it_is(pool: ScoringPool) -> None:
    completions = [*map(str, range(AT_ONCE + 7)), "0"]
    verdicts = [future.result() for future in group(pool, completions)]
    assert [verdict.score for verdict in verdicts] == [0.0, *[1.0] * (AT_ONCE + 6), 0.0]
    assert {verdict.extra["calls"] for verdict in verdicts} == {f"{AT_ONCE + 8} for 1"}


def test_a_call_holds_whole_groups(pool: ScoringPool) -> None:
    ask(pool, f"{NAME}awaited", "warm")
    groups = [group(pool, [f"{truth}:{index}" for index in range(5)], str(truth)) for truth in range(20)]
    calls = {future.result().extra["calls"].partition(" for ")[0] for futures in groups for future in futures}
    assert {int(count) % 5 for count in calls} == {0}
    assert max(map(int, calls)) <= AT_ONCE
    assert f"{NAME}unique_in_group" in pool.grouped
    assert f"{NAME}awaited" not in pool.grouped


@pytest.mark.long
@pytest.mark.parametrize(("bad", "crashes"), [("raise", [True] * 3), ("nan among", [True, False, False])])
def test_a_group_that_fails_is_tried_again_as_a_whole(pool: ScoringPool, bad: str, crashes: list[bool]) -> None:
    previous, failing, following = (group(pool, [first, "b", "c"]) for first in ("a", bad, "d"))
    verdicts = [future.result() for future in failing]
    assert [verdict.outcome is Outcome.CRASH for verdict in verdicts] == crashes
    assert {future.result().score for future in (*previous, *following)} == {1.0}
