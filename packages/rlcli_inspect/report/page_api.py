"""The API of the pages: a name and parameters in, a JSON object out; the same for `rlcli view` and for a report."""

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
MAX_NAMES = 30
"""Metrics in one answer."""


class Api:
    """Answers queries about several runs; thread-safe."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self.runs = list(runs)
        self.names = names_of([run.folder for run in self.runs])
        self.news = 0
        """Counter of updates: it grows whenever a run has new records."""
        self._lock = threading.Lock()
        self._answers: dict[str, Callable[[RunData, Mapping[str, str]], object]] = {
            "overview": lambda run, query: overview.overview(run),
            "series": lambda run, query: overview.series(run, query.get("names", "").split(",")[:MAX_NAMES]),
            "samples": lambda run, query: sample_queries.samples(
                run, sample_queries.Filter.of(query), query.get("cursor", "")
            ),
            "group": lambda run, query: sample_details.group(run, *_group_key(query)),
            "sample": lambda run, query: sample_details.sample(run, *_group_key(query), _integer(query, "sample", 0)),
            "prompt": lambda run, query: sample_queries.visits(
                run, sample_queries.kind_of(query), query.get("prompt", ""), query.get("cursor", "")
            ),
            "time": lambda run, query: _time(run, query),
        }
        self._cache: dict[tuple[str, int], tuple[int, object]] = {}
        self._thumbnails = [Thumbnails(run.folder) for run in self.runs]

    def answer(self, name: str, query: Mapping[str, str]) -> object:
        """The answer to `name`; `query["run"]` is the index of the run, 0 if missing. RlcliError if there is none."""
        if name == "compare":
            return self._slow(name, 0, lambda: comparison_of(self.runs))
        if name == "signals":
            run = self._run(query)
            return self._slow(name, self.runs.index(run), lambda: signals_of(run))
        if name == "image":  # may be large: without the lock
            thumbnails = self._thumbnails[self.runs.index(self._run(query))]
            return thumbnails.answer(query.get("digest", ""), query.get("where", ""), query.get("large") == "1")
        with self._lock:
            self.news += sum(run.refresh() for run in self.runs)
            if name == "index":
                return self.index()
            if name == "state":
                return {"news": self.news, "runs": [state_of(run) for run in self.runs]}
            if name not in self._answers:
                raise RlcliError(f"no such page: {name!r:.50}", "see /")
            return self._answers[name](self._run(query), query)

    def _run(self, query: Mapping[str, str]) -> RunData:
        number = _integer(query, "run", 0)
        if not 0 <= number < len(self.runs):
            raise RlcliError(f"no run {number}", f"there are {len(self.runs)}")
        return self.runs[number]

    def _slow(self, name: str, number: int, answer: Callable[[], object]) -> object:
        """An answer that takes seconds: computed without the lock, so that other requests are not blocked, and cached
        until a run has new records."""
        with self._lock:
            self.news += sum(run.refresh() for run in self.runs)
            news, (cached_news, cached) = self.news, self._cache.get((name, number), (-1, None))
        if cached_news != news:
            cached = answer()
            self._cache[name, number] = news, cached
        return cached

    def index(self) -> dict[str, object]:
        """Data that the pages need at their start."""
        from rlcli.types import Outcome

        return {
            "rlcli": rlcli.__version__,
            "news": self.news,
            "runs": [state_of(run) | {"name": name} for name, run in zip(self.names, self.runs, strict=True)],
            "compare": len(self.runs) == 2,
            "outcomes": [str(outcome) for outcome in Outcome],
            "finish_reasons": FINISH_REASONS,
        }


def state_of(run: RunData) -> dict[str, object]:
    """The name and progress of a run, and which pages have data."""
    steps, evaluations, timeline = run.steps(), run.steps("evaluations"), run.timeline.steps()
    return {
        "name": run.name,
        "state": run.state,
        "step": run.metrics.steps[-1] if run.metrics.steps else 0,
        "samples": [len(steps), *steps[:1], *steps[-1:]],
        "evaluations": [len(evaluations), *evaluations[:1], *evaluations[-1:]],
        "time": [len(timeline), *timeline[:1], *timeline[-1:]],
    }


def signals_of(run: RunData) -> dict[str, object]:
    """The signals of a run; none if they cannot be computed, with the reason as `error`."""
    from rlcli_inspect.signals.panel import panel_of

    try:
        return {"signals": [signal.as_dict() for signal in panel_of(run.folder)]}
    except RlcliError as error:
        return {"signals": [], "error": str(error)}


def comparison_of(runs: Sequence[RunData]) -> dict[str, object]:
    """The comparison of two runs; if it is not possible, the reason as `error`."""
    from rlcli_inspect.report.comparison import compare

    if len(runs) != 2:
        return {"error": f"two runs can be compared, not {len(runs)}"}
    try:
        return compare(runs[0].folder, runs[1].folder).as_dict()
    except RlcliError as error:
        return {"error": str(error)}


def as_json(answer: object) -> str:
    """JSON that every browser reads: NaN and infinities as null, half surrogates replaced.

    >>> as_json({"a": math.nan, "b": "\\ud800"})
    '{"a":null,"b":"?"}'
    """
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    try:
        text = encoder.encode(answer)
    except ValueError:  # rare, and the copy takes longer than the rest
        text = encoder.encode(_finite(answer))
    return text.encode(errors="replace").decode()


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _time(run: RunData, query: Mapping[str, str]) -> dict[str, object]:
    """The lanes of a step (the newest if none is given), and its neighbours."""
    steps = run.timeline.steps()
    if not steps:
        return {"step": None, "lanes": []}
    step = _integer(query, "step", steps[-1])
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


def lanes_of(line: Mapping[str, Any]) -> list[dict[str, object]]:
    """The lanes of a line of timeline.jsonl, without spans that are not [name, begin, end]."""
    lanes = line.get("lanes")
    result: list[dict[str, object]] = []
    for lane in lanes if isinstance(lanes, list) else ():
        spans = lane.get("spans") if isinstance(lane, dict) else None
        if isinstance(spans, list):
            valid_spans = [[str(span[0]), *map(float, span[1:])] for span in spans if _is_span(span)]
            result.append({"name": str(lane.get("name", "")), "spans": valid_spans})
    return result


def _is_span(span: object) -> bool:
    if not isinstance(span, list) or len(span) != 3:
        return False
    return all(isinstance(end, int | float) and math.isfinite(end) for end in span[1:])


def _group_key(query: Mapping[str, str]) -> tuple[Kind, int, str, int | None]:
    group = _integer(query, "group") if query.get("group") else None
    return sample_queries.kind_of(query), _integer(query, "step"), query.get("prompt", ""), group


def _integer(query: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = query.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise RlcliError(f"{name} is {text!r:.50}", "give a whole number") from None
