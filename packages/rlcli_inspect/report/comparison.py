"""Compares two runs: curves, evaluations paired by prompt, the prompts that changed most, and the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlcli.config.changes import PATHS
from rlcli.config.recipes import flatten
from rlcli.data.sample_files import sample_files
from rlcli.errors import DataError
from rlcli.evaluation.evaluation_folder import read_samples
from rlcli.evaluation.paired_comparison import EvaluationComparison
from rlcli.evaluation.paired_comparison import compare as compare_samples
from rlcli.evaluation.rescoring import steps_of
from rlcli.evaluation.statistics import Estimate
from rlcli.runs.curve_marks import marks_of
from rlcli.runs.folder import events_of
from rlcli.runs.listing import config_of, run_at
from rlcli.runs.record_files import metrics_of
from rlcli.runs.run_data import RunData, names_of
from rlcli.runs.software_record import directory_of, environment_of
from rlcli_inspect.report.curves import Curve, curves_of

CHANGED = 20
"""Prompts that changed most, with their responses."""
MAX_STEPS = 10
"""Evaluated steps that are compared: the first, the last and others evenly between them."""
HEADLINE = ("pass@1", "mean@1", "greedy")
"""Measures to show, in this order; `rlcli eval compare` has all."""


@dataclass(frozen=True)
class PairedEvaluation:
    """One measure of an evaluation in both runs."""

    steps: tuple[int, int]
    """Evaluated step of each run; equal unless the runs have none in common."""
    metric: str
    """Name of the measure, such as `pass@1`."""
    a: Estimate
    """Estimate for run A."""
    b: Estimate
    """Estimate for run B."""
    difference: Estimate
    """B minus A, with a 95% interval over the prompts."""
    prompts: int
    """Number of prompts in both."""

    def as_dict(self) -> dict[str, object]:
        sides = {"a": asdict(self.a), "b": asdict(self.b), "difference": asdict(self.difference)}
        facts = {"step": self.steps[0], "step_b": self.steps[1], "metric": self.metric, "prompts": self.prompts}
        return facts | sides


@dataclass(frozen=True)
class Side:
    """Samples of a prompt in one run."""

    pass_rate: float
    """Share of the samples that pass."""
    response: str
    """A sample of the more frequent outcome."""
    score: float | None
    """Its score."""


@dataclass(frozen=True)
class ChangedPrompt:
    """A prompt whose pass rate differs between the last compared evaluations."""

    prompt_id: str
    """Id of the prompt."""
    prompt: str
    """Its text."""
    a: Side
    """Its samples in run A."""
    b: Side
    """Its samples in run B."""

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"difference": self.b.pass_rate - self.a.pass_rate}


@dataclass(frozen=True)
class RunComparison:
    """Result of `compare`."""

    runs: Sequence[Mapping[str, object]]
    """State of each run."""
    curves: Sequence[Curve]
    """Curves of both runs."""
    evaluations: Sequence[PairedEvaluation]
    """Evaluations paired by prompt."""
    changed: Sequence[ChangedPrompt]
    """Prompts that changed most."""
    config: Mapping[str, tuple[object, object]]
    """Key → values in A and B, of the keys that differ."""
    notes: Sequence[str]
    """Parts that cannot be compared, and why."""

    def as_dict(self) -> dict[str, object]:
        """For `--json` and for the page."""
        return {
            "runs": [dict(run) for run in self.runs],
            "curves": [curve.as_dict() for curve in self.curves],
            "evaluations": [evaluation.as_dict() for evaluation in self.evaluations],
            "changed": [prompt.as_dict() for prompt in self.changed],
            "config": [{"key": key, "a": a, "b": b} for key, (a, b) in self.config.items()],
            "notes": list(self.notes),
        }


@dataclass
class _Evaluations:
    """The evaluations that two runs have in common."""

    paired: list[PairedEvaluation] = field(default_factory=list)
    """Measures of each."""
    changed: list[ChangedPrompt] = field(default_factory=list)
    """Changed prompts of the last one."""
    notes: list[str] = field(default_factory=list)
    """Parts that cannot be compared, and why."""


def compare(run_a: Path, run_b: Path, changed: int = CHANGED) -> RunComparison:
    """Compare the runs in two folders. changed: number of the most changed prompts to list.

    What is missing in one of them or cannot be read is a note. Raises `RlcliError` for a folder that is no run.
    """
    folders = (run_a, run_b)
    names = names_of(folders)
    damage = [RunData(folder).damage() for folder in folders]
    unread = [f"{name}: {note}" for name, notes in zip(names, damage, strict=True) for note in notes]
    lines = [metrics_of(folder) for folder in folders]
    config = _config(run_a, run_b)
    evaluations = _evaluations(run_a, run_b, changed)
    runs = [asdict(run_at(folder)) | {"name": name} for name, folder in zip(names, folders, strict=True)]
    empty = [f"{name} has no metrics of a step" for name, run_lines in zip(names, lines, strict=True) if not run_lines]
    shown = dict(zip(folders, names, strict=True))
    marks = [f"{name}: {mark.text}" for folder, name in shown.items() for mark in marks_of(events_of(folder))]
    notes = [*unread, *empty, *marks, *_notes(config), *(_with_names(note, shown) for note in evaluations.notes)]
    curves = curves_of(list(zip(names, lines, strict=True)))
    return RunComparison(runs, curves, evaluations.paired, evaluations.changed, config, notes)


def _with_names(note: str, names: Mapping[Path, str]) -> str:
    """A note with the names of the runs in place of their folders.

    >>> _with_names("/runs/a2/evaluations is empty", {Path("/runs/a"): "a", Path("/runs/a2"): "mine/a2"})
    'mine/a2/evaluations is empty'
    """
    for folder, name in names.items():
        note = note.replace(f"{folder}/", f"{name}/")
    return note


def _config(run_a: Path, run_b: Path) -> dict[str, tuple[object, object]]:
    """The keys that differ. Paths are equal if they resolve to the same file."""
    a, b = (flatten(config_of(run)) for run in (run_a, run_b))
    bases = [directory_of(environment_of(run)) or Path.cwd() for run in (run_a, run_b)]
    differing = {}
    for key in sorted(a.keys() | b.keys()):
        value_a, value_b = a.get(key), b.get(key)
        if key.startswith("recipe.") and key != "recipe.name":
            continue  # text about the recipe
        if key in PATHS and isinstance(value_a, str) and isinstance(value_b, str) and value_a and value_b:
            same = (bases[0] / value_a).resolve() == (bases[1] / value_b).resolve()
        else:
            same = value_a == value_b
        if not same:
            differing[key] = (value_a, value_b)
    return differing


def _notes(config: Mapping[str, tuple[object, object]]) -> list[str]:
    """Differences of the configurations that make curves incomparable."""
    notes = []
    if "data.path" in config:
        a, b = config["data.path"]
        notes.append(f"the runs train on different data ({a}; {b}): their rewards are of different prompts")
    if "verifier.name" in config:
        a, b = config["verifier.name"]
        notes.append(f"the runs have different verifiers ({a or 'of each row'}; {b or 'of each row'})")
    return notes


def _evaluations(run_a: Path, run_b: Path, changed: int) -> _Evaluations:
    """Pair the evaluations of the same steps; also the last ones, if those are of other steps."""
    folders = (run_a / "evaluations", run_b / "evaluations")
    steps = [steps_of(folder) for folder in folders]
    result = _Evaluations()
    if not all(steps):
        result.notes.append("no evaluation in both runs: nothing is paired by prompt")
        return result
    common = sorted(set(steps[0]) & set(steps[1]))
    pairs, last = [(step, step) for step in _evenly(common)], (steps[0][-1], steps[1][-1])
    if not common or common[-1] not in last:
        pairs.append(last)
    for pair in pairs:
        of_a, of_b = (str(folder / f"step-{step:06d}") for folder, step in zip(folders, pair, strict=True))
        try:
            compared = compare_samples(of_a, of_b, changed)
            result.paired += _measures(pair, compared)
            if pair == pairs[-1]:
                result.changed = _changed(compared, folders, pair)
            if pair[0] != pair[1]:
                result.notes.append(
                    f"the last evaluations are compared: after step {pair[0]} of A, step {pair[1]} of B"
                )
        except DataError as error:
            result.notes.append(f"the evaluations after step {pair[0]} are not paired: {error.message}")
            break
    return result


def _evenly(steps: Sequence[int]) -> list[int]:
    if len(steps) <= MAX_STEPS:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (MAX_STEPS - 1))] for index in range(MAX_STEPS)]


def _measures(steps: tuple[int, int], compared: EvaluationComparison) -> list[PairedEvaluation]:
    measures, prompts = compared.overall.measures, compared.overall.prompts
    paired = [
        PairedEvaluation(steps, name, measure.of_a, measure.of_b, measure.difference, prompts)
        for name in HEADLINE
        if (measure := measures.get(name))
    ]
    # Of one sample a prompt, scored 0 or 1, the mean score is pass@1.
    return [x for x in paired if x.metric == HEADLINE[0] or (x.a, x.b) != (paired[0].a, paired[0].b)]


def _changed(compared: EvaluationComparison, folders: Sequence[Path], steps: tuple[int, int]) -> list[ChangedPrompt]:
    ids = {prompt.prompt_id for prompt in compared.overall.changed}
    of_a, of_b = (_responses(folder, step, ids) for folder, step in zip(folders, steps, strict=True))
    return [
        ChangedPrompt(
            prompt.prompt_id,
            prompt.prompt,
            _side(of_a[prompt.prompt_id], prompt.a),
            _side(of_b[prompt.prompt_id], prompt.b),
        )
        for prompt in compared.overall.changed
    ]


def _responses(folder: Path, step: int, ids: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Prompt id → its samples."""
    import pyarrow as pa
    import pyarrow.compute as pc

    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in ids}
    for file in sample_files(folder, step):
        table = read_samples(file, ("prompt_id", "sample", "response", "score", "outcome"))
        wanted = pc.is_in(table.column("prompt_id"), pa.array(ids, pa.string()))
        for row in table.filter(wanted).to_pylist():
            samples[row["prompt_id"]].append(row)
    return samples


def _side(rows: Sequence[Mapping[str, Any]], rate: float) -> Side:
    """One response of a prompt, of the more frequent outcome."""
    ordered = sorted(rows, key=lambda row: row["sample"])
    usual = [row for row in ordered if (row["outcome"] == "ok") == (rate >= 0.5)] or ordered
    return Side(rate, usual[0]["response"] or "", usual[0]["score"])
