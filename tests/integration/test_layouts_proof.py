"""scripts/proofs/layouts.py on one, two and four processes: any layout trains as plain torch in one process does."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts" / "proofs"
ALL = ["all, policy", "all, adapter", "all, critic"]
QUANTITIES = ("loss", "norm", "gradients", "weights", "loaded")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPTS / "layouts.py"))


def layouts(rows: list[dict[str, Any]], world: int) -> set[tuple[str, str]]:
    return {(row["kind"], row["layout"]) for row in rows if row["world"] == world}


def most(rows: list[dict[str, Any]]) -> float:
    return max(row[name] for row in rows for name in QUANTITIES if name in row)


@pytest.mark.exhaustive  # the same in float32 runs in CI
def test_two_processes_train_as_one_in_float64(proof: dict[str, Any], tmp_path: Path) -> None:
    """All layouts, with all features at once, of which some leave a rank idle; and load what each other one saved."""
    rows = proof["differences"](tmp_path, ["dense"], [2], ["all, adapter", "all, critic"], "float64")
    rows += proof["differences"](tmp_path, ["experts"], [2], ["all, policy"], "float64")
    dense = {("dense", name) for name in ("shard 2", "context 2", "replicate 2")}
    experts = {("experts", name) for name in ("shard 2 × expert 2", "context 2 × expert 2")}
    assert layouts(rows, 2) == dense | experts
    assert all(row["micro-batches"] > 1 for row in rows if "from" not in row)
    assert {row["layout"] for row in rows if row.get("idle")} >= {"shard 2", "replicate 2", "shard 2 × expert 2"}
    assert most(rows) <= 1e-10, max(rows, key=lambda row: most([row]))
    savers = {(row["kind"], row["layout"], row["from"]) for row in rows if "from" in row}
    assert len(savers) == 4 * 4 + 3 * 3, "each loads from each"


@pytest.mark.long
def test_in_float32_they_differ_by_rounding_alone(proof: dict[str, Any], tmp_path: Path) -> None:
    rows = proof["differences"](tmp_path, ["dense"], [2], ALL, "float32", load=False)
    assert 1e-8 < most(rows) <= 1e-3
    assert max(row["loss"] for row in rows) <= 1e-5


@pytest.mark.exhaustive  # two processes show each kind of layout; the proof itself runs all of them
def test_four_processes_train_as_one_in_float64(proof: dict[str, Any], tmp_path: Path) -> None:
    rows = proof["differences"](tmp_path, ["dense", "experts"], [4], ["idle ranks", *ALL], "float64", load=False)
    assert {len([layout for layout in layouts(rows, 4) if layout[0] == kind]) for kind in ("dense", "experts")} == {
        6,
        8,
    }
    assert most(rows) <= 1e-10, max(rows, key=lambda row: most([row]))


def test_the_worst_tensor_counts_and_one_of_zeros_must_be_one(proof: dict[str, Any]) -> None:
    from _layouts_product import largest_difference

    wanted = {"a": torch.ones(4, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    assert largest_difference(wanted, wanted)[0] == 0.0
    assert largest_difference(wanted | {"a": wanted["a"] * 1.5}, wanted) == (0.5, "a")
    assert largest_difference(wanted | {"b": wanted["b"] + 1e-3}, wanted) == (pytest.approx(2**0.5 * 1e-3), "b")


def test_the_table_has_the_largest_difference_of_all_ranks(proof: dict[str, Any]) -> None:
    base_row = {"kind": "dense", "layout": "shard 2", "feature": "plain", "loss": 1e-9, "norm": 0.0, "gradients": 2e-9}
    rows = [
        base_row | {"weights": 3e-9},
        base_row | {"weights": 5e-9},
        base_row | {"weights": 0.0, "loaded": 0.0, "from": "x"},
    ]
    assert proof["table"](rows, "layout")[-1] == "| dense: shard 2 | 1e-09 | 0e+00 | 2e-09 | 5e-09 | 0e+00 | 2e-09 |"
