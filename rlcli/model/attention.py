"""Causal attention within each sequence of a pack, registered with transformers as `rlcli_packed`.

No mask is built for all tokens. On GPUs in half precision torch's variable-length kernel takes the boundaries.
Elsewhere sequences of similar length are batched, padded at their ends, where causality hides the padding from every
real token.

A prompt that several sequences share is in the pack once. Only attention copies its keys and values in front of each
of them: all other layers compute it once, and its gradient is the sum over the sequences. On CPUs its queries are
computed once, too; the other sequences then need a mask, as does a sliding window, which limits each token to the last
ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from rlcli.errors import ModelError
from rlcli.model.device_copies import Movable, Move, upload
from rlcli.model.sinks import CpuKernel, VarlenKernel, attend_with_sinks, attend_with_sinks_unfused

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

M = TypeVar("M", bound=Movable)

ATTENTION = "rlcli_packed"
"""Name of the attention implementation in a model's config."""

_MAX_WASTE = 1.25
"""Sequences share one attention call while padding adds at most a quarter to the shortest of them."""

_FEW = 8
"""Query tokens by which padding may exceed `_MAX_WASTE`: with few queries a separate call costs more than padding."""

_SQUARE = 512
"""Sequence length up to which torch's causal CPU kernel computes the full square."""


@dataclass(frozen=True)
class Segments:
    """The S sequences of a pack, concatenated, each with its prompt.

    >>> Segments.of([3, 2], torch.device("cpu")).boundaries.tolist()
    [0, 3, 5]
    """

    boundaries: Int[Tensor, " S_plus_1"]
    """int32, on the device: 0, then the end of each sequence."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, on the host."""
    source: Int[np.ndarray, " P"] | None = None
    """int64: for each of the Σ lengths positions the index of its token in the pack; None: the identity."""
    _derived: Derived = field(default_factory=lambda: Derived(), compare=False, repr=False)
    """Cache of the layouts computed from these."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device, source: Int[np.ndarray, " P"] | None = None) -> Segments:
        """The segments on `device`."""
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
        return Segments(upload([ends], device)[0], tuple(lengths), source)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute now the layout that attention on `device` in `dtype` would compute at its first call."""
        needed = "end_to_end" if _has_kernel(device, dtype) else "padded"
        if needed == "padded" or self.source is not None:
            getattr(self, needed)

    def moved(self, move: Move) -> Segments:
        """See `Movable`. Cached layouts are moved, too."""
        return replace(self, boundaries=move(self.boundaries), _derived=self._derived.moved(move))

    def derived(self, make: Callable[[Segments], M]) -> M:
        """The result of `make` for these sequences, cached for all layers."""
        if make not in self._derived.values:
            self._derived.values[make] = make(self)
        return cast(M, self._derived.values[make])

    @property
    def end_to_end(self) -> Layout:
        """The sequences, concatenated without padding; cached for all layers."""
        return self.derived(Segments._lay_end_to_end)

    @property
    def padded(self) -> Padded:
        """The sequences in groups of similar length; cached for all layers."""
        return self.derived(Segments._lay_padded)

    def _lay_end_to_end(self) -> Layout:
        source = self._source
        return Layout.of(source, np.ones(len(source), bool), self.boundaries.device)

    def _lay_padded(self) -> Padded:
        lengths = np.array(self.lengths)
        starts = np.cumsum(lengths) - lengths
        query_counts = self._query_counts(lengths, starts)
        order = np.flatnonzero(query_counts)
        order = order[np.lexsort((lengths[order], query_counts[order], query_counts[order] < lengths[order]))]
        calls, queries, keys = [], [], []
        device = self.boundaries.device
        while len(order):
            query_count, length = query_counts[order], lengths[order]
            similar = (query_count < length) == (query_count[0] < length[0])
            similar &= query_count <= _MAX_WASTE * query_count[0] + _FEW
            similar &= length <= _MAX_WASTE * length[similar].min()
            group, order = order[similar], order[~similar]
            skipped = lengths[group] - query_counts[group]
            queries.append(_padded(starts[group] + skipped, query_counts[group]))
            keys.append(_padded(starts[group], lengths[group]))
            shape = (len(group), int(query_counts[group].max()), int(lengths[group].max()))
            positions = (queries[-1][0] - starts[group, None]) if skipped.any() else None
            calls.append(Call(shape, None if positions is None else upload([torch.tensor(positions)], device)[0]))
        key_layout = self._layout(keys)
        has_positions = any(call.positions is not None for call in calls)
        return Padded(calls, self._layout(queries) if has_positions else key_layout, key_layout)

    def _query_counts(self, lengths: Int[np.ndarray, " S"], starts: Int[np.ndarray, " S"]) -> Int[np.ndarray, " S"]:
        """The number of each sequence's last tokens that are its queries. The tokens before them belong to a prompt
        that an earlier sequence has too, and are queries there."""
        if self.source is None:
            return lengths
        first: np.ndarray = np.zeros(len(self.source), bool)
        first[np.unique(self.source, return_index=True)[1]] = True
        stored: np.ndarray = np.add.reduceat(first, starts)
        # With a mask the full rectangle is computed; without one about half of the square, if that is large.
        counts: np.ndarray = np.where((stored > 0) & (lengths > _SQUARE) & (2 * stored > lengths), lengths, stored)
        return counts

    def _layout(self, groups: Sequence[tuple[np.ndarray, np.ndarray]]) -> Layout:
        """The layout of the padded `groups` (see `_padded`), one after another."""
        positions, real = (np.concatenate([part.ravel() for part in parts]) for parts in zip(*groups, strict=True))
        return Layout.of(self._source[positions], real, self.boundaries.device)

    @property
    def _source(self) -> Int[np.ndarray, " P"]:
        return np.arange(sum(self.lengths)) if self.source is None else self.source


class Derived:
    """Cache of `Segments.derived`. Not a dataclass: in 16 bits FSDP2 copies dataclasses among the arguments of each
    layer, field by field, and the copies have to share one cache."""

    def __init__(self) -> None:
        self.values: dict[Callable[[Segments], Movable], Movable] = {}

    def moved(self, move: Move) -> Derived:
        """See `Movable`."""
        derived = Derived()
        derived.values = {make: value.moved(move) for make, value in self.values.items()}
        return derived


@dataclass(frozen=True)
class Layout:
    """Maps the T tokens of a pack to P slots, for attention only. C slots hold copies of a token."""

    source: Int[Tensor, " P"]
    """The token in each slot; any token in a padding slot."""
    home: Int[Tensor, " T"]
    """The slot from which each token's output is read."""
    copies: Int[Tensor, " C"]
    """The other slots that hold a token."""
    copied: Int[Tensor, " C"]
    """The token in each of `copies`."""

    @staticmethod
    def of(source: Int[np.ndarray, " P"], real: Bool[np.ndarray, " P"], device: torch.device) -> Layout:
        """source: the token in each slot. real: False for padding."""
        slots = np.flatnonzero(real)
        home = np.empty(source[slots].max() + 1, np.int64)
        home[source[slots[::-1]]] = slots[::-1]  # the first of several
        is_copy = real.copy()
        is_copy[home] = False
        copies = np.flatnonzero(is_copy)
        tensors = [torch.tensor(values) for values in (source, home, copies, source[copies])]
        return Layout(*upload(tensors, device))

    def moved(self, move: Move) -> Layout:
        """See `Movable`."""
        return Layout(*map(move, (self.source, self.home, self.copies, self.copied)))

    def lay(self, x: Float[Tensor, "T ..."]) -> Float[Tensor, "P ..."]:
        """Tokens to slots. Gradients of padding slots are 0 and are skipped."""
        slots: Tensor = _Lay.apply(x, self)
        return slots

    def take(self, y: Float[Tensor, "P ..."]) -> Float[Tensor, "T ..."]:
        """Slots to tokens: the inverse of `lay`."""
        tokens: Tensor = _Take.apply(y, self)
        return tokens


def _padded(
    starts: Int[np.ndarray, " B"], lengths: Int[np.ndarray, " B"]
) -> tuple[Int[np.ndarray, "B L"], Bool[np.ndarray, "B L"]]:
    """The positions from each of `starts` on, the last one of each row repeated up to the longest; and which of them
    are not repetitions."""
    column = np.arange(lengths.max())[None, :]
    return starts[:, None] + np.minimum(column, lengths[:, None] - 1), column < lengths[:, None]


@dataclass(frozen=True)
class Call:
    """One attention call over B sequences: the last tokens of each, at most L, attend to all its tokens, at most K."""

    shape: tuple[int, int, int]
    """(B, L, K)."""
    positions: Int[Tensor, "B L"] | None
    """Position of each query token in its sequence; None: all K are queries, in order."""
    masks: dict[int | None, Tensor] = field(default_factory=dict, compare=False)
    """Masks by window size, shared by all layers, whose backward passes keep them."""

    def moved(self, move: Move) -> Call:
        """See `Movable`. Masks are computed again where they are used."""
        return Call(self.shape, None if self.positions is None else move(self.positions))

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """Values added to the scores, 0 or −inf, `[B, 1, L, K]` or `[K, K]`: each token attends to the last `window`
        tokens including itself, or to all. None if causality alone does that. like: a tensor with the mask's dtype and
        device."""
        if self.positions is None and not (window and window < self.shape[2]):
            return None
        if window not in self.masks:
            visible = self.visible(window, like.device)
            self.masks[window] = like.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        return self.masks[window]

    def visible(self, window: int | None, device: torch.device) -> Tensor:
        """bool, in the shape of a mask: which tokens (last dimension) each query token attends to."""
        column = torch.arange(self.shape[2], device=device)
        positions = column[:, None] if self.positions is None else self.positions[:, None, :, None]
        return column <= positions if not window else (column <= positions) & (column > positions - window)


@dataclass(frozen=True)
class Padded:
    """The attention calls of a pack and the layout of their tokens."""

    calls: list[Call]
    """In the order of their tokens in `queries` and `keys`."""
    queries: Layout
    """Positions of the B · L query tokens of each call, one call after another."""
    keys: Layout
    """Positions of the B · K key and value tokens of each call, one call after another."""

    def moved(self, move: Move) -> Padded:
        """See `Movable`."""
        calls, keys = [call.moved(move) for call in self.calls], self.keys.moved(move)
        return Padded(calls, keys if self.queries is self.keys else self.queries.moved(move), keys)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(B, L, K) of each call."""
        return [call.shape for call in self.calls]


# Explicit backward passes: autograd's index_select adds up row by row, where a selection suffices, apart from copies.
class _Lay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layout: Layout = ctx.layout
        token_grad = grad.index_select(0, layout.home)
        if len(layout.copies):
            token_grad.index_add_(0, layout.copied, grad.index_select(0, layout.copies))
        return token_grad, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.slots = layout, len(y)
        return y.index_select(0, layout.home)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.slots, *grad.shape[1:]).index_copy_(0, ctx.layout.home, grad), None


Attention = Callable[..., Tensor]
"""(query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, V] and, for a model with sinks, sinks [Hq]) → [T, Hq, V]."""


class Divided(Protocol):
    """Ranks that divide a pack's tokens (`rlcli.model.parallel.context_parallel`)."""

    def attend(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention for this rank's tokens. `attention` is called with all tokens of the pack, for some heads; query,
        key, value and the result have this rank's tokens only. sinks [Hq]: of all heads."""
        ...


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 Hq T D"],
    key: Float[Tensor, "1 Hkv T D"],
    value: Float[Tensor, "1 Hkv T V"],
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    divided: Divided | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Float[Tensor, " Hq"] | None = None,
    **rest: object,
) -> tuple[Float[Tensor, "1 T Hq V"], None]:
    """Attend query to key and value, causally in each sequence: the attention function that transformers calls.

    divided: T counts this rank's run of the pack's tokens only. sliding_window: number of tokens that each token
    attends to, itself included; None: all preceding ones. s_aux: a sink in each head (`rlcli.model.sinks`).
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
    if divided is None:
        output: Tensor = attend(query, key, value, s_aux)
    else:
        output = divided.attend(attend, query, key, value, s_aux)
    return output[None], None


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """True if torch has a variable-length kernel for it."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _has_cpu_kernel(device: torch.device) -> bool:
    """True if torch's flash kernel for CPUs can be called; sinks need the log-sum-exp that it returns."""
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
) -> Float[Tensor, "T Hq V"]:
    """Attention over sequences of similar length, padded and batched."""
    padded = segments.padded
    gqa = query.shape[1] != key.shape[1]
    # In 16 bits torch's CPU kernel is less exact, and its backward pass takes three times as long.
    dtype, exact = query.dtype, torch.promote_types(query.dtype, torch.float32)
    width = value.shape[-1]
    value = _widened(value, key.shape[-1])
    query, key, value = (
        layout.lay(x).to(exact) for x, layout in ((query, padded.queries), (key, padded.keys), (value, padded.keys))
    )
    query_sizes = [batch * queries for batch, queries, _ in padded.shapes]
    key_sizes = [batch * keys for batch, _, keys in padded.shapes]
    outputs = []
    # Split, not sliced one by one: the gradients are then concatenated at once.
    for call, *parts in zip(
        padded.calls, query.split(query_sizes), key.split(key_sizes), value.split(key_sizes), strict=True
    ):
        q, k, v = (part.view(call.shape[0], -1, *part.shape[1:]).transpose(1, 2) for part in parts)
        mask = call.mask(window, q)
        if sinks is None:
            output = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
            )
        else:
            output = _with_sinks(q, k, v, sinks, mask, _scale(scaling, q))
        outputs.append(_narrowed(output, width).transpose(1, 2).flatten(0, 1))
    return padded.queries.take(torch.cat(outputs).to(dtype))


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of one call for a model with sinks."""
    if _has_cpu_kernel(q.device):
        return attend_with_sinks(CpuKernel(mask, scale), q, k, v, sinks)
    if mask is None:
        mask = q.new_full((q.shape[2], q.shape[2]), -torch.inf).triu(1)
    return attend_with_sinks_unfused(q, k, v, sinks, mask, scale)


def _scale(scaling: float | None, query: Tensor) -> float:
    """`scaling`, or the default of attention, 1 / √D."""
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
) -> Float[Tensor, "T Hq V"]:
    """Attention by torch's variable-length kernel."""
    from torch.nn.attention.varlen import varlen_attn

    shared = segments.source is not None
    width = value.shape[-1]
    value = _widened(value, key.shape[-1])
    q, k, v = (segments.end_to_end.lay(x) if shared else x.contiguous() for x in (query, key, value))
    boundaries, longest = segments.boundaries, max(segments.lengths)
    # Number of preceding tokens that each token attends to (-1: all), and of following ones.
    window_size = (-1 if window is None else window - 1, 0)
    if sinks is None:
        kernel = partial(varlen_attn, enable_gqa=True) if _needs_gqa_flag() else varlen_attn
        result = kernel(q, k, v, boundaries, boundaries, longest, longest, scale=scaling, window_size=window_size)
        assert isinstance(result, Tensor), "without return_aux it returns the output alone"
        output = result
    else:
        sink_kernel = VarlenKernel(boundaries, longest, _scale(scaling, q), window_size[0])
        output = attend_with_sinks(sink_kernel, q, k, v, sinks)
    output = _narrowed(output, width)
    return segments.end_to_end.take(output) if shared else output


def _widened(value: Tensor, width: int) -> Tensor:
    """Values `[…, V]` padded with zeros to the width of the keys: kernels have one head size, and without a kernel a
    CPU would keep all scores. `_narrowed` cuts off the zeros of the output."""
    return value if value.shape[-1] == width else F.pad(value, (0, width - value.shape[-1]))


def _narrowed(output: Tensor, width: int) -> Tensor:
    """The first `width` elements of each head's output."""
    return output if output.shape[-1] == width else output[..., :width]


@cache
def _needs_gqa_flag() -> bool:
    """True if `varlen_attn` has a flag for grouped-query attention (torch ≥ 2.12); before, the kernel needs none."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


AttentionInterface.register(ATTENTION, packed_attention)
