"""Mixtures of experts: how many tokens each expert computes, and routes that the engine chose.

A router returns of T tokens its logits [T, E], the weights of the chosen experts [T, K] and their ids [T, K]. Only some
layers may have one: all counts and routes are of these layers, in their order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Load:
    """How many tokens each expert of each layer computes in passes with gradients.

    load = Load(model)
    …
    load.take()      # int64 [layers, E], or None without experts; counts from 0 again
    """

    def __init__(self, model: nn.Module) -> None:
        self._counts: dict[int, Tensor] = {}
        for layer, router in enumerate(_routers(model)):
            router.register_forward_hook(partial(self._count, layer))

    def _count(self, layer: int, router: Any, given: Any, found: tuple[Tensor, Tensor, Tensor]) -> None:
        if not torch.is_grad_enabled():
            return
        own = occurrences(found[2].flatten(), found[0].shape[-1])
        self._counts[layer] = self._counts[layer] + own if layer in self._counts else own

    def take(self) -> Tensor | None:
        counts, self._counts = self._counts, {}
        return torch.stack([counts[layer] for layer in sorted(counts)]) if counts else None


class Replay:
    """Has a model's routers choose the experts that the engine chose, with weights from their own logits, which so have
    a gradient: rollout routing replay (R3, arXiv 2510.11370, section 3). Where a token's route is unknown, the router
    chooses.

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

    def _choose(self, layer: int, router: Any, given: Any, found: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, own_weights, own = found
        if self.routes is None:
            self._count(own, own, own.new_zeros(len(own), 1, dtype=torch.bool))
            return found
        assert self.routes.shape[-1] == own.shape[-1], "checked where the engine recorded them"
        routes = self.routes[:, layer].long()
        known = (routes >= 0).all(-1, keepdim=True)
        chosen = torch.where(known, routes, own)
        self._count(own, chosen, known)
        return logits, _weights(router, logits, chosen).to(own_weights.dtype), chosen

    def _count(self, own: Tensor, chosen: Tensor, known: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        others = (chosen[..., None] != own[..., None, :]).all(-1)
        made = torch.full_like(known.sum(), own.numel())
        counts = torch.stack([made, known.sum() * own.shape[-1], others.sum()])
        self._counts = counts if self._counts is None else self._counts + counts

    def take(self) -> Tensor | None:
        counts, self._counts = self._counts, None
        return counts


def replay_metrics(counts: Tensor) -> dict[str, float]:
    """Of what `Replay.take` returns, summed over ranks. routes_known: share of the choices that were replayed.
    routes_differ: share of those that the trainer's router would not have made.

    >>> replay_metrics(torch.tensor([8, 4, 1]))
    {'routes_known': 0.5, 'routes_differ': 0.25}
    """
    made, replayed, others = counts.tolist()
    return {"routes_known": replayed / max(made, 1), "routes_differ": others / max(replayed, 1)}


def _weights(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """As `router` computes them, [T, K] float32: a router with a bias for its choice scores by sigmoid (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2), one with a bias of its logits by softmax over the chosen ones (GPT-OSS, arXiv
    2508.10925), others by softmax over all; Mixtral's always normalises."""
    if getattr(router, "bias", None) is not None:
        return logits.gather(-1, chosen).softmax(-1)
    sigmoid = hasattr(router, "e_score_correction_bias")
    scores = logits.float().sigmoid() if sigmoid else logits.softmax(-1, dtype=torch.float32)
    weights = scores.gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0))
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def occurrences(ids: Tensor, count: int) -> Tensor:
    """How often each of `count` ids occurs in `ids` [N]: int64 [count]. (For torch's bincount the host waits.)

    >>> occurrences(torch.tensor([0, 2, 2]), 4)
    tensor([1, 0, 2, 0])
    """
    return torch.zeros(count, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))


def _routers(model: nn.Module) -> list[nn.Module]:
    """Of the layers that have one, in their order."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Of the tokens of each expert of each layer, [layers, E]. busiest_expert: tokens of the busiest one ÷ its layer's
    mean, so 1 if all have equally many; in the layer where that is largest. unused_experts: share of all that had none.

    >>> load_metrics(torch.tensor([[3, 3, 3, 3], [0, 0, 4, 8]]))
    {'busiest_expert': 2.6666667461395264, 'unused_experts': 0.25}
    """
    even = counts.sum(-1, keepdim=True).clamp(min=1) / counts.shape[-1]
    busiest, unused = torch.stack([(counts / even).max(), (counts == 0).float().mean()]).tolist()
    return {"busiest_expert": busiest, "unused_experts": unused}
