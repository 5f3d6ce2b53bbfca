"""Finds samples: by filter in pages, and the visits to a prompt.

Steps are searched one after the other, newest first, until the page is full or the time for one answer is used up. The
answer then has a cursor to continue from. So a run of any length answers at once, and no index is kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from rlcli.errors import RlcliError
from rlcli.images.image_descriptions import descriptions, worded_last
from rlcli.runs.run_data import Kind, RunData, add_training, key_of
from rlcli_inspect.report.sample_details import (
    KEYS,
    LISTED,
    advantages_of,
    excerpt,
    short,
    taken,
    token_keys,
)

if TYPE_CHECKING:
    from pyarrow import Table

PAGE = 50
"""Samples in an answer."""
ANSWER_S = 0.6
"""Seconds that one search may take."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which samples to list; None and empty: all. text: in the prompt, a message or the answer, in any case of letters.
    low, high: bounds of the score; shortest, longest: of the drawn tokens; first, last: of the steps. tokens: only
    samples of which the run keeps tokens. oldest: oldest steps first."""

    kind: Kind = "samples"
    first: int | None = None
    last: int | None = None
    outcome: str = ""
    finish_reason: str = ""
    low: float | None = None
    high: float | None = None
    shortest: int | None = None
    longest: int | None = None
    prompt_id: str = ""
    text: str = ""
    left_out: bool = False
    tokens: bool = False
    oldest: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Filter:
        """From the parameters of a URL; unknown ones are ignored. RlcliError for a value that is no number."""
        kinds: dict[str, Callable[[str], Any]] = {
            "int | None": int,
            "float | None": float,
            "bool": lambda text: text in ("1", "true"),
            "str": str,
        }
        found: dict[str, Any] = {"kind": kind_of(given)}
        for field in fields(cls):
            if field.name != "kind" and given.get(field.name):
                try:
                    found[field.name] = kinds[str(field.type)](given[field.name])
                except ValueError:
                    raise RlcliError(f"{field.name} is {given[field.name]!r:.50}", "give a number") from None
        return cls(**found)

    def columns(self) -> list[str]:
        """The columns that decide, without the texts."""
        wanted = {
            "outcome": self.outcome,
            "finish_reason": self.finish_reason,
            "score": self.low is not None or self.high is not None,
            "response_tokens": self.shortest is not None or self.longest is not None,
            "prompt_id": self.prompt_id,
            "left_out": self.left_out,
        }
        return [name for name, needed in wanted.items() if needed]


def kind_of(given: Mapping[str, str]) -> Kind:
    """`samples` of training, or of `evaluations`."""
    return "evaluations" if given.get("kind") == "evaluations" else "samples"


def samples(run: RunData, wanted: Filter, cursor: str = "", limit: int = PAGE) -> dict[str, Any]:
    """A page: `rows`, how many steps were `searched` of `steps`, and the `cursor` of the next page (None: no more).

    cursor: `STEP.ROW`, where to continue. Adding steps to the run does not move it.
    """
    began = time.monotonic()
    steps = [s for s in run.steps(wanted.kind) if _within(s, wanted.first, wanted.last)]
    if not wanted.oldest:
        steps.reverse()
    at, start = _place(cursor)
    left = [step for step in steps if at is None or (step >= at if wanted.oldest else step <= at)]
    rows: list[dict[str, Any]] = []
    for done, step in enumerate(left):
        begin = start if step == at else 0
        if len(rows) >= limit or (done and time.monotonic() - began > ANSWER_S):
            return {"rows": rows, "cursor": f"{step}.{begin}", "searched": done, "steps": len(left)}
        found = _matching(run, wanted, step, begin)
        page = found[: limit - len(rows)]
        rows += _listed(run, wanted, step, page)
        if len(found) > len(page):
            return {"rows": rows, "cursor": f"{step}.{page[-1] + 1}", "searched": done, "steps": len(left)}
    return {"rows": rows, "cursor": None, "searched": len(left), "steps": len(left)}


def visits(run: RunData, kind: Kind, prompt_id: str, cursor: str = "") -> dict[str, Any]:
    """The steps in which a prompt occurs, oldest first: `[step, group, samples, passed, mean score]` of each, with a
    cursor as in `samples`."""
    import pyarrow.compute as pc

    began = time.monotonic()
    at, _ = _place(cursor)
    left = [step for step in run.steps(kind) if at is None or step >= at]
    found: list[tuple[int, int, int, int, float | None]] = []
    for done, step in enumerate(left):
        if done and time.monotonic() - began > ANSWER_S:
            return {"visits": found, "cursor": f"{step}.0", "searched": done, "steps": len(left)}
        table = run.table(step, ["prompt_id", "group", "score", "outcome"], kind)
        own = table.filter(pc.fill_null(pc.equal(table["prompt_id"], prompt_id), False)).to_pylist()
        for number in sorted({row["group"] or 0 for row in own}):
            rows = [row for row in own if (row["group"] or 0) == number]
            scores = [row["score"] for row in rows if row["score"] is not None]
            passed = sum(row["outcome"] == "ok" for row in rows)
            found.append((step, number, len(rows), passed, sum(scores) / len(scores) if scores else None))
    return {"visits": found, "cursor": None, "searched": len(left), "steps": len(left)}


def _matching(run: RunData, wanted: Filter, step: int, begin: int) -> list[int]:
    """The rows of a step, from `begin` on, that the filter keeps. Texts are read only of steps with such rows."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    table = run.table(step, wanted.columns() or ["sample"], wanted.kind)
    keep: Any = np.ones(len(table), dtype=bool)
    keep[:begin] = False
    for mask in _masks(table, wanted):
        keep &= pc.fill_null(mask, False).to_numpy(zero_copy_only=False).astype(bool)
    if wanted.text and keep.any():
        texts = run.table(step, ["prompt", "response", "answer", "messages"], wanted.kind).filter(pa.array(keep))
        places = np.flatnonzero(keep)
        keep = np.zeros(len(table), dtype=bool)
        keep[places[_contains(texts, wanted.text)]] = True
    if wanted.tokens and keep.any():
        known = token_keys(run, wanted.kind, step)
        rows = run.rows(step, KEYS, wanted.kind) if known else []
        keep &= np.array([key_of(row) in known for row in rows] or [False] * len(table), dtype=bool)
    return cast(list[int], np.flatnonzero(keep).tolist())


def _masks(table: Table, wanted: Filter) -> Iterator[Any]:
    import pyarrow.compute as pc

    for name in ("outcome", "finish_reason", "prompt_id"):
        if value := getattr(wanted, name):
            yield pc.equal(table[name], value)
    bounds = (("score", wanted.low, wanted.high), ("response_tokens", wanted.shortest, wanted.longest))
    for name, low, high in bounds:
        if low is not None:
            yield pc.greater_equal(table[name], low)
        if high is not None:
            yield pc.less_equal(table[name], high)
    if wanted.left_out:
        yield pc.is_valid(table["left_out"])


def _contains(texts: Table, wanted: str) -> Any:
    """Whether each row has the text, as a NumPy mask. In `messages` it is looked for as JSON writes it."""
    import numpy as np
    import pyarrow.compute as pc

    found: Any = np.zeros(len(texts), dtype=bool)
    for name in texts.column_names:
        needle = json.dumps(wanted, ensure_ascii=False)[1:-1] if name == "messages" else wanted
        mask = pc.match_substring(texts[name], needle, ignore_case=True)
        found |= pc.fill_null(mask, False).to_numpy(zero_copy_only=False).astype(bool)
    return found


def _listed(run: RunData, wanted: Filter, step: int, places: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of a list: texts as excerpts, around what was searched for, and the prompt's `images`."""
    if not places:
        return []
    known, tokens = advantages_of(run, wanted.kind, step), token_keys(run, wanted.kind, step)
    rows = []
    for row in taken(run, wanted.kind, step, (*KEYS, *LISTED, "prompt", "response", "images"), places):
        row["tokens"] = key_of(row) in tokens
        add_training(row, known)
        row["images"] = [one | {"where": row["prompt_id"]} for one in descriptions(row["images"])]
        row["prompt"] = excerpt(worded_last(row["prompt"] or "", row["images"]), wanted.text)
        row["response"] = excerpt(row["response"], wanted.text)
        row["answer"], row["ground_truth"] = short(row["answer"]), short(row["ground_truth"])
        rows.append({"step": step, **row})
    return rows


def _place(cursor: str) -> tuple[int | None, int]:
    """The step and row of a cursor. RlcliError if it is none."""
    if not cursor:
        return None, 0
    step, _, row = cursor.partition(".")
    try:
        return int(step), int(row or 0)
    except ValueError:
        raise RlcliError(f"the cursor {cursor!r:.50} is not STEP.ROW", "begin again without one") from None


def _within(step: int, first: int | None, last: int | None) -> bool:
    return (first is None or step >= first) and (last is None or step <= last)
