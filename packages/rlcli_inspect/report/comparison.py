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
from rlcli.evaluation.paired_comparison import Compared
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
MOST_STEPS = 10
"""Evaluated steps that are compared: the first, the last and others evenly between them."""
HEADLINE = ("pass@1", "mean@1", "greedy")
"""Measures to show, in this order; `rlcli eval compare` has all."""


@dataclass(frozen=True)
class PairedEvaluation:
    """One measure of an evaluation in both runs. steps: of each run; equal unless they have none in common. prompts: in
    both. difference: B minus A, with a 95% interval over the prompts."""

    steps: tuple[int, int]
    metric: str
    a: Estimate
    b: Estimate
    difference: Estimate
    prompts: int

    def as_dict(self) -> dict[str, Any]:
        sides = {"a": asdict(self.a), "b": asdict(self.b), "difference": asdict(self.difference)}
        own = {"step": self.steps[0], "step_b": self.steps[1], "metric": self.metric, "prompts": self.prompts}
        return own | sides


@dataclass(frozen=True)
class Side:
    """What one run made of a prompt. pass_rate: of its samples; response, score: of one of them, of the more frequent
    outcome."""

    pass_rate: float
    response: str
    score: float | None


@dataclass(frozen=True)
class ChangedPrompt:
    """A prompt whose pass rate differs between the last compared evaluations."""

    prompt_id: str
    prompt: str
    a: Side
    b: Side

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"difference": self.b.pass_rate - self.a.pass_rate}


@dataclass(frozen=True)
class Comparison:
    """What `compare` returns. config: key → values in A and B, of the keys that differ. notes: what cannot be compared,
    and why."""

    runs: Sequence[Mapping[str, Any]]
    curves: Sequence[Curve]
    evaluations: Sequence[PairedEvaluation]
    changed: Sequence[ChangedPrompt]
    config: Mapping[str, tuple[Any, Any]]
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """For `--json` and for the page."""
        return {
            "runs": [dict(run) for run in self.runs],
            "curves": [curve.as_dict() for curve in self.curves],
            "evaluations": [one.as_dict() for one in self.evaluations],
            "changed": [one.as_dict() for one in self.changed],
            "config": [{"key": key, "a": a, "b": b} for key, (a, b) in self.config.items()],
            "notes": list(self.notes),
        }


@dataclass
class _Evaluations:
    """The evaluations that two runs have in common; of the last of them, the changed prompts."""

    paired: list[PairedEvaluation] = field(default_factory=list)
    changed: list[ChangedPrompt] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(run_a: Path, run_b: Path, changed: int = CHANGED) -> Comparison:
    """Compare the runs in two folders. changed: how many of the prompts that changed most to list.

    What one of them lacks or what cannot be read is a note. Raises `RlcliError` for a folder that is no run.
    """
    folders = (run_a, run_b)
    names = names_of(folders)
    damage = [RunData(folder).damage() for folder in folders]
    unread = [f"{name}: {note}" for name, notes in zip(names, damage, strict=True) for note in notes]
    lines = [metrics_of(folder) for folder in folders]
    config = _config(*folders)
    evaluations = _evaluations(*folders, changed)
    runs = [asdict(run_at(folder)) | {"name": name} for name, folder in zip(names, folders, strict=True)]
    empty = [f"{name} has no metrics of a step" for name, own in zip(names, lines, strict=True) if not own]
    shown = dict(zip(folders, names, strict=True))
    marks = [f"{name}: {mark.text}" for folder, name in shown.items() for mark in marks_of(events_of(folder))]
    notes = [*unread, *empty, *marks, *_notes(config), *(_with_names(note, shown) for note in evaluations.notes)]
    curves = curves_of(list(zip(names, lines, strict=True)))
    return Comparison(runs, curves, evaluations.paired, evaluations.changed, config, notes)


def _with_names(note: str, names: Mapping[Path, str]) -> str:
    """A note with the names of the runs in place of their folders.

    >>> _with_names("/runs/a2/evaluations is empty", {Path("/runs/a"): "a", Path("/runs/a2"): "mine/a2"})
    'mine/a2/evaluations is empty'
    """
    for folder, name in names.items():
        note = note.replace(f"{folder}/", f"{name}/")
    return note


def _config(run_a: Path, run_b: Path) -> dict[str, tuple[Any, Any]]:
    """The keys that differ. Paths count as equal if they name the same place."""
    a, b = (flatten(config_of(run)) for run in (run_a, run_b))
    bases = [directory_of(environment_of(run)) or Path.cwd() for run in (run_a, run_b)]
    found = {}
    for key in sorted(a.keys() | b.keys()):
        one, other = a.get(key), b.get(key)
        if key.startswith("recipe.") and key != "recipe.name":
            continue  # text about the recipe
        if key in PATHS and isinstance(one, str) and isinstance(other, str) and one and other:
            same = (bases[0] / one).resolve() == (bases[1] / other).resolve()
        else:
            same = one == other
        if not same:
            found[key] = (one, other)
    return found


def _notes(config: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """What the configurations say about which curves can be compared."""
    found = []
    if "data.path" in config:
        a, b = config["data.path"]
        found.append(f"the runs train on different data ({a}; {b}): their rewards are of different prompts")
    if "verifier.name" in config:
        a, b = config["verifier.name"]
        found.append(f"the runs have different verifiers ({a or 'of each row'}; {b or 'of each row'})")
    return found


def _evaluations(run_a: Path, run_b: Path, changed: int) -> _Evaluations:
    """Pair the evaluations of the same steps; the last ones too, if both are of other steps."""
    rooms = (run_a / "evaluations", run_b / "evaluations")
    steps = [steps_of(room) for room in rooms]
    found = _Evaluations()
    if not all(steps):
        found.notes.append("no evaluation in both runs: nothing is paired by prompt")
        return found
    both = sorted(set(steps[0]) & set(steps[1]))
    pairs, last = [(step, step) for step in _evenly(both)], (steps[0][-1], steps[1][-1])
    if not both or both[-1] not in last:
        pairs.append(last)
    for pair in pairs:
        of_a, of_b = (str(room / f"step-{step:06d}") for room, step in zip(rooms, pair, strict=True))
        try:
            compared = compare_samples(of_a, of_b, changed)
            found.paired += _measures(pair, compared)
            if pair == pairs[-1]:
                found.changed = _changed(compared, rooms, pair)
            if pair[0] != pair[1]:
                found.notes.append(f"the last evaluations are compared: after step {pair[0]} of A, step {pair[1]} of B")
        except DataError as error:
            found.notes.append(f"the evaluations after step {pair[0]} are not paired: {error.message}")
            break
    return found


def _evenly(steps: Sequence[int]) -> list[int]:
    if len(steps) <= MOST_STEPS:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (MOST_STEPS - 1))] for place in range(MOST_STEPS)]


def _measures(steps: tuple[int, int], compared: Compared) -> list[PairedEvaluation]:
    measures, prompts = compared.overall.measures, compared.overall.prompts
    found = [
        PairedEvaluation(steps, name, one.of_a, one.of_b, one.difference, prompts)
        for name in HEADLINE
        if (one := measures.get(name))
    ]
    # Of one sample a prompt, scored 0 or 1, the mean score is pass@1.
    return [one for one in found if one.metric == HEADLINE[0] or (one.a, one.b) != (found[0].a, found[0].b)]


def _changed(compared: Compared, rooms: Sequence[Path], steps: tuple[int, int]) -> list[ChangedPrompt]:
    ids = {one.prompt_id for one in compared.overall.changed}
    of_a, of_b = (_responses(room, step, ids) for room, step in zip(rooms, steps, strict=True))
    return [
        ChangedPrompt(one.prompt_id, one.prompt, _side(of_a[one.prompt_id], one.a), _side(of_b[one.prompt_id], one.b))
        for one in compared.overall.changed
    ]


def _responses(room: Path, step: int, ids: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Prompt id → its samples."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ids}
    for file in sample_files(room, step):
        table = read_samples(file, ("prompt_id", "sample", "response", "score", "outcome"))
        wanted = pc.is_in(table.column("prompt_id"), pa.array(ids, pa.string()))
        for row in table.filter(wanted).to_pylist():
            found[row["prompt_id"]].append(row)
    return found


def _side(rows: Sequence[Mapping[str, Any]], rate: float) -> Side:
    """One response of a prompt, of the more frequent outcome."""
    ordered = sorted(rows, key=lambda row: row["sample"])
    usual = [row for row in ordered if (row["outcome"] == "ok") == (rate >= 0.5)] or ordered
    return Side(rate, usual[0]["response"] or "", usual[0]["score"])
