"""Weight transfer to engines in separate workers by broadcasts: NCCL between GPUs, gloo between CPUs.

Trainers and engines are two groups of processes, each with its own world. This is a third process group, of the
trainers' rank 0, which sends, and of all engines' workers. While one bucket is sent the trainers gather the next; while
an engine loads one it receives the next.

A member that dies ends gloo's transfers of the others with an error; NCCL's might wait. Either way the controller sees
that a worker of one group has failed, and ends both groups (`rlcli.training.loop.engine_groups`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

from rlcli.cluster.rendezvous import store_at
from rlcli.cluster.watchdog import progress
from rlcli.support.machine.gpus import tensor_group
from rlcli.training.worker.weight_sync.weight_transfer import Header, NamedTensor, buffer_bytes, packed, unpacked

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import BroadcastOptions, Work

BUCKET_BYTES = 32 << 20
"""Bytes of tensors in one broadcast, unless a single one is larger: as many as are gathered at once."""
JOIN_S = 60.0
"""Longest wait for all members to join."""


class _Group(Protocol):
    """A process group of any backend. torch's type stubs leave this method out, hence the casts."""

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions, /) -> Work: ...


class Broadcast:
    """One member of the process group. rank 0 sends; every other rank receives.

        Broadcast(host, port, 0, world, device, timeout_s).send(buckets)
        for name, tensor in Broadcast(host, port, rank, world, device, timeout_s).received(): ...

    host, port: as `rendezvous_address` returns them on the machine of rank 0. Raises `OSError` or `RuntimeError` if the
    group cannot be formed.
    """

    def __init__(self, host: str, port: int, rank: int, world: int, device: torch.device, timeout_s: float) -> None:
        from torch.distributed import ProcessGroupGloo
        from torch.distributed.distributed_c10d import PrefixStore

        timeout = timedelta(seconds=timeout_s)
        # Not a default group: each of the two worlds has its own.
        store = store_at(host, port, rank, world, timedelta(seconds=JOIN_S))
        self._device = device
        self._sizes = cast("_Group", ProcessGroupGloo(PrefixStore("sizes", store), rank, world, timeout))
        self._tensors = self._sizes
        if device.type == "cuda":
            self._tensors = cast("_Group", tensor_group(PrefixStore("tensors", store), rank, world, timeout))
        self._store = store  # of rank 0, which serves it to the others
        self._syncs = 0

    def send(self, buckets: Iterable[list[NamedTensor]]) -> None:
        """Broadcast all buckets. The next one is gathered (`buckets` is iterated) while one is sent."""
        sent: tuple[Work, Tensor] | None = None
        self._syncs += 1
        self._store.set(f"sync {self._syncs}", "")
        for bucket in buckets:
            header, values = packed(bucket, self._device)
            self._await(sent)
            self._send_header(header)
            sent = (self._broadcast(self._tensors, values), values)
            progress()
        self._await(sent)
        self._send_header([])

    def is_announced(self) -> bool:
        """True once the sender has started the next `send`: before that a receiver would wait in a collective, whose
        timeout is shorter than a step may be."""
        return bool(self._store.check([f"sync {self._syncs + 1}"]))

    def received(self) -> Iterator[NamedTensor]:
        """The tensors of all buckets, in their order, on the device; each is the caller's until the next one is read.
        The next bucket is received while one is used."""
        self._syncs += 1
        executor = ThreadPoolExecutor(1)
        try:
            next_bucket = executor.submit(self._receive)
            while bucket := next_bucket.result():
                next_bucket = executor.submit(self._receive)
                yield from bucket
                progress()
        finally:
            executor.shutdown(wait=False)

    def _send_header(self, header: Header) -> None:
        import torch

        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        self._broadcast(self._sizes, torch.tensor([len(text)])).wait()
        self._broadcast(self._sizes, text).wait()

    def _receive(self) -> list[NamedTensor]:
        """The next bucket; empty after the last."""
        import torch

        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(self._sizes, size).wait()
        text = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(self._sizes, text).wait()
        header = json.loads(text.numpy().tobytes())
        if not header:
            return []
        values = torch.empty(buffer_bytes(header), dtype=torch.uint8, device=self._device)
        self._await((self._broadcast(self._tensors, values), values))
        return list(unpacked(header, values))

    def _broadcast(self, group: _Group, tensor: Tensor) -> Work:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return group.broadcast([tensor], options)

    def _await(self, sent: tuple[Work, Tensor] | None) -> None:
        """Wait for a broadcast, whose buffer is kept until then."""
        if sent is not None:
            sent[0].wait()
            if self._device.type == "cuda":
                import torch

                torch.accelerator.synchronize()
