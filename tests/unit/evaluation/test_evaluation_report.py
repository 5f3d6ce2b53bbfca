"""The report of an evaluation: its measures against plain loops, categories, lengths, greedy responses."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from rlcli.data.columns import SampleTable
from rlcli.evaluation.evaluation_report import MOST_CATEGORIES, labels_of, report_of
from rlcli.evaluation.responses import Responses, joined
from rlcli.rollout.rollout_arguments import GREEDY
from rlcli.types import Outcome, Prompt, Sample, Verdict


def prompts(count: int, **extra: Sequence[object]) -> list[Prompt]:
    return [
        Prompt(
            f"sums:test:{n}",
            ({"role": "user", "content": f"{n}+1="},),
            "sums" if n % 3 else "products",
            "math",
            "exact",
            str(n + 1),
            {name: values[n] for name, values in extra.items()},
        )
        for n in range(count)
    ]


def sample(prompt: int, index: int, outcome: Outcome, answer: str | None, score: float, tokens: int = 4) -> Sample:
    reason = "length" if tokens >= 8 else "stop"
    return Sample(prompt, index, 0, 0, 3, tokens, reason, Verdict(score, outcome, answer, detail="why"), 0)  # type: ignore[arg-type]


def right(prompt: int, index: int, tokens: int = 4) -> Sample:
    return sample(prompt, index, Outcome.OK, "r", 1.0, tokens)


def wrong(prompt: int, index: int, answer: str | None = "w", tokens: int = 4) -> Sample:
    return sample(prompt, index, Outcome.NO_ANSWER if answer is None else Outcome.WRONG, answer, 0.0, tokens)


def report(samples: Sequence[Sample], count: int, by: Sequence[str] = (), **extra: Sequence[object]):  # type: ignore[no-untyped-def]
    return report_of(Responses.of_samples(SampleTable.of(samples)), prompts(count, **extra), by)


def test_what_was_not_verified_is_counted_and_named() -> None:
    some = [right(0, 0), sample(0, 1, Outcome.TIMEOUT, None, 0.0), sample(0, 2, Outcome.CRASH, None, 0.0), wrong(0, 3)]
    eval_report = report(some, 1)
    assert eval_report.unverified == eval_report.as_dict()["unverified"] == 2
    assert eval_report.headline().endswith("on 1 prompts; 2 of 4 responses not verified")
    assert "not verified" not in report([right(0, 0)], 1).headline()


def test_measures_are_means_over_prompts_of_what_their_samples_did() -> None:
    eval_report = report([right(0, 0), right(0, 1), wrong(0, 2), wrong(1, 0), wrong(1, 1), right(1, 2)], 2)
    means = {name: estimate.mean for name, estimate in eval_report.measures.items()}
    assert means == pytest.approx(
        {"pass@1": 0.5, "pass@2": (1 + 2 / 3) / 2, "pass@3": 1.0, "maj@2": 0.5, "maj@3": 0.5}
        | {"mean@1": 0.5, "mean@3": 0.5}
    )
    assert eval_report.pass_rates == pytest.approx((2 / 3, 1 / 3))
    assert (eval_report.prompts, eval_report.samples) == (2, 6)
    assert eval_report.outcomes["ok"] + eval_report.outcomes["wrong"] == 1.0
    assert eval_report.metrics()["maj@3/low"] <= 0.5 <= eval_report.metrics()["maj@3/high"]
    assert "pass@1 50.0%" in eval_report.headline()


def test_prompts_with_fewer_samples_bound_the_k_of_all() -> None:
    eval_report = report([right(0, 0), right(0, 1), wrong(0, 2), wrong(0, 3), right(1, 0)], 2)
    assert set(eval_report.measures) == {"pass@1", "mean@1"}
    assert eval_report.pass_rates == (0.5, 1.0)


def test_one_prompt_all_wrong_and_without_an_answer() -> None:
    eval_report = report([wrong(0, n, None) for n in range(4)], 1)
    for estimate in eval_report.measures.values():
        assert (estimate.mean, estimate.low) == (0.0, 0.0)
        assert 0.5 < estimate.high <= 1.0
    assert eval_report.outcomes["no_answer"] == 1.0


def test_spaces_around_an_answer_do_not_split_a_vote() -> None:
    samples = [sample(0, 0, Outcome.OK, "7", 1.0), sample(0, 1, Outcome.OK, " 7\n", 1.0)]
    eval_report = report([*samples, wrong(0, 2, "8"), wrong(0, 3, "9")], 1)
    assert eval_report.measures["maj@4"].mean == 1.0


def test_greedy_responses_are_told_apart_from_the_samples() -> None:
    eval_report = report(
        [right(0, GREEDY, tokens=8), wrong(0, 0), wrong(0, 1), wrong(1, GREEDY), right(1, 0), right(1, 1)], 2
    )
    assert eval_report.measures["greedy"].mean == 0.5
    assert (eval_report.samples, eval_report.lengths.max, eval_report.lengths.truncated) == (4, 4.0, 0.0)
    assert eval_report.as_dict()["greedy"]["mean"] == 0.5
    assert "greedy" not in report([right(0, 0)], 1).measures


def test_lengths_are_of_the_samples_whose_tokens_were_counted() -> None:
    statistics = report([right(0, n, tokens) for n, tokens in enumerate(range(1, 101))], 1).lengths
    assert (statistics.mean, statistics.p50, statistics.max) == (50.5, 50.5, 100.0)
    assert statistics.p95 == pytest.approx(95.05)
    assert statistics.truncated == 0.93
    uncounted = Responses.of([0], [0], [1.0], ["ok"], ["1"], [None], ["length"], [""])
    uncounted_report = report_of(uncounted, prompts(1))
    lengths = uncounted_report.lengths
    assert np.isnan(lengths.mean)
    assert lengths.truncated == 1.0
    assert '"mean_response_tokens": null' in json.dumps(uncounted_report.as_dict(), allow_nan=False)


def test_categories_are_those_of_source_ability_and_the_fields_asked_for() -> None:
    samples = [right(n, 0) if n in (0, 1, 2) else wrong(n, 0, tokens=8) for n in range(6)]
    categories = report(samples, 6, by=["level"], level=[1, 1, 2, 2, 2, 2]).categories
    assert list(categories) == ["data_source", "ability", "level"]
    assert {value: category.prompts for value, category in categories["data_source"].items()} == {
        "sums": 4,
        "products": 2,
    }
    assert list(categories["level"]) == ["2", "1"]
    hard, easy = categories["level"]["2"], categories["level"]["1"]
    assert (easy.measures["pass@1"].mean, easy.truncated, easy.mean_response_tokens) == (1.0, 0.0, 4.0)
    assert (hard.measures["pass@1"].mean, hard.truncated) == (0.25, 0.75)
    assert report(samples, 6, by=["level"], level=[1] * 6).as_dict()["by"]["level"]["1"]["prompts"] == 6


def test_a_field_with_too_many_values_tells_nothing_apart() -> None:
    count = MOST_CATEGORIES + 1
    eval_report = report([right(n, 0) for n in range(count)], count, by=["index"], index=list(range(count)))
    assert "index" not in eval_report.categories
    assert labels_of(prompts(2), "index") is None


def test_scores_beyond_zero_and_one_are_averaged_as_they_are() -> None:
    samples = [sample(0, 0, Outcome.OK, "1", 1.1), sample(1, 0, Outcome.WRONG, "2", -0.5)]
    eval_report = report(samples, 2)
    assert eval_report.measures["mean@1"].mean == pytest.approx(0.3)
    assert eval_report.measures["mean@1"].low < 0.0
    assert eval_report.measures["pass@1"].mean == 0.5


def test_the_first_crash_is_told() -> None:
    assert report([right(0, 0), sample(1, 0, Outcome.CRASH, None, 0.0)], 2).crash == "why"


def test_parts_of_one_dataset_and_of_several_are_joined() -> None:
    first = Responses.of_samples(SampleTable.of([right(0, 0), wrong(1, 0, "7")]))
    other = Responses.of_samples(SampleTable.of([wrong(0, 1, "8"), wrong(1, 1, "7")]))
    same = report_of(joined([first, other], [0, 0]), prompts(2))
    assert same.measures["maj@2"].mean == 0.25
    separate = report_of(joined([first, other], [0, 2]), prompts(4))
    assert separate.pass_rates == (1.0, 0.0, 0.0, 0.0)


def test_graded_scores_have_their_mean_beside_the_share_that_passed() -> None:
    eval_report = report([sample(0, 0, Outcome.OK, "r", 0.1), sample(1, 0, Outcome.OK, "r", 0.3)], 2)
    assert eval_report.is_graded
    assert eval_report.headline().startswith("pass@1 100.0% [")
    assert ", mean@1 0.200 [" in eval_report.headline()
    assert eval_report.as_dict()["mean"]["mean@1"]["mean"] == eval_report.metrics()["mean@1"] == pytest.approx(0.2)
    assert "mean@1" in eval_report.as_dict()["by"]["data_source"]["products"]["measures"]
    plain = report([right(0, 0), wrong(1, 0)], 2)
    assert not plain.is_graded
    assert plain.headline().endswith("], mean@1 0.500 on 2 prompts")


def test_the_mean_score_has_the_name_of_one_sample_and_of_all_of_them() -> None:
    eval_report = report([right(0, n) for n in range(4)], 1)
    assert eval_report.measures["mean@1"] == eval_report.measures["mean@4"]
