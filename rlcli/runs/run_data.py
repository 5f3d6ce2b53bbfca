"""Reads the folder of a run, alive or finished, in pieces and columns. Damaged files are left out with a note.

    run = RunData(Path("runs/gsm8k"))
    run.refresh()                                  # again to read what a live run has added
    run.metrics.points("reward/mean")              # [(1, 0.25), (2, 0.5), …]
    table = run.table(12, ["prompt_id", "score"])  # a pyarrow.Table of these columns alone
    run.notes                                      # what could not be read

Nothing is written into the folder and no lock is held, so a run in progress does not notice.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlcli.data.sample_files import check_rows
from rlcli.data.step_files import ADVANTAGES, advantages_schema, tokens_schema
from rlcli.runs.folder import EVENTS, METRICS, TIMELINE, check_is_run
from rlcli.runs.growing_files import GrowingFile, Metrics, Records, Timeline
from rlcli.runs.listing import config_of, state_of
from rlcli.support.files import read_object
from rlcli.support.reading import UnfitFile, check_regular, parse_toml, read_text

if TYPE_CHECKING:
    import pyarrow as pa

Kind = Literal["samples", "evaluations"]
_OF_STEP = re.compile(r"step-(\d+)(\.json|\.rank-.*\.parquet)?")
_NUMBERS = re.compile(r"\d+")
MOST_NOTES = 50
WAITED = 4
"""Number of later steps whose files may have the advantage of a sample."""
Key = tuple[str, int, int]
"""Identifies a sample within its step: prompt_id, group (0 in runs of an older rlcli), sample."""


class RunData:
    """A run's folder. Files are read on demand; `refresh` reads what a live run has added."""

    def __init__(self, folder: Path) -> None:
        """RlcliError if there is no folder, or it has no file that a run writes."""
        self.folder = folder
        self.name = folder.resolve().name
        self.metrics = Metrics(folder / METRICS)
        self.timeline = Timeline(folder / TIMELINE)
        self._events = Records(folder / EVENTS)
        self._notes: dict[str, None] = {}
        self._step_folders: dict[Kind, _StepFolders] = {
            kind: _StepFolders(folder / kind) for kind in ("samples", "evaluations")
        }
        check_is_run(folder)

    def refresh(self) -> bool:
        """Read what the run has added to its records. Returns True if there was anything new."""
        changes = [file.refresh() for file in self._files()]
        changes += [folders.refresh() for folders in self._step_folders.values()]
        return any(changes)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The run's events, oldest first."""
        return self._events.records

    @property
    def notes(self) -> list[str]:
        """Lines of text about what could not be read so far."""
        lines = [note for file in self._files() for note in file.notes()]
        folders = [
            f"{each.path.name} cannot be read: {each.error}" for each in self._step_folders.values() if each.error
        ]
        return [*lines, *folders, *self._notes]

    def damage(self) -> list[str]:
        """Lines of text about the records that cannot be read. Reads them all."""
        self.refresh()
        self.config()
        self.evaluations()
        return self.notes

    @property
    def state(self) -> str:
        """alive, finished, stopped, failed or killed."""
        return state_of(self.folder)

    def config(self) -> dict[str, Any]:
        """The sections of config.toml, not validated; empty, with a note, if it cannot be read."""
        try:
            parse_toml(self.config_text())
        except ValueError as error:
            self.note(f"config.toml cannot be read: it is not TOML: {error}")
        return config_of(self.folder)

    def config_text(self) -> str:
        """config.toml as it is; empty, with a note, if it cannot be read."""
        try:
            return read_text(self.folder / "config.toml")
        except (OSError, UnicodeDecodeError) as error:
            self.note(f"config.toml cannot be read: {getattr(error, 'strerror', None) or 'it is not text in UTF-8'}")
            return ""

    def environment(self) -> dict[str, Any]:
        """environment.json: versions, machine, command; empty if it cannot be read."""
        return read_object(self.folder / "environment.json")

    def evaluations(self) -> dict[int, dict[str, Any]]:
        """Step → report of each evaluation."""
        reports = {}
        for step, path in sorted(self._step_folders["evaluations"].reports.items()):
            report = read_object(path)
            if report:
                reports[step] = report
            else:
                self.note(f"evaluations/{path.name} cannot be read")
        return reports

    def steps(self, kind: Kind = "samples") -> list[int]:
        """The steps that have files of samples, ascending."""
        return self._step_folders[kind].steps

    def files(self, step: int, pattern: str = "rank-", kind: Kind = "samples") -> list[Path]:
        """The parquet files of a step whose names begin with `pattern`, by number."""
        return self._step_folders[kind].files(step, pattern)

    def table(self, step: int, columns: Sequence[str], kind: Kind = "samples") -> pa.Table:
        """The samples of a step as a pyarrow.Table of `columns`, in the order of ranks. Columns that a file lacks are
        null, with a note if every rlcli writes them. Files that cannot be read are left out with a note."""
        import pyarrow as pa

        from rlcli.data.sample_files import NEEDED, schema

        known = schema()
        fields = [known.field(name) for name in columns]
        files = self.files(step, kind=kind)
        if not files and kind == "samples":
            self.advantages(step)  # a note if these were samples of this step, and not of an earlier one that waited
        tables = [self._columns(path, fields, NEEDED) for path in files]
        return pa.concat_tables([pa.schema(fields).empty_table(), *(table for table in tables if table is not None)])

    def rows(self, step: int, columns: Sequence[str], kind: Kind = "samples") -> list[dict[str, Any]]:
        """`table` as dicts; `parts` as a dict."""
        rows: list[dict[str, Any]] = self.table(step, columns, kind).to_pylist()
        for row in rows:
            if "parts" in row:
                row["parts"] = dict(row["parts"] or ())
        return rows

    def advantages(self, step: int) -> dict[Key, dict[str, Any]]:
        """Advantage, shaped reward, reason for being left out, and `trained_step` of the samples in the step's files.
        `trained_step` is later if the sample waited. Empty if there are none."""
        by_sample: dict[Key, dict[str, Any]] = {}
        for row in self._of_saved(step, ADVANTAGES, advantages_schema()):
            training = {name: row.get(name) for name in ("advantage", "reward", "left_out")}
            by_sample[key_of(row)] = training | {"trained_step": row.get("step")}
        self._note_missing(step, by_sample.keys())
        return by_sample

    def tokens(self, step: int) -> list[dict[str, Any]]:
        """The token columns of those samples in the step's files for which the run has kept them."""
        return self._of_saved(step, "tokens-", tokens_schema())

    def token_keys(self, step: int) -> set[Key]:
        """The samples in the step's files that have token columns, without reading the tokens."""
        fields = [tokens_schema().field(name) for name in ("prompt_id", "saved_step", "group", "sample")]
        return {key_of(row) for row in self._of_saved(step, "tokens-", fields)}

    def note(self, text: str) -> None:
        """Add a note, once."""
        if len(self._notes) < MOST_NOTES:
            self._notes[text] = None

    def _note_missing(self, step: int, trained: Set[Key]) -> None:
        """Note if samples that were trained on are in none of the step's files, though these can be read."""
        if not self.files(step):
            if trained:
                self.note(f"step {step} has no rank-*.parquet: its samples are missing")
            return
        rows = self.rows(step, ("prompt_id", "group", "sample"))
        missing = len(trained - {key_of(row) for row in rows})
        noted = any(note.startswith(f"samples/step-{step:06d}") for note in self._notes)
        if missing and not noted:
            self.note(f"step {step} has no file with {missing} of the {len(trained)} samples that were trained on")

    def _files(self) -> tuple[GrowingFile, ...]:
        return self.metrics.file, self._events.file, self.timeline.file

    def _columns(self, path: Path, fields: Sequence[pa.Field], needed: Sequence[str] = ()) -> pa.Table | None:
        import pyarrow as pa

        stored = self._open(path, [field.name for field in fields], needed)
        if stored is None:
            return None
        arrays = []
        for field in fields:
            try:
                column = stored.column(field.name) if field.name in stored.column_names else None
                arrays.append(pa.nulls(len(stored), field.type) if column is None else column.cast(field.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                self.note(f"{self._relative(path)}: column {field.name} has another type and is left out")
                arrays.append(pa.nulls(len(stored), field.type))
        return pa.table(arrays, schema=pa.schema(fields))

    def _of_saved(self, step: int, pattern: str, fields: Sequence[pa.Field]) -> list[dict[str, Any]]:
        """Rows about the samples in the files of `step`: from its own folder, and from those of the next steps, which
        trained on samples that had waited."""
        steps = self.steps()
        rows = [row for path in self.files(step, pattern) for row in self._read(path, fields)]
        saved_rows = [row for row in rows if (row.get("saved_step") or step) == step]
        begin = bisect_right(steps, step)
        for later_step in steps[begin : begin + WAITED]:
            for path in self.files(later_step, pattern):
                if self._least(path, "saved_step") <= step:
                    saved_rows += [row for row in self._read(path, fields) if row.get("saved_step") == step]
        return saved_rows

    def _least(self, path: Path, column: str) -> float:
        """The smallest value of a column by the file's statistics, without reading it; infinite if unknown."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            check_regular(path)
            with pq.ParquetFile(path) as file:
                field_index = file.schema_arrow.get_field_index(column)
                groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
                leaves = [
                    group.column(leaf) for group in groups for leaf in range(group.num_columns) if field_index >= 0
                ]
                statistics = [leaf.statistics for leaf in leaves if leaf.path_in_schema == column]
                minima = [each.min for each in statistics if each is not None and each.has_min_max]
                return min((value for value in minima if isinstance(value, int)), default=math.inf)
        except (OSError, pa.ArrowException):  # noted when the step's own samples are read
            return math.inf

    def _read(self, path: Path, fields: Sequence[pa.Field]) -> list[dict[str, Any]]:
        table = self._columns(path, fields)
        return [] if table is None else table.to_pylist()

    def _open(self, path: Path, columns: Sequence[str], needed: Sequence[str]) -> pa.Table | None:
        """The columns of a file that exist and can be read, None with a note if none can. It has all rows of the file
        whatever the columns, so that rows may be selected by some columns and shown with others. Adds a note if it
        lacks any of `needed`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            check_regular(path)
            with pq.ParquetFile(path) as file:
                check_rows(path, file.metadata)
                stored = file.schema_arrow.names
                wanted = [name for name in columns if name in stored]
                if missing := [name for name in needed if name not in stored]:
                    self.note(f"{self._relative(path)} is not as rlcli writes it: it lacks {', '.join(missing)}")
                try:
                    if wanted:  # ParquetFile.read([]) gives a table without rows
                        return file.read(wanted, use_threads=False)
                except (OSError, pa.ArrowException, ValueError):
                    self.note(f"{self._relative(path)} is damaged: some of its columns cannot be read")
                readable = {"_": pa.nulls(file.metadata.num_rows)}
                for name in wanted:
                    with suppress(OSError, pa.ArrowException, ValueError):
                        readable[name] = file.read([name], use_threads=False).column(name)
                return pa.table(readable)
        except (OSError, pa.ArrowException, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is damaged or incomplete"
            self.note(f"{self._relative(path)} cannot be read: {why}")
            return None

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


class _StepFolders:
    """The folder `samples` or `evaluations`: the steps that it has, by one scan for all, and the files of each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[int] = []
        self.reports: dict[int, Path] = {}
        self.error = ""
        self._folders: dict[int, Path] = {}
        self._flat: dict[int, list[Path]] = {}
        self._seen = -1

    def refresh(self) -> bool:
        try:
            seen = self.path.stat().st_mtime_ns
            if seen == self._seen:
                return False
            with os.scandir(self.path) as entries:
                self._scan(entries)
            self._seen, self.error = seen, ""
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            self.error = error.strerror or str(error)
        return True

    def files(self, step: int, pattern: str) -> list[Path]:
        folder = self._folders.get(step)
        flat = [path for path in self._flat.get(step, ()) if f".{pattern}" in path.name]
        if folder is None:
            return flat
        try:
            names = [name for name in os.listdir(folder) if name.startswith(pattern) and name.endswith(".parquet")]
        except OSError:
            return flat
        return [*(folder / name for name in sorted(names, key=_by_number)), *flat]

    def _scan(self, entries: Iterable[os.DirEntry[str]]) -> None:
        self._folders, self._flat, self.reports = {}, {}, {}
        for entry in entries:
            if not (match := _OF_STEP.fullmatch(entry.name)):
                continue
            step, path = int(match[1]), self.path / entry.name
            if entry.is_symlink():
                raise UnfitFile(path, "is a link", "put the file or folder itself there")
            if match[2] is None:
                self._folders[step] = path
            elif match[2] == ".json":
                self.reports[step] = path
            else:
                self._flat.setdefault(step, []).append(path)
        for paths in self._flat.values():
            paths.sort(key=lambda path: _by_number(path.name))
        self.steps = sorted(self._folders.keys() | self._flat.keys())


def names_of(folders: Sequence[Path]) -> list[str]:
    """Labels for the runs in these folders: their names, with the parent's if two are equal.

    >>> names_of([Path("/a/run"), Path("/b/run")]), names_of([Path("/a/run"), Path("/a/run")])
    (['a/run', 'b/run'], ['a/run (1)', 'a/run (2)'])
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
    return names if len(set(names)) == len(names) else [f"{name} ({number})" for number, name in enumerate(names, 1)]


def key_of(row: dict[str, Any]) -> Key:
    """The key of a row of samples, advantages or tokens."""
    return str(row.get("prompt_id")), int(row.get("group") or 0), int(row.get("sample") or 0)


def add_training(row: dict[str, Any], known: Mapping[Key, Mapping[str, Any]]) -> None:
    """Add the trainer's columns of the sample: advantage, shaped reward, and the reason why it was left out."""
    training = known.get(key_of(row), {})
    for name in ("advantage", "reward", "trained_step"):
        row[name] = training.get(name)
    row["left_out"] = training.get("left_out") or row["left_out"]


def _by_number(name: str) -> list[int]:
    return [int(number) for number in _NUMBERS.findall(name)]
