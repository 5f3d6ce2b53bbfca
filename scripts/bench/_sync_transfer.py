"""A child of `sync.py`: weights on their way to engines in other workers, by broadcast and by the object store."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import torch
from _common import interleaved

from rlcli.cluster.dispatch import dispatch, implements
from rlcli.cluster.process import malloc
from rlcli.cluster.ray_session import ray_session
from rlcli.cluster.worker_group import WorkerGroup
from rlcli.training.loop.engine_groups import Engines
from rlcli.training.worker.calls import WorkerCalls
from rlcli.training.worker.weight_sync.weight_sync import WeightSync

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
        rollout = SimpleNamespace(sync="full")
        stalls = SimpleNamespace(stall_s=60.0)
        config: Any = SimpleNamespace(fault_tolerance=stalls, rollout=rollout, copies_weights=False)
        context = SimpleNamespace(separate_adapter=False, keeps=False)
        self.spec: Any = SimpleNamespace(adapter_prefix="", config=config, context=context)
        self.policy = self.rollout_role = self.batch = None
        with torch.device(self.device):
            lm = Qwen2ForCausalLM(Qwen2Config(**shape)).to(getattr(torch, dtype))
        if engine:
            engine_of = Holder({n: p.detach() for n, p in lm.named_parameters()})
            self.rollout_role: Any = SimpleNamespace(engine=engine_of, pause=lambda keep=False: None)
        else:
            self.policy: Any = SimpleNamespace(policy=PolicyModel(lm, dtype=getattr(torch, dtype), source="bench"))

    @implements(WorkerCalls.rendezvous)
    def rendezvous(self) -> tuple[str, int]:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return "127.0.0.1", int(probe.getsockname()[1])

    @dispatch()
    def peak(self) -> int:
        """Bytes of memory at most since the last call, above what there was at that call. Host memory on CPUs."""
        if self.device.type == "cuda":
            highest = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            baseline, self._before = getattr(self, "_before", highest), torch.cuda.memory_allocated()
            return int(highest - baseline)
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        highest, now = (int(fields[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS"))
        Path("/proc/self/clear_refs").write_text("5")
        baseline, self._before = getattr(self, "_before", highest), now
        return highest - baseline


def measured(shape: dict[str, Any], dtype: str, engines: int, repeats: int) -> dict[str, Any]:
    """Seconds of each transfer, and the memory that the first one takes in new processes, in MiB: sender, engine."""
    import ray

    actor = ray.remote(
        num_cpus=0,
        num_gpus=int(torch.cuda.is_available()),
        runtime_env={"env_vars": malloc.environment() | {"OMP_NUM_THREADS": "1"}},
    )(Member)

    def group(logs: str, count: int, engine: bool) -> WorkerGroup[Any]:
        return WorkerGroup([actor.remote(i, shape, dtype, engine) for i in range(count)], Path(logs), None)

    def ways(logs: str) -> tuple[Engines, dict[str, Any]]:
        sync = Engines(group(logs, 1, False), group(logs, engines, True))
        assert sync._join(sync.workers)
        return sync, {"broadcast": sync._by_broadcast, "object store": sync._by_object_store}

    with TemporaryDirectory() as logs, ray_session("", 2):
        peaks, peak = {}, cast(Any, Member.peak)
        for name in ("broadcast", "object store"):
            sync, each = ways(logs)
            sync.policy.call(peak), sync.workers.call(peak)
            each[name](sync.workers)
            peaks[name] = [max(sync.policy.call(peak)) // MIB, max(sync.workers.call(peak)) // MIB]
            sync.policy.kill(), sync.workers.kill()
        sync, each = ways(logs)
        return {"peak_mib": peaks} | _timed(sync, each, repeats)


def _timed(sync: Engines, ways: dict[str, Any], repeats: int) -> dict[str, Any]:
    sizes = set()

    def timed(work: Any) -> float:
        began = time.perf_counter()
        sizes.add(work(sync.workers))
        seconds = time.perf_counter() - began
        sync.policy.call(WorkerCalls.sent_checksums)
        return seconds

    timings = interleaved({name: lambda work=work: timed(work) for name, work in ways.items()}, repeats=repeats)  # type: ignore[misc]
    (nbytes,) = sizes  # both ways carry the same
    return {"bytes": nbytes, "seconds": timings}
