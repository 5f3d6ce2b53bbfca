"""A model's tensors by name: in memory, in its files and in vLLM.

In memory the experts of a layer are fused: `experts.gate_up_proj` [E, 2 F, H], `experts.down_proj` [E, H, F], for E
experts of width F. Files hold three matrices of each expert: gate and up [F, H] and down [H, F]. Training, sync and
checkpoints use the first form, which vLLM mostly loads too; exported models the second, which everyone reads.

The bias with which a router of GLM-4 or DeepSeek-V3 chooses experts is no parameter: no gradient reaches it. It is a
buffer in float32 whatever the model is in, and belongs to the weights: it is read, sent, saved and exported with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
PREDICTING = "mtp."
"""Prefix of the names of multi-token prediction layers: transformers does not load them, so they are not trained, and
an export copies them."""
FIXED = ".e_score_correction_bias"
DECODER = "language_model"
"""Name of the text decoder in a vision-language model."""
PROJECTORS = frozenset({"merger", "deepstack_merger_list", "multi_modal_projector"})
"""Modules of vision encoders that project features to the width of the decoder."""


@dataclass(frozen=True)
class FileNames:
    """Names of the experts' modules in a family's files."""

    block: str = "mlp"
    """The part of a layer that has experts."""
    gate: str = "gate_proj"
    """Gate matrix of an expert."""
    up: str = "up_proj"
    """Up matrix of an expert."""
    down: str = "down_proj"
    """Down matrix of an expert."""


BEGINNINGS = {
    "internvl": (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    "qwen2_5_vl": (("model.language_model.", "model."), ("model.visual.", "visual.")),
}
"""Prefixes of names in memory and in a family's files where they differ, by `model_type`."""
FILES = {"mixtral": FileNames("block_sparse_moe", "w1", "w3", "w2")}
FILES |= {"deepseek_v3": FileNames(), "glm4_moe_lite": FileNames()}  # vLLM does not load their fused experts
"""By `model_type`; others have the default."""
FUSED = ("gpt_oss",)
"""Kinds whose files hold the experts of a layer as they are in memory, `[E, H, 2 F]` and `[E, F, H]`, with biases."""


def named_weights(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters, tied ones once, and the fixed tensors."""
    return chain(lm.named_parameters(), fixed_weights(lm))


def fixed_weights(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights that are never trained: buffers, whole on every rank."""
    return ((name, buffer) for name, buffer in lm.named_buffers() if name.endswith(FIXED))


def kept_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor of a model in `dtype` is sent and stored.

    >>> kept_dtype("mlp.gate.e_score_correction_bias", torch.bfloat16)
    torch.float32
    """
    return torch.float32 if name.endswith(FIXED) else dtype


def has_vision_encoder(lm: nn.Module) -> bool:
    """True if the model has a vision encoder."""
    return hasattr(lm.config, "vision_config")


def vision_modules(lm: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules of the vision encoder, in the order of the forward pass; none in a text-only model."""
    if has_vision_encoder(lm):
        yield from (part for name, part in lm.base_model.named_children() if name != DECODER)


def base_name(name: str) -> str:
    """The parameter's name in the model without adapters.

    >>> base_name("mlp.experts.base_layer.base_layer.down_proj")
    'mlp.experts.down_proj'
    """
    return name.replace("base_layer.", "")


def has_experts(lm: nn.Module) -> bool:
    """True for a mixture of experts."""
    return any(name.endswith(DOWN) for name, _ in lm.named_parameters())


def file_name(name: str, kind: str) -> str:
    """The name in files of a tensor that is not fused. kind: the `model_type`.

    >>> file_name("layers.0.mlp.gate.weight", "mixtral")
    'layers.0.block_sparse_moe.gate.weight'
    """
    for ours, theirs in BEGINNINGS.get(kind, ()):
        if name.startswith(ours):
            return name.replace(ours, theirs, 1)
    return name.replace(".mlp.", f".{FILES.get(kind, FileNames()).block}.")


def expert_names(name: str, expert: int, kind: str) -> list[str]:
    """Names in files of one expert's matrices in the fused parameter `name`, in order; none if it is not fused, or is
    fused in the files, too."""
    if kind in FUSED:
        return []
    files = FILES.get(kind, FileNames())
    matrices = (files.gate, files.up) if name.endswith(UP) else (files.down,) if name.endswith(DOWN) else ()
    experts = file_name(name, kind).rpartition(".")[0]
    return [f"{experts}.{expert}.{matrix}.weight" for matrix in matrices]


def stored_shapes(name: str, shape: Sequence[int], kind: str = "") -> dict[str, list[int]]:
    """The tensors of a file for the parameter `name`, with their shapes: one, unless it has experts.

    >>> stored_shapes("mlp.experts.gate_up_proj", [1, 8, 6])
    {'mlp.experts.0.gate_proj.weight': [4, 6], 'mlp.experts.0.up_proj.weight': [4, 6]}
    """
    if not expert_names(name, 0, kind):
        return {file_name(name, kind): list(shape)}
    names = [matrix for expert in range(shape[0]) for matrix in expert_names(name, expert, kind)]
    matrix_shape = [shape[1] // 2 if name.endswith(UP) else shape[1], *shape[2:]]
    return {matrix: list(matrix_shape) for matrix in names}


def stored(name: str, tensor: Tensor, kind: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file for the parameter `name`: views of `tensor`."""
    if not expert_names(name, 0, kind):
        yield file_name(name, kind), tensor
        return
    parts = tensor.unbind()
    halves = [half for part in parts for half in (part.chunk(2) if name.endswith(UP) else [part])]
    yield from zip(stored_shapes(name, tensor.shape, kind), halves, strict=True)


def for_vllm(weights: Iterable[tuple[str, Tensor]], kind: str) -> Iterator[tuple[str, Tensor]]:
    """Named tensors for vLLM's loader: as in memory, which needs the fewest calls, or as in the files (views) for
    families whose experts the loader only recognises by the names in the files."""
    return (
        part for name, tensor in weights for part in (stored(name, tensor, kind) if kind in FILES else [(name, tensor)])
    )
