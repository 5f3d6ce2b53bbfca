"""Gated DeltaNet (arXiv 2412.06464), the linear attention of Qwen3-Next and Qwen3.5, over packs.

Each head carries a state S [K, V]. For a token with query q, key k, value v, decay α = exp(g) and step β,

    S ← α S,   S ← S + β k (v − Sᵀ k)ᵀ,   o = Sᵀ q                                        (equation 10)

where q and k are normalised to length 1, q is divided by √K, and q, k, v come from a causal convolution over about 4
tokens. State and convolution are reset at each sequence of a pack. A prompt that several sequences share is computed
once: each of them continues from its last state and last inputs, and its gradient is the sum over the sequences
(`rlcli.model.recurrence`).

The part between the projections is recomputed in the backward pass, so that only its inputs are kept. On GPUs in 16
bits with `flash-linear-attention` and `causal-conv1d` installed, their kernels compute it; elsewhere torch does, in
float32, over chunks of tokens (`chunk_rule`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlcli.errors import ModelError
from rlcli.model.attention import Divided, Segments
from rlcli.model.recurrence import CHUNK, ConcatenatedPieces, PaddedPieces

EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


def packs(lm: nn.Module) -> None:
    """Patch the gated DeltaNet layers of `lm` to read packs, described by `segments`, which decoder layers pass on as
    they do to attention. Without `segments` the layers compute as transformers does."""
    for layer in delta_layers(lm):
        layer.forward = partial(_forward, layer)


def delta_layers(lm: nn.Module) -> list[Any]:
    """The gated DeltaNet layers of `lm`, in order. (transformers has a class for each architecture.)"""
    return [module for module in lm.modules() if type(module).__name__.endswith("GatedDeltaNet")]


def _forward(
    layer: Any,
    hidden_states: Tensor,
    cache_params: object = None,
    attention_mask: Tensor | None = None,
    *,
    segments: Segments | None = None,
    divided: Divided | None = None,
    **rest: object,
) -> Tensor:
    """The layer's output, of the shape of `hidden_states` [1, T, H]: those of a pack if `segments` is given."""
    if segments is None:
        output: Tensor = type(layer).forward(layer, hidden_states, cache_params, attention_mask, **rest)
        return output
    if divided is not None:
        raise ModelError(
            "parallel.context divides a pack's tokens, and gated DeltaNet layers carry a state from each to the next",
            "leave parallel.context out",
        )
    assert attention_mask is None, "boundaries replace the mask"
    sizes = Sizes.of(layer)
    mixed, z, b, a = _projected(layer, hidden_states)
    kernels = _has_kernels(mixed.device, mixed.dtype)
    core = partial(_concatenated if kernels else _padded, sizes, segments)
    weights = layer.conv1d.weight, layer.A_log, layer.dt_bias, layer.norm.weight
    heads = _Recomputed.apply(core, mixed, z, b, a, *weights)
    projected: Tensor = layer.out_proj(heads)[None]
    return projected


@dataclass(frozen=True)
class Sizes:
    """Sizes of a gated DeltaNet layer."""

    keys: int
    """Heads of queries and keys."""
    values: int
    """Heads of values, a multiple of `keys`."""
    key: int
    """K, size of a query or key head."""
    value: int
    """V, size of a value head."""
    kernel: int
    """W, tokens that the convolution reads."""
    epsilon: float
    """Epsilon of the norm."""

    @staticmethod
    def of(layer: Any) -> Sizes:
        """The sizes of `layer`."""
        return Sizes(
            layer.num_k_heads,
            layer.num_v_heads,
            layer.head_k_dim,
            layer.head_v_dim,
            layer.conv_kernel_size,
            layer.norm.variance_epsilon,
        )

    def heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [..., 2 · keys · K + values · V] into queries and keys [..., values, K] and values [..., values, V]."""
        width = self.keys * self.key
        q, k, v = convolved.split([width, width, self.values * self.value], -1)
        q, k = (x.unflatten(-1, (self.keys, self.key)).repeat_interleave(self.values // self.keys, -2) for x in (q, k))
        return q, k, v.unflatten(-1, (self.values, self.value))


def _projected(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The projections of [1, T, H]: queries, keys and values of all heads before the convolution,
    [T, 2 · keys · K + values · V]; the gate z [T, values · V]; and the inputs of β and the decay, b and a
    [T, values]."""
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next, whose projections are ordered by key head
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
        )
        mixed = torch.cat([x[0].flatten(1) for x in (q, k, v)], -1)
        return mixed, z[0].flatten(1), b[0], a[0]
    x = hidden_states[0]
    return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)


class _Recomputed(torch.autograd.Function):
    """Computes `core` of tensors, and recomputes it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, core: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.core = core
        ctx.save_for_backward(*tensors)
        return core(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        tensors = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            output = ctx.core(*tensors)
        differentiable = [x for x in tensors if x.requires_grad]
        grads = iter(torch.autograd.grad(output, differentiable, grad))
        return None, *(next(grads) if need else None for need in needed)


def _padded(
    sizes: Sizes, segments: Segments, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, *weights: Tensor
) -> Tensor:
    """[T, values · V] by torch operations, from the results of `_projected`. weights: of the convolution [C, 1, W],
    A_log and dt_bias [values], and of the norm [V]."""
    pieces = segments.derived(_padded_pieces(sizes.kernel - 1))
    kernel, log_a, bias, scale = weights
    exact = torch.promote_types(mixed.dtype, torch.float32)
    gates = pieces.layout.lay(torch.cat([decay_logs(a, log_a, bias), b.sigmoid().to(exact)], -1))
    inputs, padded_inputs = pieces.layout.lay(mixed), torch.cat([mixed, mixed.new_zeros(1, mixed.shape[1])])
    counts = [group.real.numel() for group in pieces.groups]
    outputs, states = list[Tensor](), list[Tensor]()
    for group, x, gate in zip(pieces.groups, inputs.split(counts), gates.split(counts), strict=True):
        count, longest = group.shape
        x = x.view(count, longest, -1)
        earlier = (
            x.new_zeros(count, sizes.kernel - 1, x.shape[-1]) if group.inputs is None else padded_inputs[group.inputs]
        )
        convolved = convolution(torch.cat([earlier, x], 1), kernel[:, 0])
        # Padding neither writes nor decays, so the last state is that of the last token.
        g, beta = (gate.view(count, longest, -1) * group.real[..., None]).chunk(2, -1)
        start = None if group.parents is None else torch.cat(states)[group.parents]
        output, last = chunk_rule(*sizes.heads(convolved), g, beta, start)
        outputs.append(output.flatten(0, 1))
        if group.parents is None:
            states.append(last)
    heads = pieces.layout.take(torch.cat(outputs)).to(mixed.dtype)
    return _gated_norm(heads, z.view_as(heads), scale, sizes.epsilon).flatten(1)


@cache
def _padded_pieces(width: int) -> Callable[[Segments], PaddedPieces]:
    """Cached, since `Segments.derived` caches results by the function."""
    return partial(PaddedPieces.of, width=width)


@cache
def _concatenated_pieces(width: int) -> Callable[[Segments], ConcatenatedPieces]:
    return partial(ConcatenatedPieces.of, width=width)


def decay_logs(a: Tensor, log_a: Tensor, bias: Tensor) -> Tensor:
    """g = −exp(A_log) softplus(a + dt_bias), float32 or more."""
    exact = torch.promote_types(a.dtype, torch.float32)
    return -log_a.to(exact).exp() * F.softplus(a.to(exact) + bias)


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """silu(Σ_j w_j x_{t − W + 1 + j}), a causal convolution of each channel, [B, L, C] of [B, W − 1 + L, C], whose
    first W − 1 tokens are earlier ones; computed in float32 and rounded once. weight: [C, W]."""
    exact = torch.promote_types(x.dtype, torch.float32)
    width = weight.shape[1]
    length = x.shape[1] - width + 1
    weight = weight.to(exact)
    total = sum((x[:, j : j + length].to(exact) * weight[:, j] for j in range(width - 1)), x.new_zeros((), dtype=exact))
    return F.silu(total + x[:, width - 1 :].to(exact) * weight[:, width - 1]).to(x.dtype)


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """w · x / rms(x) · silu(gate), over the last dimension, rounded where transformers rounds."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + epsilon)
    return ((weight * normed.to(x.dtype)) * F.silu(gate.to(exact.dtype))).to(x.dtype)


def chunk_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, start: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over chunks of tokens: outputs [B, L, H, V] and the last states [B, H, K, V], in float32 or
    more.

    q, k: [B, L, H, K]. v: [B, L, H, V]. g, beta: [B, L, H]. start: [B, H, K, V]; None: zeros.

    Within a chunk of C tokens, let γ_i = α_1 … α_i, D_ij = γ_i / γ_j for i ≥ j and 0 elsewhere, and

        A = strictly lower part of (diag(β) K Kᵀ ⊙ D)
        W = (1 + A)⁻¹ diag(β γ) K,    U = (1 + A)⁻¹ diag(β) V         (section 3.3; arXiv 2406.06484, section 3.2)

    With the state S at the chunk's start, R = U − W S is what the tokens write, and

        O = diag(γ) Q S + (Q Kᵀ ⊙ D) R,    S ← γ_C S + Kᵀ diag(γ_C / γ) R
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    length, chunk = q.shape[1], min(chunk, q.shape[1])
    missing = -length % chunk
    q, k, v = (F.pad(x.to(dtype), (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
    g, beta = (F.pad(x.to(dtype), (0, 0, 0, missing)) for x in (g, beta))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    # [B, H, chunks, C, …]
    q, k, v, g, beta = (x.unflatten(1, (-1, chunk)).movedim(3, 1) for x in (q, k, v, g, beta))
    log_gamma = g.cumsum(-1)
    log_decay = log_gamma[..., :, None] - log_gamma[..., None, :]
    is_future = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay = log_decay.masked_fill(is_future, -torch.inf).exp()
    gamma = log_gamma.exp()[..., None]
    chunk_decay, rest = gamma[..., -1:, :], (log_gamma[..., -1:] - log_gamma).exp()[..., None]
    system = (beta[..., None] * k) @ k.transpose(-1, -2) * decay
    solved = torch.linalg.solve_triangular(
        system, beta[..., None] * torch.cat([gamma * k, v], -1), upper=False, unitriangular=True
    )
    reading, written = solved.split([k.shape[-1], v.shape[-1]], -1)
    scores = q @ k.transpose(-1, -2) * decay
    asking, storing = gamma * q, (rest * k).transpose(-1, -2)
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]) if start is None else start.to(dtype)
    outputs = list[Tensor]()
    parts = (x.unbind(2) for x in (reading, written, scores, asking, storing, chunk_decay))
    for w, u, score, query, keys, decayed in zip(*parts, strict=True):
        writes = u - w @ state
        outputs.append(query @ state + score @ writes)
        state = decayed * state + keys @ writes
    output = torch.stack(outputs, 2).flatten(2, 3)[:, :, :length]  # [B, H, L, V]
    return output.transpose(1, 2), state


def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the kernels of `flash-linear-attention` and `causal-conv1d` can compute it."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and _installed()


@cache
def _installed() -> bool:
    return all(find_spec(name) is not None for name in ("fla", "causal_conv1d"))


def _concatenated(
    sizes: Sizes, segments: Segments, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, *weights: Tensor
) -> Tensor:
    """As `_padded`, by variable-length kernels: of `flash-linear-attention` and `causal-conv1d`.

    The second does not support initial inputs together with boundaries: the last inputs of a prompt are repeated before
    each continuation, and the outputs there are dropped.
    """
    from causal_conv1d import causal_conv1d_fn

    pieces = segments.derived(_concatenated_pieces(sizes.kernel - 1))
    kernel, log_a, bias, scale = weights
    conv_inputs = pieces.convolved.lay(mixed)[None].transpose(1, 2)  # channels last, as boundaries need it
    convolved = causal_conv1d_fn(
        conv_inputs, kernel[:, 0].contiguous(), seq_idx=pieces.sequence[None], activation="silu"
    )
    q, k, v = sizes.heads(pieces.convolved.take(convolved[0].transpose(0, 1)))
    heads = _delta_kernel(pieces, (q, k, v, decay_logs(a, log_a, bias), b.sigmoid()))
    return _gated_norm(heads, z.view_as(heads), scale, sizes.epsilon).flatten(1)


def _delta_kernel(pieces: ConcatenatedPieces, inputs: Sequence[Tensor]) -> Tensor:
    """[T, H, V]: `chunk_rule` by `flash-linear-attention`. inputs: q, k, v [T, H, …], g and β [T, H]."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    outputs, states = list[Tensor](), None
    for run in pieces.runs:
        q, k, v, g, beta = (x.index_select(0, run.tokens)[None] for x in inputs)
        start = None if run.parents is None or states is None else states.index_select(0, run.parents)
        output, last = chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=start,
            output_final_state=run.parents is None and len(pieces.runs) > 1,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=run.boundaries.long(),
        )
        outputs.append(output[0])
        states = last if run.parents is None else states
    return torch.cat(outputs).index_select(0, pieces.order)
