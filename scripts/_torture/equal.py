"""Whether a run that was tortured equals one that was not: metrics, samples, evaluations and weights, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

CLOCKED = ("time/", "throughput/", "memory/", "verify_s")
"""What a clock says, and how much memory is in use, is another matter each time."""


def differences(run: Path, reference: Path) -> list[str]:
    """What differs, each in a few words; nothing where the runs are equal."""
    found = _metrics(run, reference)
    for room in ("samples", "evaluations"):
        found += _tables(run / room, reference / room, room)
    return found + _checkpoints(run, reference)


def lost_samples(run: Path, reference: Path) -> int:
    """Samples of the reference run that the other run's folder lacks, or holds with another response."""
    lost = 0
    for file in sorted((reference / "samples").rglob("*.parquet")):
        there = run / file.relative_to(reference)
        mine = _rows(there) if there.exists() else []
        lost += sum(row not in mine for row in _rows(file))
    return lost


def _rows(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return [_timeless(row) for row in rows]


def _timeless(row: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in row.items() if not name.startswith(CLOCKED)}


def _metrics(run: Path, reference: Path) -> list[str]:
    mine, theirs = ([_timeless(json.loads(line)) for line in _lines(folder)] for folder in (run, reference))
    if len(mine) != len(theirs):
        return [f"metrics.jsonl has {len(mine)} lines instead of {len(theirs)}"]
    return [
        f"metrics.jsonl, line {number}: {name} is {one.get(name)} instead of {two.get(name)}"
        for number, (one, two) in enumerate(zip(mine, theirs, strict=True), 1)
        for name in sorted(one.keys() | two.keys())
        if one.get(name) != two.get(name)
    ]


def _lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()


def _tables(mine: Path, theirs: Path, room: str) -> list[str]:
    names = [{str(file.relative_to(folder)) for file in folder.rglob("*.*")} for folder in (mine, theirs)]
    if names[0] != names[1]:
        return [f"{room}/ holds other files: {sorted(names[0] ^ names[1])}"]
    return [
        f"{room}/{name} differs"
        for name in sorted(names[0])
        if (name.endswith(".parquet") and _rows(mine / name) != _rows(theirs / name))
        or (name.endswith(".json") and (mine / name).read_bytes() != (theirs / name).read_bytes())
    ]


def _checkpoints(run: Path, reference: Path) -> list[str]:
    mine, theirs = (_tensors(folder / "checkpoints" / "latest") for folder in (run, reference))
    if mine.keys() != theirs.keys():
        return [f"the last checkpoint holds other tensors: {sorted(mine.keys() ^ theirs.keys())[:5]}"]
    if not any("model" in name for name in mine):
        return ["the last checkpoint holds no weights"]
    return [f"checkpoint: {name} differs" for name in mine if not _same(mine[name], theirs[name])]


def _same(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == two)
    alike = isinstance(two, torch.Tensor) and (one.dtype, one.shape) == (two.dtype, two.shape)
    return alike and _bits(one).equal(_bits(two))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As numbers, 0 would equal -0, and NaN nothing."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """All that the checkpoint holds, by name: of each sharded folder, and of each file of a rank."""
    from rlcli.model.io.checkpoint_files import TensorReader, load_tensors, load_values

    found: dict[str, Any] = {}
    for metadata in sorted(checkpoint.rglob(".metadata")):
        reader = TensorReader(metadata.parent)
        entries = reader.metadata.state_dict_metadata
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
        load_tensors(state, reader)
        found |= _flat(state, str(metadata.parent.relative_to(checkpoint)))
    for file in sorted(checkpoint.rglob("*.pt")):
        found |= _flat(load_values(file), str(file.relative_to(checkpoint)))
    return found


def _flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for k, v in value.items() for key, leaf in _flat(v, f"{name}/{k}").items()}
    if isinstance(value, list | tuple):
        return {key: leaf for i, v in enumerate(value) for key, leaf in _flat(v, f"{name}/{i}").items()}
    return {name: value}
