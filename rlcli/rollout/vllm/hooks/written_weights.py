"""Weights that vLLM's reload leaves as they were, written into its parameters.

vLLM's loader for GPT-OSS copies sinks, experts and their biases into its parameters itself. While it reloads, these are
stand-ins without memory, and so nothing changes, silently: the parameters with which it computes come back after
it. They are written here instead, while the others are loaded, so that no weight is held twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

WRITTEN = ("gpt_oss",)
"""`model_type`s of which some weights are written."""
NAMES = {
    ".self_attn.sinks": (".attn.sinks",),
    ".mlp.experts.gate_up_proj": (".mlp.experts.routed_experts.w13_weight", ".mlp.experts.w13_weight"),
    ".mlp.experts.gate_up_proj_bias": (".mlp.experts.routed_experts.w13_bias", ".mlp.experts.w13_bias"),
    ".mlp.experts.down_proj": (".mlp.experts.routed_experts.w2_weight", ".mlp.experts.w2_weight"),
    ".mlp.experts.down_proj_bias": (".mlp.experts.routed_experts.w2_bias", ".mlp.experts.w2_bias"),
}
"""Endings of names in checkpoints, and in vLLM's releases."""
ADDED = ".mlp.experts.down_proj_bias"
"""Weight that is added once to the sum of all ranks' outputs: the first rank has it, and the others zeros."""


class WrittenWeights:
    """Weights of a vLLM model that are written directly, before it reloads.

    written = WrittenWeights(model)
    reload(written.others(weights))     # the rest is written by then

    rank, ranks: of the engine's tensor parallelism.
    """

    def __init__(self, model: nn.Module, rank: int = 0, ranks: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        kind = getattr(getattr(model, "config", None), "model_type", "")
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters()) if kind in WRITTEN else {}
        """What is written into, by vLLM's names."""
        self.parameters = {name: parameter for name, parameter in self.parameters.items() if name.endswith(_ENDS)}

    @classmethod
    def of(cls, model: nn.Module) -> WrittenWeights:
        """For this process's part of an engine's model."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        return cls(model, group.rank_in_group, group.world_size)

    @property
    def empty(self) -> list[str]:
        """Parameters that another rank fills."""
        ends = NAMES[ADDED]
        return [name for name in self.parameters if self._rank and name.endswith(ends)]

    def others(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield those of `weights` that vLLM loads; the others are written."""
        for name, tensor in weights:
            if not self._write(name, tensor):
                yield name, tensor

    def _write(self, name: str, tensor: Tensor) -> bool:
        import torch

        held = self._held(name)
        if held is None:
            return False
        part = self._part(name, tensor)
        with torch.no_grad():
            if part is not None:
                held.copy_(part)
            else:
                held.zero_()
        return True

    def _held(self, name: str) -> nn.Parameter | None:
        """The parameter for a tensor of a checkpoint."""
        for end, theirs in NAMES.items():
            if name.endswith(end):
                begin = name.removesuffix(end)
                return next(
                    (self.parameters[begin + vllm_end] for vllm_end in theirs if begin + vllm_end in self.parameters),
                    None,
                )
        return None

    def _part(self, name: str, tensor: Tensor) -> Tensor | None:
        """This rank's part of a tensor, with inputs last; None: all of it is another rank's."""
        if name.endswith(ADDED):
            return tensor if self._rank == 0 else None
        if name.endswith(".down_proj"):
            return self._own(tensor, 1).transpose(1, 2)
        if name.endswith(".gate_up_proj"):
            return self._own(tensor, 2).transpose(1, 2)
        return self._own(tensor, tensor.ndim - 1)

    def _own(self, tensor: Tensor, dim: int) -> Tensor:
        size = tensor.shape[dim] // self._ranks
        return tensor.narrow(dim, self._rank * size, size)


_ENDS = tuple(end for ends in NAMES.values() for end in ends)
