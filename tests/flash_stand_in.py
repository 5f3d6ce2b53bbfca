"""CPU reference of torch's variable-length attention kernels, for tests without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlcli.model.attention import _varlen


def varlen_attn(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Any, scale: Any, window_size: Any, **__: Any) -> Any:
    """As `torch.nn.attention.varlen.varlen_attn`."""
    left_window, right_window = window_size
    assert right_window == 0
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "the kernel has one size of heads"
    parts = zip(*(x.transpose(0, 1)[None].split(ends.diff().tolist(), 2) for x in (q, k, v)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(*sequence, seen(sequence[0].shape[2], left_window), scale=scale, enable_gqa=True)
        for sequence in parts
    ]
    return torch.cat(outputs, 2)[0].transpose(0, 1)


def seen(size: int, left_window: int) -> Tensor:
    distance = torch.arange(size)[:, None] - torch.arange(size)
    return (distance >= 0) & (distance <= (size if left_window < 0 else left_window))


def sequences(ends: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Splits tensors `[T, heads, …]` into each sequence's `[heads, length, …]`."""
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        yield [tensor[start:end].transpose(0, 1) for tensor in tensors]


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, _: Tensor, longest: int, *__: Any, scale: float, **options: Any
) -> tuple[Tensor, ...]:
    """As `aten._flash_attention_forward`: the output and its log-sum-exp `[heads, T]`."""
    outputs, sums = [], []
    assert longest == int(ends.diff().max())
    for query, key, value in sequences(ends, q, k, v):
        scores = scored(query, key, scale, options["window_size_left"])
        outputs.append((scores.softmax(-1) @ grouped(value, query)).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    assert options["window_size_right"] == 0
    return torch.cat(outputs), torch.cat(sums, 1), q.new_empty(0), q.new_empty(0), q.new_empty(0)


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output_packed: Tensor,
    lse: Tensor,
    ends: Tensor,
    *_: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    """As `aten._flash_attention_backward` (FlashAttention-2, arXiv 2307.08691, algorithm 2): by the output and the
    log-sum-exp that are given."""
    gradients = []
    assert lse.shape == (q.shape[1], len(q))
    for query, key, value, gradient, output, sums in sequences(ends, q, k, v, grad, output_packed, lse.t()):
        scale = options["scale"]
        weights = (scored(query, key, scale, options["window_size_left"]) - sums[..., None]).exp()
        delta = (gradient * output).sum(-1, keepdim=True)
        of_scores = weights * (gradient @ grouped(value, query).transpose(1, 2) - delta) * scale
        shape = (len(key), -1, *key.shape[1:])
        of_keys = (of_scores.transpose(1, 2) @ query).view(shape).sum(1)
        of_values = (weights.transpose(1, 2) @ gradient).view(shape).sum(1)
        gradients.append([x.transpose(0, 1) for x in (of_scores @ grouped(key, query), of_keys, of_values)])
    return tuple(torch.cat(parts) for parts in zip(*gradients, strict=True))


def scored(query: Tensor, key: Tensor, scale: float, left_window: int) -> Tensor:
    scores = query @ grouped(key, query).transpose(1, 2) * scale
    return scores.masked_fill(~seen(query.shape[1], left_window), -torch.inf)


def grouped(key: Tensor, query: Tensor) -> Tensor:
    return key.repeat_interleave(len(query) // len(key), 0)


def use_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend as on a GPU."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    monkeypatch.setattr("rlcli.model.attention._grouped", _varlen)
    # What it finds out about torch's kernel is kept for the process: not of this one.
    monkeypatch.setattr("rlcli.model.attention._needs_gqa_flag", bool)
