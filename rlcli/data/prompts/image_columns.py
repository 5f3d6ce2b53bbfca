"""The column of a parquet file that holds the rows' images."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from rlcli.support.files import cache_folder, closed_folder

IMAGES = "images"


def image_column(schema: Any) -> str:
    """The column that holds the rows' images: `images`, as in verl's files, or `image`, one for each row, as in some
    of TRL's. Empty if there is none; columns of these names with other types are not read."""
    import pyarrow.types as kinds

    def is_binary(kind: Any) -> bool:
        return bool(kinds.is_binary(kind) or kinds.is_large_binary(kind))

    def is_one(kind: Any) -> bool:
        return is_binary(kind) or (kinds.is_struct(kind) and not {"bytes", "path"}.isdisjoint(f.name for f in kind))

    for name in (IMAGES, "image"):
        if schema.get_field_index(name) < 0:
            continue
        kind = schema.field(name).type
        many = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
        if is_one(kind) or (name == IMAGES and many and (is_one(kind.value_type) or is_text_type(kind.value_type))):
            return name
    return ""


def are_counts(images: Any) -> bool:
    """Return whether a table's column of images has only their counts (see `PromptTable.without`)."""
    import pyarrow.types as kinds

    return bool(kinds.is_integer(images.type))


def image_counts(column: Any) -> Any:
    """Number of images in each row of a column of images."""
    import pyarrow.compute
    import pyarrow.types as kinds

    if are_counts(column):
        return column
    kind = column.type
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return pyarrow.compute.fill_null(pyarrow.compute.list_value_length(column), 0)
    return pyarrow.compute.cast(column.is_valid(), "int64")


def is_text_type(kind: Any) -> bool:
    import pyarrow.types as kinds

    return bool(kinds.is_string(kind) or kinds.is_large_string(kind))


def mapped(batches: Callable[[], Iterator[Any]]) -> Any:
    """A table of record batches in a file without a name, below the cache folder, and mapped from there: the system
    reads what is looked at, and takes the memory back when it needs it. In memory if there is no room for the file.

    batches: begins to read them. There is at least one.
    """
    import pyarrow as pa

    try:
        folder = closed_folder(cache_folder() / "pictures")
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            record_batches = batches()
            first = next(record_batches)
            with pa.ipc.new_stream(file, first.schema) as stream:
                for batch in chain([first], record_batches):
                    stream.write_batch(batch)
            file.flush()
            return pa.ipc.open_stream(pa.memory_map(file.name)).read_all()
    except (OSError, RuntimeError):  # a full or read-only disk, or no home
        return pa.Table.from_batches(list(batches()))
