"""Recording of the experts that vLLM chooses for each token (`rollout.replay_routes`).

vLLM's own recorder (`enable_return_routed_experts`) is in its second model runner, which needs Triton. Elsewhere
`RouteRecorder` indexes them by KV cache slot, so that requests that share a prefix share its routes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeGuard

import numpy as np

from rlcli.data.expert_routes import route_type, unknown
from rlcli.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Int
    from torch import Tensor, nn

    from rlcli.data.expert_routes import Routes
    from rlcli.rollout.vllm.vllm_types import BlockTable, Worker

HINT = "leave rollout.replay_routes out"


class Router(Protocol):
    """vLLM's router of a layer, which chooses the experts of each token."""

    def set_capture_fn(self, capture_fn: Callable[[Int[Tensor, "T chosen"]], None]) -> None:
        """Have it call this with the experts of each step."""
        ...


class ExpertRunner(Protocol):
    """vLLM's `MoERunner`: the experts of a layer."""

    router: Router
    """Chooses among them."""


class RouteRecorder:
    """Records what one worker of vLLM computes, from now on. Raises `SetupError` if its model has no experts, or its
    routers cannot be recorded."""

    def __init__(self, worker: Worker) -> None:
        self._runner = worker.model_runner
        routers = _routers(self._runner.get_model())
        config = worker.vllm_config.model_config
        experts, experts_per_token = config.get_num_experts(), config.hf_text_config.num_experts_per_tok
        table = self._table
        blocks = worker.vllm_config.cache_config.num_gpu_blocks
        self._routes = np.empty((blocks * table.block_size, len(routers), experts_per_token), route_type(experts))
        self._routes[:] = unknown(1, self._routes)
        for index, router in enumerate(routers):
            router.set_capture_fn(partial(self._record, index))

    def of(self, name: str, tokens: int) -> Routes:
        """The routes of the first tokens of a request that runs, or has ended in the last step; none of one that waits.
        name: as it was added; vLLM appends to it."""
        batch, table = self._runner.input_batch, self._table
        row = next(
            (row for request_name, row in batch.req_id_to_index.items() if request_name.partition("-")[0] == name), None
        )
        if row is None:
            return unknown(0, self._routes)
        blocks = table.get_numpy_array()[row, : -(-tokens // table.block_size)]
        slots = blocks[:, None].astype(np.int64) * table.block_size + np.arange(table.block_size)
        routes: np.ndarray = self._routes[slots.ravel()[:tokens]]
        return routes

    @property
    def _table(self) -> BlockTable:
        """Block table of the first group of caches: all layers of a supported model that attend to everything are in
        it."""
        return self._runner.input_batch.block_table[0]

    def _record(self, layer: int, experts: Int[Tensor, "T chosen"]) -> None:
        """experts: of the step's tokens."""
        from vllm.forward_context import get_forward_context

        mappings = get_forward_context().slot_mapping
        if not mappings:  # no request, as when vLLM measures its memory
            return
        slots = next(iter(mappings.values())).cpu().numpy()[: len(experts)]
        assert experts.shape[1] == self._routes.shape[2], "as many experts for each token as the model's config says"
        self._routes[slots[slots >= 0], layer] = experts.cpu().numpy()[: len(slots)][slots >= 0]


def _is_runner(module: nn.Module) -> TypeGuard[ExpertRunner]:
    return type(module).__name__ == "MoERunner"


def _routers(model: nn.Module) -> list[Router]:
    """Routers of the layers, in their order."""
    routers = [module.router for module in model.modules() if _is_runner(module)]
    if not routers:
        raise SetupError("rollout.replay_routes: the engine's model has no experts", HINT)
    if not all(hasattr(router, "set_capture_fn") for router in routers):
        raise SetupError("rollout.replay_routes: this release of vLLM does not report which experts it chooses", HINT)
    return routers
