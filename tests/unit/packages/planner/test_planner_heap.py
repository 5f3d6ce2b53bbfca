"""On CPUs: what the C library's heap is said to waste and to keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rlcli_planner.heap_memory import rounding, size_class, wasted
from rlcli_planner.phase_memory import TEMPORARY_PARTS, phases
from rlcli_planner.plan_input import RunPlanInput

from tests.planner_settings import qwen_7b, setting, totals


def test_the_heap_keeps_a_checkpoints_copy_that_finds_no_room_in_it() -> None:
    """On CPUs: of few tokens the copy is more than the passes."""
    few = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "data.max_prompt_tokens=16"]
    few += ["rollout.max_response_tokens=16"]
    without_copy, copied = (
        totals(replace(run, device=replace(run.device, memory=1e12)))  # or no copy is made
        for run in (setting(qwen_7b(), "cpu", f"checkpoint.every={every}", *few) for every in (0, 1))
    )
    assert copied["generate"] > without_copy["generate"]
    assert copied["update"] > without_copy["update"]  # what it took stays


def passing_and_heap(run: RunPlanInput) -> tuple[dict[str, float], float]:
    """The transient memory of an update, and the memory that the heap takes besides."""
    parts = next(phase.parts for phase in phases(run) if phase.name == "update")
    names = ("activations", "logits", "gradients", "gathered weights")
    return {name: parts.get(name, 0.0) for name in names}, parts["heap"]


def rounded_up(run: RunPlanInput) -> float:
    """By how many bytes the activations of an update are rounded up."""
    return rounding(run, run.policy)


def test_what_an_update_keeps_is_rounded_up_tensor_by_tensor() -> None:
    """Of a Qwen2's layer four are as wide as the gated unit, six as the hidden state, and
    at each sample's own places two as the queries and two as the keys. (The planner takes the keys, and what goes into
    the output projection, to be rounded as the queries are.)"""
    run = setting(qwen_7b(), "cpu", "checkpoint.every=0")
    tokens, attention_tokens, model = run.pack.tokens, run.pack.attention_tokens, run.policy
    kept_tensors = [(tokens, model.intermediate)] * 4 + [(tokens, model.hidden)] * 6
    kept_tensors += [(attention_tokens, model.query)] * 2 + [(attention_tokens, model.key)] * 2
    over = sum(size_class(4 * rows * width) - 4 * rows * width for rows, width in kept_tensors)
    assert over > 0
    assert rounded_up(run) == pytest.approx(model.layers * over, rel=0.1)


def test_what_is_not_kept_is_not_rounded_up() -> None:
    full, adapters, recomputed = (
        rounded_up(setting(qwen_7b(), "cpu", "checkpoint.every=0", key))
        for key in ("lora.rank=0", "lora.rank=16", "model.gradient_checkpointing=true")
    )
    assert adapters == pytest.approx(full)  # the hidden state, which they keep less of, has just jemalloc's size
    assert 0 < recomputed < 0.01 * full


def test_whatever_an_update_takes_besides_leaves_more_holes() -> None:
    """The optimizer's moments, temporary memory, and most of all weights that are gathered for a moment."""
    run, shape = setting(qwen_7b(), "cpu:2", "checkpoint.every=0", "model.dtype=float32"), qwen_7b()
    none = wasted(run, shape, {}, 0.0)
    assert none > rounding(run, shape) * 0.5 > 0
    assert wasted(run, shape, {}, 100.0) > none
    activations, gathered = (wasted(run, shape, {name: 100.0}, 0.0) for name in ("activations", "gathered weights"))
    assert none < activations < none + 100 < gathered
    passing, heap = passing_and_heap(run)
    moments = 2 * 4 * run.trained_parameters() / 2  # of two ranks
    assert passing["gathered weights"] > 0
    assert heap == pytest.approx(wasted(run, run.policy, passing, moments))


@pytest.mark.parametrize(
    ("size", "size_with_rounding"),
    [(4 << 20, 4 << 20), ((4 << 20) + 1, 5 << 20), (5.5 * (1 << 20), 6 << 20), (9 << 20, 10 << 20), (1.0, 1)],
)
def test_a_tensor_is_rounded_up_to_one_of_four_sizes_per_power_of_two(size: float, size_with_rounding: int) -> None:
    assert size_class(size) == size_with_rounding


def test_what_an_update_took_stays_and_later_phases_find_room_in_it() -> None:
    """Each phase is what is held in it, and above that as much as the update had."""
    phase_by_name = {phase.name: phase for phase in phases(setting(qwen_7b(), "cpu", "checkpoint.every=0"))}
    passing, heap = passing_and_heap(setting(qwen_7b(), "cpu", "checkpoint.every=0"))
    for phase in phase_by_name.values():
        held = sum(phase.parts[part] for part in phase.parts if part not in TEMPORARY_PARTS | {"heap"})
        assert phase.total - held == pytest.approx(sum(passing.values()) + heap), phase.name
