"""`rlcli.Run`: the records of a run as plain Python values."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.errors import RlcliError

if TYPE_CHECKING:
    from rlcli.runs.listing import State
    from rlcli.runs.run_data import Kind

Columns = dict[str, list[Any]]
"""Name → values, as `pandas.DataFrame` and `polars.DataFrame` accept them."""
SAMPLES: Kind = "samples"
EVALUATIONS: Kind = "evaluations"


class Run:
    """A run in its folder, alive or not; every call reads the current files.

        run = rlcli.Run("runs/grpo-1")     # or its name below runs/
        run.state, run.step, run.steps     # ('alive', 12, 100)
        pandas.DataFrame(run.metrics())

    path: the folder. Raises `RlcliError` if it is not a run's.
    """

    def __init__(self, folder: str | Path) -> None:
        from rlcli.launch.resume import find_record

        self.path = find_record(folder)

    def __repr__(self) -> str:
        progress = f"{self.state}, step {self.step} of {self.steps}"
        rewards = [reward for reward in self.metrics().get("reward/mean", []) if reward is not None]
        return f"Run({str(self.path)!r}): {progress}" + (f", reward {rewards[-1]:.3f}" if rewards else "")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def state(self) -> State:
        """`alive`; else how its last attempt ended: `finished`, `stopped`, `failed`, or `killed` if it recorded no
        end."""
        from rlcli.runs.listing import state_of

        return state_of(self.path)

    @property
    def step(self) -> int:
        """Steps done so far, of `steps`."""
        from rlcli.runs.listing import run_at

        return int(run_at(self.path).step)

    @property
    def steps(self) -> int:
        from rlcli.runs.listing import run_at

        return run_at(self.path).steps

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, section → key → value: `run.config["train"]["lr"]`."""
        from rlcli.runs.listing import config_of

        return config_of(self.path)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The run's events, oldest first: `event`, `time` in seconds since 1970, and further entries of each."""
        from rlcli.runs.folder import events_of

        return events_of(self.path)

    @property
    def evaluations(self) -> dict[int, dict[str, Any]]:
        """Step → report of each evaluation during the run: `run.evaluations[50]["pass"]["pass@1"]["mean"]`."""
        from rlcli.runs.record_files import evaluations_of

        return evaluations_of(self.path)

    @property
    def notes(self) -> list[str]:
        """Lines of text about records that cannot be read; the other properties leave these out."""
        from rlcli.runs.run_data import RunData

        return RunData(self.path).damage()

    def metrics(self) -> Columns:
        """The metrics of each step as columns (docs/metrics.md), None where a step lacks one. Step 0 is the evaluation
        before training."""
        from rlcli.runs.record_files import metrics_of

        return _columns([_with_nonfinite(line) for line in metrics_of(self.path)])

    def samples(self, step: int | None = None, *, evaluation: bool = False) -> Columns:
        """The samples of a step as columns, one row a response; of the last step that has any by default.

        `messages` are the messages of a conversation, `parts` the named parts of its reward. `advantage` and `reward`,
        the shaped score, are those of training, in the step `trained_step`; None if the sample was left out.
        evaluation: samples of the evaluation after that step, which have none of these. Files that cannot be read are
        left out with a Python warning. Raises `RlcliError` if there are no samples.
        """
        from rlcli.data.sample_files import schema
        from rlcli.runs.run_data import RunData, add_training

        data, kind = RunData(self.path), EVALUATIONS if evaluation else SAMPLES
        data.refresh()
        last = next((number for number in reversed(data.steps(kind)) if data.files(number, kind=kind)), 0)
        last = last if step is None else step
        if not data.files(last, kind=kind):
            available = _ranges([number for number in data.steps(kind) if data.files(number, kind=kind)])
            message = (
                f"{self.path} has no samples of " + ("an evaluation after " if evaluation else "") + f"step {last}"
            )
            raise RlcliError(message, f"there are those of step {available}" if available else "no step has any")
        rows = data.rows(last, schema().names, kind)
        known = {} if evaluation else data.advantages(last)
        for row in rows:
            row["messages"] = _parsed(row["messages"])
            if not evaluation:
                add_training(row, known)
        for note in data.notes:
            if note.startswith(kind):
                warnings.warn(f"{self.path}: {note}", stacklevel=2)
        if not rows:
            raise RlcliError(f"the samples of step {last} in {self.path} cannot be read", "see another step")
        return {name: [row[name] for row in rows] for name in rows[0]}


def _with_nonfinite(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics with NaN and infinities, which JSON lacks, in their places."""
    nonfinite = line.get("nonfinite")
    values = {name: float(text) for name, text in nonfinite.items()} if isinstance(nonfinite, dict) else {}
    return {name: value for name, value in (line | values).items() if name != "nonfinite"}


def _columns(lines: list[dict[str, Any]]) -> Columns:
    """The lines' values by name; a column with a float has floats only."""
    names = dict.fromkeys(name for line in lines for name in line)
    columns = {name: [line.get(name) for line in lines] for name in names}
    for name, values in columns.items():
        if any(isinstance(value, float) for value in values):
            columns[name] = [float(value) if isinstance(value, int) else value for value in values]
    return columns


def _ranges(steps: list[int]) -> str:
    """
    >>> _ranges([1, 2, 3, 7])
    '1 to 3, 7'
    """
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], step]
        else:
            spans.append([step, step])
    return ", ".join(f"{first} to {last}" if last > first else str(first) for first, last in spans)


def _parsed(messages: str | None) -> Any:
    """Messages from their JSON; a text that is not JSON is returned unchanged."""
    with suppress(ValueError, RecursionError):
        return json.loads(messages or "null")
    return messages
