"""Finds samples: by filter in pages, and the visits to a prompt.

Steps are searched one after the other, newest first, until the page is full or the time for one answer is used up. The
answer then has a cursor to continue from. So a run of any length answers at once, and no index is kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rlcli.errors import RlcliError
from rlcli.images.image_descriptions import descriptions, worded_last
from rlcli.runs.run_data import Kind, RunData, add_training, key_of
from rlcli_inspect.report.sample_details import (
    KEYS,
    LISTED,
    advantages_of,
    excerpt,
    short,
    take,
    token_keys,
)

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from jaxtyping import Bool
    from pyarrow import Table

PAGE = 50
"""Samples of a page."""
ANSWER_S = 0.6
"""Seconds that one search may take."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter of samples. None and empty values select all."""

    kind: Kind = "samples"
    """Samples of training or of evaluations."""
    first: int | None = None
    """First step."""
    last: int | None = None
    """Last step."""
    outcome: str = ""
    """Outcome of the verification."""
    finish_reason: str = ""
    """Finish reason of the response."""
    low: float | None = None
    """Minimum score."""
    high: float | None = None
    """Maximum score."""
    shortest: int | None = None
    """Minimum of response tokens."""
    longest: int | None = None
    """Maximum of response tokens."""
    prompt_id: str = ""
    """Id of the prompt."""
    text: str = ""
    """Text in the prompt, a message or the answer, ignoring case."""
    left_out: bool = False
    """Only samples that do not train."""
    tokens: bool = False
    """Only samples with recorded tokens."""
    oldest: bool = False
    """Oldest steps first."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        """From the parameters of a URL; unknown ones are ignored. RlcliError for a value that is no number."""
        kinds: dict[str, Callable[[str], Any]] = {
            "int | None": int,
            "float | None": float,
            "bool": lambda text: text in ("1", "true"),
            "str": str,
        }
        values: dict[str, Any] = {"kind": kind_of(query)}
        for field in fields(cls):
            if field.name != "kind" and query.get(field.name):
                try:
                    values[field.name] = kinds[str(field.type)](query[field.name])
                except ValueError:
                    raise RlcliError(f"{field.name} is {query[field.name]!r:.50}", "give a number") from None
        return cls(**values)

    def columns(self) -> list[str]:
        """The columns that the filter reads, without texts."""
        wanted = {
            "outcome": self.outcome,
            "finish_reason": self.finish_reason,
            "score": self.low is not None or self.high is not None,
            "response_tokens": self.shortest is not None or self.longest is not None,
            "prompt_id": self.prompt_id,
            "left_out": self.left_out,
        }
        return [name for name, needed in wanted.items() if needed]


def kind_of(query: Mapping[str, str]) -> Kind:
    """`samples` of training, or of `evaluations`."""
    return "evaluations" if query.get("kind") == "evaluations" else "samples"


def samples(run: RunData, wanted: Filter, cursor: str = "", limit: int = PAGE) -> dict[str, object]:
    """A page: `rows`, how many steps were `searched` of `steps`, and the `cursor` of the next page (None: no more).

    cursor: `STEP.ROW`, where to continue. Adding steps to the run does not move it.
    """
    started = time.monotonic()
    steps = [s for s in run.steps(wanted.kind) if _within(s, wanted.first, wanted.last)]
    if not wanted.oldest:
        steps.reverse()
    at, start = _parse_cursor(cursor)
    remaining = [step for step in steps if at is None or (step >= at if wanted.oldest else step <= at)]
    rows: list[dict[str, Any]] = []
    for done, step in enumerate(remaining):
        begin = start if step == at else 0
        if len(rows) >= limit or (done and time.monotonic() - started > ANSWER_S):
            return {"rows": rows, "cursor": f"{step}.{begin}", "searched": done, "steps": len(remaining)}
        matching = _matching(run, wanted, step, begin)
        page = matching[: limit - len(rows)]
        rows += _listed(run, wanted, step, page)
        if len(matching) > len(page):
            return {"rows": rows, "cursor": f"{step}.{page[-1] + 1}", "searched": done, "steps": len(remaining)}
    return {"rows": rows, "cursor": None, "searched": len(remaining), "steps": len(remaining)}


def visits(run: RunData, kind: Kind, prompt_id: str, cursor: str = "") -> dict[str, object]:
    """The steps in which a prompt occurs, oldest first: `[step, group, samples, passed, mean score]` of each, with a
    cursor as in `samples`."""
    import pyarrow.compute as pc

    started = time.monotonic()
    at, _ = _parse_cursor(cursor)
    remaining = [step for step in run.steps(kind) if at is None or step >= at]
    result: list[tuple[int, int, int, int, float | None]] = []
    for done, step in enumerate(remaining):
        if done and time.monotonic() - started > ANSWER_S:
            return {"visits": result, "cursor": f"{step}.0", "searched": done, "steps": len(remaining)}
        table = run.table(step, ["prompt_id", "group", "score", "outcome"], kind)
        prompt_rows = table.filter(pc.fill_null(pc.equal(table["prompt_id"], prompt_id), False)).to_pylist()
        for number in sorted({row["group"] or 0 for row in prompt_rows}):
            rows = [row for row in prompt_rows if (row["group"] or 0) == number]
            scores = [row["score"] for row in rows if row["score"] is not None]
            passed = sum(row["outcome"] == "ok" for row in rows)
            result.append((step, number, len(rows), passed, sum(scores) / len(scores) if scores else None))
    return {"visits": result, "cursor": None, "searched": len(remaining), "steps": len(remaining)}


def _matching(run: RunData, wanted: Filter, step: int, begin: int) -> list[int]:
    """The rows of a step, from `begin` on, that the filter keeps. Texts are read only of steps with such rows."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    table = run.table(step, wanted.columns() or ["sample"], wanted.kind)
    keep: Bool[np.ndarray, " rows"] = np.ones(len(table), dtype=bool)
    keep[:begin] = False
    for mask in _masks(table, wanted):
        keep &= pc.fill_null(mask, False).to_numpy(zero_copy_only=False).astype(bool)
    if wanted.text and keep.any():
        texts = run.table(step, ["prompt", "response", "answer", "messages"], wanted.kind).filter(pa.array(keep))
        indices = np.flatnonzero(keep)
        keep = np.zeros(len(table), dtype=bool)
        keep[indices[_contains(texts, wanted.text)]] = True
    if wanted.tokens and keep.any():
        known = token_keys(run, wanted.kind, step)
        rows = run.rows(step, KEYS, wanted.kind) if known else []
        keep &= np.array([key_of(row) in known for row in rows] or [False] * len(table), dtype=bool)
    return [int(index) for index in np.flatnonzero(keep)]


def _masks(table: Table, wanted: Filter) -> Iterator[pa.ChunkedArray]:
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


def _contains(texts: Table, wanted: str) -> Bool[np.ndarray, " rows"]:
    """Mask of the rows with the text. In `messages` it is searched as JSON encodes it."""
    import numpy as np
    import pyarrow.compute as pc

    contains: Bool[np.ndarray, " rows"] = np.zeros(len(texts), dtype=bool)
    for name in texts.column_names:
        needle = json.dumps(wanted, ensure_ascii=False)[1:-1] if name == "messages" else wanted
        mask = pc.match_substring(texts[name], needle, ignore_case=True)
        contains |= pc.fill_null(mask, False).to_numpy(zero_copy_only=False).astype(bool)
    return contains


def _listed(run: RunData, wanted: Filter, step: int, indices: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of a list: texts as excerpts, around what was searched for, and the prompt's `images`."""
    if not indices:
        return []
    known, tokens = advantages_of(run, wanted.kind, step), token_keys(run, wanted.kind, step)
    rows = []
    for row in take(run, wanted.kind, step, (*KEYS, *LISTED, "prompt", "response", "images"), indices):
        row["tokens"] = key_of(row) in tokens
        add_training(row, known)
        row["images"] = [description | {"where": row["prompt_id"]} for description in descriptions(row["images"])]
        row["prompt"] = excerpt(worded_last(row["prompt"] or "", row["images"]), wanted.text)
        row["response"] = excerpt(row["response"], wanted.text)
        row["answer"], row["ground_truth"] = short(row["answer"]), short(row["ground_truth"])
        rows.append({"step": step, **row})
    return rows


def _parse_cursor(cursor: str) -> tuple[int | None, int]:
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
