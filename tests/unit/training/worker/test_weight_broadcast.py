"""Weights broadcast to engines in other processes: all arrive, in order; a member that is gone is an error.

The members are threads of one process, each with its own connection: gloo does not know the difference.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcli.training.worker.weight_sync.weight_broadcast import Broadcast

ENGINES = 2
LONG_S = 300.0
"""Of a broadcast: a test that waited for it would end at its own, shorter limit."""


def buckets() -> list[list[tuple[str, Tensor]]]:
    return [
        [("half", torch.randn(3, 5).bfloat16()), ("turned", torch.randn(4, 6).t()), ("scalar", torch.tensor(2.5))],
        [("alone", torch.arange(100_003, dtype=torch.int64))],
        [("bytes", torch.randint(0, 255, (7,), dtype=torch.uint8)), ("last", torch.randn(2, 3, 4))],
    ]


@pytest.fixture
def members() -> list[Broadcast]:
    """The sender, and each receiver."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def join(rank: int) -> Broadcast:
        return Broadcast("127.0.0.1", port, rank, 1 + ENGINES, torch.device("cpu"), LONG_S)

    with ThreadPoolExecutor(1 + ENGINES) as pool:
        return list(pool.map(join, range(1 + ENGINES)))


def together(*calls: Callable[[], Any]) -> list[Future[Any]]:
    pool = ThreadPoolExecutor(len(calls))
    return [pool.submit(call) for call in calls]


def test_every_engine_gets_all_tensors_as_they_were_sent(members: list[Broadcast]) -> None:
    sender, *receivers = members
    for sent in (buckets(), buckets()):  # each sync anew
        assert not any(receiver.is_announced() for receiver in receivers)
        read = [lambda receiver=receiver: [(n, t.clone()) for n, t in receiver.received()] for receiver in receivers]
        sending, *reading = together(lambda sent=sent: sender.send(sent), *read)
        sending.result(60)
        assert not any(receiver.is_announced() for receiver in receivers), "of this one they have read all"
        pairs = [pair for bucket in sent for pair in bucket]
        for engine in reading:
            got = engine.result(60)
            assert [name for name, _ in got] == [name for name, _ in pairs]
            for (_, tensor), (_, expected) in zip(got, pairs, strict=True):
                assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
                assert torch.equal(tensor, expected)


def test_the_next_bucket_is_gathered_and_received_while_one_is_loaded(members: list[Broadcast]) -> None:
    sender, *receivers = members
    gathered: list[int] = []

    def gather() -> Iterator[list[tuple[str, Tensor]]]:
        for number in range(4):
            gathered.append(number)
            yield [(str(number), torch.full((1000,), float(number)))]

    others = [lambda receiver=receiver: list(receiver.received()) for receiver in receivers[1:]]
    sending, *_ = together(lambda: sender.send(gather()), *others)
    read = receivers[0].received()
    assert next(read)[0] == "0"
    # The first is not released yet. The second has come, or comes, without another call.
    while len(gathered) < 3:
        assert not sending.done()
        time.sleep(0.001)
    assert [name for name, _ in read] == ["1", "2", "3"]
    sending.result(60)


def test_an_engine_that_is_gone_is_an_error_for_the_trainers(members: list[Broadcast]) -> None:
    endless = ([(str(number), torch.zeros(100_000))] for number in range(1_000_000))
    sender, departed = members[0], members.pop(1)
    sending, reading = together(lambda: sender.send(endless), lambda: sum(1 for _ in members[1].received()))
    assert departed._receive()[0][0] == "0"
    del departed  # as the end of its process does, this closes its connections
    with pytest.raises(RuntimeError, match="onnection"):
        sending.result(60)
    sending, sender, members[0] = None, None, None  # type: ignore[assignment, call-overload]
    with pytest.raises(RuntimeError, match="onnection"):
        reading.result(60)
