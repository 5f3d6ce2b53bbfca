"""On CPUs: what the C library's heap is said to waste and to keep."""

from __future__ import annotations

import pytest

from rlcli.planner.heap import size_class, wasted
from rlcli.planner.memory import COMING_AND_GOING, phases
from rlcli.planner.setting import Setting
from tests.planner_settings import qwen_7b, setting, totals


def test_the_heap_keeps_a_checkpoints_copy_that_finds_no_room_in_it() -> None:
    """On CPUs: of few tokens the copy is more than the passes."""
    few = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "data.max_prompt_tokens=16"]
    few += ["rollout.max_response_tokens=16"]
    kept, copied = (totals(setting(qwen_7b(), "cpu", f"checkpoint.every={every}", *few)) for every in (0, 1))
    assert copied["generate"] > kept["generate"]
    assert copied["update"] > kept["update"]  # what it took stays


def passing_and_heap(of: Setting) -> tuple[dict[str, float], float]:
    """What comes and goes in an update, and what the heap takes besides."""
    parts = next(phase.parts for phase in phases(of) if phase.name == "update")
    names = ("activations", "logits", "gradients", "gathered weights")
    return {name: parts.get(name, 0.0) for name in names}, parts["heap"]


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_what_passes_through_its_rounding_and_the_moments_leave_holes_in_the_heap(
    rank: int, checkpointing: str
) -> None:
    """The rounding lies between those of the widths that tensors have."""
    keys = ("checkpoint.every=0", f"lora.rank={rank}", f"model.gradient_checkpointing={checkpointing}")
    of = setting(qwen_7b(), "cpu", *keys)
    passing, found = passing_and_heap(of)
    moments = 2 * 4 * of.trained_parameters()
    holes = 0.115 * sum(passing.values()) + 0.17 * moments + 31 * (1 << 20)
    widths = {"hidden": of.policy.hidden, "intermediate": of.policy.intermediate, "query": of.policy.query}
    over = {
        name: size_class(of.pack.tokens * 4 * width) / (of.pack.tokens * 4 * width) - 1
        for name, width in widths.items()
    }
    assert 0 < max(over.values()) < 0.25
    rounded = (found - holes) / 0.69
    assert min(over.values()) * 0.5 < rounded / passing["activations"] < max(over.values()) + 0.01


def test_weights_gathered_for_a_moment_leave_holes_of_their_own() -> None:
    keys = ("checkpoint.every=0", "model.dtype=float32")
    of = setting(qwen_7b(), "cpu:2", *keys)
    parts, shape = {"gathered weights": 100.0, "activations": 50.0}, qwen_7b()
    fewer = {"activations": 50.0}
    more = wasted(of, shape, parts, 0.0) - wasted(of, shape, fewer, 0.0)
    assert more == pytest.approx(100 * (1.6 + 0.115))
    passing, _ = passing_and_heap(of)
    assert passing["gathered weights"] > 0


@pytest.mark.parametrize(
    ("size", "taken"),
    [(4 << 20, 4 << 20), ((4 << 20) + 1, 5 << 20), (5.5 * (1 << 20), 6 << 20), (9 << 20, 10 << 20), (1.0, 1)],
)
def test_a_tensor_is_rounded_up_to_one_of_four_sizes_between_two_powers_of_two(size: float, taken: int) -> None:
    assert size_class(size) == taken


def test_what_an_update_took_stays_and_later_phases_find_room_in_it() -> None:
    """Each phase is what is held in it, and above that as much as the update had."""
    found = {phase.name: phase for phase in phases(setting(qwen_7b(), "cpu", "checkpoint.every=0"))}
    passing, heap = passing_and_heap(setting(qwen_7b(), "cpu", "checkpoint.every=0"))
    for phase in found.values():
        held = sum(phase.parts[part] for part in phase.parts if part not in COMING_AND_GOING | {"heap"})
        assert phase.total - held == pytest.approx(sum(passing.values()) + heap), phase.name
