"""Attention with sinks against plain loops in float64, by each kernel, and a stand-in for the GPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlcli.model.attention import Segments, packed_attention
from tests.flash_stand_in import use_varlen

CPU = torch.device("cpu")
LENGTHS = [9, 4, 1, 8]
HEADS, GROUPS, WIDTH = 4, 2, 8


def by_loops(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """softmax over the scores of what a token sees and its head's sink, which has no value: [T, H, D]."""
    start, rows = 0, []
    for length in LENGTHS:
        for position in range(start, start + length):
            first = start if window is None else max(start, position - window + 1)
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                scores = key[0, group, first : position + 1] @ query[0, head, position] / WIDTH**0.5
                weights = torch.cat([scores, sinks[head : head + 1]]).softmax(0)[:-1]
                heads.append(weights @ value[0, group, first : position + 1])
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


def drawn() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    query = torch.randn(1, HEADS, total, WIDTH, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, GROUPS, total, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return query, key, value, torch.randn(HEADS, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("kernel", ["cpu", "gpu", "plain"])
def test_a_sink_takes_its_share_of_the_weights(
    kernel: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "gpu":
        use_varlen(monkeypatch)
    if kernel == "plain":
        monkeypatch.setattr("rlcli.model.attention._has_cpu_kernel", lambda device: False)
    query, key, value, sinks = inputs = drawn()
    segments = Segments.of(LENGTHS, CPU)
    options: dict[str, Any] = {"segments": segments, "sliding_window": window, "s_aux": sinks}
    attended, _ = packed_attention(torch.nn.Identity(), query, key, value, None, **options)
    expected = by_loops(query, key, value, sinks, window)
    torch.testing.assert_close(attended[0], expected)
    weight = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((output * weight).sum(), inputs) for output in (attended[0], expected))
    for actual, gradient in zip(ours, theirs, strict=True):
        assert gradient.any()
        torch.testing.assert_close(actual, gradient)


def test_a_sink_far_below_the_scores_changes_nothing() -> None:
    query, key, value, sinks = drawn()
    segments = Segments.of(LENGTHS, CPU)
    without, _ = packed_attention(torch.nn.Identity(), query, key, value, None, segments=segments)
    low = torch.full_like(sinks, -60.0)
    attended, _ = packed_attention(torch.nn.Identity(), query, key, value, None, segments=segments, s_aux=low)
    torch.testing.assert_close(attended, without)
