"""Parquet files of samples, with one row per response, the same for training and for evaluation."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from rlcli.errors import RunFailed
from rlcli.images.image_descriptions import described
from rlcli.support.files import filled_path, replacing, sync_file, sync_folder
from rlcli.support.reading import UnfitFile
from rlcli.types import Prompt, Verdict

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

MOST_ROWS = 10_000_000
"""Rows of a file of samples: one with more was not written by a run, and does not fit into memory."""
NEEDED = ("prompt_id", "sample", "outcome", "score")
"""Columns without which a row is no sample."""
_NUMBERS = re.compile(r"\d+")
PART_EVERY_S = 1.0
PART_SHARE = 0.01
"""A part is written a second after the previous one, later after one hundredth of the writer's lifetime, so that a
long evaluation does not write a file for every second."""


@dataclass(frozen=True, slots=True)
class LogProbSummary:
    """Mean and minimum of the log-probs of a sample's response tokens, in nats."""

    mean: float
    least: float

    @classmethod
    def of(cls, log_probs: np.ndarray) -> LogProbSummary | None:
        """None for a response without tokens."""
        return cls(float(log_probs.mean()), float(log_probs.min())) if len(log_probs) else None


class SampleRow(TypedDict):
    """One row of a file of samples, without its step (see `sample_row`)."""

    prompt_id: str
    """Id of the prompt."""
    sample: int
    """Index within the prompt's group; -1: the greedy response."""
    prompt: str
    """Content of the prompt's last message."""
    response: str
    """The response; in a conversation its last turn."""
    ground_truth: str
    """Reference answer of the prompt."""
    answer: str | None
    """The answer that the verifier read."""
    score: float
    """Score of the verdict."""
    outcome: str
    """Outcome of the verification."""
    detail: str
    """Detail of the verdict."""
    parts: dict[str, float]
    """Parts of the reward by name."""
    extra: dict[str, str] | None
    """Values that the verifier logs of the response, by name."""
    verify_s: float
    """Seconds of the verification."""
    prompt_tokens: int | None
    """Tokens of the prompt."""
    response_tokens: int | None
    """Response tokens, of all turns."""
    finish_reason: str
    """Why the response ended: "stop" or "length", or as a served model has it."""
    version: int | None
    """Policy version of the first response token."""
    newest_version: int | None
    """Policy version of the last response token."""
    turns: int
    """Turns of the policy."""
    mean_log_prob: float | None
    """Mean log-prob of the response tokens, in nats."""
    min_log_prob: float | None
    """Minimum of these."""
    perplexity: float | None
    """exp(-mean log-prob)."""
    left_out: str | None
    """Why the response is excluded from the loss and from its group's statistics."""
    ended: str | None
    """Why the conversation ended."""
    messages: str
    """All messages, as JSON."""
    turn_rewards: list[float] | None
    """Rewards of the turns by the environment."""
    group: int | None
    """Number of the group among those that the step generated."""
    images: Sequence[Mapping[str, object]] | None
    """Size and digest of each image of the prompt."""
    problem: str
    """Equal for rows of the dataset that pose the same problem (`Prompt.problem`)."""


def sample_row(
    prompt: Prompt,
    sample: int,
    response: str,
    verdict: Verdict,
    *,
    prompt_tokens: int | None,
    response_tokens: int | None,
    finish_reason: str,
    log_probs: LogProbSummary | None = None,
    version: int | None = None,
    newest_version: int | None = None,
    turns: int = 1,
    left_out: str = "",
    ended: str | None = None,
    messages: Sequence[Mapping[str, object]] = (),
    turn_rewards: Sequence[float] = (),
    group: int | None = None,
) -> SampleRow:
    """One row. Values unknown for a served model's response (its log-probs, the tokens of its prompt) are None.

    sample: index within the prompt's group; -1 is the greedy response. response_tokens, log_probs: of the tokens that
    the policy generated, in all its `turns`. response: its last turn. messages: of a conversation; else those of the
    prompt and the response are written, as JSON. Of a conversation, ended: why; turn_rewards: what the environment gave
    for each turn. version, newest_version: how many weight syncs the engine had seen at the first and at the last of
    them. The perplexity is exp(-mean log-prob). left_out: why this response by itself is excluded from the loss and
    from its group's statistics (timeout, crash, truncated); empty, and so None in the row, if it is not. group: number
    of the group among those that the step generated, or of the prompt in an evaluation. The row's `images` are the
    sizes and the digests of the prompt's images; None if it has none. Its `problem` is equal for rows of the dataset
    that pose the same one (`Prompt.problem`). Its `extra` is what the verifier logs of the response, by name; None if
    that is nothing.
    """
    return {
        "prompt_id": prompt.id,
        "sample": sample,
        "prompt": prompt.messages[-1]["content"],
        "response": response,
        "ground_truth": prompt.ground_truth,
        "answer": verdict.answer,
        "score": verdict.score,
        "outcome": str(verdict.outcome),
        "detail": verdict.detail,
        "parts": dict(verdict.parts),
        "extra": dict(verdict.extra) or None,
        "verify_s": verdict.latency_s,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "finish_reason": finish_reason,
        "version": version,
        "newest_version": newest_version,
        "turns": turns,
        "mean_log_prob": log_probs.mean if log_probs else None,
        "min_log_prob": log_probs.least if log_probs else None,
        "perplexity": math.exp(-log_probs.mean) if log_probs else None,
        "left_out": left_out or None,
        "ended": ended,
        "messages": json.dumps(
            list(messages) or [*prompt.messages, {"role": "assistant", "content": response}], ensure_ascii=False
        ),
        "turn_rewards": list(turn_rewards) or None,
        "group": group,
        "images": described(prompt.images) or None,
        "problem": prompt.problem(with_extra_info=ended is not None),
    }


def is_conversation(row: Mapping[str, object]) -> bool:
    """Return whether a row is of a conversation with an environment or an agent. (Every row has messages.)

    >>> is_conversation({"turns": 1, "ended": None}), is_conversation({"turns": 1, "ended": "done"})
    (False, True)
    """
    turns = row.get("turns")
    return (isinstance(turns, int | float) and turns > 1) or row.get("ended") is not None


@cache
def schema() -> pa.Schema:
    """The columns, with explicit types: otherwise a part without any answer would have no type for `answer`."""
    import pyarrow as pa

    text, integer, number = pa.string(), pa.int64(), pa.float64()
    return pa.schema(
        [
            ("step", integer),
            ("prompt_id", text),
            ("sample", integer),
            ("prompt", text),
            ("response", text),
            ("ground_truth", text),
            ("answer", text),
            ("score", number),
            ("outcome", text),
            ("detail", text),
            ("parts", pa.map_(text, number)),
            ("extra", pa.map_(text, text)),
            ("verify_s", number),
            ("prompt_tokens", integer),
            ("response_tokens", integer),
            ("finish_reason", text),
            ("version", integer),
            ("newest_version", integer),
            ("turns", integer),
            ("mean_log_prob", number),
            ("min_log_prob", number),
            ("perplexity", number),
            ("left_out", text),
            ("ended", text),
            ("messages", text),
            ("turn_rewards", pa.list_(number)),
            ("group", integer),
            ("images", pa.list_(pa.struct([("digest", text), ("width", integer), ("height", integer)]))),
            ("problem", text),
        ]
    )


def check_rows(file: Path, metadata: pq.FileMetaData) -> None:
    """UnfitFile if a file of samples has more rows than any run writes. metadata: of the parquet file."""
    if metadata.num_rows > MOST_ROWS:
        raise UnfitFile(file, f"has {metadata.num_rows:,} rows, more than {MOST_ROWS:,}", "give a file of samples")


def sample_files(room: Path, step: int) -> list[Path]:
    """The files of samples that the workers of a run wrote for one step, sorted by rank. room: the run's `samples` or
    `evaluations` folder. In runs that an older rlcli started, they are in that folder itself, with the step as a
    prefix of their name: it is listed only for a step without files in its own folder. Raises `UnfitFile` if the
    step's folder is a link."""
    step_name = f"step-{step:06d}"
    if (room / step_name).is_symlink():
        raise UnfitFile(room / step_name, "is a link", "put the folder itself there")
    files = [*(room / step_name).glob("rank-*.parquet")] or [*room.glob(f"{step_name}.rank-*.parquet")]
    return sorted(
        files, key=lambda path: [int(number) for number in _NUMBERS.findall(path.name.removeprefix(step_name))]
    )


def write_samples(path: Path, step: int, rows: Sequence[SampleRow]) -> None:
    """Write `rows`, each from `sample_row`, like `write_table`, with a column `step`."""
    import pyarrow as pa

    write_table(path, pa.Table.from_pylist([{"step": step, **row} for row in rows], schema=schema()))


def write_table(path: Path, table: pa.Table, group_rows: int | None = None) -> None:
    """Write a table of samples atomically; the file and its name are on disk when this returns. group_rows: of a row
    group, if they are large. Raises RunFailed if it cannot be written."""
    import pyarrow.parquet as pq

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            pq.write_table(table, temporary, row_group_size=group_rows)
            sync_file(temporary)
        sync_folder(path.parent)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise RunFailed(f"cannot write {path}: {why}", "free space there, or give another folder") from error


class PartWriter:
    """Writes rows to separate files as they arrive, so that a kill loses unfinished rows and, at most, a second of
    finished ones (see PART_SHARE).

    pattern: their path, with `{part}` for the number of each.
    """

    def __init__(self, pattern: str, step: int) -> None:
        self._pattern, self._step = pattern, step
        self._rows: list[SampleRow] = []
        self._number = 0
        self._began = self._wrote = time.monotonic()

    def add(self, row: SampleRow) -> None:
        """Add one row, and write the pending ones when it is time."""
        self._rows.append(row)
        now = time.monotonic()
        if now - self._wrote >= max(PART_EVERY_S, PART_SHARE * (now - self._began)):
            self.flush()

    def flush(self) -> None:
        """Write the pending rows."""
        if self._rows:
            path = Path(filled_path(self._pattern, "part", f"{self._number:06d}"))
            write_samples(path, self._step, self._rows)
            self._rows = []
            self._number += 1
        self._wrote = time.monotonic()
