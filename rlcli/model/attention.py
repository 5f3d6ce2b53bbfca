"""Causal attention within each sequence of a pack, under a name of our own in transformers' attention registry.

No mask is ever made: on GPUs in half precision torch's variable-length kernel takes the boundaries; elsewhere sequences
of like length are attended together, padded at their ends, where causality alone keeps padding out of every real token.
A prompt that several sequences have in common is in the pack once, and laid before each of them here and nowhere else:
all other layers see it once, and its gradient is the sum of theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from rlcli.errors import ModelError

ATTENTION = "rlcli_packed"
"""The name that a model's config holds as its attention implementation."""

_MAX_WASTE = 1.25
"""Sequences share one attention call while padding adds at most a quarter to the shortest of them."""


@dataclass(frozen=True)
class Segments:
    """The S sequences of a pack, laid end to end, each whole.

    boundaries [S + 1] int32: 0, then the end of each sequence (on the device). lengths: the same as plain numbers.
    source [Σ lengths] int64: which token of the pack lies at each place; None: they lie in the pack as they do here.

    >>> Segments.of([3, 2], torch.device("cpu")).boundaries.tolist()
    [0, 3, 5]
    """

    boundaries: Tensor
    lengths: tuple[int, ...]
    source: np.ndarray | None = None

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device, source: np.ndarray | None = None) -> Segments:
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        return Segments(ends.to(device=device, dtype=torch.int32), tuple(lengths), source)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def end_to_end(self) -> Layout:
        """The sequences as they are."""
        lengths, source = np.array(self.lengths), self._source
        return Layout.of(source, np.ones(len(source), bool), [(1, int(lengths.sum()))], self.boundaries.device)

    @cached_property
    def padded(self) -> Layout:
        """The sequences in groups of like length, worked out once and used by every layer."""
        lengths = np.array(self.lengths)
        starts = np.cumsum(lengths) - lengths
        order = np.argsort(lengths, kind="stable")
        shapes, places, real = [], [], []
        while len(order):
            size = int(np.searchsorted(lengths[order], _MAX_WASTE * lengths[order[0]], side="right"))
            group, order = order[:size], order[size:]
            column, own = np.arange(lengths[group].max())[None, :], lengths[group, None]
            places.append((starts[group, None] + np.minimum(column, own - 1)).ravel())
            real.append((column < own).ravel())
            shapes.append((size, column.shape[1]))
        source = self._source[np.concatenate(places)]
        return Layout.of(source, np.concatenate(real), shapes, self.boundaries.device)

    @property
    def _source(self) -> np.ndarray:
        return np.arange(sum(self.lengths)) if self.source is None else self.source


@dataclass(frozen=True)
class Layout:
    """Where the T tokens of a pack lie in P places, for attention alone.

    shapes: [B, L] of each stretch of places that is attended in one call. source [P]: the token at each place; where
    there is none, any. home [T]: of each token the place that its output is taken from. copies, copied [C]: the other
    places that hold a token, and which.
    """

    shapes: list[tuple[int, int]]
    source: Tensor
    home: Tensor
    copies: Tensor
    copied: Tensor

    @staticmethod
    def of(source: np.ndarray, real: np.ndarray, shapes: list[tuple[int, int]], device: torch.device) -> Layout:
        places = np.flatnonzero(real)
        home = np.empty(source[places].max() + 1, np.int64)
        home[source[places[::-1]]] = places[::-1]  # of several the first
        other = real.copy()
        other[home] = False
        copies = np.flatnonzero(other)
        tensors = (torch.tensor(values, device=device) for values in (source, home, copies, source[copies]))
        return Layout(shapes, *tensors)

    def lay(self, x: Tensor) -> Tensor:
        """[P, …] of x [T, …]. What comes back to a place without a token is no part of the gradient: it is 0."""
        laid: Tensor = _Lay.apply(x, self)
        return laid

    def take(self, y: Tensor) -> Tensor:
        """[T, …] of y [P, …]."""
        taken: Tensor = _Take.apply(y, self)
        return taken


# Written out, since autograd's own index_select adds up row by row what is, but for copies, a selection too.
class _Lay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layout: Layout = ctx.layout
        own = grad.index_select(0, layout.home)
        if len(layout.copies):
            own.index_add_(0, layout.copied, grad.index_select(0, layout.copies))
        return own, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.places = layout, len(y)
        return y.index_select(0, layout.home)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.places, *grad.shape[1:]).index_copy_(0, ctx.layout.home, grad), None


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
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    attend = _varlen if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) else _grouped
    return attend(query, key, value, segments, scaling)[None], None


def _grouped(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    layout = segments.padded
    gqa = query.shape[1] != key.shape[1]
    sizes = [count * length for count, length in layout.shapes]
    outputs = []
    # Split, not sliced one by one: the gradients are then laid end to end in one go.
    for (count, length), *parts in zip(
        layout.shapes, *(layout.lay(x).split(sizes) for x in (query, key, value)), strict=True
    ):
        q, k, v = (part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return layout.take(torch.cat(outputs))


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    shared = segments.source is not None
    q, k, v = (segments.end_to_end.lay(x) if shared else x.contiguous() for x in (query, key, value))
    ends, longest = segments.boundaries, segments.longest
    # (-1, 0): each token sees all before it and none after.
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), **_grouped_heads())
    return segments.end_to_end.take(out) if shared else out


@cache
def _grouped_heads() -> dict[str, bool]:
    """torch ≥ 2.12 asks to be told of grouped-query attention; before, the kernel takes it without a word."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


AttentionInterface.register(ATTENTION, packed_attention)
