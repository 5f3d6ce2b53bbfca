"""On CPUs: what the C library's heap is said to waste and to keep."""

from __future__ import annotations

import json

import pytest

from rlcli.planner import memory, passes
from rlcli.planner.memory import phases
from rlcli.planner.setting import Setting
from rlcli.planner.shape import ModelShape, read_shape
from tests.planner_settings import QWEN_7B, setting, totals


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return read_shape(str(folder))


def test_the_heap_keeps_a_checkpoints_copy_that_finds_no_room_in_it(shape: ModelShape) -> None:
    """On CPUs: of few tokens the copy is more than the passes."""
    few = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "data.max_prompt_tokens=16"]
    few += ["rollout.max_response_tokens=16"]
    kept, copied = (totals(setting(shape, "cpu", f"checkpoint.every={every}", *few)) for every in (0, 1))
    assert copied["generate"] > kept["generate"]
    assert copied["update"] > kept["update"]  # what it took stays


def passing_and_heap(of: Setting) -> tuple[dict[str, float], float]:
    """What comes and goes in an update, and what the heap takes besides."""
    parts = next(phase.parts for phase in phases(of) if phase.name == "update")
    names = ("activations", "logits", "gradients", "gathered weights")
    return {name: parts.get(name, 0.0) for name in names}, parts["heap"]


def test_recomputed_activations_leave_as_many_holes_in_the_heap_as_those_that_stay(shape: ModelShape) -> None:
    (passing, heap), (passing_again, heap_again) = (
        passing_and_heap(setting(shape, "cpu", f"model.gradient_checkpointing={value}", "checkpoint.every=0"))
        for value in ("false", "true")
    )
    assert sum(passing.values()) > 2 * sum(passing_again.values())
    assert heap_again == pytest.approx(heap)


@pytest.mark.parametrize(("rank", "given_back"), [(0, 1.0), (16, 0.5)])
def test_tensors_that_are_mapped_by_themselves_do_not_stay_and_leave_half_as_many_holes(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch, rank: int, given_back: float
) -> None:
    cpu = setting(shape, "cpu", "checkpoint.every=0", f"lora.rank={rank}")
    one = cpu.pack.tokens * cpu.bytes_each * shape.intermediate  # a tensor of the gated unit's width
    found = {}
    for name, least in (("none", 1 << 60), ("gated", int(one))):
        monkeypatch.setattr(passes, "MAPPED_BYTES", least)
        found[name] = totals(cpu)
    gone = given_back * 4 * one * shape.layers
    holes = memory.HEAP_WASTE["passing"] * gone / 2
    assert found["none"]["generate"] - found["gated"]["generate"] == pytest.approx(gone + holes)
    assert found["none"]["sync"] - found["gated"]["sync"] == pytest.approx(gone / 2 + holes)
    assert found["none"]["update"] - found["gated"]["update"] == pytest.approx(holes)


@pytest.fixture
def nothing_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MAPPED_BYTES", 1 << 60)


@pytest.mark.parametrize("rank", [0, 16])
def test_what_passes_through_and_the_weights_leave_holes_in_the_heap(
    shape: ModelShape, nothing_mapped: None, rank: int
) -> None:
    """An update's share: 0.44 of what passes, 0.4 of the weights, 30 MiB."""
    cpu = setting(shape, "cpu", "checkpoint.every=0", f"lora.rank={rank}")
    passing, heap = passing_and_heap(cpu)
    assert heap == pytest.approx(0.44 * sum(passing.values()) + 0.4 * cpu.weight_bytes() + (30 << 20))


def test_weights_gathered_for_a_moment_leave_twice_themselves_and_more(shape: ModelShape, nothing_mapped: None) -> None:
    alone = setting(shape, "cpu:1", "checkpoint.every=0", "model.dtype=float32")
    ranks = setting(shape, "cpu:2", "checkpoint.every=0", "model.dtype=float32")
    (whole, _), (passing, heap) = map(passing_and_heap, (alone, ranks))
    assert whole["gathered weights"] == 0 < passing["gathered weights"]
    others = 0.44 * sum(passing.values()) + 0.4 * ranks.weight_bytes() / 2 + (30 << 20)
    assert heap - others == pytest.approx(2.6 * passing["gathered weights"])
