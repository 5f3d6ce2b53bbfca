"""Causal attention within each sequence of a pack, under a name of our own in transformers' attention registry.

No mask is ever made: on GPUs in half precision torch's variable-length kernel takes the boundaries; elsewhere sequences
of like length are attended together, padded at their ends, where causality alone keeps padding out of every real token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from rlcli.errors import ModelError

ATTENTION = "rlcli_packed"
"""The name that a model's config holds as its attention implementation."""

_MAX_WASTE = 1.25
"""Sequences share one attention call while padding adds at most a quarter to the shortest of them."""


@dataclass(frozen=True)
class Segments:
    """Where the sequences of a pack begin and end.

    boundaries [S + 1] int32: 0, then the end of each sequence (on the device). lengths: the same as plain numbers.

    >>> Segments.of([3, 2], torch.device("cpu")).boundaries.tolist()
    [0, 3, 5]
    """

    boundaries: Tensor
    lengths: tuple[int, ...]

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Segments:
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        return Segments(ends.to(device=device, dtype=torch.int32), tuple(lengths))

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def groups(self) -> list[Group]:
        """The sequences in groups of like length, worked out once and used by every layer."""
        starts = self.boundaries.tolist()
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        groups: list[list[int]] = []
        for index in order:
            if groups and self.lengths[index] <= _MAX_WASTE * self.lengths[groups[-1][0]]:
                groups[-1].append(index)
            else:
                groups.append([index])
        device = self.boundaries.device
        return [Group.of([(starts[i], self.lengths[i]) for i in members], device) for members in groups]


@dataclass(frozen=True)
class Group:
    """Sequences that are attended in one call of [B, L].

    source [B·L]: the token at each place (a padded place repeats the sequence's last token). place [N]: the places that
    hold real tokens. target [N]: where in the pack each of those belongs.
    """

    size: int
    length: int
    source: Tensor
    place: Tensor
    target: Tensor

    @staticmethod
    def of(spans: Sequence[tuple[int, int]], device: torch.device) -> Group:
        starts, lengths = torch.tensor(spans).unbind(1)
        longest = int(lengths.max())
        column = torch.arange(longest)[None, :]
        source = (starts[:, None] + column.minimum(lengths[:, None] - 1)).flatten()
        place = (column < lengths[:, None]).flatten().nonzero()[:, 0]
        return Group(len(spans), longest, source.to(device), place.to(device), source[place].to(device))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend query [1, Hq, T, D] to key and value [1, Hkv, T, D], causally in each sequence; gives [1, T, Hq, D]."""
    for feature in ("sliding_window", "softcap", "s_aux"):
        if rest.get(feature) is not None:
            raise ModelError(
                f"{type(module).__name__} attends with {feature}, which packed attention does not do",
                "choose a model with full attention",
            )
    assert attention_mask is None, "boundaries stand in for a mask"
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen(query, key, value, segments, scaling), None
    return _grouped(query, key, value, segments, scaling), None


def _grouped(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    gqa = query.shape[1] != key.shape[1]
    heads, width = query.shape[1], value.shape[3]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    outputs = []
    for group in segments.groups:
        q, k, v = (
            x.index_select(0, group.source).view(group.size, group.length, *x.shape[1:]).transpose(1, 2)
            for x in (query, key, value)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
        outputs.append(out.transpose(1, 2).reshape(-1, heads, width).index_select(0, group.place))
    target = torch.cat([group.target for group in segments.groups])
    return torch.empty_like(query).index_copy(0, target, torch.cat(outputs))[None]


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    ends, longest = segments.boundaries, segments.longest
    # (-1, 0): each token sees all before it and none after.
    out = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), **_grouped_heads()
    )
    return out[None]


@cache
def _grouped_heads() -> dict[str, bool]:
    """torch ≥ 2.12 asks to be told of grouped-query attention; before, the kernel takes it without a word."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


AttentionInterface.register(ATTENTION, packed_attention)
