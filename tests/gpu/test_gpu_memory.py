"""Memory on one NVIDIA GPU: offloaded tensors return bit for bit, and phases report their use."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import run, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU"),
]

GIB = 1 << 30
AGREEMENT = 0.1
"""Largest mean |log π − log μ| of engine and trainer in bfloat16."""
SIZES = {"hidden": 1024, "layers": 8, "heads": 16, "kv_heads": 16}
"""Some 130 million parameters: half a GiB in float32, and a whole one of AdamW's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlcli.model.io.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", **SIZES)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    folder = tmp_path_factory.mktemp("data")
    for split, prompts in prepare(converter_named("arithmetic"), ConvertOptions(count=64, test_count=8)).splits.items():
        write_prompts(folder / f"{split}.parquet", prompts)
    return folder


def driven(function_name: str, model: Path) -> Any:
    """The result of the function `function_name` of this file, in a separate process, since a CUDA context persists."""
    return json.loads(run(__file__, function_name, model).stdout.splitlines()[-1])


def learning(model: str, checkpointing: Any = False) -> tuple[Any, Any, Any]:
    """A policy in bfloat16 on the GPU, its optimizer, and what updates it on `tokens` tokens."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from rlcli.model.io.loading import load_policy
    from rlcli.model.optim import build_optimizer
    from rlcli.model.packed import pack

    if not dist.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    device = torch.device("cuda", 0)
    mesh = init_device_mesh("cuda", (1,))
    policy = load_policy(model, dtype=torch.bfloat16, device=device, mesh=mesh, gradient_checkpointing=checkpointing)
    optimizer = build_optimizer(policy, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)

    def backward(tokens: int) -> None:
        rows: list[tuple[Any, int]] = [(np.arange(512, dtype=np.int32) % 200 + 6, 16)] * (tokens // 512)
        policy(pack(rows, device), temperature=1.0, want_entropy=True).log_probs.mean().backward()

    return policy, optimizer, backward


def local(tensor: Any) -> Any:
    """This rank's part, which is the whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bits(policy: Any, optimizer: Any) -> dict[str, Any]:
    import torch

    from rlcli.model.io.model_state import trained_state

    torch.cuda.synchronize()
    state = trained_state({"policy": (policy, optimizer)})
    return {name: local(tensor).cpu().clone() for name, tensor in state.items()}


def round_trip(model: str) -> dict[str, Any]:
    import torch

    from rlcli.model.io.model_state import copied, trained_state
    from rlcli.model.parallel.offload import KINDS, Offload

    policy, optimizer, backward = learning(model)
    offload = Offload(KINDS["all"], torch.device("cuda", 0))
    offload.add("policy", policy, optimizer)
    measured: dict[str, Any] = {"same": [], "copied": [], "held": []}
    for _ in range(3):
        offload.to_device("policy")
        offload.to_device("policy.optimizer", prefetch=True)
        backward(1024)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        initial, held = bits(policy, optimizer), torch.cuda.memory_allocated()
        offload.to_host(*offload.names)
        measured["held"].append((held, torch.cuda.memory_allocated()))
        away = copied(trained_state({"policy": (policy, optimizer)}), offload.copied)
        measured["copied"].append(all(torch.equal(initial[name], local(tensor)) for name, tensor in away.items()))
        filler = torch.full((held // 8,), 7.0, device="cuda")  # where they were
        del filler
        offload.to_device(*offload.names)
        restored = bits(policy, optimizer)
        measured["same"].append(all(torch.equal(initial[name], restored[name]) for name in initial))
        offload.to_host(*offload.names)
    return measured


def test_offloaded_state_returns_bit_for_bit_and_is_saved_while_away(model: Path) -> None:
    measured = driven("round_trip", model)
    assert measured["same"] == measured["copied"] == [True] * 3
    for held, away in measured["held"]:
        assert away < 0.05 * held


def checkpointing(model: str) -> dict[str, Any]:
    import torch

    tokens, peaks = 16384, {}
    for setting in (False, True, "offload"):
        policy, optimizer, backward = learning(model, setting)
        backward(tokens)  # a first time, for what is set up once
        optimizer.zero_grad(set_to_none=True)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        backward(tokens)
        norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        peaks[str(setting)] = [torch.cuda.max_memory_allocated() - held, float(norm)]
        del policy, optimizer, backward
        torch.cuda.empty_cache()
    return peaks | {"inputs": SIZES["layers"] * tokens * SIZES["hidden"] * 2}


def test_recomputed_or_offloaded_activations_take_less_memory(model: Path) -> None:
    peaks = driven("checkpointing", model)
    (none, norm), (recomputed, norm_recomputed), (offloaded, norm_offloaded) = (
        peaks["False"],
        peaks["True"],
        peaks["offload"],
    )
    assert norm_recomputed == pytest.approx(norm, rel=1e-2)
    assert norm_offloaded == pytest.approx(norm_recomputed, rel=1e-3)
    assert recomputed < 0.7 * none
    # All but the layer in work: its input is back while it is computed again.
    assert offloaded < recomputed - 0.5 * peaks["inputs"]


def train_with_reference(model: Path, sums: Path, run_folder: Path, *words: str) -> list[dict[str, Any]]:
    return train(
        model,
        sums,
        run_folder,
        *("--set", "rollout.gpu_memory_utilization=0.2", "--set", "rollout.kv_cache_mb=6144"),
        *("--set", "algorithm.kl_coef=0.1", "--set", "checkpoint.every=1", *words),
    )


def test_phases_take_less_the_more_is_offloaded_and_learn_the_same(model: Path, sums: Path, tmp_path: Path) -> None:
    runs = {
        setting: train_with_reference(model, sums, tmp_path / setting, "--set", f"train.offload={setting}")
        for setting in ("none", "optimizer", "all")
    }
    none, optimizer, everything = (runs[setting][-1] for setting in ("none", "optimizer", "all"))
    for lines in runs.values():
        assert all(line["log_prob_check/mean_abs_diff"] < AGREEMENT for line in lines)
        assert lines[-1]["update/grad_norm"] > 0
    kv_cache, float_weights = 6.0, 0.4
    # The engine's memory is there while it generates and gone while the trainer works with gradients and activations.
    assert none["memory/update_gb"] < none["memory/generate_gb"] - 0.5 * kv_cache
    # Two moments; then the weights in float32 and the reference besides.
    assert optimizer["memory/generate_gb"] < none["memory/generate_gb"] - 1.8 * float_weights
    assert everything["memory/generate_gb"] < optimizer["memory/generate_gb"] - float_weights
    # What leaves and comes back is the same: the first step's gradient is that of the run in which nothing moved.
    assert everything["memory/fragmented_gb"] >= 0
    first = [runs[setting][0]["update/grad_norm"] for setting in ("none", "all")]
    assert first[1] == pytest.approx(first[0], rel=0.05)


def test_a_run_that_offloads_everything_goes_on_from_its_checkpoint(model: Path, sums: Path, tmp_path: Path) -> None:
    """The loaded model must give the log-probs that were saved, or the run would stop."""
    run_folder = tmp_path / "run"
    train_with_reference(model, sums, run_folder, "--set", "train.offload=all")
    run("-m", "rlcli.cli.main", "train", "--resume", run_folder, "--steps", "5")
    steps = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert all(line["log_prob_check/mean_abs_diff"] < AGREEMENT for line in steps)


def segments(_: str) -> list[bool]:
    import torch

    from rlcli.model.parallel.offload import growing_segments

    torch.zeros(1, device="cuda")
    expandable = []
    for wanted in (True, False, True):
        growing_segments(wanted)
        tensor = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        expandable.append(any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()))
        del tensor
        torch.cuda.empty_cache()
    return expandable


def test_segments_grow_when_they_are_told_to_and_only_then(model: Path) -> None:
    assert driven("segments", model) == [True, False, True]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
