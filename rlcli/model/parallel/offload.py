"""Keeps weights and optimizer states in host memory while others need the device's (HybridFlow, arXiv 2409.19256).

An offloaded tensor keeps its identity: its storage is emptied, as FSDP2 does with gathered parameters, and every view
of it, including the optimizer's and FSDP2's, has its contents again once the bytes are back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlcli.model.parallel.host_memory import HostMemory

MODEL, OPTIMIZER = "model", "optimizer"
KINDS = {"none": frozenset[str](), "optimizer": frozenset({OPTIMIZER}), "all": frozenset({OPTIMIZER, MODEL})}
"""train.offload → what is offloaded."""


@dataclass
class _Place:
    """The bytes of one storage. pieces: where they are in host memory. constant: they never change, so that they need
    to be copied there only once."""

    storage: torch.UntypedStorage
    bytes: int
    pieces: list[Tensor]
    constant: bool


@dataclass
class _Group:
    """Tensors that are moved together. tensors: each with whether it is constant. places: of their storages, once they
    have been offloaded. arrives: an event that completes when the bytes in transit have arrived."""

    tensors: Callable[[], Iterable[tuple[Tensor, bool]]]
    host: HostMemory
    places: dict[int, _Place] = field(default_factory=dict)
    away: bool = False
    arrives: Any = None


class Offload:
    """Keeps named models, and `NAME.optimizer`, in host memory while they are not used. Names that `kinds` does not
    offload are ignored everywhere.

    kinds: a value of `KINDS`. On a GPU copies go through pinned memory on a separate stream. On a CPU, where nothing is
    gained, the same code moves bytes to other host memory, for tests.
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
        return tuple(self._groups)

    def to_host(self, *names: str) -> None:
        """Move to host memory. On return torch may use their device memory for other tensors."""
        leaving = [self._groups[name] for name in names if name in self._groups and not self._groups[name].away]
        for name in names:
            self._await(name)
        with self._copying():
            for group in leaving:
                group.places = self._copied_out(group)
        if self._stream is not None:
            self._stream.synchronize()
        for group in leaving:
            group.away = True
            for place in group.places.values():
                place.storage.resize_(0)

    def to_device(self, *names: str, ahead: bool = False) -> None:
        """Move back to the device, for the next computation. ahead: only for an optimizer's next step, so that its
        states arrive while gradients are computed."""
        for name in names:
            group = self._groups.get(name)
            if group is None or not group.away:
                continue
            for place in group.places.values():
                place.storage.resize_(place.bytes)
            with self._copying():
                for place in group.places.values():
                    for there, here in _pairs(place):
                        there.copy_(here, non_blocking=True)
                group.arrives = self._stream.record_event() if self._stream is not None else None
            group.away = False
        for name in () if ahead else names:
            self._await(name)

    def forget_copies(self) -> None:
        """What `copied` has returned so far is not needed any more: the next copies take its memory."""
        self._copies.reuse()

    def copied(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU, sharded as `tensor` is, wherever its bytes are."""
        for name in self._groups:  # A skipped step has not waited for its optimizer's states.
            self._await(name)
        local = _local(tensor)
        place = self._away().get(_key(local))
        if place is None:
            return self._copies.copy(tensor)
        flat = torch.cat(place.pieces).view(local.dtype)
        found = torch.empty_like(tensor.detach(), device="cpu")
        _local(found).copy_(flat.as_strided(local.size(), local.stride(), local.storage_offset()))
        return found

    def _copied_out(self, group: _Group) -> dict[int, _Place]:
        """The places of the group's tensors as they are now, with their bytes (on a GPU: once the stream is done).
        Tensors that were offloaded before reuse their place."""
        places: dict[int, _Place] = {}
        for tensor, constant in group.tensors():
            local = _local(tensor)
            storage, key = local.untyped_storage(), _key(local)
            if local.device.type != self._device.type or not storage.nbytes() or key in places:
                continue
            place = group.places.get(key)
            if place is None:
                place = _Place(storage, storage.nbytes(), group.host.take(storage.nbytes()), constant=False)
            if not place.constant:
                for there, here in _pairs(place):
                    here.copy_(there, non_blocking=True)
            place.constant = constant
            places[key] = place
        return places

    def _away(self) -> dict[int, _Place]:
        return {key: place for group in self._groups.values() if group.away for key, place in group.places.items()}

    def _await(self, name: str) -> None:
        """Make the next computation wait for bytes in transit."""
        group = self._groups.get(name)
        if group is not None and group.arrives is not None:
            torch.accelerator.current_stream().wait_event(group.arrives)
            group.arrives = None

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """On the copy stream, after all work queued on the device so far."""
        with torch.no_grad():
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.accelerator.current_stream())
            with self._stream:
                yield


def growing_segments(on: bool) -> None:
    """Whether torch allocates GPU memory in segments that can grow, which avoids fragmentation if micro-batches differ
    in size. Not while vLLM's pool is mapped or allocated from: the two are incompatible (pytorch#147851). A setting in
    the environment is kept."""
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments" in given:
        return
    # torch parses the settings as a whole: omitted ones are reset to their default.
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (given, f"expandable_segments:{on}"))))


def _states(optimizer: Optimizer) -> list[tuple[Tensor, bool]]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [(value, False) for value in values if isinstance(value, Tensor)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _key(local: Tensor) -> int:
    """The identity of its storage, which stays the same whatever it holds."""
    return int(local.untyped_storage()._cdata)


def _pairs(place: _Place) -> Iterator[tuple[Tensor, Tensor]]:
    """The storage's bytes and their pieces in host memory, pair by pair."""
    whole = torch.empty(0, dtype=torch.uint8, device=place.storage.device).set_(place.storage)
    return zip(whole.split([len(piece) for piece in place.pieces]), place.pieces, strict=True)
