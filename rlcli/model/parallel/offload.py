"""Offloads weights and optimizer states to host memory while the device's memory is needed otherwise (HybridFlow, arXiv
2409.19256).

An offloaded tensor keeps its identity: its storage is resized to zero, as FSDP2 does with gathered parameters, and
every view of it, including the optimizer's and FSDP2's, is valid again once the bytes are copied back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlcli.model.parallel.host_memory import HostMemory

MODEL, OPTIMIZER = "model", "optimizer"
KINDS = {"none": frozenset[str](), "optimizer": frozenset({OPTIMIZER}), "all": frozenset({OPTIMIZER, MODEL})}
"""train.offload → kinds of tensors that are offloaded."""


@dataclass
class _HostCopy:
    """One storage and its copy in host memory."""

    storage: torch.UntypedStorage
    """On the device; empty while it is offloaded."""
    bytes: int
    """Size of the storage when it is on the device."""
    pieces: list[Tensor]
    """The copy: uint8 tensors in host memory, in order."""
    constant: bool
    """The bytes never change, so that they are copied to the host only once."""


@dataclass
class _Group:
    """Tensors that are moved together."""

    tensors: Callable[[], Iterable[tuple[Tensor, bool]]]
    """Returns the tensors, each with a flag: True if it is constant."""
    host: HostMemory
    """Device of the copies."""
    copies: dict[int, _HostCopy] = field(default_factory=dict)
    """By the key of the storage (`_key`), once they have been offloaded."""
    offloaded: bool = False
    """The storages are empty, and the copies in host memory are current."""
    arrival: torch.Event | None = None
    """Completes when the copy back to the device has finished; None if no copy is in flight."""


class Offload:
    """Offloads named models, and `NAME.optimizer`, while they are not used. Names that `kinds` does not offload are
    ignored everywhere.

    kinds: a value of `KINDS`. On a GPU copies use pinned memory and a separate stream. On a CPU, where nothing is
    gained, the same code copies to other host memory, for tests.
    """

    def __init__(self, kinds: frozenset[str], device: torch.device) -> None:
        self.kinds = kinds
        self._stream = torch.Stream(device=device) if kinds and device.type == "cuda" else None
        self._device = device
        self._groups: dict[str, _Group] = {}
        self._copies = HostMemory()

    def add(self, name: str, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Register parameters of `model` and states of `optimizer` for offloading. Nothing is moved yet."""
        pinned = self._stream is not None
        if MODEL in self.kinds:
            self._groups[name] = _Group(
                lambda: ((p, not p.requires_grad) for p in model.parameters()), HostMemory(pinned)
            )
        if OPTIMIZER in self.kinds and optimizer is not None:
            states = f"{name}.{OPTIMIZER}"
            self._groups[states] = _Group(lambda: _states(optimizer), HostMemory(pinned))
            optimizer.register_step_pre_hook(lambda *_: self._await(states))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what is offloaded."""
        return tuple(self._groups)

    def to_host(self, *names: str) -> None:
        """Offload them. On return torch may use their device memory for other tensors."""
        groups = [self._groups[name] for name in names if name in self._groups and not self._groups[name].offloaded]
        for name in names:
            self._await(name)
        with self._copying():
            for group in groups:
                group.copies = self._copied_to_host(group)
        if self._stream is not None:
            self._stream.synchronize()
        for group in groups:
            group.offloaded = True
            for copy in group.copies.values():
                copy.storage.resize_(0)

    def to_device(self, *names: str, prefetch: bool = False) -> None:
        """Move them back to the device, for the next computation. prefetch: only an optimizer's next step waits for its
        states, which arrive while gradients are computed."""
        for name in names:
            group = self._groups.get(name)
            if group is None or not group.offloaded:
                continue
            for copy in group.copies.values():
                copy.storage.resize_(copy.bytes)
            with self._copying():
                for copy in group.copies.values():
                    for on_device, on_host in _pairs(copy):
                        on_device.copy_(on_host, non_blocking=True)
                group.arrival = self._stream.record_event() if self._stream is not None else None
            group.offloaded = False
        for name in () if prefetch else names:
            self._await(name)

    def forget_copies(self) -> None:
        """Free all results of `copied`: the next copies overwrite them."""
        self._copies.reuse()

    def copied(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU, sharded as `tensor` is, whether `tensor` is offloaded or not."""
        for name in self._groups:  # A skipped step has not waited for its optimizer's states.
            self._await(name)
        local = _local(tensor)
        host_copy = self._offloaded().get(_key(local))
        if host_copy is None:
            return self._copies.copy(tensor)
        flat = torch.cat(host_copy.pieces).view(local.dtype)
        copy = torch.empty_like(tensor.detach(), device="cpu")
        _local(copy).copy_(flat.as_strided(local.size(), local.stride(), local.storage_offset()))
        return copy

    def _copied_to_host(self, group: _Group) -> dict[int, _HostCopy]:
        """Copies of the group's current tensors, by the key of their storage; on a GPU complete once the stream is
        done. Tensors that were offloaded before reuse the memory of their copies."""
        copies: dict[int, _HostCopy] = {}
        for tensor, constant in group.tensors():
            local = _local(tensor)
            storage, key = local.untyped_storage(), _key(local)
            if local.device.type != self._device.type or not storage.nbytes() or key in copies:
                continue
            copy = group.copies.get(key)
            if copy is None:
                copy = _HostCopy(storage, storage.nbytes(), group.host.take(storage.nbytes()), constant=False)
            if not copy.constant:
                for on_device, on_host in _pairs(copy):
                    on_host.copy_(on_device, non_blocking=True)
            copy.constant = constant
            copies[key] = copy
        return copies

    def _offloaded(self) -> dict[int, _HostCopy]:
        """The copies of all storages that are offloaded now, by their keys."""
        return {key: copy for group in self._groups.values() if group.offloaded for key, copy in group.copies.items()}

    def _await(self, name: str) -> None:
        """Have the next computation wait for a copy in flight."""
        group = self._groups.get(name)
        if group is not None and group.arrival is not None:
            torch.accelerator.current_stream().wait_event(group.arrival)
            group.arrival = None

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Context on the copy stream, after all work queued on the device so far."""
        with torch.no_grad():
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.accelerator.current_stream())
            with self._stream:
                yield


def growing_segments(on: bool) -> None:
    """Switch torch's expandable segments of GPU memory on or off. They avoid fragmentation if micro-batches differ in
    size, but must be off while vLLM's pool is mapped or allocated from (pytorch#147851). A setting in the environment
    takes precedence."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments" in settings:
        return
    # Omitted settings are reset to their defaults, so all have to be passed.
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (settings, f"expandable_segments:{on}"))))


def _states(optimizer: Optimizer) -> list[tuple[Tensor, bool]]:
    """The optimizer's state tensors, none of them constant."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [(value, False) for value in values if isinstance(value, Tensor)]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded, detached."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _key(local: Tensor) -> int:
    """The identity of its storage, which does not change when it is resized."""
    return int(local.untyped_storage()._cdata)


def _pairs(copy: _HostCopy) -> Iterator[tuple[Tensor, Tensor]]:
    """The storage's bytes on the device, split like their pieces in host memory, and these pieces."""
    storage_bytes = torch.empty(0, dtype=torch.uint8, device=copy.storage.device).set_(copy.storage)
    return zip(storage_bytes.split([len(piece) for piece in copy.pieces]), copy.pieces, strict=True)
