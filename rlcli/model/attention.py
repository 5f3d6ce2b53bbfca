"""Causal attention within each sequence of a pack, registered under its own name in transformers.

No mask is built: on GPUs in half precision torch's variable-length kernel takes the boundaries; elsewhere sequences of
similar length are attended together, padded at their ends, where causality alone hides the padding from every real
token. (Only there a sliding window, with which each token sees the last ones alone, needs a mask.) A prompt that
several sequences share is in the pack once, and is copied in front of each of them only here: all other layers see it
once, and its gradient is the sum of theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from rlcli.errors import ModelError

ATTENTION = "rlcli_packed"
"""The attention implementation in a model's config."""

_MAX_WASTE = 1.25
"""Sequences share one attention call while padding adds at most a quarter to the shortest of them."""


@dataclass(frozen=True)
class Segments:
    """The S sequences of a pack, concatenated, each whole.

    boundaries [S + 1] int32: 0, then the end of each sequence (on the device). lengths: the same as plain numbers.
    source [Σ lengths] int64: the token of the pack at each place; None: the same order as in the pack.

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

    @cached_property
    def end_to_end(self) -> Layout:
        """The sequences, concatenated without padding."""
        lengths, source = np.array(self.lengths), self._source
        return Layout.of(source, np.ones(len(source), bool), [(1, int(lengths.sum()))], self.boundaries.device)

    @cached_property
    def padded(self) -> Layout:
        """The sequences in groups of similar length, computed once and used by every layer."""
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
    """Maps the T tokens of a pack to P places, for attention only.

    shapes: [B, L] of each range of places that is attended in one call. source [P]: the token at each place (any token
    at a place without one). home [T]: the place from which each token's output is taken. copies, copied [C]: the other
    places that hold a token, and which token.
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
        home[source[places[::-1]]] = places[::-1]  # the first of several
        other = real.copy()
        other[home] = False
        copies = np.flatnonzero(other)
        tensors = (torch.tensor(values, device=device) for values in (source, home, copies, source[copies]))
        return Layout(shapes, *tensors)

    def lay(self, x: Tensor) -> Tensor:
        """[P, …] of x [T, …]. Gradients at places without a token are 0 and left out."""
        return _Lay.apply(x, self)

    def take(self, y: Tensor) -> Tensor:
        """[T, …] of y [P, …]."""
        return _Take.apply(y, self)


# Explicit, since autograd's index_select adds up row by row even where, except for copies, a selection suffices.
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


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of query [T, Hq, D], key and value [T, Hkv, D]: [T, Hq, D]."""


class Divided(Protocol):
    """Ranks that divide a pack's tokens (`rlcli.model.parallel.context`)."""

    def attend(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The result of `attention` for this rank's tokens; it is called with all tokens of the pack, for some heads.
        All other tensors have this rank's tokens only."""
        ...


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    divided: Divided | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend query [1, Hq, T, D] to key and value [1, Hkv, T, D], causally in each sequence; returns [1, T, Hq, D].

    divided: T is this rank's run of the pack's tokens only. sliding_window: how many tokens each sees, itself included;
    None: all before it.
    """
    for feature in ("softcap", "s_aux"):
        if rest.get(feature) is not None:
            raise ModelError(
                f"{type(module).__name__} attends with {feature}, which packed attention does not support",
                "choose a model of another architecture",
            )
    assert attention_mask is None, "boundaries replace the mask"
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    kernel = _varlen if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) else _grouped
    attend = partial(kernel, segments=segments, scaling=scaling, window=sliding_window)
    found = attend(query, key, value) if divided is None else divided.attend(attend, query, key, value)
    return found[None], None


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    layout = segments.padded
    gqa = query.shape[1] != key.shape[1]
    sizes = [count * length for count, length in layout.shapes]
    outputs = []
    # Split, not sliced one by one: the gradients are then concatenated at once.
    for (count, length), *parts in zip(
        layout.shapes, *(layout.lay(x).split(sizes) for x in (query, key, value)), strict=True
    ):
        q, k, v = (part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in parts)
        seen = _seen(length, window, q.device) if window and window < length else None
        how = {"is_causal": True} if seen is None else {"attn_mask": seen}
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=gqa, **how)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return layout.take(torch.cat(outputs))


def _seen(length: int, window: int, device: torch.device) -> Tensor:
    """bool [length, length]: which tokens (columns) each one sees of the last `window`, itself included."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device)
    return seen.tril().triu(1 - window)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    shared = segments.source is not None
    q, k, v = (segments.end_to_end.lay(x) if shared else x.contiguous() for x in (query, key, value))
    ends, longest = segments.boundaries, max(segments.lengths)
    # Each token sees so many before it (-1: all), and none after.
    sees = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=sees, **_grouped_heads())
    return segments.end_to_end.take(out) if shared else out


@cache
def _grouped_heads() -> dict[str, bool]:
    """torch ≥ 2.12 needs a flag for grouped-query attention; before, the kernel accepts it without one."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


AttentionInterface.register(ATTENTION, packed_attention)
