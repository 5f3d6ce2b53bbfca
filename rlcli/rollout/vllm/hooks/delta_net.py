"""Gated DeltaNet layers of vLLM's models on CPUs, by torch, where vLLM's kernels do not compute them: these take
bfloat16 and heads of 64 and 128 alone.

The states of requests stay in vLLM's cache: the last inputs of the convolution, and a matrix for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeGuard

from rlcli.rollout.vllm.vllm_types import CustomOp, is_custom_op

if TYPE_CHECKING:
    from jaxtyping import Float, Int64
    from torch import Tensor, nn

KERNEL_HEADS = (64, 128)
"""Sizes of heads that vLLM's kernels take."""


class Convolution(Protocol):
    """The convolution of a layer."""

    weight: Float[Tensor, "channels 1 W"]
    """Its kernel."""


class DeltaNetLayer(CustomOp, Protocol):
    """Attributes that are used of vLLM's `QwenGatedDeltaNetAttention`."""

    prefix: str
    """Name of the layer."""
    tp_size: int
    """Ranks that share the layer."""
    gqa_interleaved_layout: bool
    """True if projections are ordered by key head, as in Qwen3-Next."""
    num_k_heads: int
    """Heads of queries and keys, of all ranks."""
    num_v_heads: int
    """Heads of values, of all ranks."""
    head_k_dim: int
    """K, size of a query or key head."""
    head_v_dim: int
    """V, size of a value head."""
    value_dim: int
    """Sizes of all value heads together."""
    layer_norm_epsilon: float
    """Epsilon of the norm."""
    conv1d: Convolution
    """Convolution over the last tokens."""
    A_log: Float[Tensor, " H"]
    """Logarithm of each head's decay."""
    dt_bias: Float[Tensor, " H"]
    """Bias of the decay's time step."""
    kv_cache: Sequence[Tensor]
    """Inputs of the convolution and matrices of the heads, for each slot."""
    in_proj_qkvz: Callable[[Tensor], tuple[Tensor, object]]
    """Projection to queries, keys, values and gates."""
    in_proj_ba: Callable[[Tensor], tuple[Tensor, object]]
    """Projection to b and a."""

    def fix_query_key_value_ordering(
        self, mixed_qkvz: Tensor, mixed_ba: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, z, b and a of the interleaved layout."""
        ...

    def _output_projection(self, core_attn_out: Tensor, z: Tensor) -> Tensor:
        """Gated norm and output matrix."""
        ...


def _is_delta_net(layer: nn.Module) -> TypeGuard[DeltaNetLayer]:
    return type(layer).__name__ == "QwenGatedDeltaNetAttention" and is_custom_op(layer)


def install(model: nn.Module) -> int:
    """Have the layers of `model` that vLLM's kernels do not take compute by torch; returns how many do. Called in the
    worker through `apply_model`."""
    import torch

    replaced = 0
    for layer in model.modules():
        if not _is_delta_net(layer):
            continue
        has_kernel = layer.head_k_dim in KERNEL_HEADS and layer.head_v_dim in KERNEL_HEADS
        if not has_kernel or layer.conv1d.weight.dtype != torch.bfloat16:
            layer._forward_method = partial(_forward, layer)
            replaced += 1
    return replaced


def _forward(
    layer: DeltaNetLayer, hidden_states: Float[Tensor, "T D"], *_: object, **__: object
) -> Float[Tensor, "T D"]:
    """[T, D] of all scheduled tokens: those of requests that decode, one each, and then of those that begin."""
    import torch
    from vllm.forward_context import get_forward_context

    projected, ba = layer.in_proj_qkvz(hidden_states)[0], layer.in_proj_ba(hidden_states)[0]
    ranks = layer.tp_size
    if layer.gqa_interleaved_layout:  # Qwen3-Next
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(projected, ba)
        mixed = torch.cat([x.flatten(1) for x in (q, k, v)], -1)
    else:
        width = layer.value_dim // ranks
        mixed, z = projected.split([projected.shape[-1] - width, width], -1)
        z, (b, a) = z.unflatten(-1, (-1, layer.head_v_dim)), ba.chunk(2, -1)
    output = hidden_states.new_zeros(len(hidden_states), layer.num_v_heads // ranks, layer.head_v_dim)
    metadata = get_forward_context().attn_metadata
    if metadata is not None:  # else vLLM measures its memory
        layer_metadata = metadata[layer.prefix]
        assert layer_metadata.spec_sequence_masks is None, "refused with rollout.speculate"
        ends, slots = (
            layer_metadata.non_spec_query_start_loc.tolist(),
            layer_metadata.non_spec_state_indices_tensor.long(),
        )
        has_state = [True] * layer_metadata.num_decodes
        if layer_metadata.num_prefills:
            has_state += layer_metadata.has_initial_state.tolist()[
                layer_metadata.num_decodes : layer_metadata.num_decodes + layer_metadata.num_prefills
            ]
        requests = [slice(0, layer_metadata.num_decodes)] if layer_metadata.num_decodes else []
        requests += [slice(number, number + 1) for number in range(layer_metadata.num_decodes, len(has_state))]
        for some in requests:
            at = slice(ends[some.start], ends[some.stop])
            steps = _Steps(layer, slots[some], has_state[some.start])
            output[at] = steps.outputs(mixed[at], b[at], a[at]).to(output.dtype)
    return layer._output_projection(output, z)


class _Steps:
    """The next tokens of N requests, equally many of each. slots: where their states are in vLLM's cache. has_state:
    whether there is anything in them."""

    def __init__(self, layer: DeltaNetLayer, slots: Int64[Tensor, " N"], has_state: bool) -> None:
        self._layer, self._slots, self._has_state = layer, slots, has_state
        inputs, self._states = layer.kv_cache[0], layer.kv_cache[1]
        weight = layer.conv1d.weight
        # [slots, W − 1, channels]: vLLM has either order.
        self._inputs = inputs if inputs.shape[-1] == weight.shape[0] else inputs.transpose(1, 2)

    def outputs(
        self, mixed: Float[Tensor, "N*L channels"], b: Float[Tensor, "N*L H"], a: Float[Tensor, "N*L H"]
    ) -> Float[Tensor, "N*L H V"]:
        """Outputs of the rule for L tokens of each of the N requests."""
        import torch

        from rlcli.model.delta_net import Sizes, chunk_rule, convolution, decay_logs

        layer, count = self._layer, len(self._slots)
        weight = layer.conv1d.weight[:, 0]
        earlier = self._inputs[self._slots] if self._has_state else mixed.new_zeros(count, *self._inputs.shape[1:])
        x = torch.cat([earlier.to(mixed.dtype), mixed.view(count, -1, mixed.shape[-1])], 1)
        self._inputs[self._slots] = x[:, 1 - weight.shape[1] :].to(self._inputs.dtype)
        sizes = Sizes(
            layer.num_k_heads // layer.tp_size,
            layer.num_v_heads // layer.tp_size,
            layer.head_k_dim,
            layer.head_v_dim,
            weight.shape[1],
            layer.layer_norm_epsilon,
        )
        g = decay_logs(a, layer.A_log, layer.dt_bias).view(count, -1, sizes.values)
        beta = b.sigmoid().view(count, -1, sizes.values)
        # vLLM's states are [V, K].
        start = self._states[self._slots].transpose(-1, -2) if self._has_state else None
        heads, last = chunk_rule(*sizes.heads(convolution(x, weight)), g, beta, start)
        self._states[self._slots] = last.transpose(-1, -2).to(self._states.dtype)
        return heads.flatten(0, 1)
