"""Causal attention within each sequence of a pack, registered under its own name in transformers.

No mask is built: on GPUs in half precision torch's variable-length kernel takes the boundaries; elsewhere sequences of
similar length are attended together, padded at their ends, where causality alone hides the padding from every real
token. A prompt that several sequences share is in the pack once. Its keys and values are copied in front of each of
them only here: all other layers see it once, and its gradient is the sum of theirs. On CPUs its tokens attend once,
too; those of the other sequences need a mask there, as does a sliding window, with which each token sees the last ones
alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from rlcli.errors import ModelError
from rlcli.model.device_copies import Movable, Move, upload
from rlcli.model.sinks import CpuKernel, VarlenKernel, attend_with_sinks, plain

M = TypeVar("M", bound=Movable)

ATTENTION = "rlcli_packed"
"""The attention implementation in a model's config."""

_MAX_WASTE = 1.25
"""Sequences share one attention call while padding adds at most a quarter to the shortest of them."""

_FEW = 8
"""If only their last tokens attend, padding may add so many more of these: a call for a few of them costs more."""

_SQUARE = 512
"""Of sequences up to this length torch's causal CPU kernel computes the whole square."""


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
    _derived: Derived = field(default_factory=lambda: Derived(), compare=False, repr=False)

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device, source: np.ndarray | None = None) -> Segments:
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
        return Segments(upload([ends], device)[0], tuple(lengths), source)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute now what attention on `device` in `dtype` would compute at its first call."""
        needed = "end_to_end" if _has_kernel(device, dtype) else "padded"
        if needed == "padded" or self.source is not None:
            getattr(self, needed)

    def moved(self, move: Move) -> Segments:
        """See `Movable`. What has been computed already goes with it."""
        return replace(self, boundaries=move(self.boundaries), _derived=self._derived.moved(move))

    def derived(self, make: Callable[[Segments], M]) -> M:
        """What `make` computes of these sequences, computed once and used by every layer that asks for it."""
        if make not in self._derived.values:
            self._derived.values[make] = make(self)
        found: M = self._derived.values[make]
        return found

    @property
    def end_to_end(self) -> Layout:
        """The sequences, concatenated without padding, computed once and used by every layer."""
        return self.derived(Segments._lay_end_to_end)

    @property
    def padded(self) -> Padded:
        """The sequences in groups of similar length, computed once and used by every layer."""
        return self.derived(Segments._lay_padded)

    def _lay_end_to_end(self) -> Layout:
        source = self._source
        return Layout.of(source, np.ones(len(source), bool), self.boundaries.device)

    def _lay_padded(self) -> Padded:
        lengths = np.array(self.lengths)
        starts = np.cumsum(lengths) - lengths
        attending = self._attending(lengths, starts)
        order = np.flatnonzero(attending)
        order = order[np.lexsort((lengths[order], attending[order], attending[order] < lengths[order]))]
        calls, queries, keys = [], [], []
        device = self.boundaries.device
        while len(order):
            last, whole = attending[order], lengths[order]
            alike = ((last < whole) == (last[0] < whole[0])) & (last <= _MAX_WASTE * last[0] + _FEW)
            alike &= whole <= _MAX_WASTE * whole[alike].min()
            group, order = order[alike], order[~alike]
            before = lengths[group] - attending[group]
            queries.append(_padded(starts[group] + before, attending[group]))
            keys.append(_padded(starts[group], lengths[group]))
            shape = (len(group), int(attending[group].max()), int(lengths[group].max()))
            places = (queries[-1][0] - starts[group, None]) if before.any() else None
            calls.append(Call(shape, None if places is None else upload([torch.tensor(places)], device)[0]))
        key_layout = self._layout(keys)
        return Padded(
            calls, self._layout(queries) if any(call.places is not None for call in calls) else key_layout, key_layout
        )

    def _attending(self, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """[S]: how many of each sequence's tokens, its last ones, attend in it. The others, of a prompt that an earlier
        sequence has too, do so there."""
        if self.source is None:
            return lengths
        first: np.ndarray = np.zeros(len(self.source), bool)
        first[np.unique(self.source, return_index=True)[1]] = True
        stored: np.ndarray = np.add.reduceat(first, starts)
        # With a mask the whole rectangle is computed; without one about half of the square, if that is large.
        attending: np.ndarray = np.where((stored > 0) & (lengths > _SQUARE) & (2 * stored > lengths), lengths, stored)
        return attending

    def _layout(self, groups: Sequence[tuple[np.ndarray, np.ndarray]]) -> Layout:
        places, real = (np.concatenate([part.ravel() for part in parts]) for parts in zip(*groups, strict=True))
        return Layout.of(self._source[places], real, self.boundaries.device)

    @property
    def _source(self) -> np.ndarray:
        return np.arange(sum(self.lengths)) if self.source is None else self.source


class Derived:
    """What `Segments.derived` has computed. No dataclass: in 16 bits FSDP2 copies those among the arguments of each
    layer, field by field, and a copy is to know what other layers have computed."""

    def __init__(self) -> None:
        self.values: dict[Callable[[Segments], Any], Any] = {}

    def moved(self, move: Move) -> Derived:
        """See `Movable`."""
        found = Derived()
        found.values = {make: value.moved(move) for make, value in self.values.items()}
        return found


@dataclass(frozen=True)
class Layout:
    """Maps the T tokens of a pack to P places, for attention only.

    source [P]: the token at each place (any token at a place without one). home [T]: the place from which each token's
    output is taken. copies, copied [C]: the other places that hold a token, and which token.
    """

    source: Tensor
    home: Tensor
    copies: Tensor
    copied: Tensor

    @staticmethod
    def of(source: np.ndarray, real: np.ndarray, device: torch.device) -> Layout:
        places = np.flatnonzero(real)
        home = np.empty(source[places].max() + 1, np.int64)
        home[source[places[::-1]]] = places[::-1]  # the first of several
        other = real.copy()
        other[home] = False
        copies = np.flatnonzero(other)
        tensors = [torch.tensor(values) for values in (source, home, copies, source[copies])]
        return Layout(*upload(tensors, device))

    def moved(self, move: Move) -> Layout:
        """See `Movable`."""
        return Layout(*map(move, (self.source, self.home, self.copies, self.copied)))

    def lay(self, x: Tensor) -> Tensor:
        """[P, …] of x [T, …]. Gradients at places without a token are 0 and left out."""
        return _Lay.apply(x, self)

    def take(self, y: Tensor) -> Tensor:
        """[T, …] of y [P, …]."""
        return _Take.apply(y, self)


def _padded(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[B, longest]: the places from `starts` on, the last one of each row repeated; and which are not repetitions."""
    column = np.arange(lengths.max())[None, :]
    return starts[:, None] + np.minimum(column, lengths[:, None] - 1), column < lengths[:, None]


@dataclass(frozen=True)
class Call:
    """B sequences that are attended together: the last tokens of each, at most L, to all of its tokens, at most K.

    shape: (B, L, K). places [B, L] int64: where in its sequence each of the L is; None: all K attend, in order.
    """

    shape: tuple[int, int, int]
    places: Tensor | None
    masks: dict[int | None, Tensor] = field(default_factory=dict, compare=False)
    """The masks of windows, which all layers share: their backward passes keep them."""

    def moved(self, move: Move) -> Call:
        """See `Movable`. Masks are computed where they are used."""
        return Call(self.shape, None if self.places is None else move(self.places))

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """What is added to scores, 0 or −inf, `[B, 1, L, K]` or `[K, K]`, so that each token sees the last `window`
        up to itself, or all; None if causality alone does that. like: a tensor of its dtype and device."""
        if self.places is None and not (window and window < self.shape[2]):
            return None
        if window not in self.masks:
            seen = self.seen(window, like.device)
            self.masks[window] = like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        return self.masks[window]

    def seen(self, window: int | None, device: torch.device) -> Tensor:
        """bool, of the shape of a mask: which tokens (last dimension) each one sees."""
        column = torch.arange(self.shape[2], device=device)
        places = column[:, None] if self.places is None else self.places[:, None, :, None]
        return column <= places if not window else (column <= places) & (column > places - window)


@dataclass(frozen=True)
class Padded:
    """The calls of a pack, and where their tokens are: queries lays out the B · L of each call, keys its B · K."""

    calls: list[Call]
    queries: Layout
    keys: Layout

    def moved(self, move: Move) -> Padded:
        """See `Movable`."""
        calls, keys = [call.moved(move) for call in self.calls], self.keys.moved(move)
        return Padded(calls, keys if self.queries is self.keys else self.queries.moved(move), keys)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        return [call.shape for call in self.calls]


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


Attention = Callable[..., Tensor]
"""Of query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, V] and, if there are any, sinks [Hq]: [T, Hq, V]."""


class Divided(Protocol):
    """Ranks that divide a pack's tokens (`rlcli.model.parallel.context_parallel`)."""

    def attend(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """The result of `attention` for this rank's tokens; it is called with all tokens of the pack, for some heads.
        All other tensors have this rank's tokens only. sinks [Hq]: of all heads; those of the heads are passed on."""
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
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend query [1, Hq, T, D] to key [1, Hkv, T, D] and value [1, Hkv, T, V], causally in each sequence; returns
    [1, T, Hq, V].

    divided: T is this rank's run of the pack's tokens only. sliding_window: how many tokens each sees, itself included;
    None: all before it. s_aux [Hq]: a sink in each head (`rlcli.model.sinks`).
    """
    if rest.get("softcap") is not None:
        raise ModelError(
            f"{type(module).__name__} attends with softcap, which packed attention does not support",
            "choose a model of another architecture",
        )
    assert attention_mask is None, "boundaries replace the mask"
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    kernel = _varlen if _has_kernel(query.device, query.dtype) else _grouped
    attend = partial(kernel, segments=segments, scaling=scaling, window=sliding_window)
    given = (query, key, value) if s_aux is None else (query, key, value, s_aux)
    found = attend(*given) if divided is None else divided.attend(attend, *given)
    return found[None], None


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for sequences of several lengths."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _has_cpu_kernel(device: torch.device) -> bool:
    """Whether torch's flash kernel for CPUs can be called, which gives what sinks need."""
    return str(device.type) == "cpu"


def _grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    padded = segments.padded
    gqa = query.shape[1] != key.shape[1]
    # In 16 bits torch's CPU kernel is less exact, and its backward pass takes three times as long.
    dtype, exact = query.dtype, torch.promote_types(query.dtype, torch.float32)
    width = value.shape[-1]
    value = _widened(value, key.shape[-1])
    query, key, value = (
        layout.lay(x).to(exact) for x, layout in ((query, padded.queries), (key, padded.keys), (value, padded.keys))
    )
    attending = [count * last for count, last, _ in padded.shapes]
    attended = [count * whole for count, _, whole in padded.shapes]
    outputs = []
    # Split, not sliced one by one: the gradients are then concatenated at once.
    for call, *parts in zip(
        padded.calls, query.split(attending), key.split(attended), value.split(attended), strict=True
    ):
        q, k, v = (part.view(call.shape[0], -1, *part.shape[1:]).transpose(1, 2) for part in parts)
        mask = call.mask(window, q)
        if sinks is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
            )
        else:
            out = _sunk(q, k, v, sinks, mask, _scale(scaling, q))
        outputs.append(_narrowed(out, width).transpose(1, 2).flatten(0, 1))
    return padded.queries.take(torch.cat(outputs).to(dtype))


def _sunk(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if _has_cpu_kernel(q.device):
        return attend_with_sinks(CpuKernel(mask, scale), q, k, v, sinks)
    if mask is None:
        mask = q.new_full((q.shape[2], q.shape[2]), -torch.inf).triu(1)
    return plain(q, k, v, sinks, mask, scale)


def _scale(scaling: float | None, query: Tensor) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    shared = segments.source is not None
    width = value.shape[-1]
    value = _widened(value, key.shape[-1])
    q, k, v = (segments.end_to_end.lay(x) if shared else x.contiguous() for x in (query, key, value))
    ends, longest = segments.boundaries, max(segments.lengths)
    # Each token sees so many before it (-1: all), and none after.
    sees = (-1 if window is None else window - 1, 0)
    if sinks is None:
        out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=sees, **_grouped_heads())
    else:
        out = attend_with_sinks(VarlenKernel(ends, longest, _scale(scaling, q), sees[0]), q, k, v, sinks)
    out = _narrowed(out, width)
    return segments.end_to_end.take(out) if shared else out


def _widened(value: Tensor, width: int) -> Tensor:
    """Values `[…, V]` as wide as keys, filled with zeros: kernels have one size of heads, and without one a CPU would
    keep all scores. The zeros of the output are cut off by `_narrowed`."""
    return value if value.shape[-1] == width else F.pad(value, (0, width - value.shape[-1]))


def _narrowed(out: Tensor, width: int) -> Tensor:
    return out if out.shape[-1] == width else out[..., :width]


@cache
def _grouped_heads() -> dict[str, bool]:
    """torch ≥ 2.12 needs a flag for grouped-query attention; before, the kernel accepts it without one."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


AttentionInterface.register(ATTENTION, packed_attention)
