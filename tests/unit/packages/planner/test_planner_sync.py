"""Costs of `rollout.sync = delta` and `ahead`, and where they pay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rlcli_planner.phase_memory import engine_host_bytes, engine_worker, host_bytes, phases
from rlcli_planner.step_time import times

from tests.planner_settings import qwen_7b, setting


def test_copies_of_the_weights_are_counted_where_they_are_held() -> None:
    separate = ["rollout.workers=2", "async.staleness=1", "model.dtype=bfloat16"]
    full, delta, overlapped = (
        setting(qwen_7b(), "h100:4", *separate, *sets) for sets in ([], ["rollout.sync=delta"], ["rollout.sync=ahead"])
    )
    size = 2 * qwen_7b().parameters
    assert host_bytes(delta) - host_bytes(full) == pytest.approx(size / full.shards)
    assert host_bytes(overlapped) == host_bytes(full)
    bare = engine_host_bytes(full)
    assert bare is not None
    for layout in (delta, overlapped):
        assert (engine_host_bytes(layout) or 0.0) - bare == pytest.approx(size)
    assert engine_host_bytes(setting(qwen_7b(), "h100:4")) is None
    cpus = [setting(qwen_7b(), "cpu", "rollout.workers=1", *sets) for sets in ([], ["rollout.sync=delta"])]
    held = [{phase.name: phase.total for phase in [*phases(layout), engine_worker(layout)] if phase} for layout in cpus]
    assert held[1]["update"] - held[0]["update"] == pytest.approx(4 * qwen_7b().parameters)
    assert held[1]["generate"] - held[0]["generate"] == pytest.approx(4 * qwen_7b().parameters)


def test_a_sync_of_changes_pays_where_links_are_slower_than_host_memory() -> None:
    def seconds(link: float, *sets: str) -> float:
        layout = setting(qwen_7b(), "h100:8", "rollout.workers=8", "async.staleness=1", "model.dtype=bfloat16", *sets)
        slow = replace(layout, device=replace(layout.device, link_rate=link))
        return next(phase.seconds for phase in times(slow) if phase.name == "sync")

    assert seconds(1e9, "rollout.sync=delta") < 0.3 * seconds(1e9)
    assert seconds(450e9, "rollout.sync=delta") > seconds(450e9)
    overlapped = "rollout.sync=ahead"
    assert seconds(1e9, "rollout.sync=delta_ahead") == seconds(450e9, overlapped) < seconds(1e9, "rollout.sync=delta")


def test_the_base_of_an_adapter_travels_to_host_memory_and_back() -> None:
    def sync(*sets: str) -> tuple[float, str]:
        layout = setting(qwen_7b(), "h100:8", "lora.rank=32", "model.dtype=bfloat16", "async.staleness=1", *sets)
        return next((phase.seconds, phase.bound) for phase in times(layout) if phase.name == "sync")

    (together, bound), (separate_s, _) = sync(), sync("rollout.workers=8")
    full_model = setting(qwen_7b(), "h100:8")
    host_rate = full_model.device.host_rate / full_model.device.constants.over_links
    assert bound == "host memory"
    assert together - separate_s == pytest.approx(2 * 2 * qwen_7b().parameters / host_rate, rel=0.01)
    assert sync("rollout.tensor_parallel=4")[0] < together / 3
