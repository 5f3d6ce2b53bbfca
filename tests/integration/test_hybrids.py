"""A model with layers of linear attention through real runs: FSDP2 on one and two ranks, vLLM's caches of states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_catalog import train

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlcli.model.io.tiny_model import make_tiny_model

    return make_tiny_model(
        tmp_path_factory.mktemp("hybrid") / "tiny", kind="qwen3_5", hidden=64, heads=2, kv_heads=1, layers=3
    )


@pytest.fixture(scope="module")
def runs(hybrid: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By the number of ranks."""
    root = tmp_path_factory.mktemp("runs")
    return {ranks: train(hybrid, sums, root / str(ranks), ranks, ["grpo"]) for ranks in (1, 2)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_samples_from_what_is_trained(runs: dict[int, dict[str, Any]], ranks: int) -> None:
    steps = runs[ranks]["grpo"]["steps"]
    assert len(steps) == 2
    for step in steps:
        assert step["sync/unchecked_tensors"] == 0
        assert step["sync/changed_tensors"] == step["sync/checked_tensors"], "decays and convolutions are trained, too"
        assert step["log_prob_check/max_abs_diff"] < 1e-4
        assert step["mismatch/k3"] < 1e-9
        assert step["update/grad_norm"] > 0


def test_two_ranks_train_as_one(runs: dict[int, dict[str, Any]]) -> None:
    expected, actual = (runs[ranks]["grpo"]["steps"][0] for ranks in (1, 2))
    for name in ("reward/mean", "update/policy_loss", "update/grad_norm", "update/entropy"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("sets", "tolerance", "unchecked"),
    [
        pytest.param("lora.rank=4", 1e-4, 0, marks=pytest.mark.exhaustive),
        # vLLM packs the convolutions for its kernels in their place, where they cannot be compared.
        pytest.param("model.dtype=bfloat16", 0.3, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_adapters_are_merged_and_bfloat16_runs(
    hybrid: Path,
    sums: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sets: str,
    tolerance: float,
    unchecked: int,
) -> None:
    monkeypatch.setenv("CATALOG_SETS", sets)
    steps = train(hybrid, sums, tmp_path / "runs", 1, ["grpo"])["grpo"]["steps"]
    assert len(steps) == 2
    for step in steps:
        assert step["sync/unchecked_tensors"] == unchecked
        assert step["log_prob_check/max_abs_diff"] < tolerance
        assert step["update/grad_norm"] > 0
