"""Verify the responses in a JSON Lines file (`rlcli verifiers run`)."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

from rlcli.errors import DataError
from rlcli.rewards.processes.scoring_pool import ScoringPool, in_order
from rlcli.rewards.service.shared_rows import ROW_FIELDS
from rlcli.support.files import replacing
from rlcli.support.reading import DATA_LINE_BYTES, ENCODING_BYTES, bounded_lines, check_encoding, not_utf8
from rlcli.support.redact import printable_json
from rlcli.types import UNVERIFIED, Message, Verdict, VerifyRequest

STANDARD = "-"
"""The path for standard input or output."""

REQUIRED = {"completion": "the response, as text", "ground_truth": "the right answer, as text"}

OURS = (*REQUIRED, "prompt", "data_source", "extra_info", "finish_reason", "thinking")
"""Fields of a row that are read here; a verifier finds the others in `extra_info`, as those of a dataset."""

OnProgress = Callable[[str, int, int], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One line: its fields, and the request made from them."""

    fields: Mapping[str, object]
    request: VerifyRequest


@dataclass
class Summary:
    """Totals of many verifications."""

    rows: int = 0
    """Number of verifications."""
    score: float = 0.0
    """Sum of the scores."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Rows by outcome."""
    parts: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and number of rows of each part."""
    seconds: array[float] = field(default_factory=lambda: array("d"))
    """Latency of each verification."""
    failures: list[str] = field(default_factory=list)
    """Details of the first three without a verdict (`UNVERIFIED`)."""

    @property
    def verified(self) -> int:
        """Rows with a verdict."""
        return self.rows - sum(self.outcomes[outcome] for outcome in UNVERIFIED)

    def add(self, verdict: Verdict) -> None:
        """Count one verdict."""
        self.rows += 1
        self.score += verdict.score
        self.outcomes[str(verdict.outcome)] += 1
        self.seconds.append(verdict.latency_s)
        for name, part in verdict.parts.items():
            total, count = self.parts.get(name, (0.0, 0))
            self.parts[name] = (total + part, count + 1)
        if verdict.outcome in UNVERIFIED and len(self.failures) < 3:
            self.failures.append(verdict.detail)


class RowFile:
    """The rows of a JSON Lines file (`-`: standard input; .gz: unpacked), parsed again in each iteration: memory holds
    one of them. skipped: how many bad lines are left out.

    A row is an object with `completion` and `ground_truth`, and may have `prompt` (text or chat messages),
    `data_source`, `extra_info`, `finish_reason` ("stop" or "length") and `thinking` (true: the prompt ended within an
    open <think>); all other fields are kept, and a verifier finds them in `extra_info`. Empty lines are skipped.
    Raises `DataError` with file, line and hint, unless `skip_bad`; always for a file that cannot be read or has no row.
    """

    def __init__(self, path: str, skip_bad: bool = False) -> None:
        self._path, self._skip_bad = path, skip_bad
        self._standard: BufferedRandom | None = None
        if path == STANDARD:  # it can be read only once
            self._standard = tempfile.TemporaryFile()  # noqa: SIM115 - it lasts as long as this object
            shutil.copyfileobj(sys.stdin.buffer, self._standard)
        self.skipped = 0
        self._rows = sum(1 for _ in self._parsed(self._count_skipped))
        if not self._rows:
            raise DataError(f"{_name(path)} has no row to verify", "give one JSON object per line")

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[Row]:
        return self._parsed(lambda: None)

    def _count_skipped(self) -> None:
        self.skipped += 1

    def _parsed(self, on_skipped: Callable[[], None]) -> Iterator[Row]:
        for number, line in _lines(self._path, self._standard):
            try:
                yield _row(line)
            except ValueError as error:
                if not self._skip_bad:
                    raise DataError(
                        f"{_name(self._path)}, line {number}: {error}",
                        "fix that line, or skip such lines with --skip-bad",
                    ) from error
                on_skipped()


def read_rows(path: str, skip_bad: bool = False) -> tuple[list[Row], int]:
    """The rows of a file that fits in memory, and how many bad lines were skipped. Raises like `RowFile`."""
    rows = RowFile(path, skip_bad)
    return list(rows), rows.skipped


def verify_rows(
    verifier: str,
    rows: Collection[Row] | RowFile,
    pool: ScoringPool,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Iterator[tuple[Row, Verdict]]:
    """The verdict on each row, in the order of the rows. A verifier that reads the responses to a prompt together gets
    those in a row that have one prompt and the same other fields."""

    def submitted() -> Iterator[tuple[Row, Future[Verdict]]]:
        done = 0
        for group in _groups(rows) if verifier in pool.grouped else ([row] for row in rows):
            on_progress("verify", done, len(rows))
            yield from zip(group, pool.submit_together(verifier, [row.request for row in group]), strict=True)
            done += len(group)

    return ((row, verdict) for (row, _), verdict in in_order(submitted(), lambda pair: pair[1]))


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows one after another that are responses to one prompt; a row without a prompt is alone."""
    group: list[Row] = []
    for row in rows:
        if group and not (row.request.prompt and _source(row) == _source(group[0])):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _source(row: Row) -> tuple[object, ...]:
    return tuple(getattr(row.request, name) for name in ROW_FIELDS)


def as_fields(row: Row, verdict: Verdict) -> dict[str, object]:
    """An output row: the input and its verdict."""
    result: dict[str, object] = {
        "score": verdict.score,
        "outcome": str(verdict.outcome),
        "extracted": verdict.answer,
        "seconds": round(verdict.latency_s, 6),
    }
    if verdict.parts:
        result["parts"] = dict(verdict.parts)
    if verdict.extra:
        result["extra"] = dict(verdict.extra)
    if verdict.detail:
        result["detail"] = verdict.detail
    return {**row.fields, **result}


@contextmanager
def writing(path: str) -> Iterator[Callable[[Mapping[str, object]], None]]:
    """A function that writes one row to `path` (`-`: standard output; .gz: packed). The file is written atomically."""
    if path == STANDARD:
        sys.stdout.flush()
        yield lambda fields: _write(sys.stdout.buffer, fields)
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, temporary.open("wb") as raw:
            if target.suffix == ".gz":
                with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
                    yield lambda fields: _write(packed, fields)
            else:
                yield lambda fields: _write(raw, fields)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}", "give a writable folder with free space"
        ) from error


def _write(stream: BinaryIO | gzip.GzipFile, fields: Mapping[str, object]) -> None:
    stream.write(printable_json(json.dumps(fields, ensure_ascii=False)).encode() + b"\n")


def _lines(path: str, standard: BufferedRandom | None) -> Iterator[tuple[int, bytes]]:
    """The non-empty lines, counted from 1. standard: what was read from standard input, if `path` names it."""
    try:
        with _open(path, standard) as stream:
            check_encoding(stream.peek(ENCODING_BYTES)[:ENCODING_BYTES], _name(path))
            for number, line in enumerate(bounded_lines(stream, _name(path), DATA_LINE_BYTES), start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:  # a .gz that is truncated, or not a .gz
        why = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {_name(path)}: {why}", "give a JSON Lines file (.jsonl or .jsonl.gz)") from error


@contextmanager
def _open(path: str, standard: BufferedRandom | None) -> Iterator[BufferedRandom | BufferedReader | gzip.GzipFile]:
    if standard is not None:
        standard.seek(0)
        yield standard
        return
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as stream:
        yield stream


def _row(line: bytes) -> Row:
    """Parse a line. Raises `ValueError` with a description of the error in it."""
    try:
        fields = json.loads(line.decode("utf-8-sig").rstrip(), parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} (character {error.colno})") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"it is not a JSON object but {_kind(fields)}")
    for name, description in REQUIRED.items():
        if not isinstance(fields.get(name), str):
            problem = f"is {_kind(fields[name])}" if name in fields else "is missing"
            raise ValueError(f"'{name}', {description}, {problem}")
    columns = {name: value for name, value in fields.items() if name not in OURS}
    source, extra = _optional(fields, "data_source", str, ""), columns | _optional(fields, "extra_info", dict, {})
    reason, thinking = _optional(fields, "finish_reason", str, ""), _optional(fields, "thinking", bool, False)
    request = VerifyRequest(
        fields["completion"],
        fields["ground_truth"],
        _messages(fields),
        source,
        extra,
        finish_reason="length" if reason == "length" else "stop" if reason else "",  # servers have further values
        thinking=thinking,
    )
    return Row(fields, request)


def _optional(fields: Mapping[str, object], name: str, kind: type[T], default: T) -> T:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        expected: dict[type, str] = {str: "text", bool: "true or false"}
        wanted = expected.get(kind, "an object")
        raise ValueError(f"'{name}' is {_kind(value)}, and should be {wanted}")
    return default if value is None else value


def _messages(fields: Mapping[str, object]) -> tuple[Message, ...]:
    prompt = fields.get("prompt")
    if prompt is None:
        return ()
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in prompt
    ):
        raise ValueError("'prompt' must be text or a list of messages with role and content as text")
    return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names: Iterable[tuple[type, str]] = ((bool, "a boolean"), (str, "text"), (dict, "an object"), (list, "a list"))
    return next((name for kind, name in names if isinstance(value, kind)), "a number")


def _name(path: str) -> str:
    return "standard input" if path == STANDARD else path
