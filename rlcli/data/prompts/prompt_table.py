"""The rows of a parquet file as columns: a row becomes a `Prompt` only on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, overload

from rlcli.data.prompts.image_columns import IMAGES, are_counts, image_column, image_counts, is_text_type, mapped
from rlcli.data.prompts.parquet_schema import JSON_FIELD, unpack_extra_info
from rlcli.data.prompts.unprepared_files import has_other_files, is_other_file, missing, raw_rows, unprepared
from rlcli.data.prompts.verl_rows import ground_truth_text, is_verls_style, verifier_of
from rlcli.errors import ConfigError, DataError
from rlcli.images.row_images import BadImage, content_text, load_images, marked
from rlcli.rewards.expression import Composition, parse
from rlcli.rewards.verifier_registry import of_row
from rlcli.support.reading import parse_json
from rlcli.types import Message, Prompt

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

REQUIRED = ("data_source", "prompt", "reward_model")
ROWS_AT_ONCE = 128
"""Rows that an iteration holds as Python objects. Few: a row may have megabytes of test cases."""
READ_AT_ONCE = 1 << 16
IMAGE_ROWS_AT_ONCE = 8
"""Rows with images that are read: the reader keeps some times as many, and more than 2 GiB at once cannot be."""
MAPPED_FROM = 64 << 20
"""Bytes of a file with images from which on they are not kept in memory."""
BUFFER = 1 << 20
MOST_VERIFIERS = 1000
"""Different verifiers that the rows of a file may name: each is loaded before the run."""


def read_sets(
    paths: Sequence[str], names: Sequence[str], split: str, verifier: str, limit: int = 0, *, verified: bool = True
) -> Sequence[Prompt]:
    """The prompts of one dataset, or of several as `JoinedPrompts`; the ids of these begin with their set's name, so
    that rows of two sets differ. limit: the first rows of each; 0: all. Raises like `read_prompts`."""
    if len(paths) == 1:
        return read_prompts(paths[0], split, verifier, verified=verified)[: limit or None]
    parts = [
        read_prompts(path, split, verifier, name, verified=verified) for path, name in zip(paths, names, strict=True)
    ]
    return JoinedPrompts([part[: limit or None] for part in parts], names)


def read_prompts(
    path: str | Path, split: str, verifier: str = "auto", label: str = "", *, verified: bool = True
) -> PromptTable:
    """The rows of a parquet file, or of `<split>.parquet` in a folder. Files made for verl work as well.

    verifier: an expression (see `scoring.expression`), in which "auto" stands for the verifier that each row names
    (`reward_model.style`), or that verl's table names for its `data_source`; without it the row's name is not read. A
    prompt's verifier is the resulting expression.
    A prompt's id is `data_source:split:row`, with rows counted from 0, after `label/` if one is given.
    verified: responses to the rows will be verified; if not, rows need not name a verifier, and have "" then.
    Every row is checked. Raises `DataError` that names the file, the column or the row, and the fix; `ConfigError` for
    an expression that cannot be parsed.
    """
    expression = parse(verifier).located()
    file = find_file(Path(path), split)
    origin = Origin(file, split, expression, _stamp(file), label, verified)
    table = PromptTable(_read(file), origin)
    table.check()
    return table


def find_file(path: Path, split: str) -> Path:
    """The parquet file of a split: `path` itself, or `<split>.parquet` in that folder. Raises `DataError`."""
    if path.is_file():
        if is_other_file(path):
            raise unprepared(path)
        return path
    if not path.exists():
        raise missing(path)
    file = path / f"{split}.parquet"
    if not file.is_file():
        if not any(path.glob("*.parquet")) and has_other_files(path):
            raise unprepared(path)
        files = sorted(other.name for other in path.glob("*.parquet") if other.is_file())
        existing = "a folder of that name" if file.is_dir() else ", ".join(files) or "no parquet file"
        raise DataError(
            f"data: {path} has no {split}.parquet (it has {existing})",
            f"give a parquet file, or make the folder with: rlcli prep NAME --out {path}",
        )
    return file


def _read(file: Path) -> pa.Table:
    """The wanted columns as a pyarrow table of short chunks: 2 GiB of text do not fit into one."""
    import pyarrow
    import pyarrow.parquet

    hint = "make the file with: rlcli prep NAME (rlcli prep list shows the names)"
    try:
        # Buffered: otherwise a column's part of a row group, which may have gigabytes, would be read at once.
        with pyarrow.parquet.ParquetFile(file, buffer_size=BUFFER) as parquet:
            columns: list[str] = parquet.schema_arrow.names
            lacking = [name for name in REQUIRED if name not in columns]
            if lacking:
                problem = f"has no column '{lacking[0]}' (it has {', '.join(columns)})"
                if raw_rows(columns):
                    raise unprepared(file, problem, columns)
                raise DataError(f"data: {file} {problem}", hint)
            images = image_column(parquet.schema_arrow)
            column_names = [name for name in (*REQUIRED, "ability", "extra_info", images) if name in columns]
            if not parquet.metadata.num_rows:
                raise DataError(f"data: {file} has no rows", hint)
            if not images:
                table = pyarrow.Table.from_batches(list(parquet.iter_batches(READ_AT_ONCE, columns=column_names)))
            elif file.stat().st_size < MAPPED_FROM:
                table = pyarrow.Table.from_batches(list(_few_at_once(parquet, column_names)))
            else:
                table = mapped(lambda: _few_at_once(parquet, column_names))
                pyarrow.default_memory_pool().release_unused()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data: {file} cannot be read as parquet: {str(error).rstrip('. '):.200}", hint) from error
    if images:
        table = table.rename_columns([IMAGES if name == images else name for name in table.column_names])
    for name in table.column_names:
        try:
            table.column(name).validate(full=True)
        except pyarrow.ArrowInvalid as error:
            raise DataError(
                f"data: {file}{_row_of_bad_text(table.column(name))}: '{name}' holds text that is not UTF-8",
                "store that row's text as UTF-8",
            ) from error
    return table


def _few_at_once(parquet: pq.ParquetFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Record batches of few rows. Of several row groups at once the reader would keep all that it has read."""
    for group in range(parquet.num_row_groups):
        yield from parquet.iter_batches(IMAGE_ROWS_AT_ONCE, row_groups=[group], columns=columns, use_threads=False)


def _row_of_bad_text(column: pa.ChunkedArray) -> str:
    for number in range(len(column)):
        try:
            column[number].as_py()
        except UnicodeDecodeError:
            return f", row {number} (the first is 0)"
    return ""


@dataclass(frozen=True)
class Origin:
    """The source of a table's rows."""

    file: Path
    """The parquet file."""
    split: str
    """Name of the split, for the rows' ids."""
    expression: Composition
    """Verifier expression for all rows."""
    stamp: tuple[int, int, int]
    """Inode, size and modification time of the file, before it was read."""
    label: str = ""
    """Prefix of the rows' ids."""
    verified: bool = True
    """True if responses to the rows will be verified; if not, rows need not name a verifier."""


def _stamp(file: Path) -> tuple[int, int, int]:
    """It changes when a file is written or replaced; zeros if there is no file."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns


class _PickledTable(TypedDict):
    """A pickled `PromptTable`."""

    stream: bytes
    """Its rows as an IPC stream of Arrow."""
    rest: tuple[Origin, np.ndarray, int]
    """Its other arguments: origin, rows and first."""


class PromptTable(Sequence[Prompt]):
    """Some rows of a parquet file, in their order. A slice is a view of the same table.

    table: a pyarrow table of the columns that `read_prompts` reads. rows: int64 `[rows]`, ascending, their indexes in
    the table; None: all of them. first: the number of the table's first row in the file.
    """

    def __init__(self, table: pa.Table, origin: Origin, rows: np.ndarray | None = None, first: int = 0) -> None:
        import numpy as np

        self.table, self.origin, self.first = table, origin, first
        self.row_indexes: np.ndarray = np.arange(len(table)) if rows is None else rows
        self._of_style = cache(lambda style: str(of_row(origin.expression, style)))
        self.has_images = IMAGES in table.column_names

    def __len__(self) -> int:
        return len(self.row_indexes)

    @overload
    def __getitem__(self, row: int) -> Prompt: ...
    @overload
    def __getitem__(self, row: slice) -> PromptTable: ...
    def __getitem__(self, row: int | slice) -> Prompt | PromptTable:
        if isinstance(row, slice):
            return self.take(range(len(self))[row])
        at = int(self.row_indexes[row])
        values = {name: self.table.column(name)[at].as_py() for name in self.table.column_names}
        return self._prompt(at, values)

    def __iter__(self) -> Iterator[Prompt]:
        if self.has_images and not are_counts(self.table.column(IMAGES)):
            yield from map(self.__getitem__, range(len(self)))  # one at a time, with its megabytes
            return
        for start in range(0, len(self), ROWS_AT_ONCE):
            indexes = self.row_indexes[start : start + ROWS_AT_ONCE].tolist()
            low = indexes[0]
            rows = self.table.slice(low, indexes[-1] - low + 1).to_pylist()
            yield from (self._prompt(at, rows[at - low]) for at in indexes)

    def __getstate__(self) -> _PickledTable:
        # A slice of a pyarrow table pickles the whole table; its IPC stream holds only the slice.
        import pyarrow

        low, high = (int(self.row_indexes[0]), int(self.row_indexes[-1]) + 1) if len(self) else (0, 0)
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, self.table.schema) as stream:
            stream.write_table(self.table.slice(low, high - low))
        return {"stream": sink.getvalue().to_pybytes(), "rest": (self.origin, self.row_indexes - low, self.first + low)}

    def __setstate__(self, state: _PickledTable) -> None:
        import pyarrow

        table = pyarrow.ipc.open_stream(state["stream"]).read_all()
        self.__init__(table, *state["rest"])  # type: ignore[misc]

    def take(self, rows: Sequence[int] | np.ndarray) -> PromptTable:
        """The rows at these positions, ascending."""
        import numpy as np

        selected = self.row_indexes[np.asarray(rows, np.int64)]
        return PromptTable(self.table, self.origin, selected, self.first)

    def without(self, column: str) -> PromptTable:
        """The same rows without an optional column. Without their images, the messages still have the markers."""
        if column == IMAGES and self.has_images:
            at = self.table.column_names.index(IMAGES)
            counts = self.table.set_column(at, IMAGES, image_counts(self.table.column(IMAGES)))
            return PromptTable(counts, self.origin, self.row_indexes, self.first)
        names = [name for name in self.table.column_names if name != column]
        return PromptTable(self.table.select(names), self.origin, self.row_indexes, self.first)

    def is_current(self) -> bool:
        """True if the file is unchanged since it was read."""
        return self.origin.stamp == _stamp(self.origin.file)

    def verifiers(self) -> dict[str, str]:
        """Each distinct verifier expression of the rows → the id of the first such row. None of rows whose responses
        are not verified, unless the user has named one."""
        import numpy as np

        if self.origin.expression.names_rows_own and not self.origin.verified:
            return {}
        if not self.origin.expression.names_rows_own:
            return {str(self.origin.expression): self[0].id} if len(self) else {}
        _, firsts = np.unique(self._verifier_codes()[self.row_indexes], return_index=True)
        first_ids: dict[str, str] = {}
        for row in sorted(firsts.tolist()):
            prompt = self[row]
            first_ids.setdefault(prompt.verifier, prompt.id)
        return first_ids

    def check(self) -> None:
        """Raise the `DataError` of the first row that is not a prompt."""
        if not self._is_plain():
            for _ in self:
                pass

    def _is_plain(self) -> bool:
        """True if types and nulls alone show that every row is a prompt. If not, each row is checked."""
        import pyarrow.types as kinds

        columns = {name: self.table.column(name) for name in self.table.column_names}
        ability, extra, reward = columns.get("ability"), columns.get("extra_info"), columns["reward_model"]
        return (
            not self.has_images
            and _is_text(columns["data_source"])
            and _are_chats(columns["prompt"])
            and (ability is None or _is_text(ability, nulls=True) or kinds.is_null(ability.type))
            and (extra is None or _are_extras(extra))
            and _has_texts(reward, "ground_truth")
            and (not self.origin.expression.names_rows_own or self._are_verifiers(columns["data_source"], reward))
        )

    def _are_verifiers(self, data_sources: pa.ChunkedArray, reward: pa.ChunkedArray) -> bool:
        """True if every row names a verifier: by the column `reward_model`, or as verl by `data_source`."""
        import pyarrow.compute

        if not _has_texts(reward, "style"):
            return False
        styles = pyarrow.compute.struct_field(reward, "style").unique().to_pylist()
        verls = [style for style in styles if is_verls_style(style)]
        sources = data_sources.unique().to_pylist() if verls else []
        if len(styles) > MOST_VERIFIERS or len(sources) > MOST_VERIFIERS:
            return False
        try:
            return all(self._of_style(style) for style in styles if style not in verls) and (
                not self.origin.verified or all(verifier_of(style, source) for style in verls for source in sources)
            )
        except ConfigError:
            return False

    def _verifier_codes(self) -> np.ndarray:
        """int64 `[rows of the table]`: equal numbers only for rows that name the same verifier, by equal
        `reward_model.style` and, with a style of verl's, equal `data_source`."""
        import numpy as np
        import pyarrow.compute

        styles = pyarrow.compute.struct_field(self.table.column("reward_model"), "style")
        codes = _codes(styles)
        if any(is_verls_style(style) for style in styles.unique().to_pylist()):
            sources = _codes(self.table.column("data_source"))
            codes = codes * (np.int64(sources.max(initial=0)) + 1) + sources
        return codes

    def _prompt(self, at: int, row: Mapping[str, object]) -> Prompt:
        number = self.first + at

        def bad(what: str, hint: str = "fix that row, or make the file again with: rlcli prep NAME") -> DataError:
            return DataError(f"data: {self.origin.file}, row {number} (the first is 0): {what}", hint)

        messages = _chat(row["prompt"])
        if messages is None:
            raise bad(
                f"'prompt' must be a list of messages with role and content as text, and is {row['prompt']!r:.120}"
            )
        images: tuple[bytes, ...] = ()
        if self.has_images or _are_parts(row["prompt"]):
            try:
                images, count = self._images(row.get(IMAGES))
                messages = marked(messages, count)
            except BadImage as error:
                raise bad(str(error)) from error
        reward = row["reward_model"]
        reward_fields: Mapping[str, object] = reward if isinstance(reward, dict) else {}
        truth = ground_truth_text(reward_fields.get("ground_truth"))
        if truth is None:
            raise bad(f"'reward_model' must hold 'ground_truth' as text, a number or a struct, and is {reward!r:.120}")
        source, ability, extra = row["data_source"], row.get("ability") or "", row.get("extra_info")
        if not isinstance(source, str) or not isinstance(ability, str):
            raise bad(f"'data_source' and 'ability' must be text, and are {source!r:.60} and {ability!r:.60}")
        if extra is not None and not isinstance(extra, dict):
            raise bad(f"'extra_info' must be a struct, and is {extra!r:.120}")
        try:
            extra_info = unpack_extra_info(extra)
        except (ValueError, TypeError, RecursionError) as error:
            raise bad(f"'extra_info.{JSON_FIELD}' is not the JSON of an object ({type(error).__name__})") from error
        if not isinstance(reward_fields["ground_truth"], str):  # a reward function written for verl takes the struct
            extra_info.setdefault("ground_truth", reward_fields["ground_truth"])
        return Prompt(
            id=f"{self.origin.label}{'/' * bool(self.origin.label)}{source}:{self.origin.split}:{number}",
            messages=messages,
            data_source=source,
            ability=ability,
            verifier=self._verifier(reward_fields.get("style"), source, bad),
            ground_truth=truth,
            extra_info=extra_info,
            images=images,
        )

    def _images(self, value: object) -> tuple[tuple[bytes, ...], int]:
        """The row's images and their number; of a table without its images, the number alone."""
        if isinstance(value, int):
            return (), value
        images = load_images(value, self.origin.file.parent)
        return images, len(images)

    def _verifier(self, style: object, data_source: str, bad: Callable[..., DataError]) -> str:
        if not self.origin.expression.names_rows_own:
            return str(self.origin.expression)
        verifier = style
        if isinstance(style, str) and is_verls_style(style):
            verifier = verifier_of(style, data_source)
        if not isinstance(verifier, str) or not verifier:
            if not self.origin.verified:
                return ""
            raise bad(
                f"'reward_model.style' is {style!r}, which names no verifier, and verl's table has none for the "
                f"data_source {data_source!r:.80}",
                "give one with: --verifier NAME (rlcli verifiers list shows the names), or --verifier FILE.py:FUNCTION",
            )
        try:
            expression = self._of_style(verifier)
        except ConfigError as error:
            raise bad(f"'reward_model.style' is {style!r:.200}: {error.message}", error.hint) from None
        if self._of_style.cache_info().currsize > MOST_VERIFIERS:
            raise bad(
                f"up to here, rows name more than {MOST_VERIFIERS} different verifiers (reward_model.style)",
                "give one for all rows with --verifier",
            )
        return expression


class JoinedPrompts(Sequence[Prompt]):
    """Several sequences of prompts, concatenated. names: of each, if they have any. starts: int64 `[parts + 1]`, where
    each begins, and the end."""

    def __init__(self, parts: Sequence[Sequence[Prompt]], names: Sequence[str] = ()) -> None:
        import numpy as np

        self.parts, self.names = parts, tuple(names)
        self.starts: np.ndarray = np.cumsum([0, *map(len, parts)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @overload
    def __getitem__(self, row: int) -> Prompt: ...
    @overload
    def __getitem__(self, row: slice) -> JoinedPrompts: ...
    def __getitem__(self, row: int | slice) -> Prompt | JoinedPrompts:
        if isinstance(row, slice):
            return self.take(range(len(self))[row])
        row = range(len(self))[row]
        part = int(self.starts.searchsorted(row, side="right")) - 1
        return self.parts[part][row - int(self.starts[part])]

    def __iter__(self) -> Iterator[Prompt]:
        return chain.from_iterable(self.parts)

    def take(self, rows: Sequence[int] | np.ndarray) -> JoinedPrompts:
        """The prompts at these positions, ascending. Every part remains, even if empty."""
        import numpy as np

        selected = np.asarray(rows, np.int64)
        bounds = selected.searchsorted(self.starts)
        return JoinedPrompts(
            [
                taken(part, selected[low:high] - start)
                for part, start, low, high in zip(self.parts, self.starts[:-1], bounds[:-1], bounds[1:], strict=True)
            ],
            self.names,
        )

    def without(self, column: str) -> JoinedPrompts:
        """As `PromptTable.without`."""
        parts = [part.without(column) if isinstance(part, PromptTable) else part for part in self.parts]
        return JoinedPrompts(parts, self.names)


def taken(prompts: Sequence[Prompt], rows: np.ndarray) -> Sequence[Prompt]:
    """The prompts at these positions, int64 and ascending."""
    if isinstance(prompts, PromptTable | JoinedPrompts):
        return prompts.take(rows)
    return tuple(prompts[row] for row in rows.tolist())


def dataset_name(prompts: Sequence[Prompt], row: int) -> str:
    """The dataset name of the prompt at this position; empty if there is only one dataset."""
    if not isinstance(prompts, JoinedPrompts) or not prompts.names:
        return ""
    return prompts.names[int(prompts.starts.searchsorted(row, side="right")) - 1]


def verifiers_of(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Each verifier expression of the prompts → the id of the first of them."""
    if isinstance(prompts, PromptTable):
        return prompts.verifiers()
    if isinstance(prompts, JoinedPrompts):
        every = [verifiers_of(part) for part in reversed(prompts.parts)]
        return {verifier: first for first_ids in every for verifier, first in first_ids.items()}
    first_ids: dict[str, str] = {}
    for prompt in prompts:
        first_ids.setdefault(prompt.verifier, prompt.id)
    return first_ids


def _chat(messages: object) -> tuple[Message, ...] | None:
    """The messages with their content as text; None if it is no chat."""
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        return None
    chat = []
    for message in messages:
        role, content = message.get("role"), content_text(message.get("content"))
        if not isinstance(role, str) or content is None:
            return None
        chat.append({"role": role, "content": content})
    return tuple(chat)


def _are_parts(messages: object) -> bool:
    """True if the content of some message of a chat is a list of parts."""
    return isinstance(messages, list) and any(not isinstance(message["content"], str) for message in messages)


def images_per_prompt(prompts: Sequence[Prompt]) -> np.ndarray:
    """int64 `[prompts]`: how many images each has."""
    import numpy as np

    counts: np.ndarray
    if isinstance(prompts, JoinedPrompts):
        counts = np.concatenate([np.zeros(0, np.int64), *map(images_per_prompt, prompts.parts)])
    elif isinstance(prompts, PromptTable):
        every = image_counts(prompts.table.column(IMAGES)).to_numpy() if prompts.has_images else None
        counts = np.zeros(len(prompts), np.int64) if every is None else every[prompts.row_indexes].astype(np.int64)
    else:
        counts = np.fromiter((len(prompt.images) for prompt in prompts), np.int64, len(prompts))
    return counts


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """int64 `[rows]`: equal numbers for equal texts."""
    import numpy as np

    # Not by `to_numpy`, which imports pandas.
    encoded = column.dictionary_encode(null_encoding="encode")
    codes: np.ndarray = np.concatenate([np.from_dlpack(chunk.indices) for chunk in encoded.chunks]).astype(np.int64)
    return codes


def _is_text(column: pa.ChunkedArray, nulls: bool = False) -> bool:
    return is_text_type(column.type) and (nulls or not column.null_count)


def _has_texts(column: pa.ChunkedArray, *names: str) -> bool:
    """True if a column has a struct in every row, in which each of `names` is text."""
    import pyarrow.compute
    import pyarrow.types as kinds

    if not kinds.is_struct(column.type) or column.null_count:
        return False
    field_names = {field.name for field in column.type}
    return field_names.issuperset(names) and all(_is_text(pyarrow.compute.struct_field(column, name)) for name in names)


def _are_chats(column: pa.ChunkedArray) -> bool:
    import pyarrow.compute
    import pyarrow.types as kinds

    if not (kinds.is_list(column.type) or kinds.is_large_list(column.type)) or column.null_count:
        return False
    shortest = pyarrow.compute.min(pyarrow.compute.list_value_length(column)).as_py()
    return bool(shortest) and _has_texts(pyarrow.compute.list_flatten(column), "role", "content")


def _are_extras(column: pa.ChunkedArray) -> bool:
    import pyarrow.compute
    import pyarrow.types as kinds

    if not kinds.is_struct(column.type):
        return bool(kinds.is_null(column.type))
    if [field.name for field in column.type] != [JSON_FIELD]:
        return True
    texts = pyarrow.compute.struct_field(column, JSON_FIELD)
    if not _is_text(texts, nulls=True) or texts.null_count != column.null_count:
        return False
    try:
        return all(isinstance(parse_json(text.as_py()), dict) for text in texts if text.is_valid)
    except (ValueError, RecursionError):
        return False
