"""Evaluates the model in the workers' engines, or a served model: pass@k, maj@k and mean@1."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import PromptTask
from rlcli.data.prompts.prompt_table import JoinedPrompts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.evaluation.equal_problems import Problems, repeats_note
from rlcli.evaluation.responses import Responses
from rlcli.evaluation.statistics import Estimate, interval, ks_of, majorities, pass_rates, shown_estimate
from rlcli.rollout.engine import Sampling
from rlcli.rollout.rollout_arguments import RolloutArguments
from rlcli.rollout.scheduler.dispatcher import OnProgress, gather
from rlcli.rollout.worker_calls import RolloutWorkers
from rlcli.types import UNVERIFIED, Outcome, Prompt

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64, Int64

PURPOSE = "eval"
"""Part of the seed of every evaluation sample."""
MOST_CATEGORIES = 100
"""A field with more values than this is not used for categories."""


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens; NaN if a server does not count them."""

    mean: float
    """Mean over the responses."""
    p50: float
    """Median."""
    p95: float
    """95th percentile."""
    max: float
    """Longest response."""
    truncated: float
    """Share of responses cut off at the limit."""

    @classmethod
    def of(cls, responses: Responses) -> Lengths:
        import numpy as np

        counted = responses.tokens[~np.isnan(responses.tokens)]
        cut = float(responses.truncated.mean())
        if not len(counted):
            return cls(math.nan, math.nan, math.nan, math.nan, cut)
        median, p95 = float(np.percentile(counted, 50)), float(np.percentile(counted, 95))
        return cls(float(counted.mean()), median, p95, float(counted.max()), cut)


@dataclass(frozen=True)
class Category:
    """The results on the prompts of one category."""

    prompts: int
    """Number of prompts."""
    measures: Mapping[str, Estimate]
    """Name → estimate, for pass@1 and the measures over all samples."""
    mean_response_tokens: float
    """NaN if a server does not count tokens."""
    truncated: float
    """Share of responses cut off at the limit."""


@dataclass(frozen=True)
class EvalReport:
    """The result of an evaluation."""

    prompts: int
    """Distinct prompts: rows that pose the same problem are one."""
    samples: int
    """Responses that were scored, without greedy ones besides the samples."""
    measures: Mapping[str, Estimate]
    """Name → estimate: pass@k; maj@k for k of 2 and more; mean@1, the samples' mean score, which is also mean@n of n
    samples a prompt; greedy: pass@1 of the greedy responses, if there are any besides the samples."""
    sampled_k: tuple[int, ...]
    """The k for which maj@k is not exact, but over random subsets."""
    outcomes: dict[str, float]
    """Outcome → share of the responses."""
    lengths: Lengths
    """Response lengths."""
    categories: Mapping[str, Mapping[str, Category]]
    """Field → value → result on its prompts."""
    values: Mapping[str, Float64[np.ndarray, " prompts"]]
    """Measure → value of each prompt; the estimates are their means."""
    crash: str
    """Message of the first verifier crash; empty if none crashed."""
    prompt_of_row: Int64[np.ndarray, " rows"]
    """Index of each row's prompt."""
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Reason → rows of the data that were not evaluated."""
    sets: Mapping[str, EvalReport] = dataclasses.field(default_factory=dict)
    """Name → report on each of several datasets; all else covers all prompts together."""

    @property
    def rows(self) -> int:
        """Rows of the data that were evaluated."""
        return len(self.prompt_of_row)

    @property
    def pass_rates(self) -> tuple[float, ...]:
        """The share of each prompt's samples that passed, in the order of the rows; equal for rows of one prompt."""
        return tuple(self.values["pass@1"][self.prompt_of_row].tolist())

    @property
    def is_graded(self) -> bool:
        """True if scores are not just 1 for passed responses and 0 for the rest, so that mean@1 is not pass@1."""
        return bool((self.values["mean@1"] != self.values["pass@1"]).any())

    @property
    def unverified(self) -> int:
        """Responses without a verdict (`UNVERIFIED`). They count as not passed."""
        return round(sum(self.outcomes.get(outcome, 0.0) for outcome in UNVERIFIED) * self.samples)

    def metrics(self) -> dict[str, float]:
        """Flat numbers, for trackers."""
        flat: dict[str, float] = {}
        for name, estimate in self.measures.items():
            flat |= {name: estimate.mean, f"{name}/low": estimate.low, f"{name}/high": estimate.high}
        lengths = asdict(self.lengths)
        return {
            **flat,
            "prompts": self.prompts,
            "rows": self.rows,
            "left_out": sum(self.left_out.values()),
            "samples": self.samples,
            **{f"outcome/{name}": share for name, share in self.outcomes.items()},
            **{f"response_tokens/{name}": value for name, value in lengths.items()},
            **{f"{name}/{key}": value for name, report in self.sets.items() for key, value in report.metrics().items()},
        }

    def as_dict(self) -> dict[str, Any]:
        """The whole report, for `--json`: unknown values are None."""
        measures = {name: asdict(estimate) for name, estimate in self.measures.items()}
        result = {
            "prompts": self.prompts,
            "rows": self.rows,
            "left_out": dict(self.left_out),
            "samples": self.samples,
            **{
                kind: {n: e for n, e in measures.items() if n.startswith(f"{kind}@")}
                for kind in ("pass", "maj", "mean")
            },
            "greedy": measures.get("greedy"),
            "maj_over_random_subsets": [f"maj@{k}" for k in self.sampled_k],
            "outcomes": self.outcomes,
            "unverified": self.unverified,
            "mean_response_tokens": self.lengths.mean,
            "response_tokens": {name: value for name, value in asdict(self.lengths).items() if name != "truncated"},
            "truncated": self.lengths.truncated,
            "by": {
                field: {value: asdict(category) for value, category in values.items()}
                for field, values in self.categories.items()
            },
            **({"datasets": {name: report.as_dict() for name, report in self.sets.items()}} if self.sets else {}),
        }
        return {name: _without_nan(value) for name, value in result.items()}

    def headline(self) -> str:
        """One line: `pass@1 41.2% [37.0, 45.6], mean@1 0.412 on 512 prompts`; mean@1 has its interval too if it is
        another figure. Also the number of rows that repeat a prompt or were left out, and of unverified responses."""
        at_k = [f", {name} {self.measures[name]}" for name in self.measures if name.startswith("pass@")][1:]
        rows = f" in {self.rows} rows" if self.rows > self.prompts else ""
        sets = "; ".join(f"{name} {report._at_one()}" for name, report in self.sets.items())
        parts = [f"pass@1 {self._at_one()}{''.join(at_k)} on {self.prompts} prompts{rows}"]
        parts[0] += f" ({sets})" if sets else ""
        parts += self._left_out_lines()
        parts += [f"{self.unverified} of {self.samples} responses not verified"] * bool(self.unverified)
        return "; ".join(parts)

    def _at_one(self) -> str:
        """pass@1 and mean@1, with its interval unless it is the same figure."""
        mean = self.measures["mean@1"]
        shown = shown_estimate("mean@1", mean) if self.is_graded else f"{mean.mean:.3f}"
        return f"{self.measures['pass@1']}, mean@1 {shown}"

    def notes(self) -> list[str]:
        """Notes for a reader of the measures: rows that repeat a prompt, and rows that were left out."""
        return [note for note in (repeats_note(self.rows, self.prompts), *self._left_out_lines()) if note]

    def _left_out_lines(self) -> list[str]:
        return [f"{count} rows left out: {why}" for why, count in self.left_out.items()]


def evaluate(
    workers: RolloutWorkers,
    prompts: TokenizedPrompts,
    config: RunConfig,
    *,
    save_as: str = "",
    step: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> EvalReport:
    """Generate the samples of every prompt with the rollout and scoring code of training, and report."""
    wanted = [tuple(range(config.evaluation.samples))] * len(prompts)
    responses = generate(workers, prompts, wanted, config, save_as=save_as, step=step, on_progress=on_progress)
    rows, conversing = prompts.prompts, bool(config.environment.name)
    report = report_of(responses, rows, conversing=conversing, left_out=prompts.left_out)
    if not isinstance(rows, JoinedPrompts):
        return report
    sets = {
        name: report_of(responses.between(start, end), part, conversing=conversing)
        for name, part, (start, end) in zip(rows.names, rows.parts, pairwise(rows.starts), strict=True)
    }
    return replace(report, sets=sets)


def generate(
    workers: RolloutWorkers,
    prompts: TokenizedPrompts,
    wanted: Sequence[tuple[int, ...]],
    config: RunConfig,
    *,
    save_as: str,
    step: int = 0,
    on_progress: OnProgress,
) -> Responses:
    """Responses with their verdicts. wanted: for each prompt, the indexes of the samples to generate; GREEDY means a
    greedy one. A sample depends only on (seed, step, prompt id, index), not on the other samples.
    """
    rollout = config.rollout
    sampling = Sampling(config.evaluation.temperature, rollout.max_response_tokens, config.evaluation.top_p)
    arguments = RolloutArguments(sampling, config.train.seed, PURPOSE, step, save_as, keep_tokens=False)
    tasks = [
        PromptTask(index, prompts.tokens(index), prompts.prompts[index], len(samples), wanted=samples)
        for index, samples in enumerate(wanted)
        if samples
    ]
    reports = gather(
        workers,
        tasks,
        arguments,
        tensor_parallel=rollout.tensor_parallel,
        slots=rollout.max_concurrent,
        on_progress=on_progress,
    )
    return Responses.of_samples(SampleTable.joined([report.samples for report in reports]))


def report_of(
    responses: Responses,
    prompts: Sequence[Prompt],
    by: Sequence[str] = (),
    *,
    conversing: bool = False,
    left_out: Mapping[str, int] | None = None,
) -> EvalReport:
    """The report on all responses to `prompts`, each of which has one or more besides the greedy one.

    A response passes if its outcome is ok. Responses to rows that pose the same problem are samples of one prompt. by:
    fields of extra_info to group the prompts by, besides data_source and ability. conversing: with an environment.
    left_out: reason → rows of the data that are not among `prompts`.
    """
    problems = Problems.of_prompts(prompts, conversing=conversing)
    by_problem = replace(responses, prompt=problems.of_row[responses.prompt])
    values, sampled_k = values_of(by_problem, len(problems))
    greedy, sampled = by_problem.split_greedy()
    bounds = score_bounds(sampled)
    return EvalReport(
        prompts=len(problems),
        samples=len(sampled),
        measures={name: _estimated(name, array, bounds) for name, array in values.items()},
        sampled_k=sampled_k,
        outcomes={str(outcome): float((sampled.outcome == str(outcome)).mean()) for outcome in Outcome},
        lengths=Lengths.of(sampled),
        categories=_categories(responses, prompts, by, problems, values, bounds),
        values=values,
        crash=sampled.crash or greedy.crash,
        prompt_of_row=problems.of_row,
        left_out={why: count for why, count in (left_out or {}).items() if count},
    )


def values_of(responses: Responses, prompts: int) -> tuple[dict[str, Float64[np.ndarray, " prompts"]], tuple[int, ...]]:
    """Measure → its value for each prompt, and the k whose maj@k is not exact. Includes greedy if every prompt has a
    greedy response besides its samples. The mean score has two names: mean@1, and mean@k with the largest k, under
    which others publish it."""
    import numpy as np

    greedy, responses = responses.split_greedy()
    counts = np.bincount(responses.prompt, minlength=prompts)
    assert counts.all(), "a prompt without a response"
    right = np.bincount(responses.prompt, weights=responses.passed, minlength=prompts).astype(np.int64)
    ks = ks_of(int(counts.min()))
    votes = majorities(responses.prompt, responses.answers(), responses.passed, prompts, [k for k in ks if k > 1])
    values = {f"pass@{k}": pass_rates(counts, right, k) for k in ks}
    values |= {f"maj@{k}": array for k, (array, _) in votes.items()}
    values["mean@1"] = responses.per_prompt(responses.score, prompts)
    values[f"mean@{ks[-1]}"] = values["mean@1"]
    if np.bincount(greedy.prompt, minlength=prompts).all():
        values["greedy"] = greedy.per_prompt(greedy.passed, prompts)
    return values, tuple(k for k, (_, exact) in votes.items() if not exact)


def score_bounds(responses: Responses) -> tuple[float, float]:
    """The assumed bounds of a score: 0 and 1, extended to the observed scores."""
    return min(0.0, float(responses.score.min())), max(1.0, float(responses.score.max()))


def _estimated(name: str, values: Float64[np.ndarray, " prompts"], bounds: tuple[float, float]) -> Estimate:
    """The estimate of a measure. bounds: of a score."""
    return interval(values, bounds=bounds if name.startswith("mean@") else (0.0, 1.0))


def _categories(
    responses: Responses,
    prompts: Sequence[Prompt],
    by: Sequence[str],
    problems: Problems,
    values: Mapping[str, Float64[np.ndarray, " prompts"]],
    bounds: tuple[float, float],
) -> dict[str, dict[str, Category]]:
    """Field → value → its prompts; the most frequent values come first. Fields with more than MOST_CATEGORIES values
    are left out. responses: numbered by rows of `prompts`; values: of each problem."""
    import numpy as np

    categories: dict[str, dict[str, Category]] = {}
    for field in ("data_source", "ability", *by):
        labels = labels_of(prompts, field)
        if labels is None:
            continue
        names, label_of_row, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        if len(names) > MOST_CATEGORIES:
            continue
        # Rows of one problem may have several values: then each value counts the responses to its own rows.
        divides = bool((label_of_row != label_of_row[problems.first_rows][problems.of_row]).any())
        categories[field] = {}
        for label in np.argsort(-sizes, kind="stable").tolist():
            rows = label_of_row == label
            members = np.unique(problems.of_row[rows])
            members_responses = responses.where(rows[responses.prompt])
            if divides:
                numbers = np.asarray(np.searchsorted(members, problems.of_row[members_responses.prompt]))
                member_values, _ = values_of(replace(members_responses, prompt=numbers), len(members))
            else:
                member_values = {name: array[members] for name, array in values.items()}
            lengths = Lengths.of(members_responses.split_greedy()[1])
            categories[field][str(names[label])] = Category(
                len(members),
                {name: _estimated(name, member_values[name], bounds) for name in _of_category(member_values)},
                lengths.mean,
                lengths.truncated,
            )
    return categories


def _of_category(values: Mapping[str, Float64[np.ndarray, " prompts"]]) -> Sequence[str]:
    """The measures of a category: those of one sample, and of all."""
    largest_k = max(int(name.partition("@")[2]) for name in values if name.startswith("pass@"))
    wanted = ("pass@1", f"pass@{largest_k}", f"maj@{largest_k}", "mean@1", f"mean@{largest_k}", "greedy")
    return [name for name in dict.fromkeys(wanted) if name in values]


def _without_nan(value: object) -> object:
    """`value` with None for NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def labels_of(prompts: Sequence[Prompt], field: str) -> list[str] | None:
    """The category of each prompt by data_source, ability or a field of extra_info; None if no prompt has one."""
    if field in ("data_source", "ability"):
        labels = [str(getattr(prompt, field)) for prompt in prompts]
        return labels if any(labels) else None
    if not any(field in prompt.extra_info for prompt in prompts):
        return None
    return [str(prompt.extra_info.get(field, "")) for prompt in prompts]
