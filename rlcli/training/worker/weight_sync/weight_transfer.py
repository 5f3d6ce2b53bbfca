"""Weight transfer from the policy's workers to engines in separate workers, bucket by bucket.

The buckets of both ways: broadcasts (`weight_broadcast.py`), and Ray's object store where the processes cannot form a
group for those. In the second the trainers gather a bucket, and their rank 0 puts it
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
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch
    from jaxtyping import Float, UInt8
    from torch import Tensor

    from rlcli.model.parallel.host_memory import HostMemory
    from rlcli.model.weight_check.checksum import Checksums
    from rlcli.rollout.engine import WeightReceiver
    from rlcli.training.worker.backend import PolicyBackend

NamedTensor = tuple[str, "Tensor"]
Header = list[tuple[str, str, list[int], int, int]]
"""Layout of each tensor in a bucket: name, dtype, shape, first byte in the buffer, bytes."""

BUCKET_BYTES = 256 << 20
"""Bytes of tensors in one bucket, unless a single one is larger."""
ALIGNED = 16
"""Alignment of tensors in a buffer, in bytes, so that each can be viewed in its dtype."""


class Synced(NamedTuple):
    """The result of a sync."""

    difference: float
    """Largest difference of a log-prob of the probe between any engine and the trainer; infinite if one is NaN."""
    bytes: int
    """Received by each engine."""
    seconds: float
    """For gathering and loading, without the checks."""
    checked: int
    """Tensors that the engine holds exactly as they were sent."""
    unchecked: int
    """Tensors that could not be compared, since the engine's loader changes them."""
    check_s: float
    """Seconds for the checks, without the probe."""
    changed: int
    """Tensors whose values differ from the last sync."""
    share: float = 1.0
    """Share of the values that differ from the last sync, with `rollout.sync = delta`; 1 if everything was sent."""

    @classmethod
    def of_all(cls, ranks: Sequence[Synced]) -> Synced:
        """The maximum of each field: all wait for the slowest."""
        return cls(*(max(values) for values in zip(*ranks, strict=True)))


def largest(differences: Float[np.ndarray, " R"]) -> float:
    """The largest absolute value. A NaN counts as infinite: the controller takes the maximum of all ranks, which would
    lose it."""
    import numpy as np

    return float(np.abs(differences).max()) if np.isfinite(differences).all() else float("inf")


def record_sizes(weights: Iterable[NamedTensor], sizes: list[int]) -> Iterator[NamedTensor]:
    """`weights`, with the bytes of each appended to `sizes`."""
    for name, tensor in weights:
        sizes.append(tensor.nbytes)
        yield name, tensor


def outgoing(
    policy: PolicyBackend,
    sums: Checksums,
    adapter: tuple[str | None, str, torch.dtype] | None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[list[NamedTensor]]:
    """The weights for engines, with their checksums added to `sums`: all weights under their checkpoint
    names, or, with `adapter` (folder, prefix, the engine's dtype), the files of its adapter, which pass through a
    temporary folder in that folder with that prefix. Collective: every rank iterates to the end, in step."""
    if adapter is not None:
        import numpy as np
        import torch

        folder, prefix, dtype = adapter
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as temporary:
            save_adapter(policy, Path(temporary), sums, dtype)
            files = sorted(Path(temporary).iterdir())
            bytes_of = [(file.name, torch.from_numpy(np.fromfile(file, np.uint8))) for file in files]
        yield bytes_of
        return
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in sums.of(policy.stream_weights()):
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket


def save_adapter(policy: PolicyBackend, folder: Path, sums: Checksums, dtype: torch.dtype) -> None:
    """Write the policy's adapter to `folder`, and add to `sums` the values that an engine of `dtype` computes from it:
    it rounds both factors, then scales the second. Collective."""
    for name, tensor in policy.save_adapter(folder).items():
        rounded = tensor.to(dtype)
        sums.add(name, rounded * policy.adapter_scale if ".lora_B." in name else rounded)


def packed(
    bucket: list[NamedTensor], device: torch.device, memory: HostMemory | None = None
) -> tuple[Header, UInt8[Tensor, " bytes"]]:
    """A bucket as it is sent: the name, dtype, shape, first byte and bytes of each tensor, and one buffer that holds
    all of them, uint8: numpy has no bfloat16. memory: of the buffer, which is on the host and valid until the next
    call; otherwise it is on `device`."""
    import torch

    header, offset = Header(), 0
    for name, tensor in bucket:
        header.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, tensor.nbytes))
        offset += -(-tensor.nbytes // ALIGNED) * ALIGNED
    if memory is not None:
        memory.reuse()
        values = memory.take_whole(buffer_bytes(header))
    else:
        values = torch.empty(buffer_bytes(header), dtype=torch.uint8, device=device)
    for (_, view), (_, tensor) in zip(unpacked(header, values), bucket, strict=True):
        view.copy_(tensor.detach())
    return header, values


def buffer_bytes(header: Header) -> int:
    return max(offset + nbytes for _, _, _, offset, nbytes in header)


def unpacked(header: Header, values: UInt8[Tensor, " bytes"]) -> Iterator[NamedTensor]:
    """The tensors that `values` holds; they share its memory."""
    import torch

    for name, dtype, shape, offset, nbytes in header:
        yield name, values[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)


class Incoming:
    """Turns buckets that arrive in separate calls into the one iterator that an engine reads.

        incoming = Incoming(engine.load_weights)
        incoming.give(bucket)           # returns when it has been read
        incoming.end()

    The engine reads in a thread that runs only while a caller waits for it. Its error is raised by that call.
    """

    def __init__(self, load: Callable[[Iterator[NamedTensor]], None]) -> None:
        self._buckets: SimpleQueue[Iterable[NamedTensor] | None] = SimpleQueue()
        self._read: SimpleQueue[None] = SimpleQueue()
        self._done: Future[None] = Future()
        threading.Thread(target=self._run, args=(load,), daemon=True).start()

    def end(self) -> None:
        """After the last bucket: wait until the engine has taken over everything."""
        self.give(None)
        self._done.result()

    def give(self, bucket: Iterable[NamedTensor] | None) -> None:
        """Have the engine read a bucket, or, given None, end its iteration."""
        self._buckets.put(bucket)
        self._read.get()
        if self._done.done():
            self._done.result()

    def _run(self, load: Callable[[Iterator[NamedTensor]], None]) -> None:
        try:
            load(self._tensors())
            self._done.set_result(None)
        except BaseException as error:
            self._done.set_exception(error)
        self._read.put(None)

    def _tensors(self) -> Iterator[NamedTensor]:
        while (bucket := self._buckets.get()) is not None:
            yield from bucket
            del bucket  # its memory belongs to the object store, which frees it when nobody reads it
            self._read.put(None)


def load_files(engine: WeightReceiver, folder: str | None, prefix: str, files: Iterable[NamedTensor]) -> None:
    """Load an adapter's files into the engine, through a temporary folder in `folder`, named `prefix`…"""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as temporary:
        for name, content in files:
            (Path(temporary) / name).write_bytes(content.cpu().numpy().tobytes())
        engine.load_adapter(temporary)
