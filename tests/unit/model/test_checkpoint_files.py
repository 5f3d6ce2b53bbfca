"""Files of a checkpoint that somebody has changed: nothing that they name runs, and the file is named in one line."""

from __future__ import annotations

import base64
import contextlib
import pickle
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rlcli.errors import CheckpointError
from rlcli.model.io.checkpoint_files import (
    METADATA,
    RECORDS,
    TensorPlanner,
    TensorReader,
    load_tensors,
    load_values,
    read_metadata,
)
from tests.hostile_pickles import LEGACY, Runs, legacy

SHARD = "__0_0.distcp"
STATE = {"one": torch.arange(6.0).reshape(2, 3), "two": torch.arange(4).to(torch.bfloat16), "step": torch.tensor(7.0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A distributed checkpoint of `STATE`."""
    dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(tmp_path / "policy"), no_dist=True)
    return tmp_path / "policy"


def loaded(folder: Path, *names: str) -> dict[str, torch.Tensor]:
    state = {name: torch.zeros_like(STATE[name]) for name in names or STATE}
    load_tensors(state, TensorReader(folder))
    return state


def refused(read: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as error:
        read()
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2
    return error.value.message


def change(folder: Path, edit: Callable[[Metadata], object], protocol: int = 4) -> None:
    """Unpickle `.metadata`, which the test has written itself, edit it and pickle it again."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    edit(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata, protocol))


def test_what_was_saved_is_loaded(folder: Path) -> None:
    tensors = loaded(folder)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in STATE.items())
    assert read_metadata(folder).state_dict_metadata.keys() == STATE.keys()


@pytest.mark.parametrize("protocol", [4, 5])
def test_other_versions_are_read(folder: Path, protocol: int) -> None:
    """Of Python and of torch."""

    def as_before(metadata: Metadata) -> None:
        metadata.storage_meta = None  # torch 2.3
        metadata.version = None

    change(folder, as_before, protocol)
    assert torch.equal(loaded(folder, "one")["one"], STATE["one"])


BEFORE = """
c-nna!A{#i5H%#hP(p<Ym3pWuRVpe`g-J+6;8;;op(uc$$5z|5z0Pdo*sgbt0I5=YNF}7bvHjo9Iu1z-
tq+zx^WK|zv$NmJzew52AGIOl)C0%oLZ;l!B=a2)m^Vmb9!Y1&B=xDJS}pb_pSQa9Lx0noYE4Kg8S%L%$sN!nO4M;RSnBBq7Ku1L
#}c&9?h8Ch(l}wM<V+a&>KJ}H4d%#ARmpqQ$_~Pq%H|Hn)!Mjk!BS2`eoZBhBdwN6pGgwZt2mPewNjwao6meb(r5YxE3K2>VUKi9
&U$Y@ki+AHlXpkQ?-Ad%a)i{bDhqzi^j+!lx%ovzX_Tv|1rM@lAoM5G`TBwR`KM1i4g$d>ntW+0<ot@!&m)Cm=F-
enbDoB!F%7El*w}|vwdm%~8@s3p&u-wkX%Su^dA>XUGpEA_cCuM8-
<U#OtH^B6;)*ijewinKDAyhmtxfc5cT$<ECLxU?mXgW&gAMjbLlc_#?m%ax5hTXLnSv~}GMUs-<g?4^xJtp-NQ12^JdbxRwJ;vw%
>2;9>;G<Uz(Xdkgk(dls-!rYqbP`{byiXq;@(^^l28c-M(U)V3wntLY6^!e>SL}~TgY7aSWJSTx6fS*=<Jv=-
!JlCU;q>;5dO{UOn9{iDQDG!GBYr9v&@by&#c#shpA=4eY_&ZO2}QUmQG{AFHeoLTLjK+YgLlNM5}qxz?V1B((IuvC=S3-
Us1o^Z29|pTl;O=*lN}HcJZs(-fFT|tKRl@+H@~K0&b#j2*=7E#(sul#!G<bVPCLR<hQWWaOzGSW6p10<E}#
"""
"""A `.metadata` that was written before this reader existed, by torch 2.13: base 85 of zlib."""


def test_a_checkpoint_of_before_is_read(tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(zlib.decompress(base64.b85decode("".join(BEFORE.split()))))
    (tmp_path / SHARD).write_bytes(bytes(3 * 1577))
    entries = read_metadata(tmp_path).state_dict_metadata
    shapes = {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}
    assert shapes == {"a.b": ((3,), torch.float32), "c": ((2, 2), torch.bfloat16), "s": ((), torch.float32)}


def test_it_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = TensorReader(folder)
    assert reader.metadata is reader.read_metadata()
    (folder / METADATA).unlink()
    state = {"one": torch.zeros(2, 3)}
    load_tensors(state, reader)
    load_tensors(state, reader)
    assert torch.equal(state["one"], STATE["one"])


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_the_metadata_does_not_run(folder: Path, protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    change(folder, lambda metadata: setattr(metadata, "planner_data", Runs(marker)), protocol)
    message = refused(lambda: loaded(folder))
    why = "names posix.mkdir, which no checkpoint of this program holds"
    assert message.startswith(f"{folder}/.metadata {why if protocol >= 4 else 'is not a file of a checkpoint: '}")
    assert not marker.exists()


def string(text: str) -> bytes:
    """As a pickle has it."""
    return b"\x8c" + bytes([len(text.encode())]) + text.encode()


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "builtins.getattr",
        "torch.load",
        "torch.hub.load",
        "torch.float32.__class__",
        "pathlib.PosixPath.home",
        "torch.serialization.load",
        "torch.distributed.checkpoint.metadata.os",
        "torch.distributed.checkpoint.metadata.Metadata.__init__",
        "torch.distributed.checkpoint.filesystem.pickle",
        "\x1b[31mred.it",
    ],
)
def test_only_what_a_checkpoint_needs_is_found(folder: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    if module in ("torch.float32", "pathlib.PosixPath", "torch.distributed.checkpoint.metadata.Metadata"):
        module, attribute = module.rpartition(".")[0], f"{module.rpartition('.')[2]}.{attribute}"
    (folder / METADATA).write_bytes(b"\x80\x04" + string(module) + string(attribute) + b"\x93.")
    message = refused(lambda: read_metadata(folder))
    assert message.startswith(f"{folder}/.metadata names ")
    assert message.isprintable()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_the_classes_themselves_stay_as_they_are(folder: Path, record: type) -> None:
    """A pickle may set attributes of a class that it finds."""
    initial = dict(vars(record))
    name = b"".join(string(part) for part in (record.__module__, record.__name__))
    for attribute in ("__setstate__", "__init__", "other"):
        (folder / METADATA).write_bytes(b"\x80\x04" + name + b"\x93(N}" + string(attribute) + b"K\x01stb.")
        refused(lambda: read_metadata(folder))
        assert dict(vars(record)) == initial


def first(metadata: Metadata) -> TensorStorageMetadata:
    return next(iter(metadata.state_dict_metadata.values()))  # type: ignore[return-value]


def place(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


WRONG: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "file outside": (lambda m: setattr(place(m), "relative_path", "../secret"), "no file of this folder"),
    "absolute file": (lambda m: setattr(place(m), "relative_path", "/etc/passwd"), "no file of this folder"),
    "missing file": (lambda m: setattr(place(m), "relative_path", "__9_9.distcp"), "no file of this folder"),
    "file that is a number": (lambda m: setattr(place(m), "relative_path", 3), "expected string"),
    "beyond the end": (lambda m: setattr(place(m), "length", 1 << 40), "fewer bytes than it says"),
    "before the start": (lambda m: setattr(place(m), "offset", -1), "fewer bytes than it says"),
    "compressed": (lambda m: setattr(place(m), "transform_descriptors", ["stream.zstd/1"]), "is compressed"),
    "huge size": (lambda m: setattr(first(m), "size", torch.Size([1 << 60])), "not the whole tensor|argument"),
    "huge part": (
        lambda m: (
            setattr(first(m), "size", torch.Size([1 << 40, 3])),
            setattr(first(m).chunks[0], "sizes", torch.Size([1 << 40, 3])),
        ),
        "fewer bytes than its size",
    ),
    "negative part": (lambda m: setattr(first(m).chunks[0], "sizes", torch.Size([-2, -3])), "not within the tensor"),
    "no parts": (lambda m: first(m).chunks.clear(), "not the whole tensor"),
    "part that is nowhere": (lambda m: m.storage_data.clear(), "is not a file of a checkpoint"),
    "dtype of another kind": (lambda m: setattr(first(m).properties, "dtype", 4), "no size or dtype"),
    "size of another kind": (lambda m: setattr(first(m), "size", 6), "no size or dtype"),
    "entry of another kind": (lambda m: m.state_dict_metadata.update(one=7), "is not a tensor"),
    "no entries": (lambda m: setattr(m, "state_dict_metadata", None), "is not a file of a checkpoint"),
}


@pytest.mark.parametrize("defect", WRONG)
def test_entries_that_do_not_fit_the_files_are_refused(folder: Path, defect: str) -> None:
    edit, why = WRONG[defect]
    change(folder, edit)
    message = refused(lambda: loaded(folder))
    assert message.startswith(f"{folder}/.metadata is not a file of a checkpoint: ")
    assert any(part in message for part in why.split("|")), message


HUGE = (b"\x80\x04Nr\xff\xff\xff\x7f.", b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".")
"""An object with the number 2^31, for which Python would make room for as many; a byte array of 1 TiB."""


@pytest.mark.parametrize("content", [b"", b"\x80", bytes(range(64)), pickle.dumps(None), pickle.dumps([1]), *HUGE])
def test_metadata_that_is_none_is_named(folder: Path, content: bytes) -> None:
    (folder / METADATA).write_bytes(content)
    assert refused(lambda: loaded(folder)).startswith(f"{folder}/.metadata ")


def test_random_changes_of_the_metadata_are_refused_or_harmless(folder: Path) -> None:
    original = (folder / METADATA).read_bytes()
    draw = random.Random(0)
    for _ in range(300):
        changed = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        (folder / METADATA).write_bytes(changed)
        with contextlib.suppress(CheckpointError):
            assert type(read_metadata(folder)) is Metadata


def test_an_entry_that_is_no_tensor_is_never_unpickled(tmp_path: Path) -> None:
    """DCP itself would: `torch.load(…, weights_only=False)`."""
    marker, folder = tmp_path / "marker", tmp_path / "policy"
    dcp.save({"one": STATE["one"], "code": Runs(marker)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    assert "BytesStorageMetadata, which no checkpoint of this program holds" in refused(lambda: loaded(folder, "one"))
    item = type("Item", (), {"dest_index": records.MetadataIndex("code")})
    with pytest.raises(pickle.UnpicklingError, match="code is not a tensor"):
        TensorPlanner().load_bytes(item, None)
    assert not marker.exists()


@pytest.mark.parametrize("form", LEGACY)
def test_code_in_a_shard_does_not_run(folder: Path, form: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    metadata = read_metadata(folder)
    parts = {index.fqn: part for index, part in metadata.storage_data.items()}
    content = bytearray((folder / SHARD).read_bytes())
    start, length = parts["two"].offset, parts["two"].length
    content[start : start + length] = legacy(form, marker).ljust(length, b"\0")
    (folder / SHARD).write_bytes(content)
    message = refused(lambda: loaded(folder))
    assert message.startswith(f"{folder}/{SHARD} ")
    assert not marker.exists()
    assert torch.equal(loaded(folder, "one")["one"], STATE["one"]), "the other entries"


def test_a_shard_of_other_tensors_is_named(folder: Path) -> None:
    content = (folder / SHARD).read_bytes()
    parts = sorted((part.offset, part.length) for part in read_metadata(folder).storage_data.values())
    (folder / SHARD).write_bytes(b"".join(content[start : start + length] for start, length in reversed(parts)))
    assert refused(lambda: loaded(folder)).startswith(f"{folder}/{SHARD} is not a file of a checkpoint: ")


@pytest.mark.parametrize("form", LEGACY)
def test_code_in_a_ranks_values_does_not_run(tmp_path: Path, form: str) -> None:
    marker, file = tmp_path / "marker", tmp_path / "rank-0.pt"
    file.write_bytes(legacy(form, marker))
    assert refused(lambda: load_values(file)).startswith(f"{file} ")
    assert not marker.exists()
    torch.save(Runs(marker), file)
    assert refused(lambda: load_values(file)) == f"{file} names posix.mkdir, which no checkpoint of this program holds"
    assert not marker.exists()
