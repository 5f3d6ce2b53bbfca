"""Noise by counter on a GPU, compiled: the same draws as on the CPU, and no more memory than the logits take."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlcli.rollout.sampling import draw_keys, gumbel_argmax

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROWS, VOCABULARY = 256, 151_936


@pytest.fixture(scope="module")
def keys() -> torch.Tensor:
    return torch.from_numpy(draw_keys(np.arange(ROWS), np.arange(ROWS) % 7))


def test_a_gpu_draws_what_a_cpu_draws(keys: torch.Tensor) -> None:
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    compiled = torch.compile(gumbel_argmax, dynamic=True)
    on_gpu = compiled(logits.cuda(), keys.cuda()).cpu()
    # Their logarithms differ in the last bit, which may decide between two tokens.
    assert (on_gpu == gumbel_argmax(logits, keys)).double().mean() > 0.99


def test_no_noise_of_the_size_of_the_logits_is_held(keys: torch.Tensor) -> None:
    logits, gpu_keys = torch.zeros(ROWS, VOCABULARY, device="cuda"), keys.cuda()
    compiled = torch.compile(gumbel_argmax, dynamic=True)
    compiled(logits, gpu_keys)
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compiled(logits, gpu_keys)
    assert torch.cuda.max_memory_allocated() - allocated < logits.nbytes / 4
