"""`rlcli plan` and `--memory auto`: what is said of devices, what fits, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlcli_planner.engine_memory import full_responses, reloading, weights
from rlcli_planner.fitting.solve import (
    STEP,
    budget,
    fits,
    largest_microbatch,
    largest_utilization,
    solved,
    with_least_sleep,
)
from rlcli_planner.forecast import disk, forecast
from rlcli_planner.known_devices import GIB, Device, of_machine, parse_gpus
from rlcli_planner.model_shape import ModelShape, read_shape, shape_of
from rlcli_planner.phase_memory import checkpoint_bytes, host_bytes, phases
from rlcli_planner.step_time import times

from rlcli.cli.main import main
from rlcli.config.load import resolve
from rlcli.errors import ConfigError, SetupError
from rlcli.model.io.model_config import plain_config
from tests.planner_settings import QWEN_7B, setting, totals


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return folder


@pytest.fixture(scope="module")
def shape(qwen: Path) -> ModelShape:
    return read_shape(str(qwen))


def test_gpus_are_named_counted_or_given_by_size() -> None:
    h100, count = parse_gpus("H100:8")
    assert (h100.name, count, h100.has_rates) == ("h100", 8, True)
    sized, count = parse_gpus("2x24GB")
    assert count == 2
    assert sized.memory == pytest.approx(24 * GIB, rel=0.01)
    assert not sized.has_rates
    assert parse_gpus("cpu")[0].is_cpu


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", "NVIDIA L40"),
    ],
)
def test_the_machine_s_gpu_is_found_in_the_table(name: str, known: str) -> None:
    gpu = of_machine(name, 5.0)
    assert (gpu.name, gpu.memory) == (known, 5.0)


def test_a_gpu_that_tells_no_memory_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcli_planner.launch.memory_auto import own_device

    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: NVIDIA GB10" || echo "NVIDIA GB10, [N/A]"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("rlcli.cluster.ray_session._built_for", lambda: "cuda")
    with pytest.raises(SetupError, match="--gpus"):
        own_device(resolve("grpo").config)


@pytest.mark.parametrize("text", ["h1000:8", "h100:0", "eight", "8x", "0x80GB", "h100:-1", ""])
def test_devices_that_there_are_not_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_gpus(text)


def test_more_ranks_hold_smaller_parts(shape: ModelShape) -> None:
    single, eight = (phases(setting(shape, f"h100:{count}"))[-1].parts for count in (1, 8))
    assert single["weights"] == pytest.approx(4 * shape.parameters)
    assert eight["weights"] == pytest.approx(single["weights"] / 8)
    assert eight["optimizer"] == pytest.approx(2 * eight["weights"])


def test_each_copy_is_sharded_over_its_own_workers(shape: ModelShape) -> None:
    eight, copies = (setting(shape, "h100:8", f"parallel.replicate={count}") for count in (1, 2))
    four = setting(shape, "h100:4")
    parts, wanted = phases(copies)[-1].parts, phases(four)[-1].parts
    assert {name: parts[name] for name in ("weights", "optimizer")} == {
        name: wanted[name] for name in ("weights", "optimizer")
    }
    assert copies.pack == eight.pack, "rows are divided among all workers"
    assert checkpoint_bytes(copies) == checkpoint_bytes(four)
    assert host_bytes(copies) == host_bytes(four)
    update = {
        name: next(t for t in times(layout) if t.name == "update").seconds
        for name, layout in (("four", four), ("copies", copies))
    }
    assert update["copies"] < update["four"]


def test_a_run_that_does_not_fit_as_copies_is_told_of_one(shape: ModelShape) -> None:
    fix = forecast(setting(shape, "h100:8", "parallel.replicate=8")).fixes[0]
    assert fix.keys == {"parallel.replicate": 1}


def test_workers_that_divide_tokens_hold_a_share_of_the_activations(shape: ModelShape) -> None:
    long = ("rollout.max_response_tokens=30000", "data.max_prompt_tokens=1000", "train.tokens_per_microbatch=31000")
    undivided, four = (setting(shape, "h100:8", *long, f"parallel.context={ranks}") for ranks in (1, 4))
    parts, wanted = (
        next(phase for phase in phases(layout) if phase.name == "update").parts for layout in (four, undivided)
    )
    assert parts["activations"] == pytest.approx(wanted["activations"] / 4, rel=0.01)
    assert (parts["weights"], parts["optimizer"]) == (wanted["weights"], wanted["optimizer"])
    seconds = {
        ranks: next(
            t for t in times(setting(shape, f"h100:{ranks}", *long, f"parallel.context={ranks}")) if t.name == "update"
        )
        for ranks in (1, 8)
    }
    assert seconds[8].seconds > seconds[1].seconds / 8, "what they exchange"


def test_workers_that_divide_experts_gather_fewer_weights_and_send_tokens(shape: ModelShape) -> None:
    mixture = replace(shape, experts=64, experts_per_token=4, intermediate=768)
    undivided, divided = (setting(mixture, "h100:8", f"parallel.expert={ranks}") for ranks in (1, 8))
    parts, wanted = (
        next(layout for layout in phases(divided_setting) if layout.name == "update").parts
        for divided_setting in (divided, undivided)
    )
    assert (parts["weights"], parts["optimizer"]) == (wanted["weights"], wanted["optimizer"])
    others = mixture.experts * mixture.expert_parameters * 7 / 8
    assert wanted["gathered weights"] - parts["gathered weights"] == pytest.approx(2 * 2 * others), (
        "two layers, bfloat16"
    )
    seconds = []
    for tokens in (2048, 65536):
        ways = (
            setting(mixture, "h100:8", f"parallel.expert={n}", f"train.tokens_per_microbatch={tokens}") for n in (1, 8)
        )
        seconds.append([next(t for t in times(layout) if t.name == "update").seconds for layout in ways])
    (whole_s, divided_s), (long_s, long_divided_s) = seconds
    assert divided_s / whole_s < long_divided_s / long_s, (
        "weights are gathered for each micro-batch, tokens are sent once"
    )


def test_a_critic_and_teachers_on_workers_of_their_own_divide_no_experts(shape: ModelShape) -> None:
    mixture = replace(shape, experts=64, experts_per_token=4, intermediate=768)
    for keys in (["critic.workers=2", "algorithm.advantage=gae"], ["teacher.workers=2", "teacher.path=t"]):
        separate = replace(
            setting(mixture, "h100:8", "parallel.expert=8", *keys),
            teachers=(mixture,),
            critic=replace(mixture, value=True),
        )
        assert all(phase.seconds > 0 for phase in times(separate))
        assert separate.with_dedicated_workers(2).elsewhere(mixture) == 0


def test_a_run_whose_samples_are_too_long_is_told_to_divide_them(shape: ModelShape) -> None:
    long = ("rollout.max_response_tokens=60000", "data.max_prompt_tokens=1000", "train.tokens_per_microbatch=61000")
    fixes = forecast(setting(shape, "h100:8", *long)).fixes
    assert any("parallel.context" in fix.keys for fix in fixes), fixes


def test_lora_trains_an_adapter_and_keeps_the_base_in_bfloat16(shape: ModelShape) -> None:
    parts = phases(setting(shape, "h100:1", "lora.rank=16"))[-1].parts
    assert parts["weights"] == pytest.approx(2 * shape.parameters, rel=0.05)
    assert parts["optimizer"] < 0.02 * 8 * shape.parameters


def test_one_gpu_keeps_all_weights_in_16_bits_during_an_update(shape: ModelShape) -> None:
    def gathered(gpus: str, *keys: str) -> float:
        return next(phase for phase in phases(setting(shape, gpus, *keys)) if phase.name == "update").parts[
            "gathered weights"
        ]

    assert gathered("h100:1") == pytest.approx(2 * shape.parameters)
    assert gathered("h100:2", "parallel.replicate=2") == pytest.approx(2 * shape.parameters)
    assert gathered("h100:2") < shape.parameters
    assert gathered("h100:1", "lora.rank=16") < shape.parameters


def test_a_reference_is_a_copy_unless_an_adapter_can_be_left_out(shape: ModelShape) -> None:
    assert "reference" in phases(setting(shape, "h100:8", "algorithm.kl_coef=0.01"))[-1].parts
    assert "reference" not in phases(setting(shape, "h100:8", "algorithm.kl_coef=0.01", "lora.rank=8"))[-1].parts


def test_checkpointing_takes_less_and_offloading_its_inputs_still_less(shape: ModelShape) -> None:
    plain, recomputed, offloaded = (
        totals(setting(shape, "h100:8", f"model.gradient_checkpointing={value}"))["update"]
        for value in ("false", "true", "offload")
    )
    assert plain > recomputed > offloaded


def test_offload_moves_memory_from_device_to_host_during_generation(shape: ModelShape) -> None:
    resident, moments, everything = (
        setting(shape, "h100:8", f"train.offload={kind}") for kind in ("none", "optimizer", "all")
    )
    state = 4 * shape.parameters / 8
    assert totals(resident)["generate"] - totals(moments)["generate"] == pytest.approx(2 * state)
    assert totals(resident)["generate"] - totals(everything)["generate"] == pytest.approx(3 * state)
    assert totals(resident)["update"] == pytest.approx(totals(everything)["update"])
    assert host_bytes(everything) - host_bytes(resident) == pytest.approx(3 * state)


@pytest.mark.parametrize(
    ("recipe", "overrides", "bytes_each"),
    [
        ("grpo", ["algorithm.kl_coef=0.01"], 2),  # a reference in bfloat16
        ("grpo", ["lora.rank=8"], 2),  # the adapter's base
        ("ppo", ["algorithm.kl_coef=0"], 12),  # a critic with its moments
    ],
)
def test_all_that_is_offloaded_is_in_the_hosts_memory(
    shape: ModelShape, recipe: str, overrides: list[str], bytes_each: int
) -> None:
    resident, away = (
        setting(shape, "h100:8", f"train.offload={kind}", *overrides, recipe=recipe) for kind in ("none", "all")
    )
    host_increase = host_bytes(away) - host_bytes(resident)
    other_bytes = (away.critic or shape).parameters * bytes_each / 8
    assert host_increase == pytest.approx(3 * 4 * away.trained_parameters() / 8 + other_bytes)
    gone = totals(resident)["generate"] - totals(away)["generate"]
    assert host_increase == pytest.approx(gone), "what leaves the device"


def test_engines_of_their_own_leave_the_trainers_memory(shape: ModelShape) -> None:
    separate = forecast(setting(shape, "h100:4", "rollout.workers=4"))
    assert "generate" not in {phase.name for phase in separate.memory}
    assert separate.engine_worker is not None
    assert "weights" not in separate.engine_worker.parts
    assert all("KV cache" not in phase.parts for phase in separate.memory)


def test_the_sampler_s_state_sleeps_with_the_weights(shape: ModelShape) -> None:
    many = setting(shape, "h100:1", "rollout.max_concurrent=1024")
    held = {phase.name: phase.parts.get("sampler's state") for phase in phases(many)}
    assert held["generate"] == held["sync"] == 1024 * shape.vocab * (4 + 1 / 8)
    assert held["update"] is None
    drafting = phases(setting(shape, "h100:1", "rollout.speculate=4"))
    assert all("sampler's state" not in phase.parts for phase in drafting), "of the second model runner alone"
    assert all("sampler's state" not in phase.parts for phase in phases(setting(shape, "cpu")))


def test_an_engine_that_keeps_memory_has_it_while_the_trainer_computes(shape: ModelShape) -> None:
    asleep, weights_kept, awake = (
        {phase.name: phase.parts for phase in phases(setting(shape, "h100:8", f"rollout.sleep={kind}"))}["update"]
        for kind in ("all", "cache", "none")
    )
    held = {"engine's weights", "sampler's state"}
    assert weights_kept.keys() - asleep.keys() == held
    assert awake.keys() - asleep.keys() == held | {"KV cache"}
    assert weights_kept["engine's weights"] == awake["engine's weights"] == 2 * shape.parameters


@pytest.mark.parametrize(
    ("gpus", "sets", "sleep"),
    [
        ("8x180GB", [], "none"),
        ("8x100GB", ["rollout.gpu_memory_utilization=0.6"], "cache"),
        ("8x80GB", ["rollout.gpu_memory_utilization=0.6"], "all"),
        ("8x60GB", ["rollout.sleep=none"], "none"),
        ("8x180GB", ["rollout.workers=1"], "auto"),
        ("8x100GB", ["rollout.gpu_memory_utilization=0.6", "rollout.engine=server"], "all"),
    ],
)
def test_an_engine_releases_the_least_with_which_a_run_fits(
    gpus: str, sets: list[str], sleep: str, shape: ModelShape
) -> None:
    adjusted = with_least_sleep(setting(shape, gpus, *sets))
    assert adjusted.config.rollout.sleep == sleep
    if sleep != "auto" and "rollout.sleep=none" not in sets:
        assert fits(adjusted)


def test_an_adapters_base_stays_on_the_device_where_it_can(shape: ModelShape) -> None:
    adjusted = with_least_sleep(setting(shape, "h200:1", "lora.rank=32", "rollout.gpu_memory_utilization=0.6"))
    assert adjusted.config.rollout.sleep == "cache"
    moving = adjusted.with_keys(rollout={"sleep": "all"})
    assert host_bytes(moving) > host_bytes(adjusted) + weights(adjusted)
    assert {p.name: p.seconds for p in times(moving)}["sync"] > {p.name: p.seconds for p in times(adjusted)}["sync"]


def test_a_sync_takes_the_module_that_vllm_loads_anew(shape: ModelShape) -> None:
    unshared, shared = setting(shape, "h100:2"), setting(shape, "h100:2", "rollout.tensor_parallel=2")
    assert reloading(unshared) == 2 * reloading(shared) == 2 * shape.embedding_parameters
    mixture = replace(shape, experts=128, experts_per_token=8, intermediate=768)
    assert reloading(setting(mixture, "h100:1")) == 2 * 128 * mixture.expert_parameters
    assert reloading(setting(shape, "cpu")) == reloading(setting(shape, "h100:1", "lora.rank=8")) == 0
    separate_totals = {
        phase.name: phase.total
        for phase in phases(replace(unshared, config=unshared.config.changed(rollout={"workers": 1})))
    }
    colocated_totals = {phase.name: phase.total for phase in phases(unshared)}
    assert colocated_totals["sync"] > separate_totals["sync"] + reloading(unshared)


def test_fp8_halves_the_engine_s_layers(shape: ModelShape) -> None:
    halved = weights(setting(shape, "h100:1", "rollout.quantization=fp8"))
    layers = shape.layers * shape.layer_parameters
    assert weights(setting(shape, "h100:1")) - halved == pytest.approx(layers)


def test_the_largest_micro_batch_fits_and_the_next_does_not(shape: ModelShape) -> None:
    run = setting(shape, "h100:8")
    tokens = largest_microbatch(run)
    assert tokens is not None

    def update(tokens: int) -> float:
        return totals(run.with_keys(train={"tokens_per_microbatch": tokens}))["update"]

    assert update(tokens) <= budget(run) < update(tokens + STEP)


def test_the_engine_gets_the_largest_share_beside_what_trains(shape: ModelShape) -> None:
    run = setting(shape, "h100:8")
    share = largest_utilization(run)
    assert share is not None
    tried = [run.with_keys(rollout={"gpu_memory_utilization": each}) for each in (share, share + 0.01)]
    assert max(totals(tried[0])[phase] for phase in ("generate", "sync")) <= budget(run)
    assert max(totals(tried[1])[phase] for phase in ("generate", "sync")) > budget(run)


def test_what_fits_nowhere_comes_with_what_would_fit(shape: ModelShape) -> None:
    prediction = forecast(setting(shape, "1x80GB"))
    assert not prediction.fits
    assert prediction.largest == {}
    assert any(hint.keys.get("lora.rank") for hint in prediction.fixes)
    assert any(hint.keys.get("cluster.workers", 0) > 1 for hint in prediction.fixes)
    for hint in prediction.fixes:
        sections: dict[str, dict[str, Any]] = {}
        for key, value in hint.keys.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        assert solved(setting(shape, "1x80GB").with_keys(**sections)) is not None


def test_what_is_solved_fits(shape: ModelShape) -> None:
    best = solved(setting(shape, "h100:8"))
    assert best is not None
    assert fits(best)
    assert full_responses(best) >= 1


def test_checkpoints_on_disk_are_those_kept_and_the_one_being_written(shape: ModelShape) -> None:
    run = setting(shape, "h100:8", "train.steps=100", "checkpoint.every=10", "checkpoint.keep=2")
    assert disk(run)["checkpoints"] == pytest.approx(3 * checkpoint_bytes(run))
    once = setting(shape, "h100:8", "checkpoint.every=0", "checkpoint.keep=2")
    assert disk(once)["checkpoints"] == pytest.approx(checkpoint_bytes(once))


def test_times_follow_the_devices(shape: ModelShape) -> None:
    slow, fast = (sum(t.seconds for t in times(setting(shape, f"{name}:8"))) for name in ("a100", "h100"))
    assert slow > fast > 0
    assert times(setting(shape, "8x80GB")) == []
    plain, recomputed = (
        {t.name: t.seconds for t in times(setting(shape, "h100:8", f"model.gradient_checkpointing={value}"))}
        for value in ("false", "true")
    )
    assert recomputed["update"] > plain["update"]
    assert recomputed["generate"] == plain["generate"]


def test_a_cpu_s_phases_hold_the_engine_throughout(shape: ModelShape) -> None:
    run = setting(shape, "cpu")
    assert all("KV cache" in phase.parts for phase in phases(run))
    assert isinstance(run.device, Device)
    assert run.bytes_each == 4


@pytest.mark.long
def test_plan_answers_in_json_without_weights_or_a_gpu(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "grpo", "--model", str(qwen), "--gpus", "h100:8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is True
    assert set(answer["largest"]) == {"train.tokens_per_microbatch", "rollout.gpu_memory_utilization"}
    assert {"generate_gb", "update_gb", "sync_gb"} <= set(answer["memory"])
    parts = answer["memory"]["update_gb"]["parts"]
    assert sum(parts.values()) == pytest.approx(answer["memory"]["update_gb"]["total"])
    assert answer["plan"]["samples a step"].startswith("32 prompts")
    assert "prompts" not in answer["plan"]


@pytest.mark.long
def test_plan_shows_a_bar_for_each_phase(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "grpo", "--model", str(qwen), "--gpus", "h100:8"]) == 0
    shown = capsys.readouterr().out
    bars = [line for line in shown.splitlines() if "█" in line and "░" in line]
    assert len(bars) == 4
    assert "--memory auto" in shown


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpus", "h1000:8"], "h1000"),
        (["--gpus", "h100:8", "--set", "train.nonsense=1"], "train.nonsense"),
        (["--gpus", "h100:8", "--set", "rollout.max_response_tokens=9000"], "tokens_per_microbatch"),
        (["--gpus", "h100:2", "--set", "rollout.workers=2"], "rollout.workers"),
        (["--gpus", "h100:8", "--set", "rollout.tensor_parallel=8"], "28 attention heads"),
        (["--gpus", "h100:8", "--workers", "4", "--set", "rollout.workers=8"], "12 are more than 8"),
        (["--gpus", "h100:8", "--set", "lora.rank=8", "--set", "lora.targets=nothing"], "lora.targets"),
        (["--gpus", "cpu", "--set", "rollout.quantization=fp8"], "8-bit"),
        (["--gpus", "h100:8", "--set", "critic.workers=2"], "no value model"),
        (["--gpus", "h100:8", "--data", "/nowhere"], "/nowhere"),
    ],
)
def test_plan_refuses_in_one_line(
    arguments: list[str], problem: str, qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "grpo", "--model", str(qwen), *arguments]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert len(error.strip().splitlines()) == 1


def test_devices_that_share_an_engine_are_counted_before_the_rules(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "critic.workers=2", "--set", "rollout.tensor_parallel=4"]
    assert main(["plan", "ppo", "--model", str(qwen), "--gpus", "h100:6", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan"]["samples an engine"].startswith("256 / 1 engines")
    assert answer["critic_worker"]["total"] > 0


def test_what_does_not_fit_is_told_as_it_is(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "grpo", "--model", str(qwen), "--gpus", "h100:8", "--set"]
    assert main([*words, "rollout.gpu_memory_utilization=0.1"]) == 0
    assert "KV cache holds 0" in capsys.readouterr().out.replace("\n", " ")
    assert main([*words, "rollout.kv_cache_mb=100", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "kv_cache_mb" in answer["shortfall"]
    assert [hint["set"] for hint in answer["hints"]] == [{"rollout.kv_cache_mb": 112}]  # 2 · 28 · 512 · 2 B · 2,048


def test_a_critic_on_workers_of_its_own_is_no_burden_of_the_policy_s(shape: ModelShape) -> None:
    together, separate = (setting(shape, "h100:4", *words, recipe="ppo") for words in ((), ("critic.workers=2",)))
    assert "critic" not in phases(separate)[-1].parts
    critic_forecast = forecast(separate).critic_worker
    assert critic_forecast is not None
    assert critic_forecast.parts["critic"] == pytest.approx(2 * phases(together)[-1].parts["critic"])
    assert forecast(together).critic_worker is None


def test_teachers_are_counted_where_they_are(shape: ModelShape) -> None:
    two = 'teacher.path=[{path = "a", sources = ["x"]}, {path = "b"}]'
    shared, separate = (
        setting(shape, "h100:4", two, *overrides, recipe="opd") for overrides in ((), ("teacher.workers=2",))
    )
    weights_each = 2 * 2 * shape.parameters / 4  # two teachers in bfloat16 on four ranks
    for phase in phases(shared):
        assert phase.parts["teachers"] == pytest.approx(weights_each)
    assert "teacher" in totals(shared)
    assert "teacher" not in totals(separate)
    assert not any("teachers" in phase.parts for phase in phases(separate))
    teacher_forecast = forecast(separate).teacher_worker
    assert teacher_forecast is not None
    assert teacher_forecast.parts["teachers"] == pytest.approx(2 * weights_each)
    assert forecast(shared).teacher_worker is None
    seconds = {phase.name: phase.seconds for phase in times(shared)}
    assert seconds["teacher"] == pytest.approx(seconds["old_log_probs"])
    assert {phase.name: phase.seconds for phase in times(separate)}["teacher"] > seconds["teacher"]


def test_what_teachers_say_is_counted_until_the_update_is_over(shape: ModelShape) -> None:
    top = ("teacher.path=a", "teacher.top_k=16", "algorithm.advantage=one", "algorithm.loss=opd_forward")
    held = {phase.name: phase.parts.get("teacher's top k") for phase in phases(setting(shape, "h100:4", *top))}
    assert held["teacher"] == held["update"] == 256 / 4 * 1024 * 16 * 12
    assert held["generate"] is held["sync"] is None


def test_offload_keeps_teachers_off_the_device_while_they_do_not_score(shape: ModelShape) -> None:
    away = setting(shape, "h100:4", "teacher.path=a", "train.offload=all", recipe="opd")
    held = {phase.name for phase in phases(away) if "teachers" in phase.parts}
    assert held == {"teacher"}
    assert host_bytes(away) - host_bytes(setting(shape, "h100:4", "train.offload=all")) == 2 * shape.parameters / 4


def test_generation_beside_training_costs_a_step_what_takes_longer(shape: ModelShape) -> None:
    sequential, concurrent = (
        forecast(setting(shape, "h100:4", "rollout.workers=4", f"async.staleness={staleness}")) for staleness in (0, 1)
    )
    seconds = {phase.name: phase.seconds for phase in concurrent.seconds}
    assert sequential.step_seconds == pytest.approx(sum(seconds.values()))
    assert concurrent.step_seconds == max(seconds["generate"], sequential.step_seconds - seconds["generate"])


PLAIN = {name: size for name, size in QWEN_7B.items() if name != "architectures"}


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ({}, True),
        ({"use_sliding_window": False, "sliding_window": 131072}, True),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}, False),
        ({"model_type": "llama"}, True),
        ({"model_type": "mistral", "sliding_window": None}, True),
        ({"model_type": "mistral"}, False),
        ({"model_type": "qwen3", "head_dim": 128}, True),
        ({"model_type": "qwen3"}, False),
        ({"model_type": "olmo2"}, False),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, True),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, False),
        ({"layer_types": ["full_attention"] * PLAIN["num_hidden_layers"]}, True),
        ({"layer_types": ["full_attention"] * (PLAIN["num_hidden_layers"] - 1) + ["sliding_attention"]}, False),
        ({"hidden_size": "wide"}, False),
    ],
)
def test_sizes_read_without_transformers_are_the_same(change: dict[str, Any], plain: bool, tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(PLAIN | change))
    plain_settings = plain_config(str(tmp_path))
    assert (plain_settings is not None) == plain
    if plain_settings is not None:
        assert shape_of(plain_settings) == shape_of(AutoConfig.from_pretrained(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["grpo", "ppo", "dapo"])
def test_a_plan_imports_nothing_heavy(qwen: Path, recipe: str) -> None:
    program = (
        "import sys; from rlcli.cli.main import main; "
        f"assert main(['plan', {recipe!r}, '--model', {str(qwen)!r}, '--gpus', 'h100:8']) == 0; "
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    imported = set(done.stdout.splitlines()[-1].split())
    assert "rlcli_planner.forecast" in imported
    assert not imported & {"torch", "ray", "transformers", "vllm", "peft", "datasets", "pyarrow"}


@pytest.mark.long
def test_a_plan_tries_functions_of_ones_own(qwen: Path, tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text(
        "from rlcli.algorithms.losses import register\n\n"
        "@register('own', needs=['log_probs'])\ndef own(inputs):\n    return inputs.log_probs + None\n"
    )
    words = ["plan", "grpo", "--model", str(qwen), "--gpus", "h100:8", "--set", "algorithm.loss=own"]
    program = [sys.executable, "-m", "rlcli.cli.main", *words, "--set", f"algorithm.code={code}"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 2
    assert "fails on four tokens" in done.stderr


def test_plan_refuses_a_folder_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "grpo", "--model", str(tmp_path), "--gpus", "h100:8"]) == 2
    assert "config.json" in capsys.readouterr().err
    assert main(["plan", "grpo", "--gpus", "h100:8"]) == 2
    assert "--model" in capsys.readouterr().err


def test_memory_auto_knows_no_other_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grpo", "--memory", "much"]) == 2
    assert "--memory much" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of a run that could begin here."""
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.model.io.tiny_model import make_tiny_model
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    folder = tmp_path_factory.mktemp("run")
    model = make_tiny_model(folder / "tiny")
    prepared = prepare(converter_named("arithmetic"), ConvertOptions(count=16, test_count=4))
    write_prompts(folder / "train.parquet", prepared.splits["train"])
    words = ["--model", str(model), "--data", str(folder), "--out", str(folder / "out")]
    return [*words, "--set", "cluster.device=cpu", "--set", "data.max_prompt_tokens=32"]


@pytest.mark.long
def test_memory_auto_chooses_what_is_not_set_and_says_so(
    tiny_run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "grpo", *tiny_run, "--memory", "auto", "--dry-run", "--json"]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    micro_batch = answer["config"]["train"]["tokens_per_microbatch"]
    assert f"train.tokens_per_microbatch = {micro_batch}" in answer["plan"]["--memory auto, micro-batch"]
    assert f"at most {micro_batch} tokens" in answer["plan"]["micro-batch"]
    assert main([*arguments, "--set", "train.tokens_per_microbatch=2048"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["config"]["train"]["tokens_per_microbatch"] == 2048
    assert "as set" in answer["plan"]["--memory auto, micro-batch"]


def test_memory_auto_raises_a_micro_batch_that_is_shorter_than_a_sample(qwen: Path) -> None:
    from rlcli_planner.launch.memory_auto import resolve_auto

    long = ["rollout.max_response_tokens=16384"]
    adjusted = resolve_auto("grpo", {"model.path": str(qwen)}, long)
    assert adjusted.config.train.tokens_per_microbatch == 1024 + 16384
    assert adjusted.origins["train.tokens_per_microbatch"] == "--memory auto"
    assert resolve_auto("grpo", {}, []) == resolve("grpo", {}, [])
    with pytest.raises(ConfigError, match="tokens_per_microbatch = 2048"):
        resolve_auto("grpo", {}, [*long, "train.tokens_per_microbatch=2048"])


def test_what_memory_auto_chose_is_kept_in_the_run_s_configuration(tiny_run: list[str], tmp_path: Path) -> None:
    from rlcli_planner.launch.memory_auto import with_auto_memory

    from rlcli.config.changes import read_run_config
    from rlcli.config.load import dump_toml
    from rlcli.launch.preflight import prepare

    flags = {"model.path": tiny_run[1], "data.path": tiny_run[3], "cluster.device": "cpu"}
    sets = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=512"]
    resolved = resolve("grpo", flags, [*sets, "data.max_prompt_tokens=32"])
    adjusted, prepared, _ = with_auto_memory(resolved, prepare(resolved.config))
    assert adjusted.config.train.tokens_per_microbatch == 4 * (32 + 512)  # all that a step has
    assert prepared.config.train == adjusted.config.train
    (tmp_path / "config.toml").write_text(dump_toml(adjusted))
    saved_config = read_run_config(tmp_path)
    assert saved_config.config.train == adjusted.config.train
    assert saved_config.origins["train.tokens_per_microbatch"] == "--memory auto"
