"""Compares a run with kills to one without: metrics, samples, evaluations and weights, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

CLOCKED = ("time/", "throughput/", "memory/", "verify_s")
"""Clock readings and memory in use differ between runs."""


def differences(run: Path, reference: Path) -> list[str]:
    """The differences, a line each; empty where the runs are equal."""
    lines = _metrics(run, reference)
    for room in ("samples", "evaluations"):
        lines += _tables(run / room, reference / room, room)
    return lines + _checkpoints(run, reference)


def lost_samples(run: Path, reference: Path) -> int:
    """Samples of the reference run that the other run's folder lacks, or holds with another response."""
    lost = 0
    for file in sorted((reference / "samples").rglob("*.parquet")):
        counterpart = run / file.relative_to(reference)
        mine = _rows(counterpart) if counterpart.exists() else []
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
        f"metrics.jsonl, line {number}: {name} is {row.get(name)} instead of {expected.get(name)}"
        for number, (row, expected) in enumerate(zip(mine, theirs, strict=True), 1)
        for name in sorted(row.keys() | expected.keys())
        if row.get(name) != expected.get(name)
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


def _same(value: Any, expected: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return bool(value == expected)
    same_layout = isinstance(expected, torch.Tensor) and (value.dtype, value.shape) == (expected.dtype, expected.shape)
    return same_layout and _bits(value).equal(_bits(expected))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As numbers, 0 would equal -0, and NaN nothing."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """All that the checkpoint holds, by name: of each sharded folder, and of each file of a rank."""
    from rlcli.model.io.checkpoint_files import TensorReader, load_tensors, load_values

    tensors: dict[str, Any] = {}
    for metadata in sorted(checkpoint.rglob(".metadata")):
        reader = TensorReader(metadata.parent)
        entries = reader.metadata.state_dict_metadata
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
        load_tensors(state, reader)
        tensors |= _flat(state, str(metadata.parent.relative_to(checkpoint)))
    for file in sorted(checkpoint.rglob("*.pt")):
        tensors |= _flat(load_values(file), str(file.relative_to(checkpoint)))
    return tensors


def _flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for k, v in value.items() for key, leaf in _flat(v, f"{name}/{k}").items()}
    if isinstance(value, list | tuple):
        return {key: leaf for i, v in enumerate(value) for key, leaf in _flat(v, f"{name}/{i}").items()}
    return {name: value}
