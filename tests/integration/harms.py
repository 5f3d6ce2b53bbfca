"""Faults injected into one rank: `catalog.py` takes the name of one after a colon, as in `grpo:swapped`."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rlcli.training.worker.calls import Workers

Weights = Iterable[tuple[str, Any]]
SETTINGS = {
    "skip": ["fault_tolerance.on_bad_update=skip"],
    "rollback": ["fault_tolerance.on_bad_update=rollback", "checkpoint.every=1"],
    "tail": ["rollout.oversample=2"],
    "cut": ["train.truncated=mask"],
    # Few responses of the random model end within the limit, and one of those has to earn something.
    "zero": ["train.truncated=zero_reward", "rollout.samples_per_prompt=8"],
    "copies": ["parallel.replicate=2"],
}
"""`--set` arguments that go with a harm."""


def _swap(weights: Weights) -> Weights:
    """Swap two matrices of the same shape."""
    names = {
        f"model.layers.{layer}.mlp.up_proj.weight": f"model.layers.{1 - layer}.mlp.up_proj.weight" for layer in (0, 1)
    }
    return [(names.get(name, name), tensor.clone()) for name, tensor in weights]


def _spoil(weights: Weights) -> Weights:
    return [(name, tensor * math.nan if "norm" in name else tensor.clone()) for name, tensor in weights]


def _second_sync(worker: Any, change: Callable[[Weights], Weights]) -> None:
    """From the second sync on, the engine gets other weights than the trainer has."""
    load, calls = worker.engine.load_weights, itertools.count(1)
    worker.engine.load_weights = lambda weights: load(change(weights) if next(calls) > 1 else weights)


def _keep_first(worker: Any) -> None:
    """The engine ignores all weights after the first sync, in which the adapter changes nothing yet, whether it is
    sent by itself or merged into the weights."""
    adapter, load, calls = worker.engine.load_adapter, worker.engine.load_weights, itertools.count(1)

    def load_weights(stream: Weights) -> None:
        if next(calls) == 1:
            load(stream)
        else:
            for _ in stream:  # gathered from all ranks, which would wait for this one otherwise
                pass

    worker.engine.load_weights = load_weights
    worker.engine.load_adapter = lambda folder: adapter(folder) if next(calls) == 1 else None


def _die(worker: Any) -> None:
    """From the second sync on, its process ends while it receives the weights."""
    load, calls = worker.engine.load_weights, itertools.count(1)

    def load_weights(weights: Weights) -> None:
        if next(calls) > 1:
            next(iter(weights))
            os._exit(1)
        load(weights)

    worker.engine.load_weights = load_weights


def _leave_out(worker: Any, *names: str) -> None:
    """After the first sync these tensors of the engine are never loaded again."""
    _second_sync(worker, lambda weights: [(name, tensor.clone()) for name, tensor in weights if name not in names])


def _keep_head(worker: Any) -> None:
    """The engine keeps using the head of the first sync, as if it had packed it permanently (not every CPU has a kernel
    that packs it)."""
    from torch.nn.functional import linear

    load, heads = worker.engine.load_weights, list[Any]()

    def load_weights(weights: Weights) -> None:
        load(weights)
        head = worker.engine._model.lm_head
        heads.append(head.weight.detach().clone())
        head.cpu_linear = lambda x, _, bias: linear(x, heads[0], bias)

    worker.engine.load_weights = load_weights


def _keep_experts(worker: Any) -> None:
    """The engine keeps using the experts that it packed in the first sync."""
    from rlcli.model.weight_check.engine_weights import packed_experts

    load, first_experts = worker.engine.load_weights, dict[str, Any]()

    def load_weights(weights: Weights) -> None:
        load(weights)
        for name, module in worker.engine._model.named_modules():
            if packed_experts(module):
                module.w13_weight.data.copy_(first_experts.setdefault(name, module.w13_weight.detach().clone()))

    worker.engine.load_weights = load_weights


def _keep_prefixes(worker: Any) -> None:
    worker.engine._llm.reset_prefix_cache = lambda: True


def _spoil_loss(worker: Any, *bad: int) -> None:
    """The loss of the updates `bad`, counted from 1, is NaN; its gradient is finite."""
    policy, calls = worker.policy, itertools.count(1)
    update, sound_loss = policy.update, policy._loss

    def spoilt(*args: Any) -> Any:
        term, sums = sound_loss(*args)
        return term + math.nan, sums

    def counted(*args: Any) -> dict[str, float]:
        policy._loss = spoilt if next(calls) in bad else sound_loss
        done: dict[str, float] = update(*args)
        return done

    policy.update = counted


def _slow(worker: Any) -> None:
    """Its engine takes several times as long as that of another rank."""
    worker.engine.on_step = lambda: time.sleep(0.05)


def _flip_base(worker: Any) -> None:
    """Flip one bit of a base weight of the engine."""
    import torch

    weight = worker.engine._model.get_parameter("model.layers.1.input_layernorm.weight")
    weight.data.view(torch.int16)[:1].bitwise_xor_(1)


def _flip_copy(worker: Any) -> None:
    """At the second sync, flip one bit of its copy of the weights after it has been received."""
    import torch

    receive, calls = worker._receive_copy, itertools.count(1)

    def receive_copy(broadcast: Any) -> int:
        received: int = receive(broadcast)
        if next(calls) == 2:
            weights = dict(worker._weight_copy.named())
            weights["model.layers.1.mlp.up_proj.weight"].view(torch.int16)[0, :1].bitwise_xor_(1)
        return received

    worker._receive_copy = receive_copy


def _die_receiving(worker: Any) -> None:
    """At the second sync its process ends while it receives weights into its copy."""
    receive, calls = worker._receive_copy, itertools.count(1)

    def receive_copy(broadcast: Any) -> int:
        if next(calls) == 2:
            next(iter(broadcast.received()))
            os._exit(1)
        return int(receive(broadcast))

    worker._receive_copy = receive_copy


HARMS: dict[str, Callable[[Any], None]] = {
    "swapped": lambda worker: _second_sync(worker, _swap),
    "nan": lambda worker: _second_sync(worker, _spoil),
    "stale": _keep_first,
    "gone": _die,
    "bit": _flip_copy,
    "cut off": _die_receiving,
    "one": lambda worker: _leave_out(worker, "model.layers.1.self_attn.k_proj.weight"),
    "head": _keep_head,
    "experts": _keep_experts,
    "prefixes": _keep_prefixes,
    "base": _flip_base,
    "skip": lambda worker: _spoil_loss(worker, 2),
    "rollback": lambda worker: _spoil_loss(worker, 3),
    "tail": _slow,
}

# Ranks that share an engine must compute the same number of tokens, or their communication fails.
OF_ALL = {"prefixes"}


def _heal(worker: Any) -> None:
    for name in ("load_weights", "load_adapter"):
        worker.engine.__dict__.pop(name, None)
    worker.__dict__.pop("_receive_copy", None)
    worker.engine._llm.__dict__.pop("reset_prefix_cache", None)


@contextmanager
def harmed(group: Workers, harm: str) -> Iterator[None]:
    """Inject a fault into the last rank, or into all ranks if it is in `OF_ALL`, and remove it afterwards."""
    import ray
    from ray import cloudpickle

    if harm not in HARMS:  # it consists of settings alone
        yield
        return
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actors = group._actors if harm in OF_ALL else group._actors[-1:]
    ray.get([actor.__ray_call__.remote(HARMS[harm]) for actor in actors])
    try:
        yield
    finally:
        with suppress(ray.exceptions.RayActorError):  # the process has ended
            ray.get([actor.__ray_call__.remote(_heal) for actor in actors])
