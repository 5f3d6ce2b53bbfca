"""Reads the files of a checkpoint that DCP and torch wrote, without running code that they name.

`.metadata` is a pickle, which torch's reader passes to `pickle.load`; entries that are not tensors go to `torch.load`
with `weights_only=False`. Both execute code that a file names, so an untrusted checkpoint could run code. Here a file
may name only the classes that this program writes, and its sizes are checked before memory is allocated. The manifest
of a checkpoint protects from damage only: an attacker who changes a file can change its hash, too.
"""

from __future__ import annotations

import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo

from rlcli.errors import CheckpointError, RlcliError
from rlcli.support.redact import printable

METADATA = ".metadata"
RECORDS = (
    records.Metadata,
    records.StorageMeta,
    records.MetadataIndex,
    records.ChunkStorageMetadata,
    records.TensorStorageMetadata,
    records.TensorProperties,
    _StorageInfo,
)
"""The classes that `.metadata` consists of: dataclasses, whose creation has no effect."""
_CLASSES = {(record.__module__, record.__name__): record for record in (*RECORDS, torch.Size)}
_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_SHARD = re.compile(r"__\d+_\d+\.distcp")
_HINT = "use a checkpoint that you trust, or copy this one again from where it was made"


class TensorReader(FileSystemReader):
    """DCP's reader of the folder `path`, for tensors alone. `CheckpointError` names the file that is refused."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder = path

    @cached_property
    def metadata(self) -> Any:
        """DCP's `Metadata` of the folder, read and checked once."""
        return read_metadata(self.folder)

    def read_metadata(self) -> Any:
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Like DCP's, file by file, so that an error names the file."""
        items: dict[str, list[Any]] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        done = super().read_data(replace(plan, items=[]), planner)
        for name in items:
            with refusing(self.folder / name):
                done = super().read_data(replace(plan, items=items[name]), planner)
        return done


class TensorPlanner(DefaultLoadPlanner):
    """DCP's planner, for tensors alone. on_tensor: called after each of them."""

    def __init__(self, on_tensor: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.on_tensor = on_tensor

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self.on_tensor()

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Refuse: DCP's planner would unpickle the entry. `read_metadata` rejects such entries before."""
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is not a tensor")


def load_tensors(state: dict[str, Tensor], reader: TensorReader, planner: TensorPlanner | None = None) -> None:
    """Fill the tensors of `state` from the folder of `reader`, each process for itself. Not collective."""
    reader.read_metadata()  # outside of DCP, which would wrap its error
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=reader, planner=planner or TensorPlanner(), no_dist=True)
        except CheckpointException as failure:
            error, _ = failure.failures[min(failure.failures)]
            raise error from failure


def load_values(file: Path) -> Any:
    """Tensors and plain values that `torch.save` wrote. `CheckpointError` if the file holds anything else."""
    with refusing(file):
        values = torch.load(file, map_location="cpu", weights_only=True)
    return values


def read_metadata(folder: Path) -> Any:
    """DCP's `Metadata` of the checkpoint in `folder`. `CheckpointError` if it cannot be read, names code, holds
    anything but tensors, or does not fit the folder's files."""
    file = folder / METADATA
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error.strerror}", "mount the run folder at the same path on every machine"
        ) from error
    with refusing(file):
        _check_opcodes(content)
        with _unchanged(RECORDS):
            metadata = _Unpickler(BytesIO(content)).load()
        _check(metadata, folder)
    return metadata


@contextmanager
def refusing(file: Path) -> Iterator[None]:
    """Turn an error of the block, which reads `file`, into a `CheckpointError` of one line that names it."""
    try:
        yield
    except (RlcliError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error.strerror}", "give this user permission to read it"
        ) from error
    except Exception as error:  # a damaged pickle may raise anything
        if "allocate memory" in str(error):  # torch's RuntimeError on a CPU
            raise
        raise CheckpointError(f"{file} {_why(error)}", _HINT) from error


def _why(error: Exception) -> str:
    message = str(error)
    if match := re.search(r"GLOBAL (\S+)", message):
        return f"names {printable(match[1])[:100]}, which no checkpoint of this program holds"
    _, _, reason = message.rpartition("WeightsUnpickler error: ")  # torch's own begins with how to run such a file
    first = (reason.strip().splitlines() or [type(error).__name__])[0]
    return f"is not a file of a checkpoint: {printable(first)[:200]}"


def _opcodes(names: str) -> bytes:
    return b"[" + b"".join(re.escape(getattr(pickle, name)) for name in names.split()) + b"]"


_OTHERS = re.compile(
    b"(?:"
    + _opcodes(
        """MEMOIZE STACK_GLOBAL NEWOBJ REDUCE BUILD NONE NEWTRUE NEWFALSE MARK EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
        EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS STOP"""
    )
    + b"|%s.|%s..|%s....|%s.{8}"
    % tuple(_opcodes(names) for names in ("PROTO BINGET BININT1", "BININT2", "LONG_BINGET BININT", "FRAME"))
    + b")*+",
    re.DOTALL,
)
"""Opcodes of fixed size, with their arguments."""
_LENGTH_BYTES = {pickle.SHORT_BINUNICODE[0]: 1, pickle.BINUNICODE[0]: 4, pickle.LONG1[0]: 1}
"""Opcodes that are followed by a length and as many bytes."""


def _check_opcodes(content: bytes) -> None:
    """Raise ValueError unless a pickle has only the opcodes that Python writes for records. Others make it allocate
    memory at will, such as those that number its objects."""
    at = _end(content, 0)
    while at < len(content):
        length = _LENGTH_BYTES.get(content[at])
        if length is None:
            raise ValueError(f"it has the opcode {content[at]} at byte {at}")
        start = at + 1 + length
        at = _end(content, start + int.from_bytes(content[at + 1 : start], "little"))
    if at > len(content):
        raise ValueError("it is truncated")


def _end(content: bytes, at: int) -> int:
    """The end of the consecutive opcodes of fixed size from `at` on."""
    position = _OTHERS.match(content, at)
    return at if position is None or at > len(content) else position.end()


class _Unpickler(pickle.Unpickler):
    """Resolves only the records, torch's dtypes, and substitutes for other names in the fields of a record: a pickle
    may call the objects that it names, with any arguments, and set their attributes."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        encodings = {encoding.value: encoding for encoding in records._MEM_FORMAT_ENCODING}
        layouts = {"torch.strided": torch.strided}
        self._stand_ins: dict[tuple[str, str], Any] = {
            (records.__name__, "_MEM_FORMAT_ENCODING"): lambda value: encodings[value],
            ("torch.serialization", "_get_layout"): lambda name: layouts[name],
            ("pathlib", "PosixPath"): lambda *parts: "",  # where the checkpoint was written: nothing reads it
        }

    def find_class(self, module: str, name: str) -> Any:
        for table in (_CLASSES, _DTYPES, self._stand_ins):
            if (module, name) in table:
                return table[module, name]
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


@contextmanager
def _unchanged(classes: tuple[type, ...]) -> Iterator[None]:
    """Context that reverts and refuses changes of the classes by a pickle, such as another `__setstate__`."""
    saved = {record: dict(vars(record)) for record in classes}
    try:
        yield
    finally:
        changed = [record for record in classes if dict(vars(record)) != saved[record]]
        for record in changed:
            for name in vars(record).keys() - saved[record].keys():
                delattr(record, name)
            for name, value in saved[record].items():
                if vars(record)[name] is not value:
                    setattr(record, name, value)
    if changed:
        raise pickle.UnpicklingError(f"it changes the class {changed[0].__name__}")


def _check(metadata: Any, folder: Path) -> None:
    """Raise ValueError, or the error that a wrong type causes, unless each entry is a tensor whose parts are in files
    of `folder` that are large enough: memory is allocated and files are read according to these entries."""
    if type(metadata) is not records.Metadata:
        raise TypeError(f"it holds a {type(metadata).__name__}")
    metadata.storage_meta = records.StorageMeta()
    sizes: dict[str, int] = {}
    stored: dict[tuple[str, torch.Size], int] = {}
    for index, part in metadata.storage_data.items():
        if part.relative_path not in sizes:
            sizes[part.relative_path] = _shard_size(folder, part.relative_path)
        if min(part.offset, part.length) < 0 or part.offset + part.length > sizes[part.relative_path]:
            raise ValueError(f"{part.relative_path} has fewer bytes than it says")
        if part.transform_descriptors:
            raise ValueError(f"{part.relative_path} is compressed")
        stored[index.fqn, index.offset] = part.length
    for key, entry in metadata.state_dict_metadata.items():
        if type(entry) is not records.TensorStorageMetadata:
            raise TypeError(f"the entry {key!r:.100} is not a tensor")
        _check_tensor(key, entry, stored)


def _shard_size(folder: Path, name: str) -> int:
    if not _SHARD.fullmatch(name) or not (folder / name).is_file():
        raise ValueError(f"it names {name!r:.100}, which is no file of this folder")
    return (folder / name).stat().st_size


def _check_tensor(key: str, entry: Any, stored: dict[tuple[str, torch.Size], int]) -> None:
    elements = 0
    if type(entry.size) is not torch.Size or type(entry.properties.dtype) is not torch.dtype:
        raise TypeError(f"the entry {key!r:.100} has no size or dtype")
    for chunk in entry.chunks:
        if type(chunk.sizes) is not torch.Size or type(chunk.offsets) is not torch.Size:
            raise TypeError(f"a part of {key!r:.100} has no size or offset")
        for offset, count, limit in zip(chunk.offsets, chunk.sizes, entry.size, strict=True):
            if min(offset, count) < 0 or offset + count > limit:
                raise ValueError(f"a part of {key!r:.100} is not within the tensor")
        elements += math.prod(chunk.sizes)
        if math.prod(chunk.sizes) * entry.properties.dtype.itemsize > stored[key, chunk.offsets]:
            raise ValueError(f"a part of {key!r:.100} has fewer bytes than its size")
    if elements != math.prod(entry.size):
        raise ValueError(f"the parts of {key!r:.100} are not the whole tensor")
