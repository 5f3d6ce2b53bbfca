"""The plan in five lines, which a run prints before it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rlcli_planner.known_devices import GIB
from rlcli_planner.launch.memory_auto import planned, with_sizes_for_cpus
from rlcli_planner.launch.plan_summary import estimates, setting_of_run, summary
from rlcli_planner.plan_input import ImageStats

from rlcli.config.load import resolve
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.errors import ConfigError, SetupError
from rlcli.launch.preflight import longest_of, prepare
from rlcli.launch.prepared_run import Prepared
from rlcli.launch.run_plan import derived_plan
from rlcli.model.io.tiny_model import make_tiny_model
from tests.planner_settings import RATES


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    make_tiny_model(folder / "tiny")
    extra = {"response": "2"}
    for split, count in (("train", 12), ("test", 5)):
        questions = [[{"role": "user", "content": f"1+{number}="}] for number in range(count)]
        rows = [
            row(data_source="toy", messages=messages, verifier="gsm8k", ground_truth="2", extra_info=extra)
            for messages in questions
        ]
        write_rows(folder / f"{split}.parquet", rows)
    return folder


def prepared_for(recipe: str, assets: Path, *sets: str) -> Prepared:
    flags = {"model.path": str(assets / "tiny"), "data.path": str(assets), "evaluation.data": str(assets)}
    sizes = ("data.max_prompt_tokens=32", "rollout.max_response_tokens=16", "rollout.prompts_per_step=4")
    return prepare(resolve(recipe, flags, ["cluster.device=cpu", "train.steps=6", *sizes, *sets]).config)


def test_a_run_prints_five_lines(assets: Path) -> None:
    prepared = prepared_for("grpo", assets, "rollout.samples_per_prompt=2")
    rows = summary(prepared, derived_plan(prepared), Path("runs/grpo-1"))
    assert [title for title, _ in rows] == ["model", "data", "batch", "estimate", "output"]
    lines = dict(rows)
    assert lines["model"].endswith("526k parameters, float32 on cpu, all weights, 1 worker")
    assert lines["data"] == f"12 prompts of {assets}, scored by gsm8k; evaluated on 5"
    assert lines["batch"] == "4 prompts × 2 samples a step, responses of up to 16 tokens; 6 steps, 2 epochs"
    assert lines["estimate"].startswith("memory at most ")
    assert " GiB a worker; a step at most " in lines["estimate"]
    assert " s generation; less as responses end early, or groups have equal rewards); disk " in lines["estimate"]
    assert lines["output"] == "runs/grpo-1; the whole plan: --plan"


def test_given_responses_are_not_scored(assets: Path) -> None:
    prepared = prepared_for("sft", assets)
    lines = dict(summary(prepared, derived_plan(prepared), Path("runs/sft-1"), steps_done=2))
    assert "responses given by extra_info.response" in lines["data"]
    assert "gsm8k" not in lines["data"]


def test_an_unknown_device_leaves_the_estimate_out(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(config: object) -> object:
        raise SetupError("the run's GPUs are in a cluster", "…")

    monkeypatch.setattr("rlcli_planner.launch.local_machine.own_device", unknown)
    prepared = prepared_for("grpo", assets)
    lines = dict(summary(prepared, derived_plan(prepared), Path("runs/grpo-1")))
    assert lines["estimate"] == "unknown: the run's GPUs are in a cluster"


def test_without_a_measurement_memory_is_predicted_and_no_time(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcli_planner.machine.machine_rates.machine_rates", lambda *_: None)
    rows = dict(estimates(prepared_for("grpo", assets), 6))
    assert rows["memory"].startswith("at most ")
    assert rows["time"] == "time not predicted: this machine could not be measured"


def test_a_time_of_a_busy_machine_says_so(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(RATES, quiet=False, training=(1e6, 1e6, 1e6))
    monkeypatch.setattr("rlcli_planner.machine.machine_rates.machine_rates", lambda *_: slow)
    time = dict(estimates(prepared_for("grpo", assets), 6))["time"]
    assert time.endswith("measured on this machine while it was busy")
    assert "e+" not in time, "whole seconds where there are many"


@pytest.mark.long
def test_given_responses_count_at_their_own_lengths(assets: Path) -> None:
    """A response of the data has two tokens where the configuration allows 16."""
    setting = setting_of_run(prepared_for("sft", assets))
    assert setting is not None
    assert 1 <= setting.response_tokens < 4
    assert setting.pack.tokens < setting.samples * (setting.prompt_tokens + 4)
    sampled = setting_of_run(prepared_for("grpo", assets))
    assert sampled is not None
    assert sampled.response_tokens == 16


def test_the_engine_s_cache_is_as_large_as_the_prompts_ask_for(assets: Path) -> None:
    prepared = prepared_for("grpo", assets)
    longest = int(np.diff(prepared.prompts.offsets).max())
    assert longest < 32, "what the configuration allows"
    assert longest_of(prepared.config, prepared.prompts, prepared.held_out) == longest + 16


@pytest.mark.long
@pytest.mark.parametrize(("free", "verdict"), [(0.5, "does not fit: "), (1.9, "may not fit"), (40.0, "at most ")])
def test_sizes_of_a_run_follow_the_memory_of_the_machine(
    assets: Path, monkeypatch: pytest.MonkeyPatch, free: float, verdict: str
) -> None:
    monkeypatch.setattr("rlcli_planner.known_devices.available_memory", lambda: free * GIB)
    flags = {"model.path": str(assets / "tiny"), "data.path": str(assets)}
    sizes = ("train.tokens_per_microbatch=8192", "rollout.prompts_per_step=4")
    recipe = [*sizes[1:], "cluster.device=cpu"]
    resolved = resolve("grpo", flags, recipe)
    changed, prepared, rows = with_sizes_for_cpus(resolved, prepare(resolved.config))
    assert verdict in (text := dict(estimates(prepared, 1))["memory"])
    if free == 40:
        assert (changed.config, rows) == (resolved.config, [])
        assert "fit" not in text
        return
    assert changed.config.train.tokens_per_microbatch == prepared.config.train.tokens_per_microbatch < 8192
    assert dict(rows)["this machine's memory, micro-batch"].startswith("train.tokens_per_microbatch = ")
    assert changed.origins["train.tokens_per_microbatch"] == "this machine's memory"
    for key in (sizes[0], "train.deterministic=true"):
        fixed = resolve("grpo", flags, [*recipe, key])
        fixed, _, _ = with_sizes_for_cpus(fixed, prepare(fixed.config))
        assert fixed.config.train.tokens_per_microbatch == 8192


@pytest.mark.parametrize(
    ("kind", "tokens", "size"),
    [("qwen2_5_vl", 9, "0.677 MB"), ("internvl", 20, "1.51 MB")],  # 3 × 3 tokens; 2 × 2 tiles and the small version
)
def test_a_plan_counts_the_images_of_the_data_by_their_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int, size: str
) -> None:
    from rlcli.images import decoding
    from rlcli.model.io.tiny_vision import save_vision_model, vision_model
    from rlcli.prep.pipeline import Plan, converter_named, prepare
    from rlcli.prep.split_writer import write_splits
    from rlcli.types import ConvertOptions

    save_vision_model(vision_model(kind), model := tmp_path / "model")
    options = ConvertOptions(count=8, test_count=2, cells=2, cell=42)  # 84 × 84 pixels
    write_splits(tmp_path / "data", prepare(converter_named("shapes"), options, Plan(check=False)).splits, {}, "verl")

    def decode(data: bytes) -> None:
        raise AssertionError("a plan decodes no image")

    monkeypatch.setattr(decoding, "decode", decode)
    flags = {"model.path": str(model), "data.path": str(tmp_path / "data")}
    notes: list[str] = []
    result, rows = planned("grpo", flags, ["model.freeze=encoder", "data.max_prompt_tokens=64"], "cpu", notes.append)
    assert result.setting.image_stats == ImageStats(tokens, 1.0)
    assert result.setting.prompt_tokens > tokens + 10
    assert dict(rows)["pictures"] == f"at most 1 a prompt; {tokens} tokens of a mean prompt, {size} of pixels a step"
    assert f"{result.setting.pixel_bytes / 1e6:.3g} MB" == size
    assert dict(rows)["trained"] == "all weights but encoder (model.freeze)"
    assert {"pictures"} <= {part for phase in result.memory if phase.name == "update" for part in phase.parts}
    assert not notes
    with pytest.raises(ConfigError, match=r"model.freeze = vision: .* reads text alone"):
        planned("grpo", {"model.path": str(make_tiny_model(tmp_path / "text"))}, ["model.freeze=vision"], "cpu", print)
