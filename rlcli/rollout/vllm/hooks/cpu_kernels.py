"""CPU kernels for the norm and the gated unit of vLLM's models, which expect torch.compile, which is off there; ranks
of tokens, which nothing reads, are left out.

vLLM writes both as several torch calls for torch.compile to fuse. Its CPU build still has a kernel for the norm; the
gated unit needs only two calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from rlcli.rollout.vllm.vllm_types import is_custom_op, is_multimodal

if TYPE_CHECKING:
    from jaxtyping import Float, Int64
    from torch import Tensor, nn
    from vllm.v1.outputs import LogprobsTensors

    from rlcli.rollout.vllm.vllm_types import Worker

KERNELS = ("rms_norm", "fused_add_rms_norm")


class Norm(Protocol):
    """Attributes of vLLM's `RMSNorm` that `_norm` uses."""

    has_weight: bool
    """True if the normed values are multiplied by `weight`."""
    weight: Float[Tensor, " H"]
    """Factors of the normed values."""
    variance_epsilon: float
    """Added to the mean square."""
    variance_size_override: int | None
    """Number of values that the mean square is of; None: all."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The layer by torch."""
        ...


def install(model: nn.Module) -> int:
    """Make the matching layers of `model` use these; returns how many do. Called in the worker through `apply_model`.
    0 if this build of vLLM has no such kernels or its layers no such hook."""
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    _leave_embeddings(model)
    _rotate_in_torch(model)
    if not all(hasattr(torch.ops._C, name) for name in KERNELS):
        return 0
    replacements: dict[type, Callable[..., Tensor | tuple[Tensor, Tensor]]]
    replacements = {RMSNorm: _norm, SiluAndMul: _silu_and_mul}
    replaced = 0
    for layer in model.modules():
        ours = replacements.get(type(layer))
        if ours is not None and is_custom_op(layer):
            layer._forward_method = partial(ours, layer)
            replaced += 1
    return replaced


def _leave_embeddings(model: nn.Module) -> None:
    """Pack no embedding that is only looked up: vLLM packs each like a head, at each load, and never uses it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    class LookUp(UnquantizedEmbeddingMethod):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            pass

    heads = [head for module in model.modules() if (head := getattr(module, "lm_head", None)) is not None]
    heads += [head.base_layer for head in heads if hasattr(head, "base_layer")]  # within vLLM's layer for LoRA
    for module in model.modules():
        if type(module) is not VocabParallelEmbedding or any(module is head for head in heads):
            continue
        if type(module.quant_method) is UnquantizedEmbeddingMethod:
            module.quant_method = LookUp()
            vars(module).pop("cpu_linear", None)


def _rotate_in_torch(model: nn.Module) -> None:
    """Rotate the queries and keys of latent attention by vLLM's own code for torch. These have three dimensions,
    `[T, heads, D]`, of which the CPU kernel takes the stride of the heads for that of the tokens: log-probs would be
    0.3 nats off in the mean."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    from rlcli.model.io.model_config import LATENT

    if getattr(getattr(model, "config", None), "model_type", "") in LATENT:
        for layer in model.modules():
            if isinstance(layer, RotaryEmbedding):
                layer._forward_method = layer.forward_native


def _norm(
    layer: Norm, x: Float[Tensor, "*T H"], residual: Float[Tensor, "*T H"] | None = None
) -> Float[Tensor, "*T H"] | tuple[Float[Tensor, "*T H"], Float[Tensor, "*T H"]]:
    """As `RMSNorm.forward`: the norm of x, or of x + residual and that sum, both in place."""
    import torch

    # Weights are looked up at every call: a sync may have replaced them.
    fits = layer.variance_size_override is None and layer.has_weight and layer.weight.dtype == x.dtype
    if not fits or not (residual is None or (x.is_contiguous() and residual.is_contiguous())):
        return layer.forward_native(x, residual)
    weight, epsilon = layer.weight.data, layer.variance_epsilon
    if residual is not None:
        torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual
    x = x.contiguous()
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


def _silu_and_mul(layer: object, x: Float[Tensor, "*T 2*D"]) -> Float[Tensor, "*T D"]:
    """x [..., 2 · D] → silu of its first half times its second, [..., D]. With torch, whose silu is vectorized, while
    vLLM's kernel is not; in place, while vLLM's own code allocates another tensor."""
    import torch

    width = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :width]).mul_(x[..., width:])


def leave_out_ranks(worker: Worker) -> bool:
    """Have this vLLM worker return 0 as each token's rank in the vocabulary, which nothing here reads: to count the
    likelier tokens takes two passes over all logits. False if its sampler has no such method. Called in the worker
    through `collective_rpc`."""
    import torch
    from vllm.v1.outputs import LogprobsTensors

    sampler = worker.model_runner.sampler
    if not hasattr(sampler, "gather_logprobs"):
        return False
    original = sampler.gather_logprobs

    def gathered(logprobs: Float[Tensor, "B V"], num_logprobs: int, token_ids: Int64[Tensor, " B"]) -> LogprobsTensors:
        if num_logprobs:  # of other tokens too
            return original(logprobs, num_logprobs, token_ids)
        column = token_ids.unsqueeze(-1)
        ranks = torch.zeros(len(token_ids), dtype=torch.int32, device=token_ids.device)
        return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), ranks)

    sampler.gather_logprobs = gathered
    return True


def repack(model: nn.Module) -> None:
    """Pack again what vLLM packed for its CPU kernels when it first loaded, and its reload leaves as it was: a tied
    head, and experts."""
    from rlcli.model.weight_check.engine_weights import packed_experts

    text = model.get_language_model() if is_multimodal(model) else model
    head = getattr(text, "lm_head", None)
    if head is not None and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
    for module in model.modules():
        if packed_experts(module):
            attrgetter("quant_method.moe_kernel.fused_experts")(module).process_weights_after_loading(module)
