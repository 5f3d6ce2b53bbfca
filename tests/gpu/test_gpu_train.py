"""The real stack on one NVIDIA GPU: bfloat16, NCCL, CUDA graphs, and an engine that sleeps while the trainer works."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import gpu_runs
import pytest
from gpu_runs import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU"),
]

SETTINGS = ("--set", "rollout.gpu_memory_utilization=0.3", "--set", "train.warmup_steps=0")
AGREEMENT = 0.1
"""Largest mean |log π − log μ| of engine and trainer in bfloat16."""
"""Engine and trainer compute in bfloat16 with kernels of their own; a stale weight shows as whole nats."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlcli.model.io.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=256, heads=4)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    folder = tmp_path_factory.mktemp("data")
    for split, prompts in prepare(converter_named("arithmetic"), ConvertOptions(count=64, test_count=8)).splits.items():
        write_prompts(folder / f"{split}.parquet", prompts)
    return folder


def train(tiny: Path, sums: Path, run_folder: Path, *words: str, recipe: str = "grpo") -> list[dict[str, Any]]:
    return gpu_runs.train(tiny, sums, run_folder, *SETTINGS, *words, recipe=recipe)


def test_all_weights_are_trained_with_a_reference_and_two_updates(tiny: Path, sums: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run_folder = tmp_path / "run"
    steps = train(
        tiny,
        sums,
        run_folder,
        *("--eval-data", str(sums)),
        *("--set", "algorithm.kl_coef=0.1", "--set", "train.minibatches=2"),
    )
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert "eval/pass@1" in steps[0]
    for line in steps[1:]:
        assert line["log_prob_check/mean_abs_diff"] < AGREEMENT
        assert abs(line["mismatch/kl"]) < 0.01
        assert line["update/grad_norm"] > 0
        assert line["update/count"] == 2
    assert steps[3]["update/kl"] > steps[1]["update/kl"] >= 0
    run("-m", "rlcli.cli.main", "export", run_folder, "--out", tmp_path / "model")  # which checks its log-probs itself
    initial_weights, exported_weights = (
        load_file(tiny / "model.safetensors"),
        load_file(tmp_path / "model" / "model.safetensors"),
    )
    assert initial_weights.keys() == exported_weights.keys()
    assert str(next(iter(exported_weights.values())).dtype) == "torch.bfloat16"
    report = json.loads(
        run(
            *("-m", "rlcli.cli.main", "eval", "--json"),
            *("--model", run_folder / "checkpoints" / "latest", "--data", sums),
            *("--max-tokens", "32", "--verifier", "test-even", "--set", "rollout.gpu_memory_utilization=0.3"),
        ).stdout
    )
    assert report["prompts"] == 8


def test_what_a_step_breaks_off_goes_on_in_the_next(tiny: Path, sums: Path, tmp_path: Path) -> None:
    steps = train(
        tiny,
        sums,
        tmp_path / "run",
        *("--set", "rollout.oversample=2", "--set", "rollout.max_concurrent=32"),
        *("--set", "rollout.max_response_tokens=256"),
    )
    assert steps[0]["rollout/aborted"] > 0
    assert sum(line["rollout/resumed"] for line in steps) > 0
    for line in steps:
        assert line["log_prob_check/mean_abs_diff"] < AGREEMENT
        assert abs(line["mismatch/kl"]) < 0.1
        assert line["update/grad_norm"] > 0


def test_an_adapter_reaches_the_engine(tiny: Path, sums: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "lora"
    steps = train(tiny, sums, run_folder, "--set", "lora.rank=8", "--set", "algorithm.kl_coef=0.1")
    assert all(line["log_prob_check/mean_abs_diff"] < AGREEMENT for line in steps)
    # Before the first update the adapter is zero and the policy is the reference; after it, it is not.
    assert steps[0]["update/kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[2]["update/kl"] > 0
    run("-m", "rlcli.cli.main", "export", run_folder, "--out", tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_an_adapter_on_experts_reaches_the_engine(sums: Path, tmp_path: Path) -> None:
    from rlcli.model.io.tiny_model import make_tiny_model

    mixture = make_tiny_model(tmp_path / "mixture", hidden=256, heads=4, experts=8)
    sets = ("--set", "lora.rank=8", "--set", "lora.targets=all-linear,experts")
    steps = train(mixture, sums, tmp_path / "lora", *sets)
    assert all(line["log_prob_check/mean_abs_diff"] < AGREEMENT for line in steps)
    assert all(line["sync/unchecked_tensors"] > 0 for line in steps), "experts' factors are not compared"
    assert steps[-1]["update/grad_norm"] > 0


def test_an_fp8_engine_follows_the_policy_and_reports_its_difference(tiny: Path, sums: Path, tmp_path: Path) -> None:
    exact = train(tiny, sums, tmp_path / "exact")
    steps = train(tiny, sums, tmp_path / "fp8", "--set", "rollout.quantization=fp8")
    assert all(line["log_prob_check/mean_abs_diff"] < 1.0 for line in steps)
    assert all(line["update/grad_norm"] > 0 for line in steps)
    # It does compute in fewer bits, at every step: weights that a sync brought unquantised would agree better.
    for eight, sixteen in zip(steps, exact, strict=True):
        assert eight["mismatch/kl"] > sixteen["mismatch/kl"]


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_run_goes_on_from_its_checkpoint(recipe: str, tiny: Path, sums: Path, tmp_path: Path) -> None:
    """The loaded model must give the log-probs that were saved, or the run would stop."""
    run_folder = tmp_path / "run"
    train(tiny, sums, run_folder, "--set", "checkpoint.every=1", "--deterministic", recipe=recipe)
    run("-m", "rlcli.cli.main", "train", "--resume", run_folder, "--steps", "5")
    steps = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert all(line["log_prob_check/mean_abs_diff"] < AGREEMENT for line in steps)


@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        ("ppo", ["train.minibatches=2"]),
        ("dapo", ["train.minibatches=2", "shaping.overlong_buffer=16"]),
        ("prime", ["train.minibatches=1"]),
        ("remax", []),
        ("clip_cov", ["train.minibatches=2"]),
        ("dpo", []),
        ("sft", ["rollout.samples_per_prompt=1"]),
    ],
)
def test_an_algorithm_of_each_kind_trains(recipe: str, sets: list[str], tiny: Path, sums: Path, tmp_path: Path) -> None:
    """A critic, a reward model, greedy rollouts, a choice of tokens over ranks, pairs, given responses."""
    steps = train(tiny, sums, tmp_path / "run", *(word for text in sets for word in ("--set", text)), recipe=recipe)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert sum(line.get("update/grad_norm", 0.0) for line in steps) > 0
    assert all("nonfinite" not in line for line in steps)
    if recipe != "sft":
        assert all(line["log_prob_check/mean_abs_diff"] < AGREEMENT for line in steps)
    assert ("critic/loss" in steps[-1]) == (recipe in ("ppo", "prime"))


def drive(model: str, report_path: str, lora_rank: str) -> None:
    """Run in a separate process: one worker without Ray, through the engine's sleep, a change of weights and a sync."""
    import numpy as np
    import torch

    from rlcli.cluster.placement import WORKER_ENV
    from rlcli.config.schema import RunConfig
    from rlcli.context import RunContext, RunFacts
    from rlcli.data.prompts.chat_template import stop_tokens
    from rlcli.data.prompts.tokenized_prompts import load_tokenizer
    from rlcli.rollout.engine import GenerationRequest, Sampling, finished
    from rlcli.training.worker.worker import Worker
    from rlcli.training.worker.worker_spec import WorkerSpec

    os.environ.update(WORKER_ENV)
    config = RunConfig.model_validate(
        {
            "model": {"path": model},
            "data": {"max_prompt_tokens": 64},
            "rollout": {"max_response_tokens": 64, "gpu_memory_utilization": 0.3},
            "train": {"tokens_per_microbatch": 128},
            "lora": {"rank": int(lora_rank)},
            "verifier": {"processes": 1},
        }
    )
    stops = stop_tokens(load_tokenizer(model), model, ())
    facts = RunFacts("cuda", "bfloat16", 128, None, frozenset({"policy", "engine"}), stop_tokens=stops)
    context = RunContext(config, facts)
    spec = WorkerSpec(context, facts.roles, "rank", str(Path(report_path).parent), "gpu-test")
    worker = Worker(0, 1)
    worker.begin(spec)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker.join("127.0.0.1", port)
    worker.build()
    prompt = np.arange(10, 74, dtype=np.int32)
    assert worker.policy is not None
    assert worker.rollout_role is not None
    engine = worker.rollout_role.engine

    def greedy() -> list[int]:
        request = GenerationRequest(0, prompt, seed=0)
        (completion,) = finished(engine, [request], Sampling(0.0, 32))
        return [int(token) for token in completion.tokens]

    def free() -> float:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free_bytes, total = torch.cuda.mem_get_info()
        return free_bytes / total

    measured: dict[str, Any] = {
        "probe": [worker.sync_weights(prompt, 1).difference],
        "greedy": [greedy()],
        "free": [free()],
    }
    worker.release_rollout_memory()
    measured["free"].append(free())
    # What an update would leave in torch's cache is not the engine's to lose.
    del_me = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.9), dtype=torch.uint8, device="cuda")
    del del_me
    with torch.no_grad():
        for parameter in worker.policy.policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    measured["probe"].append(worker.sync_weights(prompt, 2).difference)
    measured["greedy"].append(greedy())
    measured["free"].append(free())
    Path(report_path).write_text(json.dumps(measured))
    worker.close()


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_the_engine_gives_its_memory_back_and_wakes_with_the_new_weights(
    tiny: Path, tmp_path: Path, lora_rank: int
) -> None:
    report_path = tmp_path / "found.json"
    try:
        run(__file__, tiny, report_path, str(lora_rank))
    except AssertionError as error:  # the worker's output goes to its log
        log = tmp_path / "rank-0.log"
        raise AssertionError(log.read_text()[-6000:] if log.exists() else str(error)) from error
    measured = json.loads(report_path.read_text())
    assert all(difference < AGREEMENT for difference in measured["probe"]), measured["probe"]
    assert measured["greedy"][0] != measured["greedy"][1]
    awake, asleep, awake_again = measured["free"]
    assert asleep - awake > 0.2, "its KV cache is most of the 30% that it was given"
    assert awake_again == pytest.approx(awake, abs=0.02)


if __name__ == "__main__":
    drive(*sys.argv[1:])
