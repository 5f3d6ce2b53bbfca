"""The folder of an evaluation: its settings and every finished sample, so that a second call generates only the rest.

evaluation.json         the settings that a sample depends on
NAME.parquet            the samples of dataset NAME, once complete
parts/NAME.*.parquet    samples as they finished
report.json             the output of `--json`, once complete
logs/                   logs of the workers
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.data.sample_files import NEEDED, check_rows, schema, write_table
from rlcli.errors import ConfigError, DataError, RlcliError
from rlcli.runs.folder import evaluation_folder, write_json
from rlcli.support.reading import check_regular, read_json

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
SETTINGS, REPORT, PARTS, LOCK = "evaluation.json", "report.json", "parts", ".evaluation.lock"
SPLITS = ("test", "train", "validation", "valid", "val", "dev", "eval")


class EvalStore:
    """An evaluation folder, locked by this process.

    with EvalStore.open(Path("evals/first"), settings, {"gsm8k": fingerprint}) as store:
        store.samples("gsm8k")      # a table, or None
        store.pattern("gsm8k")      # where new samples go: …/parts/gsm8k.0001.rank-{rank}-{part}.parquet
        store.finish("gsm8k")       # one file of them
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"

    @classmethod
    @contextmanager
    def open(
        cls,
        path: Path,
        settings: Mapping[str, Any],
        datasets: Mapping[str, str],
        force: bool = False,
        *,
        shared: bool = False,
    ) -> Iterator[EvalStore]:
        """Create or reopen the folder, and lock it.

        settings: those that samples depend on, by names that the user knows. datasets: name → fingerprint of its
        prompts; more datasets may be added to an existing folder. force: discard existing samples if the settings
        differ; with equal settings, discard only those of datasets whose prompts differ. shared: permissions of a new
        folder follow the umask. Raises `ConfigError` that names the differences, or if the origin of existing samples
        is unknown, and `RlcliError` if another process uses the folder.
        """
        path = evaluation_folder(path, shared=shared)
        with _locked(path):
            store = cls(path)
            previous = settings_of(path)
            if not previous and ((path / PARTS).exists() or any(path.glob("*.parquet"))):
                raise ConfigError(f"--out {path} holds parquet files of unknown origin", "give another folder")
            known = dict(previous.get("datasets", {}))
            differing = _differences(previous.get("settings", settings), settings)
            changed = [name for name, mark in datasets.items() if known.get(name, mark) != mark]
            if (differing or changed) and not force:
                differing += [f"dataset {name} has different prompts" for name in changed]
                raise ConfigError(
                    f"--out {path} holds samples of another evaluation: {'; '.join(differing)}",
                    "give another folder, or discard those samples with --force",
                )
            for name in [*known] if differing else changed:
                store._remove(name)
                del known[name]
            content = {"format": FORMAT, "settings": dict(settings), "datasets": {**known, **datasets}}
            write_json(path / SETTINGS, content)
            yield store

    def samples(self, name: str, columns: Sequence[str] | None = None) -> pa.Table | None:
        """The distinct samples of a dataset, or None if there are none. columns: those to read, including prompt_id and
        sample; None: all."""
        import pyarrow as pa

        merged = self.path / f"{name}.parquet"
        files = [*([merged] if merged.exists() else []), *self._parts(name)]
        tables = [read_samples(file, columns) for file in files]
        return _distinct(pa.concat_tables(tables)) if tables else None

    def holds(self, name: str) -> bool:
        """True if the folder has samples of a dataset."""
        return (self.path / f"{name}.parquet").exists() or bool(self._parts(name))

    def pattern(self, name: str) -> str:
        """A new file pattern for samples at each call; writers fill in `{rank}` and `{part}`."""
        earlier = [int(file.name.removeprefix(f"{name}.")[:4]) for file in self._parts(name)]
        number = max(earlier, default=0) + 1
        return str(self.path / PARTS / f"{name}.{number:04d}.rank-{{rank}}-{{part}}.parquet")

    def finish(self, name: str) -> None:
        """Merge the parts, ordered by prompt and sample. Does nothing if there are none."""
        parts = self._parts(name)
        if parts:
            write_table(self.path / f"{name}.parquet", self.samples(name))
            for part in parts:
                part.unlink()
        parts_folder = self.path / PARTS
        if parts_folder.is_dir() and not any(parts_folder.glob("*.parquet")):
            shutil.rmtree(parts_folder)  # including partial files left by a kill

    def _parts(self, name: str) -> list[Path]:
        # Not by glob: a name may contain glob characters, or start like another one.
        files = [*(self.path / PARTS).iterdir()] if (self.path / PARTS).is_dir() else []
        shape = re.compile(re.escape(name) + r"\.\d{4}\.rank-\d+-\d+\.parquet")
        return sorted(file for file in files if shape.fullmatch(file.name))

    def _remove(self, name: str) -> None:
        """Remove the samples of a dataset. Their settings are removed only when all samples are gone: after a kill in
        between, the rest must not count as samples of the next settings."""
        for file in (*self._parts(name), self.path / f"{name}.parquet", self.path / REPORT):
            file.unlink(missing_ok=True)


def settings_of(path: Path) -> dict[str, Any]:
    """The contents of evaluation.json in the folder `path`; empty if there is none. Raises `DataError` if it cannot be
    read."""
    file = path / SETTINGS
    try:
        content = read_json(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}", "give another folder with --out") from None
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or not {"settings", "datasets"} <= content.keys()
    ):
        raise DataError(f"{file} was written by another version of rlcli", "give another folder with --out")
    return content


def read_samples(file: Path, columns: Sequence[str] | None = None, *, links: bool = False) -> pa.Table:
    """A table of samples with the current columns, or the requested ones; a column that the file lacks, or that another
    version wrote in another type, is null. Raises `DataError` if that is one of `NEEDED`, and `UnfitFile`. links: allow
    the file to be a link."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_regular(file, links=links)
        with pq.ParquetFile(file) as opened:
            check_rows(file, opened.metadata)
            stored = opened.schema_arrow.names
            table = opened.read(None if columns is None else [name for name in columns if name in stored])
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file} cannot be read as parquet: {str(error).rstrip('. '):.200}",
            "remove it; its samples are then generated again",
        ) from error
    missing = [name for name in NEEDED if name not in stored]
    if missing:
        raise DataError(f"{file} holds no samples: it has no column '{missing[0]}'", "give a file that rlcli wrote")
    fields = [field for field in schema() if columns is None or field.name in columns]
    columns_read = []
    for field in fields:
        try:
            column = table.column(field.name) if field.name in stored else pa.nulls(len(table))
            columns_read.append(column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            if field.name in NEEDED:
                why = f"its column '{field.name}' is {column.type}, not {field.type}"
                raise DataError(f"{file} is of another version: {why}", "give a file that rlcli wrote") from None
            columns_read.append(pa.nulls(len(table), field.type))
    return pa.table(columns_read, schema=pa.schema(fields))


def _distinct(table: pa.Table) -> pa.Table:
    """Each (prompt, sample) once, ordered by `prompt_order` of the prompt id, then by sample."""
    ids, samples = table.column("prompt_id").to_pylist(), table.column("sample").to_pylist()
    rows = {key: row for row, key in enumerate(zip(ids, samples, strict=True))}
    positions = {name: prompt_order(name) for name in set(ids)}
    order = sorted(rows, key=lambda key: (positions[key[0]], key[1]))
    return table.take([rows[key] for key in order])


def prompt_order(name: str) -> tuple[str, int]:
    """Sort key of a prompt id: by dataset, then by row.

    >>> prompt_order("openai/gsm8k:test:12")
    ('openai/gsm8k:test', 12)
    """
    source, _, row = name.rpartition(":")
    return (source, int(row)) if row.isdecimal() else (name, 0)


def dataset_names(paths: Sequence[str], flag: str = "--data", split: str = "test") -> list[str]:
    """A short, readable, unique name for each dataset that is valid as a file name. Raises `ConfigError` for a dataset
    that `flag` gives twice.

    >>> dataset_names(["data/gsm8k", "data/math/test.parquet", "mine/gsm8k", "aime.parquet"])
    ['data-gsm8k', 'math', 'mine-gsm8k', 'aime']
    """
    resolved = [Path(path).expanduser().resolve() for path in paths]
    files = [path if path.suffix == ".parquet" else path / f"{split}.parquet" for path in resolved]
    twice = [path for number, path in enumerate(paths) if files[number] in files[:number]]
    if twice:
        raise ConfigError(f"{flag} {twice[0]} is given twice", "give each dataset once")
    words = [_words(path, split) for path in resolved]
    longest = max(map(len, words), default=0)
    word_counts = [1] * len(paths)

    def named() -> list[str]:
        names = ["-".join(path_words[-count:]) for path_words, count in zip(words, word_counts, strict=True)]
        return [re.sub(r"[^\w.-]+", "-", name).strip(".-") or "data" for name in names]

    for _ in range(longest):
        names = named()
        if len({name.lower() for name in names}) == len(names):
            return names
        lower = [name.lower() for name in names]
        word_counts = [count + (lower.count(name) > 1) for count, name in zip(word_counts, lower, strict=True)]
    return [f"{name}-{number}" for number, name in enumerate(named(), 1)]


def _words(path: Path, split: str) -> list[str]:
    """The words for a name, used from the end: `math` for data/math/test.parquet, `math-train` for its train file."""
    parts = [part for part in path.parts if part != path.anchor]
    if path.suffix != ".parquet":
        return parts
    if path.stem == split and len(parts) > 1:
        return parts[:-1]
    if path.stem in SPLITS and len(parts) > 1:
        return [*parts[:-2], f"{parts[-2]}-{path.stem}"]
    return [*parts[:-1], path.stem]


def _differences(previous: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} = {shown(previous.get(name))}, now {shown(settings.get(name))}"
        for name in {**previous, **settings}
        if previous.get(name) != settings.get(name)
    ]


def shown(value: object) -> str:
    """A setting as shown to the user; a fingerprint is shortened.

    >>> shown(0.5), shown("0123456789abcdef0123456789abcdef")
    ('0.5', '01234567…')
    """
    text = str(value)
    return f"{text[:8]}…" if re.fullmatch(r"[0-9a-f]{32,40}", text) else text


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = f"--out {path} is in use by another evaluation"
            raise RlcliError(why, "wait for it, or give another folder") from None
        yield
    finally:
        os.close(lock)
