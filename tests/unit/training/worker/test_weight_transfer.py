"""Weights on their way to engines in other workers: what is sent arrives, bucket by bucket, in bounded memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcli.errors import RunFailed
from rlcli.model.weight_check.checksum import Checksums, TensorChecksum, checksum
from rlcli.training.loop.engine_groups import Engines
from rlcli.training.worker.weight_sync.weight_transfer import Incoming, Synced, load_files, outgoing, packed, unpacked
from tests.groups import CalledByName


class Policy:
    """Streams tensors of so many elements, float32."""

    def __init__(self, *sizes: int) -> None:
        self.named = [(f"w{i}", torch.full((size,), float(i))) for i, size in enumerate(sizes)]

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named


class Adapted(Policy):
    adapter_scale = 2.0

    def save_adapter(self, folder: Path) -> dict[str, Tensor]:
        assert folder.name.startswith("run-"), "what a kill leaves behind is found by its name"
        (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)))
        (folder / "adapter_config.json").write_text("{}")
        return {f"q.lora_{kind}.weight": torch.full((2, 3), 1.0) for kind in "AB"}


def test_tensors_arrive_as_they_were_sent_in_the_memory_that_held_them() -> None:
    some = [
        ("half", torch.randn(3, 5).bfloat16()),
        ("turned", torch.randn(4, 6).t()),
        ("scalar", torch.tensor(2.5)),
        ("whole", torch.arange(9, dtype=torch.int64).view(3, 3)),
    ]
    header, sent = packed(some, torch.device("cpu"))
    arrived = dict(unpacked(header, sent))
    assert list(arrived) == [name for name, _ in some]
    for name, tensor in some:
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)
    assert arrived["half"].data_ptr() == sent.data_ptr(), "no copy is made of what is read"


def test_buckets_hold_as_much_as_they_may_and_a_larger_tensor_is_one_alone() -> None:
    policy: Any = Policy(10, 10, 10, 40, 5, 5)
    names = [[name for name, _ in bucket] for bucket in outgoing(policy, Checksums(), None, bucket_bytes=80)]
    assert names == [["w0", "w1"], ["w2"], ["w3"], ["w4", "w5"]]


def test_an_engine_reads_buckets_of_separate_calls_as_one_iterator() -> None:
    read: list[str] = []
    incoming = Incoming(lambda weights: read.extend(name for name, _ in weights))
    for number in range(3):
        bucket = [(f"{number}.{i}", torch.zeros(2)) for i in range(2)]
        alive = weakref.ref(bucket[0][1])
        incoming.give(iter(bucket))
        assert read[-2:] == [f"{number}.0", f"{number}.1"], "a call returns once its bucket has been read"
        del bucket
        assert alive() is None, "and keeps nothing of it"
    incoming.end()
    assert len(read) == 6


def test_what_the_engine_raises_is_raised_by_the_call_that_it_reads_for() -> None:
    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, _ in weights:
            if name == "bad":
                raise ValueError("shapes differ")
        raise KeyError("missing at the end")

    incoming = Incoming(load)
    incoming.give([("good", torch.zeros(1))])
    with pytest.raises(ValueError, match="shapes differ"):
        incoming.give([("bad", torch.zeros(1))])
    incoming = Incoming(load)
    incoming.give([("good", torch.zeros(1))])
    with pytest.raises(KeyError, match="missing"):
        incoming.end()


def test_an_adapter_travels_as_its_files(tmp_path: Path) -> None:
    contents: dict[str, bytes] = {}

    class Engine:
        def load_adapter(self, folder: str) -> None:
            assert Path(folder).name.startswith("run-")
            contents.update({path.name: path.read_bytes() for path in Path(folder).iterdir()})

    policy: Any = Adapted()
    sums = Checksums()
    engine: Any = Engine()
    (bucket,) = outgoing(policy, sums, (str(tmp_path), "run-", torch.bfloat16))
    incoming = Incoming(lambda files: load_files(engine, str(tmp_path), "run-", files))
    incoming.give(unpacked(*packed(bucket, torch.device("cpu"))))
    incoming.end()
    sent = {name: entry.checksum for name, entry in sums.sent().items()}
    assert sent == {
        f"q.lora_{kind}.weight": int(checksum(torch.full((2, 3), scale, dtype=torch.bfloat16)))
        for kind, scale in (("A", 1.0), ("B", 2.0))
    }
    assert contents == {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256))}
    assert list(tmp_path.iterdir()) == []


class Trainers(CalledByName):
    """Sends `count` buckets. max_in_flight: the most that were sent and not yet loaded. problem: why no process
    group can be formed; the members that joined are in `joined`."""

    def __init__(self, count: int, problem: str = "no route") -> None:
        self.count, self.sent, self.loaded, self.max_in_flight = count, 0, 0, 0
        self.next_sent = threading.Event()
        self.problem, self.joined, self.killed = problem, list[tuple[str, int, int]](), False
        self.broadcasts = list[bool]()

    def rendezvous(self) -> tuple[str, int]:
        return "here", 7

    def join_engines(self, *arguments: Any) -> list[str]:
        self.joined.append(arguments)
        return [""]

    def broadcast_weights(self, resend_all: bool = False) -> list[None]:
        self.broadcasts.append(resend_all)
        return [None]

    def changed_share(self) -> float:
        return 0.02

    def kill(self) -> None:
        self.killed = True

    def next_weight_bucket(self, first: bool, resend_all: bool = False) -> list[Any]:
        self.sent = 0 if first else self.sent
        if self.sent == self.count:
            self.next_sent.set()
            return []
        self.sent += 1
        self.max_in_flight = max(self.max_in_flight, self.sent - self.loaded)
        if not first:
            self.next_sent.set()
        return [self.sent]

    def sent_checksums(self) -> dict[str, TensorChecksum]:
        return {"w": TensorChecksum(3, 1, torch.float32)}

    def probe_log_probs(self, tokens: list[int]) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    def __len__(self) -> int:
        return 1


class EngineWorkers(CalledByName):
    """Loads a bucket once the next one has been sent: what a real engine does at the same time."""

    def __init__(self, trainers: Trainers) -> None:
        self.trainers, self.got = trainers, list[Any]()
        self.gone = threading.Event()
        self.wrong = list[list[str]]()

    def __len__(self) -> int:
        return 2

    def join_engines(self, *arguments: Any) -> list[str]:
        self.trainers.joined.append(arguments)
        return ["", self.trainers.problem]

    def receive_broadcast(self) -> list[int]:
        return [40, 30]

    def kill(self) -> None:
        self.gone.set()

    def load_weight_bucket(self, bucket: list[Any]) -> list[int]:
        assert self.trainers.next_sent.wait(30), "the next bucket is gathered while this one is loaded"
        self.trainers.next_sent.clear()
        self.trainers.loaded += 1
        self.got += bucket
        return [10, 20]

    def corrupted_tensors(self, sent: Any) -> list[list[str]]:
        assert sent == self.trainers.sent_checksums()
        return [[], self.wrong.pop(0)]

    def activate_weights(self, probe: Any, log_probs: list[float], version: int, sent: Any) -> list[Synced]:
        assert (len(log_probs), version) == (len(probe) - 1, 7)
        assert sent == self.trainers.sent_checksums()
        return [Synced(difference, 0, 0.0, 1, 0, 0.125, 1) for difference in (0.25, 0.5)]


def test_the_next_bucket_is_gathered_while_one_is_loaded() -> None:
    trainers = Trainers(5)
    workers = EngineWorkers(trainers)
    notes: list[str] = []
    engines = Engines(trainers, workers, notes.append)  # type: ignore[arg-type]
    synced = engines.sync(np.arange(4, dtype=np.int32), 7)
    assert notes == ["weights go to the engines through Ray's object store: no process group (no route)"]
    assert synced.difference == 0.5, "the largest of any engine counts"
    assert (synced.bytes, synced.checked, synced.check_s) == (5 * 20, 1, 0.125)
    assert workers.got == [1, 2, 3, 4, 5]
    assert trainers.max_in_flight == 2


def test_weights_are_broadcast_over_a_process_group_that_is_formed_once() -> None:
    trainers = Trainers(5, problem="")
    workers = EngineWorkers(trainers)
    engines = Engines(trainers, workers)  # type: ignore[arg-type]
    for _ in range(2):
        assert engines.sync(np.arange(4, dtype=np.int32), 7).bytes == 40
    assert trainers.joined == [("here", 7, 2)] * 2, "once in each group"
    assert (trainers.sent, workers.got, trainers.killed) == (0, [], False)


def test_trainers_that_wait_for_a_dead_engine_are_ended_with_its_error() -> None:
    trainers = Trainers(1, problem="")
    workers = EngineWorkers(trainers)

    def dead() -> list[int]:
        raise RunFailed("worker 1 died in receive_broadcast", retry=True)

    def waiting(resend_all: bool) -> list[None]:
        assert workers.gone.wait(30)
        raise RunFailed("worker 0 died in broadcast_weights")

    trainers.broadcast_weights, workers.receive_broadcast = waiting, dead  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match="worker 1 died in receive_broadcast") as failure:
        Engines(trainers, workers).sync(np.arange(4, dtype=np.int32), 7)  # type: ignore[arg-type]
    assert failure.value.retry, "the run resumes from its checkpoint"
    assert trainers.killed


def test_engines_of_their_own_keep_their_memory_while_others_train() -> None:
    trainers: Any = Trainers(1)
    Engines(trainers, EngineWorkers(trainers)).release_memory()  # type: ignore[arg-type]
    released: list[str] = []
    trainers.release_rollout_memory = lambda: released.append("memory")
    Engines(trainers, None).release_memory()
    assert released == ["memory"]


def copying(problem: str = "", **options: bool) -> tuple[Any, EngineWorkers, list[str], Engines]:
    """Trainers, engines that keep copies of the weights, the notes of a run, and its `Engines`."""
    trainers, notes = Trainers(1, problem), list[str]()
    workers = EngineWorkers(trainers)
    return trainers, workers, notes, Engines(trainers, workers, notes.append, copies=True, **options)  # type: ignore[arg-type]


PROBE = np.arange(4, dtype=np.int32)


def test_a_copy_that_is_wrong_is_sent_everything_before_an_engine_loads_it() -> None:
    trainers, workers, notes, engines = copying()
    loaded: list[int] = []
    load = workers.activate_weights
    workers.activate_weights = lambda *arguments: loaded.append(len(trainers.broadcasts)) or load(*arguments)  # type: ignore
    workers.wrong = [[], ["layer.up", "layer.down"], []]
    assert engines.sync(PROBE, 7).share == 0.02
    assert engines.sync(PROBE, 7).bytes == 80
    assert trainers.broadcasts == [False, False, True]
    assert notes == ["all weights are sent again: layer.up did not arrive as it was sent"]
    assert loaded == [1, 3], "only what was checked is loaded"


def test_a_copy_that_stays_wrong_ends_the_run() -> None:
    _, workers, _, engines = copying()
    workers.activate_weights = None  # type: ignore[method-assign, assignment]
    workers.wrong = [["norm"], ["norm"]]
    with pytest.raises(RunFailed, match=r"norm did not arrive .* even with all weights sent again"):
        engines.sync(PROBE, 7)


def test_weights_go_ahead_while_engines_generate_and_a_sync_loads_them() -> None:
    trainers, workers, _, engines = copying(overlaps=True)
    workers.wrong = [[], []]
    generating: Future[None] = Future()
    engines.send_ahead(generating)
    assert trainers.broadcasts == [], "no engine has joined before the first sync"
    engines.sync(PROBE, 7)
    engines.send_ahead(generating)
    assert trainers.broadcasts == [False, False]
    assert engines.sync(PROBE, 7).bytes == 40
    assert trainers.broadcasts == [False, False], "they are not sent twice"
    generating.set_result(None)
    engines.send_ahead(generating)
    assert trainers.broadcasts == [False, False], "nothing generates that it could run beside"


def test_a_generation_that_fails_is_not_kept_waiting_for_the_weights() -> None:
    trainers, workers, _, engines = copying(overlaps=True)
    workers.wrong = [[]]
    engines.sync(PROBE, 7)
    generating: Future[None] = Future()
    stuck = threading.Event()
    trainers.broadcast_weights = lambda resend_all=False: generating.set_exception(RunFailed("died")) or stuck.wait(30)
    engines.send_ahead(generating)
    stuck.set()
    with pytest.raises(RunFailed, match="died"):
        generating.result()
