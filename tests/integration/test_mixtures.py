"""A mixture of experts through real runs: FSDP2 on one and two ranks, vLLM's packed experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_catalog import train

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
EXPERTS = 4


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlcli.model.io.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("mixture") / "tiny", hidden=64, heads=2, kv_heads=1, experts=EXPERTS)


@pytest.fixture(scope="module")
def one_rank(mixture: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(mixture, sums, tmp_path_factory.mktemp("one") / "runs", 1, ["grpo", "grpo:experts"])


@pytest.fixture(scope="module")
def two_ranks(mixture: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(mixture, sums, tmp_path_factory.mktemp("two") / "runs", 2, ["grpo"])


def test_the_engines_routes_are_those_of_the_same_tokens(
    mixture: Path, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of conversations, whose turns follow each other in the engine; two workers divide each pack, and the experts. In
    float32 both choose the same experts, so one route at another token's place would show."""
    sets = "rollout.replay_routes=true train.minibatches=1 parallel.context=2 parallel.expert=2"
    sets += " model.gradient_checkpointing=true"
    monkeypatch.setenv("CATALOG_SETS", sets)
    steps = train(mixture, sums, tmp_path / "two", 2, ["guess-number"])["guess-number"]["steps"]
    assert len(steps) == 2
    assert max(step["turns/mean"] for step in steps) > 1
    for step in steps:
        assert step["update/routes_differ"] == 0
        assert step["update/routes_known"] > 0.9
        assert step["mismatch/k3"] < 1e-9


@pytest.mark.exhaustive  # tests/unit/model/test_experts.py shows the sums; each sync compares all bytes
def test_adapters_on_experts_reach_the_engine_merged(
    mixture: Path, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers divide the experts; of each layer four weights of attention and two of experts are adapted."""
    sets = "lora.rank=4 lora.targets=all-linear,experts parallel.expert=2"
    monkeypatch.setenv("CATALOG_SETS", sets)
    steps = train(mixture, sums, tmp_path / "two", 2, ["grpo"])["grpo"]["steps"]
    layers = 2
    for step in steps:
        assert step["sync/unchecked_tensors"] == 0
        assert step["log_prob_check/max_abs_diff"] < 1e-4
        assert step["update/grad_norm"] > 0
    assert steps[-1]["sync/changed_tensors"] == 6 * layers


@pytest.mark.parametrize("ranks", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.exhaustive)])
def test_experts_reach_the_engine_exactly(ranks: str, request: pytest.FixtureRequest) -> None:
    steps = request.getfixturevalue(ranks)["grpo"]["steps"]
    assert len(steps) == 2
    for step in steps:
        assert step["sync/unchecked_tensors"] == 0
        assert step["sync/changed_tensors"] == step["sync/checked_tensors"], "every expert is trained, and the router"
        assert step["log_prob_check/max_abs_diff"] < 1e-4
        assert step["update/grad_norm"] > 0


@pytest.mark.exhaustive  # test_experts_divided.py
def test_two_ranks_train_as_one(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    expected, actual = (run["grpo"]["steps"][0] for run in (one_rank, two_ranks))
    for name in ("reward/mean", "update/policy_loss", "update/grad_norm", "update/entropy"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_experts_that_the_engine_keeps_end_the_run(one_rank: dict[str, Any]) -> None:
    failed = one_rank["grpo:experts"]["failed"]
    assert "that the trainer sent: model.layers.0.mlp.experts.gate_up_proj differs" in failed, failed
