"""What the pages ask of the runs: a name and parameters in, an object for JSON out. The same for `rlcli view` and for a
report."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rlcli
from rlcli.errors import RlcliError
from rlcli.runs.run_data import Kind, RunData, names_of
from rlcli_inspect.report import overview, sample_details, sample_queries
from rlcli_inspect.report.page_images import Thumbnails

FINISH_REASONS = ("stop", "length")
MOST_NAMES = 30
"""Metrics in one answer."""


class Api:
    """Answers about several runs; may be called from several threads."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self.runs = list(runs)
        self.names = names_of([run.folder for run in self.runs])
        self.news = 0
        """Grows whenever a run has recorded something."""
        self._lock = threading.Lock()
        self._answers: dict[str, Callable[[RunData, Mapping[str, str]], Any]] = {
            "overview": lambda run, given: overview.overview(run),
            "series": lambda run, given: overview.series(run, given.get("names", "").split(",")[:MOST_NAMES]),
            "samples": lambda run, given: sample_queries.samples(
                run, sample_queries.Filter.of(given), given.get("cursor", "")
            ),
            "group": lambda run, given: sample_details.group(run, *_of_group(given)),
            "sample": lambda run, given: sample_details.sample(run, *_of_group(given), _whole(given, "sample", 0)),
            "prompt": lambda run, given: sample_queries.visits(
                run, sample_queries.kind_of(given), given.get("prompt", ""), given.get("cursor", "")
            ),
            "time": lambda run, given: _time(run, given),
        }
        self._kept: dict[tuple[str, int], tuple[int, Any]] = {}
        self._thumbnails = [Thumbnails(run.folder) for run in self.runs]

    def answer(self, what: str, given: Mapping[str, str]) -> Any:
        """The answer to `what`; `given["run"]` is the index of the run, 0 if missing. RlcliError if there is none."""
        if what == "compare":
            return self._slow(what, 0, lambda: comparison_of(self.runs))
        if what == "signals":
            run = self._run(given)
            return self._slow(what, self.runs.index(run), lambda: signals_of(run))
        if what == "picture":  # it may be large: without the lock
            thumbnails = self._thumbnails[self.runs.index(self._run(given))]
            return thumbnails.answer(given.get("digest", ""), given.get("where", ""), given.get("large") == "1")
        with self._lock:
            self.news += sum(run.refresh() for run in self.runs)
            if what == "index":
                return self.index()
            if what == "state":
                return {"news": self.news, "runs": [state_of(run) for run in self.runs]}
            if what not in self._answers:
                raise RlcliError(f"no such page: {what!r:.50}", "see /")
            return self._answers[what](self._run(given), given)

    def _run(self, given: Mapping[str, str]) -> RunData:
        number = _whole(given, "run", 0)
        if not 0 <= number < len(self.runs):
            raise RlcliError(f"no run {number}", f"there are {len(self.runs)}")
        return self.runs[number]

    def _slow(self, what: str, number: int, answer: Callable[[], Any]) -> Any:
        """An answer that takes seconds: without the lock, so that the other pages go on, and kept until there is news
        of a run."""
        with self._lock:
            self.news += sum(run.refresh() for run in self.runs)
            news, (of, kept) = self.news, self._kept.get((what, number), (-1, None))
        if of != news:
            kept = answer()
            self._kept[what, number] = news, kept
        return kept

    def index(self) -> dict[str, Any]:
        """What the pages need at their start."""
        from rlcli.types import Outcome

        return {
            "rlcli": rlcli.__version__,
            "news": self.news,
            "runs": [state_of(run) | {"name": name} for name, run in zip(self.names, self.runs, strict=True)],
            "compare": len(self.runs) == 2,
            "outcomes": [str(outcome) for outcome in Outcome],
            "finish_reasons": FINISH_REASONS,
        }


def state_of(run: RunData) -> dict[str, Any]:
    """The name of a run, how far it is, and which pages have something to show."""
    steps, evaluations, timeline = run.steps(), run.steps("evaluations"), run.timeline.steps()
    return {
        "name": run.name,
        "state": run.state,
        "step": run.metrics.steps[-1] if run.metrics.steps else 0,
        "samples": [len(steps), *steps[:1], *steps[-1:]],
        "evaluations": [len(evaluations), *evaluations[:1], *evaluations[-1:]],
        "time": [len(timeline), *timeline[:1], *timeline[-1:]],
    }


def signals_of(run: RunData) -> dict[str, Any]:
    """The signals of a run; none if they cannot be computed, with the reason as `error`."""
    from rlcli_inspect.signals.panel import panel_of

    try:
        return {"signals": [signal.as_dict() for signal in panel_of(run.folder)]}
    except RlcliError as error:
        return {"signals": [], "error": str(error)}


def comparison_of(runs: Sequence[RunData]) -> dict[str, Any]:
    """The comparison of two runs; what prevents it as `error`."""
    from rlcli_inspect.report.comparison import compare

    if len(runs) != 2:
        return {"error": f"two runs can be compared, not {len(runs)}"}
    try:
        return compare(runs[0].folder, runs[1].folder).as_dict()
    except RlcliError as error:
        return {"error": str(error)}


def as_json(answer: Any) -> str:
    """JSON that every browser reads: NaN and infinities as null, half surrogates replaced.

    >>> as_json({"a": math.nan, "b": "\\ud800"})
    '{"a":null,"b":"?"}'
    """
    options: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False, "default": str}
    try:
        text = json.dumps(answer, **options)
    except ValueError:  # rare, and the copy takes longer than the rest
        text = json.dumps(_finite(answer), **options)
    return text.encode(errors="replace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _time(run: RunData, given: Mapping[str, str]) -> dict[str, Any]:
    """The lanes of a step (the newest if none is given), and its neighbours."""
    steps = run.timeline.steps()
    if not steps:
        return {"step": None, "lanes": []}
    step = _whole(given, "step", steps[-1])
    line = run.timeline.line(step)
    if line is None:
        raise RlcliError(f"step {step} has no times", f"there are times of steps {steps[0]} to {steps[-1]}")
    return {
        "step": step,
        "start": line.get("start"),
        "lanes": lanes_of(line),
        "previous": max((other for other in steps if other < step), default=None),
        "next": min((other for other in steps if other > step), default=None),
    }


def lanes_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lanes of a line of timeline.jsonl, without spans that are not [name, begin, end]."""
    lanes = line.get("lanes")
    found = []
    for lane in lanes if isinstance(lanes, list) else ():
        spans = lane.get("spans") if isinstance(lane, dict) else None
        if isinstance(spans, list):
            kept = [[str(span[0]), *map(float, span[1:])] for span in spans if _is_span(span)]
            found.append({"name": str(lane.get("name", "")), "spans": kept})
    return found


def _is_span(span: Any) -> bool:
    if not isinstance(span, list) or len(span) != 3:
        return False
    return all(isinstance(end, int | float) and math.isfinite(end) for end in span[1:])


def _of_group(given: Mapping[str, str]) -> tuple[Kind, int, str, int | None]:
    group = _whole(given, "group") if given.get("group") else None
    return sample_queries.kind_of(given), _whole(given, "step"), given.get("prompt", ""), group


def _whole(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = given.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise RlcliError(f"{name} is {text!r:.50}", "give a whole number") from None
