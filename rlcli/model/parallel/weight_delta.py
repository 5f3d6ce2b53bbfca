"""What a weight sync must send since the last one: the changed values of each shard, bit by bit.

At the learning rates of RL an update changes few of the values that an engine computes with: AdamW moves a weight by
about the learning rate, and bfloat16 has three decimal digits. Each rank compares its own shard with the copy that was
sent last and sends (index, value) of what differs; a receiver writes these into its own copy of the weights. Both sides
then hold the same bits, which the checksums of the whole tensors confirm before an engine reads the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcli.model.parallel.buckets import BUCKET_BYTES, Named, Rows, buckets, rows_of
from rlcli.model.parallel.host_memory import HostMemory
from rlcli.model.tensor_names import kept_dtype
from rlcli.model.weight_check.checksum import INTEGERS, Sent, columns_of, keys, part_checksum, to_host

MOST = 0.25
"""A tensor of which a larger share has changed is sent whole: at a third, index and value of bfloat16 are as many bytes
as all values, and scattered writes are slower than a copy."""

INDEX, VALUE = "+index:", "+value:"
"""Prefixes of a tensor's name for the two parts of its changes."""


@dataclass
class LastSent:
    """A rank's side: its part of every parameter as it was sent last, in the engine's dtype, in host memory; about as
    much as its share of the model. changed, total: values, of the last `changes`, over all ranks."""

    changed: int = 0
    total: int = 0
    sums: dict[str, Sent] = field(default_factory=dict)
    _parts: dict[str, Tensor] = field(default_factory=dict)
    _memory: HostMemory = field(default_factory=HostMemory)

    def sent(self) -> dict[str, Sent]:
        """Of all whole tensors, as `Checksums.sent`."""
        return self.sums

    def forget(self) -> None:
        """Send everything next time."""
        self._parts.clear()
        self._memory.reuse()

    def changes(
        self, named: Iterable[Named], dtype: torch.dtype, most_bytes: int = BUCKET_BYTES
    ) -> Iterator[list[Named]]:
        """What receivers need of the parameters `named` in `dtype`, in buckets of about `most_bytes`: of each tensor
        its changes, as `+index:NAME` and `+value:NAME`, or, where more than MOST of it has changed or nothing was sent
        before, the whole tensor under its name. `sums` then has the checksums of all whole tensors.

        Collective: every rank iterates to the end, in step; what rank 0 gets is complete.
        """
        parts = [_Part.of(name, parameter) for name, parameter in named]
        counts, sums = list[Tensor](), list[Tensor]()
        for part in parts:
            now = part.values(dtype)
            sums.append(part.checksum(now))
            counts.append(self._differing(part, now).sum())
        _add_over_ranks(parts, counts, sums)
        changed = dict(zip((part.name for part in parts), to_host(counts), strict=True))
        totals = zip(parts, to_host(sums), strict=True)
        self.sums = {
            part.name: Sent(total, part.parameter.numel(), kept_dtype(part.name, dtype)) for part, total in totals
        }
        self.changed, self.total = sum(changed.values()), sum(part.parameter.numel() for part in parts)
        known = {part.name for part in parts if part.name in self._parts}
        few = [part for part in parts if part.name in known and changed[part.name] <= MOST * part.parameter.numel()]
        kept = {part.name for part in few}
        yield from self._sparse([part for part in few if changed[part.name]], dtype, most_bytes)
        rest = [part for part in parts if part.name not in kept]
        for part in rest:
            values, last = part.values(dtype), self._parts.get(part.name)
            self._parts[part.name] = self._memory.copy(values) if last is None else last.copy_(values)
        if rest:
            yield from buckets([(part.name, part.parameter) for part in rest], dtype, most_bytes)

    def _sparse(self, parts: list[_Part], dtype: torch.dtype, most_bytes: int) -> Iterator[list[Named]]:
        """The changes of `parts`, gathered for some neighbours at once. `_parts` is brought up to date."""
        group: list[_Part] = []
        size = 0
        for part in parts:
            own = int(MOST * part.parameter.numel() * (dtype.itemsize + part.index.itemsize))
            if group and (size + own > most_bytes or part.together != group[0].together):
                yield self._gathered(group, dtype)
                group, size = [], 0
            group.append(part)
            size += own
        if group:
            yield self._gathered(group, dtype)

    def _gathered(self, group: list[_Part], dtype: torch.dtype) -> list[Named]:
        found: list[tuple[Tensor, Tensor]] = []
        for part in group:
            now = part.values(dtype)
            at = self._differing(part, now).nonzero()[:, 0]
            value = now[at]
            self._parts[part.name][at.cpu()] = value.cpu()
            found.append((at.to(part.index) + part.begin, value))
        everywhere = [found] if group[0].rows is None else _gather(group[0].rows, found)
        together = zip(group, zip(*everywhere, strict=True), strict=True)
        return [
            named
            for part, ranks in together
            for named in (
                (INDEX + part.name, torch.cat([index for index, _ in ranks])),
                (VALUE + part.name, torch.cat([value for _, value in ranks])),
            )
        ]

    def _differing(self, part: _Part, now: Tensor) -> Tensor:
        """Which values differ from those sent last in any bit: bool, one a value; all if none were sent."""
        last = self._parts.get(part.name)
        if last is None:
            return torch.ones_like(now, dtype=torch.bool)
        bits = INTEGERS[now.itemsize]
        return now.view(bits) != last.to(now.device, non_blocking=True).view(bits)


@dataclass(frozen=True)
class _Part:
    """A rank's part of a parameter. rows: which it has; None: all. begin: elements of the parameter before this part.
    index: type of an index into the whole."""

    name: str
    parameter: Tensor
    rows: Rows | None
    begin: int
    index: torch.dtype

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> _Part:
        parameter = parameter.detach()
        index = torch.int32 if parameter.numel() < 1 << 31 else torch.int64
        rows = rows_of(parameter)
        return cls(name, parameter, rows, 0 if rows is None else rows.begin * parameter.shape[1:].numel(), index)

    @property
    def together(self) -> object:
        """Equal for parameters that are gathered over the same ranks."""
        return self.rows is not None and self.rows.ranks

    def values(self, dtype: torch.dtype) -> Tensor:
        """This rank's values, flat. May be the parameter's own memory. dtype: of the model."""
        own = self.parameter
        if isinstance(own, DTensor):
            own = own.to_local() if self.rows is not None or own.device_mesh.size() == 1 else own.full_tensor()
        return own.to(kept_dtype(self.name, dtype)).reshape(-1)

    def checksum(self, values: Tensor) -> Tensor:
        """The contribution of this rank's values to the checksum of the whole tensor: int64 scalar."""
        columns = columns_of(self.parameter.shape)
        if self.parameter.ndim < 2:
            return part_checksum(values[None], keys(1, 0, values.device), self.begin)
        part = values.view(-1, columns)
        first = self.begin // columns
        return part_checksum(part, keys(first + len(part), 0, values.device)[first:], 0)


def _add_over_ranks(parts: list[_Part], *columns: list[Tensor]) -> None:
    """Add each column's scalars of the sharded `parts` over the ranks that share them, in place."""
    groups: dict[object, list[int]] = {}
    for place, part in enumerate(parts):
        if part.rows is not None:
            groups.setdefault(part.together, []).append(place)
    for places in groups.values():
        first = parts[places[0]]
        assert first.rows is not None
        device = cast(DTensor, first.parameter).to_local().device
        total = torch.stack([column[place].to(device, torch.int64) for column in columns for place in places])
        dist.all_reduce(total, group=first.rows.group)
        for value, (column, place) in zip(total, ((c, p) for c in columns for p in places), strict=True):
            column[place] = value


def _gather(rows: Rows, found: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """What each of the ranks that divide these rows has found."""
    group, ranks = rows.group, len(rows.counts)
    index, value = torch.cat([one for one, _ in found]), torch.cat([one for _, one in found])
    lengths = torch.tensor([len(one) for one, _ in found], device=index.device)
    all_lengths = [torch.empty_like(lengths) for _ in range(ranks)]
    dist.all_gather(all_lengths, lengths, group=group)
    sizes = torch.stack(all_lengths).tolist()
    most = max(map(sum, sizes))
    whole = []
    for own in (index, value):
        padded = own.new_zeros(most)
        padded[: len(own)] = own
        ranks_own = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(ranks_own, padded, group=group)
        whole.append([one[: sum(size)].split(size) for one, size in zip(ranks_own, sizes, strict=True)])
    return [list(zip(*both, strict=True)) for both in zip(*whole, strict=True)]


class WeightCopy:
    """A receiver's side: all weights as they were sent, in host memory, whatever the engine computes with meanwhile.

    copy = WeightCopy()
    copy.take(received)
    if not copy.differences(sent):
        engine.load_weights(copy.named())
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._lost: set[str] = set()
        self._memory = HostMemory()

    def take(self, named: Iterable[Named]) -> None:
        """Write what `LastSent.changes` gave, in its order, in place."""
        index: Tensor | None = None
        for name, tensor in named:
            if name.startswith(INDEX):
                index = tensor.to("cpu", torch.int64)
            elif name.startswith(VALUE):
                assert index is not None, "an index comes before its values"
                self._write(name.removeprefix(VALUE), index, tensor.cpu())
            elif name in self._tensors and self._tensors[name].shape == tensor.shape:
                self._tensors[name].copy_(tensor)
            else:
                self._tensors[name] = self._memory.copy(tensor)

    def _write(self, name: str, index: Tensor, value: Tensor) -> None:
        """Changes of a tensor that is not here, or is shorter or of another type, are noted: its checksum is wrong."""
        held = self._tensors.get(name)
        if held is None or held.dtype != value.dtype or (len(index) and int(index.max()) >= held.numel()):
            self._lost.add(name)
        else:
            held.view(-1)[index] = value

    def differences(self, sent: dict[str, Sent]) -> list[str]:
        """Names of the tensors that are not as they were sent. What is not known to the sender is dropped."""
        lost, self._lost = self._lost, set()
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name in sent}
        here = {name: _Part.of(name, tensor).checksum(tensor.reshape(-1)) for name, tensor in self._tensors.items()}
        sums = dict(zip(here, to_host(list(here.values())), strict=True))
        return [name for name, one in sent.items() if name in lost or sums.get(name) != one.checksum]

    def named(self) -> Iterator[Named]:
        yield from self._tensors.items()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())
