"""The folder of an evaluation: what it was asked, and every finished sample, so that a second call generates the rest.

evaluation.json         the settings that a sample depends on
NAME.parquet            the samples of dataset NAME, once all are there
parts/NAME.*.parquet    samples as they finished
report.json             what `--json` prints, once it is whole
logs/                   of the workers
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlcli.data.samples import schema, write_table
from rlcli.errors import ConfigError, DataError, RlcliError
from rlcli.trainer.run_folder import evaluation_folder, write_json

FORMAT = 1
SETTINGS, REPORT, PARTS, HELD = "evaluation.json", "report.json", "parts", ".evaluation.lock"
SPLITS = ("test", "train", "validation", "valid", "val", "dev", "eval")


class EvalStore:
    """A folder that this process holds. settings: as they were when its first sample was generated.

    with EvalStore.open(Path("evals/first"), settings, {"gsm8k": fingerprint}) as store:
        store.samples("gsm8k")      # a table, or None
        store.pattern("gsm8k")      # where new samples go: …/parts/gsm8k.0001.rank-{rank}-{part}.parquet
        store.finish("gsm8k")       # one file of them
    """

    def __init__(self, path: Path, held: int) -> None:
        self.path = path
        self.logs = path / "logs"
        self._held = held

    @classmethod
    def open(
        cls, path: Path, settings: Mapping[str, Any], datasets: Mapping[str, str], force: bool = False
    ) -> EvalStore:
        """Make or take up the folder, and hold it.

        settings: what a sample depends on, by names that the user knows. datasets: name → fingerprint of its prompts;
        further ones may be added to a folder, with no harm to those that it has. force: begin again where the settings
        are others than those of the samples there, or, with the same settings, only with datasets whose prompts are.
        Raises `ConfigError` that names what differs, and `RlcliError` where another process evaluates into it or nobody
        knows what the samples there are of.
        """
        path = evaluation_folder(path)
        store = cls(path, _hold(path))
        try:
            before = settings_of(path)
            if not before and store._has_samples():
                raise ConfigError(f"--out {path} holds parquet files of another origin", "give another folder")
            known = dict(before.get("datasets", {}))
            differing = _differences(before.get("settings", settings), settings)
            others = [name for name, mark in datasets.items() if known.get(name, mark) != mark]
            if (differing or others) and not force:
                differing += [f"dataset {name} has other prompts" for name in others]
                raise ConfigError(
                    f"--out {path} holds samples of another evaluation: {'; '.join(differing)}",
                    "give another folder, or throw those samples away with --force",
                )
            for name in [*known] if differing else others:
                store._remove(name)
                del known[name]
            write_json(
                path / SETTINGS, {"format": FORMAT, "settings": dict(settings), "datasets": {**known, **datasets}}
            )
        except BaseException:
            store.close()
            raise
        return store

    def samples(self, name: str, columns: Sequence[str] | None = None) -> Any:
        """The samples of a dataset, each once: a pyarrow table, or None where there are none. columns: which, with
        prompt_id and sample among them; None: all."""
        import pyarrow as pa

        whole = self.path / f"{name}.parquet"
        files = [*([whole] if whole.exists() else []), *self._parts(name)]
        tables = [read_samples(file, columns) for file in files]
        return _distinct(pa.concat_tables(tables)) if tables else None

    def holds(self, name: str) -> bool:
        """Whether there are samples of a dataset."""
        return (self.path / f"{name}.parquet").exists() or bool(self._parts(name))

    def pattern(self, name: str) -> str:
        """Where writers put new samples; `{rank}` and `{part}` are theirs to fill in. Another one at each call."""
        earlier = [int(file.name.removeprefix(f"{name}.")[:4]) for file in self._parts(name)]
        number = max(earlier, default=0) + 1
        return str(self.path / PARTS / f"{name}.{number:04d}.rank-{{rank}}-{{part}}.parquet")

    def finish(self, name: str) -> None:
        """Put the parts together, ordered by prompt and sample. Harmless where there are none."""
        parts = self._parts(name)
        if parts:
            write_table(self.path / f"{name}.parquet", self.samples(name))
            for part in parts:
                part.unlink()
        room = self.path / PARTS
        if room.is_dir() and not any(room.glob("*.parquet")):
            shutil.rmtree(room)  # with what a kill has left half written

    def write_report(self, report: Mapping[str, Any]) -> None:
        """What `--json` prints."""
        write_json(self.path / REPORT, report)

    def close(self) -> None:
        """Let go of the folder. Again is harmless."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _parts(self, name: str) -> list[Path]:
        # Not by glob: a name may hold what glob takes for a pattern, or begin as another does.
        found = [*(self.path / PARTS).iterdir()] if (self.path / PARTS).is_dir() else []
        shape = re.compile(re.escape(name) + r"\.\d{4}\.rank-\d+-\d+\.parquet")
        return sorted(file for file in found if shape.fullmatch(file.name))

    def _has_samples(self) -> bool:
        return (self.path / PARTS).exists() or any(self.path.glob("*.parquet"))

    def _remove(self, name: str) -> None:
        """Remove the samples of a dataset. What they are of is forgotten only when all are gone: a kill in between
        must not leave some that are taken for those of the next settings."""
        for file in (*self._parts(name), self.path / f"{name}.parquet", self.path / REPORT):
            file.unlink(missing_ok=True)


def settings_of(path: Path) -> dict[str, Any]:
    """What evaluation.json in the folder `path` says; empty where there is none. Raises `DataError` where it cannot be
    read."""
    file = path / SETTINGS
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}", "give another folder with --out") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not {"settings", "datasets"} <= found.keys():
        raise DataError(f"{file} is of another version of rlcli", "give another folder with --out")
    return found


def read_samples(file: Path, columns: Sequence[str] | None = None) -> Any:
    """A table of samples with the columns of today, or those asked for; one that a file lacks is null. Raises
    `DataError`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            there = opened.schema_arrow.names
            table = opened.read(None if columns is None else [name for name in columns if name in there])
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file} cannot be read as parquet: {str(error).rstrip('. '):.200}",
            "remove it, and its samples are generated again",
        ) from error
    missing = [name for name in ("prompt_id", "sample", "outcome", "score") if name not in there]
    if missing:
        raise DataError(f"{file} holds no samples: it has no column '{missing[0]}'", "give a file that rlcli wrote")
    fields = [field for field in schema() if columns is None or field.name in columns]
    found = [table.column(field.name) if field.name in there else pa.nulls(len(table)) for field in fields]
    return pa.table(
        [column.cast(field.type) for column, field in zip(found, fields, strict=True)], schema=pa.schema(fields)
    )


def _distinct(table: Any) -> Any:
    """Each (prompt, sample) once, ordered: by prompt as `prompt_order` reads its id, then by sample."""
    ids, samples = table.column("prompt_id").to_pylist(), table.column("sample").to_pylist()
    rows = {key: row for row, key in enumerate(zip(ids, samples, strict=True))}
    places = {name: prompt_order(name) for name in set(ids)}
    order = sorted(rows, key=lambda key: (places[key[0]], key[1]))
    return table.take([rows[key] for key in order])


def prompt_order(name: str) -> tuple[str, int]:
    """
    >>> prompt_order("openai/gsm8k:test:12")
    ('openai/gsm8k:test', 12)
    """
    source, _, row = name.rpartition(":")
    return (source, int(row)) if row.isdecimal() else (name, 0)


def dataset_names(paths: Sequence[str], flag: str = "--data", split: str = "test") -> list[str]:
    """A name for each dataset: short, readable, of its own, and good as a file's name. Raises `ConfigError` for one
    that is given twice by `flag`.

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
    taken = [1] * len(paths)

    def named() -> list[str]:
        names = ["-".join(own[-count:]) for own, count in zip(words, taken, strict=True)]
        return [re.sub(r"[^\w.-]+", "-", name).strip(".-") or "data" for name in names]

    for _ in range(longest):
        names = named()
        if len({name.lower() for name in names}) == len(names):
            return names
        lower = [name.lower() for name in names]
        taken = [count + (lower.count(name) > 1) for count, name in zip(taken, lower, strict=True)]
    return [f"{name}-{number}" for number, name in enumerate(named(), 1)]


def _words(path: Path, split: str) -> list[str]:
    """What a name may be made of, the last word first needed: data/math/test.parquet is `math`, and its train `math`,
    `train`."""
    parts = [part for part in path.parts if part != path.anchor]
    if path.suffix != ".parquet":
        return parts
    if path.stem == split and len(parts) > 1:
        return parts[:-1]
    if path.stem in SPLITS and len(parts) > 1:
        return [*parts[:-2], f"{parts[-2]}-{path.stem}"]
    return [*parts[:-1], path.stem]


def _differences(before: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} = {shown(before.get(name))}, now {shown(settings.get(name))}"
        for name in {**before, **settings}
        if before.get(name) != settings.get(name)
    ]


def shown(value: object) -> str:
    """A setting for a reader: of a fingerprint, enough to see that it is another.

    >>> shown(0.5), shown("0123456789abcdef0123456789abcdef")
    ('0.5', '01234567…')
    """
    text = str(value)
    return f"{text[:8]}…" if re.fullmatch(r"[0-9a-f]{32,40}", text) else text


def _hold(path: Path) -> int:
    held = os.open(path / HELD, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise RlcliError(
            f"--out {path} is in use by another evaluation", "wait for it, or give another folder"
        ) from None
    return held
