"""A child of `sync.py`: all weights, or only what an update has changed of them, on the way to an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from _sync_transfer import Member

from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.process import malloc
from rlcli.cluster.ray_session import ray_session
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.config.schema import Train
from rlcli.training.loop.engine_groups import Engines
from rlcli.training.worker.calls import WorkerCalls, Workers


class Trained(Member):
    """A worker with a model in float32 that computes in bfloat16, or an engine that copies."""

    def __init__(self, rank: int, shape: dict[str, Any], engine: bool) -> None:
        super().__init__(rank, shape, "bfloat16" if engine else "float32", engine)
        self.spec.config.rollout = SimpleNamespace(sync="delta")
        self.spec.config.copies_weights = True
        if engine:
            return
        model = self.policy.policy
        model.dtype = torch.bfloat16
        model.stream_changes = lambda last, limit: last.changes(model.lm.named_parameters(), model.dtype, limit)
        rates = Train()
        optimizer_options: Any = {"betas": rates.betas, "weight_decay": rates.weight_decay}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, **optimizer_options)
        for parameter in model.parameters():
            parameter.requires_grad_(True)

    @dispatch()
    def step(self, number: int, lr: float) -> None:
        """A step of AdamW on random gradients."""
        draws = torch.Generator(self.device).manual_seed(number)
        self.optimizer.param_groups[0]["lr"] = lr
        for parameter in self.policy.policy.parameters():
            parameter.grad = torch.empty_like(parameter).normal_(generator=draws)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @dispatch()
    def load_copy(self) -> None:
        self._load(self._weight_copy.named())


def measured(shape: dict[str, Any], steps: int, lr: float) -> dict[str, Any]:
    """After each of `steps` steps a sync of what has changed, and one of resend_all: bytes, seconds, share."""
    import ray

    environment = malloc.environment() | {"OMP_NUM_THREADS": "1"}
    actor = ray.remote(num_cpus=0, num_gpus=int(torch.cuda.is_available()), runtime_env={"env_vars": environment})

    with TemporaryDirectory() as logs, ray_session("", 2):
        pair = [actor(Trained).remote(0, shape, engine) for engine in (False, True)]
        policy, engine_group = (WorkerGroup[Any]([member], Path(logs), None) for member in pair)
        engines = Engines(policy, engine_group, copies=True)
        engines.broadcasts = engines._join(engine_group)
        assert engines.broadcasts
        return {"steps": list(_syncs(engines, engine_group, steps, lr))}


def _syncs(engines: Engines, engine_group: Workers, steps: int, lr: float) -> Iterator[dict[str, Any]]:
    for number in range(steps + 1):
        if number:
            engines.policy.call(Trained.step, number, lr)  # type: ignore[arg-type]
        nbytes, transfer_s = engines._transfer(engine_group)
        sent, began = engines.policy.call(WorkerCalls.sent_checksums), time.perf_counter()
        share = engines.policy.call(WorkerCalls.changed_share)
        assert engine_group.call(WorkerCalls.corrupted_tensors, sent) == [[]]
        check_s, began = time.perf_counter() - began, time.perf_counter()
        engine_group.call(Trained.load_copy)  # type: ignore[arg-type]
        delta = {"bytes": nbytes, "transfer_s": transfer_s, "check_s": check_s, "load_s": time.perf_counter() - began}
        nbytes, transfer_s = engines._transfer(engine_group, resend_all=True)
        if number:  # the first sync sends everything in any case
            yield {"share": share, "delta": delta, "full": {"bytes": nbytes, "transfer_s": transfer_s}}
