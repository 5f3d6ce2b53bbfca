"""Rows that pose the same problem are samples of one prompt: against plain loops over prompts, in reports and when two
evaluations are compared."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.data.columns import SampleTable
from rlcli.data.sample_files import sample_row, write_samples
from rlcli.errors import DataError
from rlcli.evaluation.equal_problems import Problems, check_rows, repeats_note
from rlcli.evaluation.evaluation_report import EvalReport, report_of
from rlcli.evaluation.paired_comparison import compare
from rlcli.evaluation.responses import Responses
from rlcli.rollout.rollout_arguments import GREEDY
from rlcli.types import Outcome, Prompt, Sample, Verdict

Table = Sequence[tuple[int, Sequence[float]]]
"""Of each row its problem and the scores of its samples; above 0 passes."""


def row(number: int, problem: int, **extra: object) -> Prompt:
    messages = ({"role": "user", "content": f"{problem}+1="},)
    return Prompt(
        f"sums:test:{number}", messages, "sums", "math", "exact", str(problem + 1), {"index": number, **extra}
    )


def verdict(score: float) -> Verdict:
    return Verdict(score, Outcome.OK if score > 0 else Outcome.WRONG, "r" if score > 0 else "w")


def responses(table: Table) -> Responses:
    return Responses.of_samples(
        SampleTable.of(
            [
                Sample(number, index, 0, 0, 3, 4, "stop", verdict(score), 0)
                for number, (_, scores) in enumerate(table)
                for index, score in enumerate(scores)
            ]
        )
    )


def report(table: Table) -> EvalReport:
    return report_of(responses(table), [row(number, problem) for number, (problem, _) in enumerate(table)])


# The reference: plain loops over the scores of each problem.


def by_problem(table: Table) -> list[list[float]]:
    grouped: dict[int, list[float]] = {}
    for problem, scores in table:
        grouped.setdefault(problem, []).extend(scores)
    return list(grouped.values())


def plain_pass_at(scores: Sequence[float], k: int) -> float:
    draws = list(itertools.combinations(scores, k))
    return sum(any(score > 0 for score in draw) for draw in draws) / len(draws)


def plain_interval(values: Sequence[float], draws: int = 20_000) -> tuple[float, float]:
    """2.5% and 97.5% of means with Dirichlet weights over the problems, and over half a problem at 0 and at 1."""
    rng, means = random.Random(1), []
    for _ in range(draws):
        weights = [rng.gammavariate(1.0, 1.0) for _ in values]
        failed, passed = rng.gammavariate(0.5, 1.0), rng.gammavariate(0.5, 1.0)
        total = sum(weights) + failed + passed
        means.append((sum(w * v for w, v in zip(weights, values, strict=True)) + passed) / total)
    means.sort()
    return means[round(0.025 * draws)], means[round(0.975 * draws)]


def plain_sign_flip(differences: Sequence[float]) -> float:
    patterns = list(itertools.product((1, -1), repeat=len(differences)))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in patterns]
    return sum(total >= abs(sum(differences)) - 1e-9 for total in sums) / len(patterns)


CONTEST: Table = [(n % 4, [float(n % 4 == 0)]) for n in range(32)]
"""Four problems, each eight times; the first one is always solved."""


def test_a_contest_repeated_eight_times_has_the_interval_of_its_problems() -> None:
    eval_report = report(CONTEST)
    assert (eval_report.prompts, eval_report.rows, eval_report.samples) == (4, 32, 32)
    passed = eval_report.measures["pass@1"]
    assert passed.mean == 0.25
    assert (passed.low, passed.high) == pytest.approx(plain_interval([1.0, 0.0, 0.0, 0.0]), abs=0.015)
    assert passed.high - passed.low > 0.6  # of 32 independent prompts it would be 0.29
    assert "on 4 prompts in 32 rows" in eval_report.headline()
    assert eval_report.as_dict()["rows"] == eval_report.metrics()["rows"] == 32
    assert eval_report.pass_rates == tuple([1.0, 0.0, 0.0, 0.0] * 8)


def test_copies_give_pass_at_k_over_all_of_them() -> None:
    table: Table = [(0, [1.0]), (0, [0.0]), (0, [0.0]), (1, [0.0]), (1, [1.0]), (1, [1.0])]
    eval_report = report(table)
    for k in (1, 2, 3):
        expected = sum(plain_pass_at(scores, k) for scores in by_problem(table)) / 2
        assert eval_report.measures[f"pass@{k}"].mean == pytest.approx(expected)
    assert eval_report.measures["maj@3"].mean == pytest.approx(
        0.5
    )  # the majority of the second problem's three is right


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=3)),
        min_size=1,
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_measures_are_those_of_plain_loops_in_any_order_of_the_rows(table: Table, rng: random.Random) -> None:
    eval_report = report(table)
    grouped = by_problem(table)
    assert eval_report.prompts == len(grouped)
    for name, estimate in eval_report.measures.items():
        kind, _, k = name.partition("@")
        if kind == "pass":
            assert estimate.mean == pytest.approx(
                sum(plain_pass_at(scores, int(k)) for scores in grouped) / len(grouped)
            )
        elif kind == "mean":
            assert estimate.mean == pytest.approx(sum(sum(scores) / len(scores) for scores in grouped) / len(grouped))
    shuffled = list(table)
    rng.shuffle(shuffled)
    shuffled_report = report(shuffled)
    assert shuffled_report.sampled_k == eval_report.sampled_k
    sampled = {f"maj@{k}" for k in eval_report.sampled_k}  # over random subsets of the samples, which the order changes
    assert {
        name: measure.mean for name, measure in shuffled_report.measures.items() if name not in sampled
    } == pytest.approx({name: measure.mean for name, measure in eval_report.measures.items() if name not in sampled})


def test_copies_change_no_interval() -> None:
    once: Table = [(n, [float(n < 3), float(n < 5)]) for n in range(10)]
    copied = report([*once, *once, *once])
    assert copied.measures["pass@1"] == report(once).measures["pass@1"]
    assert copied.measures["mean@1"] == report(once).measures["mean@1"]


def test_other_truths_verifiers_and_images_are_other_problems() -> None:
    original = row(0, 1)
    assert original.problem() == row(7, 1).problem()
    others = [
        Prompt(
            original.id, original.messages, original.data_source, original.ability, original.verifier, "another truth"
        ),
        Prompt(original.id, original.messages, original.data_source, original.ability, "math", original.ground_truth),
        Prompt(original.id, original.messages, "", "", original.verifier, original.ground_truth, images=(b"a",)),
        Prompt(original.id, original.messages, "", "", original.verifier, original.ground_truth, images=(b"b",)),
        row(0, 2),
    ]
    assert len({original.problem(), *(other.problem() for other in others)}) == 6


def test_an_environment_may_read_its_task_in_extra_info() -> None:
    prompts = [row(0, 1, seed=1), row(1, 1, seed=2), row(2, 1, seed=1)]
    assert len(Problems.of_prompts(prompts)) == 1
    assert Problems.of_prompts(prompts, conversing=True).of_row.tolist() == [0, 1, 0]


def test_categories_that_divide_a_problems_rows_count_each_row_in_its_own() -> None:
    table: Table = [(0, [1.0]), (0, [0.0]), (1, [0.0]), (1, [0.0])]
    prompts = [row(number, problem, run=f"run {number % 2}") for number, (problem, _) in enumerate(table)]
    categories = report_of(responses(table), prompts, ["run"]).categories["run"]
    assert {name: (category.prompts, category.measures["pass@1"].mean) for name, category in categories.items()} == {
        "run 0": (2, 0.5),
        "run 1": (2, 0.0),
    }
    (combined,) = report_of(responses(table), prompts).categories["data_source"].values()
    assert (combined.prompts, combined.measures["pass@1"].mean) == (2, 0.25)


def test_greedy_responses_to_copies_are_averaged() -> None:
    some = [Sample(n, i, 0, 0, 3, 4, "stop", verdict(float(n == 0)), 0) for n in (0, 1) for i in (GREEDY, 0)]
    eval_report = report_of(Responses.of_samples(SampleTable.of(some)), [row(0, 5), row(1, 5)])
    assert (eval_report.prompts, eval_report.samples, eval_report.measures["greedy"].mean) == (1, 2, 0.5)


def test_rows_without_copies_are_not_mentioned() -> None:
    eval_report = report([(0, [1.0]), (1, [0.0])])
    assert repeats_note(2, 2) == ""
    assert eval_report.notes() == []
    assert "rows" not in eval_report.headline()


def test_rows_that_were_left_out_stand_in_the_report() -> None:
    eval_report = report_of(
        responses([(0, [1.0])]), [row(0, 0)], left_out={"longer than data.max_prompt_tokens": 3, "x": 0}
    )
    assert eval_report.left_out == eval_report.as_dict()["left_out"] == {"longer than data.max_prompt_tokens": 3}
    assert eval_report.metrics()["left_out"] == 3
    assert eval_report.headline().endswith("on 1 prompts; 3 rows left out: longer than data.max_prompt_tokens")
    assert eval_report.notes() == ["3 rows left out: longer than data.max_prompt_tokens"]


def test_a_set_whose_rows_are_all_one_prompt_is_refused() -> None:
    with pytest.raises(DataError, match=r"all 32 rows to evaluate ask the same prompt, '7\+1='"):
        check_rows([row(n, 7) for n in range(32)], "data/test.parquet")
    with pytest.raises(
        DataError, match=r"the same prompt, '7\+1=', with different ground truths \('8' and '9', for"
    ) as no:
        check_rows([replace(row(n, 7), ground_truth=str(8 + n)) for n in range(32)], "data/test.parquet")
    assert "samples" not in no.value.hint
    check_rows([row(0, 7)], "data/test.parquet")
    check_rows([row(0, 7), row(1, 7), row(2, 8)], "data/test.parquet")


def saved(path: Path, table: Table, *, without: bool = False) -> str:
    rows = [
        sample_row(
            row(number, problem), index, "x", verdict(score), prompt_tokens=4, response_tokens=4, finish_reason="stop"
        )
        for number, (problem, scores) in enumerate(table)
        for index, score in enumerate(scores)
    ]
    write_samples(path, 0, [{**sample, "problem": None} for sample in rows] if without else rows)
    return str(path)


def test_compared_evaluations_of_copies_have_the_p_value_of_their_problems(tmp_path: Path) -> None:
    better: Table = [(n % 4, [float(n % 4 < 2)]) for n in range(32)]
    a, b = saved(tmp_path / "a.parquet", CONTEST), saved(tmp_path / "b.parquet", better)
    overall = compare(a, b, 10).overall
    assert (overall.prompts, overall.rows, overall.better, overall.same) == (4, 32, 1, 3)
    passed = overall.measures["pass@1"]
    assert passed.p == plain_sign_flip([0.0, 1.0, 0.0, 0.0]) == 1.0
    assert passed.difference.mean == 0.25
    assert passed.difference.low <= 0.0
    assert [change.prompt for change in overall.changed] == ["1+1="]


def test_copies_in_only_one_of_two_evaluations_are_not_missing(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.parquet", CONTEST), saved(tmp_path / "b.parquet", CONTEST[:3])
    overall = compare(a, b, 10).overall
    assert (overall.prompts, overall.rows, overall.only_a, overall.only_b) == (3, 3, 1, 0)


def test_samples_of_an_older_version_have_one_prompt_a_row(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / f"{name}.parquet", CONTEST, without=True) for name in "ab")
    assert compare(a, b, 10).overall.prompts == 32
    new = saved(tmp_path / "new.parquet", CONTEST)
    assert compare(a, new, 10).overall.prompts == 4
