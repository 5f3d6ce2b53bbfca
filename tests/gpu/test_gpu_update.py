"""GPU-only parts of an update: the variable-length kernel, chunks of logits that fill it, compiled layers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcli.model.packed import PackedBatch, pack
from tests.model_fixtures import VOCABULARY, save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU"),
]
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def load(mesh: Any, base: str, **options: Any) -> Any:
    from rlcli.model.io.loading import load_policy

    return load_policy(base, dtype=torch.bfloat16, device=CUDA, mesh=mesh, **options)


def test_master_weights_start_as_on_a_cpu() -> None:
    from rlcli.model.dithering import dither

    masters = []
    for device in ("cpu", CUDA):
        weights = torch.linspace(-1, 1, 200_003).bfloat16().float().to(device)
        parameter = torch.nn.Parameter(weights)
        dither([("weight", parameter)], torch.bfloat16)
        masters.append(parameter.detach().cpu())
    assert torch.equal(*masters)


def groups(prompts: int = 4, samples: int = 8, longest: int = 300) -> list[tuple[np.ndarray, int]]:
    random, rows = np.random.default_rng(0), []
    for _ in range(prompts):
        prompt = random.integers(2, VOCABULARY, random.integers(20, 100))
        for length in random.integers(1, longest, samples):
            rows.append((np.concatenate([prompt, random.integers(2, VOCABULARY, length)]), len(prompt)))
    return rows


def log_probs_and_gradients(policy: Any, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    outputs = policy(batch)
    weight = torch.linspace(-1, 1, len(batch.targets), device=CUDA)
    (weight * outputs.log_probs).sum().backward()
    return outputs.log_probs.detach(), {name: p.grad.to_local() for name, p in policy.named_parameters()}


def assert_alike(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert (actual[0] - expected[0]).abs().max() < 0.1
    assert (actual[0] - expected[0]).abs().mean() < 0.01
    for name, gradient in actual[1].items():
        assert (gradient - expected[1][name]).norm() <= 0.05 * expected[1][name].norm(), name


def test_shared_prompts_give_what_prompts_apart_give(
    mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(save_tiny(tmp_path / "base"))
    shared = pack(groups(), CUDA)
    monkeypatch.setattr("rlcli.model.packed.WORTH_SHARING", 2.0)
    unshared = pack(groups(), CUDA)
    assert shared.tokens < unshared.tokens
    outputs = [log_probs_and_gradients(load(mesh, base), batch) for batch in (shared, unshared)]
    assert_alike(*outputs)
    alone = [log_probs_and_gradients(load(mesh, base), pack([row], CUDA))[0] for row in groups()[:3]]
    responses = sum(len(part) for part in alone)
    assert (torch.cat(alone) - outputs[0][0][:responses]).abs().mean() < 0.01


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_give_what_layers_give(mesh: Any, tmp_path: Path, checkpointing: bool) -> None:
    base, batch = str(save_tiny(tmp_path / "base")), pack(groups(), CUDA)
    plain, compiled = (
        log_probs_and_gradients(load(mesh, base, compiled=compiled, gradient_checkpointing=checkpointing), batch)
        for compiled in (False, True)
    )
    assert_alike(compiled, plain)


def test_log_probs_of_a_large_vocabulary_take_less_than_1536_mib() -> None:
    """Beyond hidden states and head, with the gradients of both."""
    from rlcli.model.logit_chunks import chunk_tokens
    from rlcli.model.logprobs import token_log_probs

    for tokens, vocabulary in ((64, 1024), (32_768, 151_936)):  # first what libraries allocate once
        hidden, weight = (
            torch.randn(size, 896, dtype=torch.bfloat16, device=CUDA).requires_grad_() for size in (tokens, vocabulary)
        )
        targets = torch.randint(vocabulary, (tokens,), device=CUDA)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        log_probs, entropies = token_log_probs(hidden, weight, targets, 1.0, chunk_tokens(vocabulary, True), True)
        (log_probs + entropies).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < 1536 * 2**20
