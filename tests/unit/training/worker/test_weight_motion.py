"""Weights of a trainer on their way to an engine, through a real process group: only what has changed, and ahead of the
sync. Trainer and engine are two workers in threads of one process; the engine holds plain tensors."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlcli.config.schema import RunConfig
from rlcli.model.parallel.weight_delta import LastSent
from rlcli.model.weight_check.checksum import Checksums, TensorChecksum
from rlcli.model.weight_check.engine_weights import Verified
from rlcli.training.loop.engine_groups import Engines
from rlcli.training.worker.weight_sync.weight_sync import WeightSync
from tests.contexts import context_of

PROBE = np.arange(4, dtype=np.int32)


class Backend:
    """A model of two layers, in float32, that an engine computes with in bfloat16."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().to(self.dtype) for name, p in self.model.named_parameters()}

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights().items()

    def stream_changes(self, last: LastSent, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        return last.changes(self.model.named_parameters(), self.dtype, bucket_bytes)


class Engine:
    """Loads copies of what it is given. loads: all weights after each load."""

    def __init__(self) -> None:
        self.loads: list[dict[str, Tensor]] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loads.append({name: tensor.clone() for name, tensor in weights})

    def verify(self, sent: dict[str, TensorChecksum]) -> Verified:
        sums = Checksums()
        for _ in sums.of(self.loads[-1].items()):
            pass
        return Verified(len(sent), 0, [name for name, checksum in sums.sent().items() if sent[name] != checksum])

    def cached_tokens(self, tokens: Any) -> int:
        return 0

    def probe(self, tokens: Any) -> tuple[int, Any]:
        return 0, np.zeros(len(tokens) - 1)


class Member(WeightSync):
    def __init__(self, config: RunConfig, **roles: Any) -> None:
        super().__init__()
        self.rank, self.device, self.batch = 0, torch.device("cpu"), None
        self.spec: Any = SimpleNamespace(config=config, context=context_of(config))
        self.policy, self.rollout_role = roles.get("policy"), roles.get("rollout")

    def rendezvous(self) -> tuple[str, int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return "127.0.0.1", int(probe.getsockname()[1])

    def probe_log_probs(self, tokens: list[int]) -> list[float]:
        return [0.0] * (len(tokens) - 1)


class Group:
    """Stands in for a `WorkerGroup` of one."""

    def __init__(self, member: Member) -> None:
        self.member = member

    def __len__(self) -> int:
        return 1

    def call(self, method: Any, *arguments: Any) -> Any:
        result = getattr(self.member, method.__name__)(*arguments)
        return result if method.dispatch.collect == "first" else [result]


@pytest.fixture
def make_workers() -> Callable[..., tuple[Backend, Engine, Member, Engines, list[str]]]:
    def make(**rollout: Any) -> tuple[Backend, Engine, Member, Engines, list[str]]:
        config = RunConfig.model_validate({"rollout": {"workers": 1, **rollout}, "async": {"staleness": 1}})
        backend, engine, notes = Backend(), Engine(), list[str]()
        receiver = Member(config, rollout=SimpleNamespace(engine=engine, pause=lambda keep=False: None))
        sender = Member(config, policy=SimpleNamespace(policy=backend))
        options: Any = {"copies": config.copies_weights, "overlaps": "ahead" in config.rollout.sync}
        engines = Engines(Group(sender), Group(receiver), notes.append, **options)  # type: ignore[arg-type]
        return backend, engine, receiver, engines, notes

    return make


def same(first: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return first.keys() == other.keys() and all(
        tensor.view(torch.int16).equal(other[name].view(torch.int16)) for name, tensor in first.items()
    )


@pytest.mark.parametrize("sync", ["full", "ahead", "delta", "delta_ahead"])
def test_an_engine_has_the_trainers_bits_after_each_sync(make_workers: Any, sync: str) -> None:
    backend, engine, _, engines, notes = make_workers(sync=sync)
    sizes = []
    for version in range(1, 5):
        sizes.append(engines.sync(PROBE, version).bytes)
        assert same(engine.loads[-1], backend.weights())
        backend.step()
        generating: Future[None] = Future()
        load_count = len(engine.loads)
        engines.send_ahead(generating)
        assert len(engine.loads) == load_count, "it generates with the weights that it has"
    full_bytes = sum(tensor.nbytes for tensor in backend.weights().values())
    assert sizes[0] == full_bytes
    assert all(size < full_bytes / 4 if "delta" in sync else size == full_bytes for size in sizes[1:])
    assert notes == []


@pytest.mark.parametrize("sync", ["delta", "delta_ahead"])
def test_a_wrong_bit_of_the_copy_reaches_no_engine(make_workers: Any, sync: str) -> None:
    backend, engine, receiver, engines, notes = make_workers(sync=sync)
    full_bytes = engines.sync(PROBE, 1).bytes
    backend.step()
    dict(receiver._weight_copy.named())["0.weight"].view(torch.int16)[3, :1].bitwise_xor_(1)
    engines.send_ahead(Future())
    assert engines.sync(PROBE, 2).bytes > full_bytes
    assert notes == ["all weights are sent again: 0.weight did not arrive as it was sent"]
    assert len(engine.loads) == 2
    assert same(engine.loads[-1], backend.weights())
    backend.step()
    engines.send_ahead(Future())
    assert engines.sync(PROBE, 3).bytes < full_bytes / 4
    assert same(engine.loads[-1], backend.weights())


def test_another_run_on_the_same_workers_begins_with_everything(make_workers: Any) -> None:
    """Whose engines are kept: only the trainers are built anew."""
    backend, engine, _, engines, _ = make_workers(sync="delta_ahead")
    full_bytes = engines.sync(PROBE, 1).bytes
    engines.policy.member._reset_sync_state()
    restarted = Engines(engines.policy, engines.dedicated, copies=True, overlaps=True)
    assert restarted.sync(PROBE, 1).bytes == full_bytes
    assert same(engine.loads[-1], backend.weights())


def test_over_the_object_store_buckets_go_into_the_copy_too(make_workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    backend, engine, _, engines, _ = make_workers(sync="delta_ahead")
    engines.broadcasts = False
    full_bytes = engines.sync(PROBE, 1).bytes
    backend.step()
    engines.send_ahead(Future())
    assert engines.sync(PROBE, 2).bytes < full_bytes / 4
    assert same(engine.loads[-1], backend.weights())
