"""Weight transfer from the policy's workers to engines in separate workers, bucket by bucket.

What is sent, in buckets, for both ways: broadcasts (`weight_broadcast.py`), and Ray's object store
where the processes cannot form a group for those. In the second the trainers gather a bucket, and their rank 0 puts it
into the store, where each engine's worker reads it without a copy; while it loads that one, the next is being gathered.
So at most two buckets exist at once, and never a second model. A LoRA adapter goes the same way, as the bytes of its
files. On GPUs the store leads through host memory.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlcli.model.parallel.host_memory import HostMemory
    from rlcli.model.weight_check.checksum import Checksums
    from rlcli.rollout.engine import WeightReceiver
    from rlcli.training.worker.backend import TrainingBackend

Named = tuple[str, "Tensor"]

BUCKET_BYTES = 256 << 20
"""Bytes of tensors in one bucket, unless a single one is larger."""
ALIGNED = 16
"""Each tensor begins at a multiple of so many bytes, so that it can be viewed in its dtype."""


class Synced(NamedTuple):
    """The result of a sync. difference: the largest difference of a log-prob of the probe between any engine and the
    trainer; infinite if one is NaN. bytes: received by each engine. seconds: for gathering and loading, without the
    checks. checked: tensors that the engine holds exactly as they were sent. unchecked: those that could not be
    compared, since its loader changes them. check_s: seconds for the checks, without the probe. changed: tensors
    whose values differ from the last sync. share: of the values that differ from the last sync, with `rollout.sync =
    delta`; 1 if everything was sent."""

    difference: float
    bytes: int
    seconds: float
    checked: int
    unchecked: int
    check_s: float
    changed: int
    share: float = 1.0

    @classmethod
    def of_all(cls, ranks: Sequence[Synced]) -> Synced:
        """The maximum of each field: all wait for the slowest."""
        return cls(*(max(values) for values in zip(*ranks, strict=True)))


def largest(differences: Any) -> float:
    """The largest absolute value. A NaN counts as infinite: the controller takes the maximum of all ranks, which would
    lose it."""
    import numpy as np

    return float(np.abs(differences).max()) if np.isfinite(differences).all() else float("inf")


def counted(weights: Iterable[Named], sizes: list[int]) -> Iterator[Named]:
    """`weights`, with the bytes of each appended to `sizes`."""
    for name, tensor in weights:
        sizes.append(tensor.nbytes)
        yield name, tensor


def outgoing(
    policy: TrainingBackend,
    sums: Checksums,
    adapter: tuple[str | None, str, torch.dtype] | None,
    most_bytes: int = BUCKET_BYTES,
) -> Iterator[list[Named]]:
    """What engines need of the policy, with its checksums added to `sums`: all its weights under their checkpoint
    names, or, with `adapter` (folder, prefix, the engine's dtype), the files of its adapter, which pass through a
    temporary folder in that folder with that prefix. Collective: every rank iterates to the end, in step."""
    if adapter is not None:
        import numpy as np
        import torch

        folder, prefix, dtype = adapter
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as place:
            save_adapter(policy, Path(place), sums, dtype)
            files = sorted(Path(place).iterdir())
            bytes_of = [(file.name, torch.from_numpy(np.fromfile(file, np.uint8))) for file in files]
        yield bytes_of
        return
    bucket: list[Named] = []
    size = 0
    for name, tensor in sums.of(policy.stream_weights()):
        if bucket and size + tensor.nbytes > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket


def save_adapter(policy: TrainingBackend, folder: Path, sums: Checksums, dtype: torch.dtype) -> None:
    """Write the policy's adapter to `folder`, and add to `sums` the values that an engine of `dtype` computes from it:
    it rounds both factors, then scales the second. Collective."""
    for name, tensor in policy.save_adapter(folder).items():
        rounded = tensor.to(dtype)
        sums.add(name, rounded * policy.adapter_scale if ".lora_B." in name else rounded)


def packed(bucket: list[Named], device: torch.device, memory: HostMemory | None = None) -> tuple[list[Any], Tensor]:
    """A bucket as it is sent: the name, dtype, shape, first byte and bytes of each tensor, and one buffer that holds
    all of them, uint8: numpy has no bfloat16. memory: of the buffer, which is on the host and valid until the next
    call; otherwise it is on `device`."""
    import torch

    header, offset = list[Any](), 0
    for name, tensor in bucket:
        header.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, tensor.nbytes])
        offset += -(-tensor.nbytes // ALIGNED) * ALIGNED
    if memory is not None:
        memory.reuse()
        values = memory.take_whole(buffer_bytes(header))
    else:
        values = torch.empty(buffer_bytes(header), dtype=torch.uint8, device=device)
    for (_, place), (_, tensor) in zip(unpacked(header, values), bucket, strict=True):
        place.copy_(tensor.detach())
    return header, values


def buffer_bytes(header: list[Any]) -> int:
    return max(int(offset + nbytes) for _, _, _, offset, nbytes in header)


def unpacked(header: list[Any], values: Tensor) -> Iterator[Named]:
    """The tensors that `values` holds; they share its memory."""
    import torch

    for name, dtype, shape, offset, nbytes in header:
        yield name, values[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)


class Incoming:
    """Turns buckets that arrive in separate calls into the one iterator that an engine reads.

        incoming = Incoming(engine.load_weights)
        incoming.give(bucket)           # returns when it has been read
        incoming.end()

    The engine reads in a thread that runs only while a caller waits for it. What it raises is raised by the call that
    it reads for.
    """

    def __init__(self, load: Callable[[Iterator[Named]], None]) -> None:
        self._given: SimpleQueue[Iterable[Named] | None] = SimpleQueue()
        self._read: SimpleQueue[None] = SimpleQueue()
        self._done: Future[None] = Future()
        threading.Thread(target=self._run, args=(load,), daemon=True).start()

    def end(self) -> None:
        """After the last bucket: wait until the engine has taken over everything."""
        self.give(None)
        self._done.result()

    def give(self, bucket: Iterable[Named] | None) -> None:
        """Have the engine read a bucket, or, given None, end its iteration."""
        self._given.put(bucket)
        self._read.get()
        if self._done.done():
            self._done.result()

    def _run(self, load: Callable[[Iterator[Named]], None]) -> None:
        try:
            load(self._tensors())
            self._done.set_result(None)
        except BaseException as error:
            self._done.set_exception(error)
        self._read.put(None)

    def _tensors(self) -> Iterator[Named]:
        while (bucket := self._given.get()) is not None:
            yield from bucket
            del bucket  # its memory belongs to the object store, which frees it when nobody reads it
            self._read.put(None)


def load_files(engine: WeightReceiver, folder: str | None, prefix: str, files: Iterable[Named]) -> None:
    """Load an adapter's files into the engine, through a temporary folder in `folder`, named `prefix`…"""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as place:
        for name, content in files:
            (Path(place) / name).write_bytes(content.cpu().numpy().tobytes())
        engine.load_adapter(place)
