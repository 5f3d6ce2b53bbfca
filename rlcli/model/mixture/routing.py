"""Mixtures of experts: expert load, and replay of the engine's routes.

For T tokens a router returns its logits [T, E], the weights of the selected experts [T, K] and their ids [T, K]. All
counts and routes are of the layers that have a router, in order.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


class Load:
    """Counts the tokens that each expert of each layer computes in passes with gradients.

    load = Load(model)
    …
    load.take()      # int64 [layers, E], or None without experts; counts from 0 again
    """

    def __init__(self, model: nn.Module) -> None:
        self._counts: dict[int, Tensor] = {}
        for layer, router in enumerate(_routers(model)):
            router.register_forward_hook(partial(self._count, layer))

    def _count(self, layer: int, router: nn.Module, inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if not torch.is_grad_enabled():
            return
        tokens = occurrences(output[2].flatten(), output[0].shape[-1])
        self._counts[layer] = self._counts[layer] + tokens if layer in self._counts else tokens

    def take(self) -> Tensor | None:
        counts, self._counts = self._counts, {}
        return torch.stack([counts[layer] for layer in sorted(counts)]) if counts else None


class Replay:
    """Rollout routing replay (R3, arXiv 2510.11370, section 3): a model's routers select the experts that the engine
    selected, with weights from the trainer's logits, which get gradients. Where a token's route is unknown, the router
    selects.

    replay = Replay(model)
    replay.routes = …        # [T, layers, K] integers, of the tokens of the next pass, also when it is computed again;
                             # or None
    replay.take()            # int64 [3]: of passes with gradients, choices made, replayed, and not the router's own

    Make it before `Load`, which counts the tokens of each expert.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routes: Tensor | None = None
        self._counts: Tensor | None = None
        for layer, router in enumerate(_routers(model)):
            router.register_forward_hook(partial(self._choose, layer))

    def _choose(
        self, layer: int, router: nn.Module, inputs: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, router_weights, router_ids = output
        if self.routes is None:
            self._count(router_ids, router_ids, router_ids.new_zeros(len(router_ids), 1, dtype=torch.bool))
            return output
        assert self.routes.shape[-1] == router_ids.shape[-1], "checked where the engine recorded them"
        routes = self.routes[:, layer].long()
        known = (routes >= 0).all(-1, keepdim=True)
        expert_ids = torch.where(known, routes, router_ids)
        self._count(router_ids, expert_ids, known)
        return logits, _weights(router, logits, expert_ids).to(router_weights.dtype), expert_ids

    def _count(self, router_ids: Tensor, expert_ids: Tensor, known: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        others = (expert_ids[..., None] != router_ids[..., None, :]).all(-1)
        total = torch.full_like(known.sum(), router_ids.numel())
        counts = torch.stack([total, known.sum() * router_ids.shape[-1], others.sum()])
        self._counts = counts if self._counts is None else self._counts + counts

    def take(self) -> Tensor | None:
        counts, self._counts = self._counts, None
        return counts


def replay_metrics(counts: Tensor) -> dict[str, float]:
    """Metrics of the counts that `Replay.take` returns, summed over ranks. routes_known: share of the choices that were
    replayed. routes_differ: share of those that the trainer's router would not have made.

    >>> replay_metrics(torch.tensor([8, 4, 1]))
    {'routes_known': 0.5, 'routes_differ': 0.25}
    """
    total, replayed, others = counts.tolist()
    return {"routes_known": replayed / max(total, 1), "routes_differ": others / max(replayed, 1)}


def _weights(router: nn.Module, logits: Tensor, expert_ids: Tensor) -> Tensor:
    """Weights of the experts as `router` computes them, [T, K] float32: a router with a correction bias uses sigmoid
    scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), one with a bias on its logits a softmax over the selected
    experts (GPT-OSS, arXiv 2508.10925), others a softmax over all; Mixtral's always normalises."""
    if getattr(router, "bias", None) is not None:
        return logits.gather(-1, expert_ids).softmax(-1)
    sigmoid = hasattr(router, "e_score_correction_bias")
    scores = logits.float().sigmoid() if sigmoid else logits.softmax(-1, dtype=torch.float32)
    weights = scores.gather(-1, expert_ids)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0))
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def occurrences(ids: Tensor, count: int) -> Tensor:
    """Occurrences of each of `count` ids in `ids` [N]: int64 [count]. (torch's bincount synchronises with the host.)

    >>> occurrences(torch.tensor([0, 2, 2]), 4)
    tensor([1, 0, 2, 0])
    """
    return torch.zeros(count, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))


def _routers(model: nn.Module) -> list[nn.Module]:
    """The routers of all layers that have one, in order."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Metrics of the tokens of each expert of each layer, [layers, E]. busiest_expert: tokens of the busiest expert ÷
    its layer's mean, so 1 if all have equally many; maximum over layers. unused_experts: share of experts without
    tokens.

    >>> load_metrics(torch.tensor([[3, 3, 3, 3], [0, 0, 4, 8]]))
    {'busiest_expert': 2.6666667461395264, 'unused_experts': 0.25}
    """
    even = counts.sum(-1, keepdim=True).clamp(min=1) / counts.shape[-1]
    busiest, unused = torch.stack([(counts / even).max(), (counts == 0).float().mean()]).tolist()
    return {"busiest_expert": busiest, "unused_experts": unused}
