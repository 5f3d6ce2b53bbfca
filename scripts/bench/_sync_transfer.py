"""A child of `sync.py`: weights on their way to engines in other workers, by broadcast and by the object store."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from _common import interleaved

from rlcli.cluster.dispatch import dispatch
from rlcli.cluster.process import malloc
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.trainer.engines import Engines
from rlcli.workers.roles.weight_sync import WeightSync

OBJECT_STORE_BYTES = 2 << 30
MIB = 1 << 20


class Holder:
    """In the place of an engine: copies each tensor into its own."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.weights[name].copy_(tensor)

    def cached_tokens(self, probe: Any) -> int:
        return 0


class Member(WeightSync):
    """A worker with a real model, and an engine that only copies: all of a sync but the engine's own loading."""

    def __init__(self, rank: int, shape: dict[str, Any], dtype: str, engine: bool) -> None:
        super().__init__()
        from transformers import Qwen2Config, Qwen2ForCausalLM

        from rlcli.model.policy import PolicyModel

        torch.set_num_threads(1)
        self.rank, self.device = rank, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config: Any = SimpleNamespace(fault_tolerance=SimpleNamespace(stall_s=60.0))
        self.spec: Any = SimpleNamespace(adapter_apart=False, adapter_prefix="", device=self.device.type, config=config)
        self.policy = self.rollout_role = self.batch = None
        with torch.device(self.device):
            lm = Qwen2ForCausalLM(Qwen2Config(**shape)).to(getattr(torch, dtype))
        if engine:
            self.rollout_role: Any = SimpleNamespace(engine=Holder({n: p.detach() for n, p in lm.named_parameters()}))
        else:
            self.policy: Any = SimpleNamespace(policy=PolicyModel(lm, dtype=getattr(torch, dtype), source="bench"))

    @dispatch(collect="first")
    def meeting_point(self) -> tuple[str, int]:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return "127.0.0.1", int(probe.getsockname()[1])

    @dispatch()
    def peak(self) -> int:
        """Bytes of memory at most since the last call, above what there was at that call. Host memory on CPUs."""
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            before, self._before = getattr(self, "_before", most), torch.cuda.memory_allocated()
            return int(most - before)
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        most, now = (int(fields[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS"))
        Path("/proc/self/clear_refs").write_text("5")
        before, self._before = getattr(self, "_before", most), now
        return most - before


def measured(shape: dict[str, Any], dtype: str, engines: int, repeats: int) -> dict[str, Any]:
    """Seconds of each transfer, and the most memory that it took on both sides, in MiB."""
    import ray

    ray.init(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, log_to_driver=False)
    try:
        with TemporaryDirectory() as logs:
            env = {"env_vars": malloc.environment() | {"OMP_NUM_THREADS": "1"}}
            options = {"num_cpus": 0, "num_gpus": int(torch.cuda.is_available()), "runtime_env": env}
            actor = ray.remote(**options)(Member)
            trainers = WorkerGroup(Member, [actor.remote(0, shape, dtype, False)], Path(logs), None)
            others = [actor.remote(rank, shape, dtype, True) for rank in range(engines)]
            own = WorkerGroup(Member, others, Path(logs), None)
            return _measured(Engines(trainers, own), trainers, own, repeats)
    finally:
        ray.shutdown()


def _measured(sync: Engines, trainers: WorkerGroup, own: WorkerGroup, repeats: int) -> dict[str, Any]:
    assert sync._joined(own)
    peaks: dict[str, list[tuple[int, int]]] = {"broadcast": [], "object store": []}
    sizes = []

    def timed(name: str, work: Any) -> float:
        trainers.peak(), own.peak()
        began = time.perf_counter()
        sizes.append(work(own))
        seconds = time.perf_counter() - began
        trainers.sent_weights()
        peaks[name].append((max(trainers.peak()) // MIB, max(own.peak()) // MIB))
        return seconds

    ways = {"broadcast": sync._by_broadcast, "object store": sync._by_object_store}
    found = interleaved({name: lambda n=name, w=work: timed(n, w) for name, work in ways.items()}, repeats=repeats)  # type: ignore[misc]
    assert len(set(sizes)) == 1, "both ways carry the same"
    most = {name: [max(side) for side in zip(*each[1:], strict=True)] for name, each in peaks.items()}
    return {"bytes": sizes[0], "seconds": found, "peak_mib": most}
