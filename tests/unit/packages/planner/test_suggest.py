"""`rlcli plan --suggest`: the layouts that it proposes fit, none that fits is faster, and what bounds them is named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rlcli_planner.fitting import suggest
from rlcli_planner.fitting.solve import fits, solved
from rlcli_planner.fitting.suggest import suggest_layouts
from rlcli_planner.known_devices import parse_gpus
from rlcli_planner.plan_input import RunPlanInput
from rlcli_planner.step_time import step_seconds, times

from rlcli.cli.main import main
from tests.planner_settings import QWEN_7B, qwen_7b, setting

LONG = ("rollout.max_response_tokens=8192", "data.max_prompt_tokens=1024", "train.tokens_per_microbatch=9216")


def seven(gpus: str, *sets: str) -> RunPlanInput:
    return setting(qwen_7b(), gpus, *LONG, *sets)


@pytest.mark.long
@pytest.mark.parametrize("gpus", ["h100:2", "h100:8", "a100:16"])
def test_what_is_proposed_fits_and_is_in_order(gpus: str) -> None:
    proposed = suggest_layouts(seven(gpus)).layouts
    assert proposed
    assert all(fits(candidate.setting) for candidate in proposed)
    assert [candidate.seconds for candidate in proposed] == sorted(candidate.seconds for candidate in proposed)
    for candidate in proposed:
        assert candidate.seconds == step_seconds(candidate.setting, times(candidate.setting))
        for key, value in candidate.keys.items():
            assert suggest._value(candidate.setting, key) == value


@pytest.mark.long
def test_no_layout_that_fits_is_faster() -> None:
    requested = seven("h100:4")
    fitting = [solved(suggest._with(requested, keys)) for keys in suggest._candidates(requested)]
    best = min(step_seconds(candidate, times(candidate)) for candidate in fitting if candidate)
    assert suggest_layouts(requested).layouts[0].seconds == pytest.approx(best, rel=2 * suggest.ALIKE)


@pytest.mark.long
def test_layouts_that_are_not_much_faster_are_left_out() -> None:
    layouts = suggest_layouts(seven("h100:8")).layouts
    divisions = [tuple(suggest._value(candidate.setting, key) for key in suggest.DIVIDING) for candidate in layouts]
    times_of: dict[tuple[Any, ...], list[float]] = {}
    for division, candidate in zip(divisions, layouts, strict=True):
        times_of.setdefault(division, []).append(candidate.seconds)
    assert all(
        slower > earlier * (1 + suggest.ALIKE)
        for seconds_of_kind in times_of.values()
        for earlier, slower in pairwise(seconds_of_kind)
    )


def test_nothing_is_proposed_where_nothing_fits_or_times_are_unknown() -> None:
    none = suggest_layouts(seven("l4:1"))
    assert none.layouts == []
    assert "memory:" in none.short_of
    assert suggest_layouts(seven("8x80GB")).layouts == []


def test_copies_on_each_node_spare_the_links_between_nodes() -> None:
    sharded = {phase.name: phase for phase in times(seven("h100:64"))}
    copied = {phase.name: phase for phase in times(seven("h100:64", "parallel.replicate=8"))}
    assert sharded["update"].bound == "links between nodes"
    assert copied["update"].seconds < sharded["update"].seconds
    assert suggest_layouts(seven("h100:64")).layouts[0].keys["parallel.replicate"] >= 8


def test_a_node_has_eight_devices() -> None:
    device, _ = parse_gpus("h100:64")
    assert device.rate_among(8) == (450e9, "links inside a node")
    assert device.rate_among(9) == (50e9, "links between nodes")
    assert parse_gpus("l4:16")[0].rate_among(16)[0] < 5e9
    assert parse_gpus("cpu")[0].rate_among(16)[1] == "links inside a node"


@pytest.mark.long
def test_the_command_proposes_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    words = ["plan", "grpo", "--model", str(tmp_path), "--gpus", "h100:8", "--suggest"]
    words += [word for key in LONG for word in ("--set", key)]
    assert main([*words, "--json"]) == 0
    suggestions = json.loads(capsys.readouterr().out)["suggested"]
    assert suggestions["layouts"][0]["seconds"] <= suggestions["layouts"][-1]["seconds"]
    assert all(layout["peak_gb"] < 79.6 for layout in suggestions["layouts"])
    assert main(words) == 0
    assert "--set train.tokens_per_microbatch=" in " ".join(capsys.readouterr().out.split())


def test_devices_without_rates_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    assert main(["plan", "grpo", "--model", str(tmp_path), "--gpus", "8x80GB", "--suggest"]) == 2
    assert "--suggest compares times, and none is predicted; give a GPU name: --gpus h100:8" in capsys.readouterr().err
