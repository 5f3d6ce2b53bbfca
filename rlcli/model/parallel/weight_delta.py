"""Delta weight sync: sends only the values that have changed since the last sync, compared bit by bit.

At the learning rates of RL an update changes few of the values in the engine's dtype: AdamW moves a weight by about the
learning rate, and bfloat16 has three decimal digits. Each rank compares its shard with the copy that was sent last and
sends (index, value) of the differences; a receiver writes these into its copy of the weights. Both sides then hold the
same bits, which the checksums of the full tensors confirm before an engine reads the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcli.model.parallel.buckets import BUCKET_BYTES, NamedTensor, Rows, buckets, rows_of
from rlcli.model.parallel.host_memory import HostMemory
from rlcli.model.tensor_names import kept_dtype
from rlcli.model.weight_check.checksum import INTEGERS, TensorChecksum, columns_of, keys, part_checksum, to_host

if TYPE_CHECKING:
    from jaxtyping import Bool, Int, Shaped

MOST = 0.25
"""Share of changed values above which a tensor is sent in full: at a third, index and value in bfloat16 are as many
bytes as all values, and scattered writes are slower than a copy."""

INDEX, VALUE = "+index:", "+value:"
"""Prefixes of a tensor's name for the two parts of its changes."""


@dataclass
class LastSent:
    """The sender's side on one rank: its shard of every parameter as it was sent last, in the engine's dtype, in host
    memory."""

    changed: int = 0
    """Values that had changed at the last `changes`, over all ranks."""
    total: int = 0
    """Values of the model at the last `changes`, over all ranks."""
    sums: dict[str, TensorChecksum] = field(default_factory=dict)
    """Checksums of the full tensors at the last `changes`."""
    _parts: dict[str, Tensor] = field(default_factory=dict)
    """This rank's values as they were sent last, flat, by the parameter's name."""
    _memory: HostMemory = field(default_factory=HostMemory)
    """Memory in which `_parts` are allocated."""

    def sent(self) -> dict[str, TensorChecksum]:
        """Checksums of all full tensors, as `Checksums.sent`."""
        return self.sums

    def forget(self) -> None:
        """Have the next `changes` send all tensors in full."""
        self._parts.clear()
        self._memory.reuse()

    def changes(
        self, weights: Iterable[NamedTensor], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[list[NamedTensor]]:
        """Yields the changes of the parameters `weights` in `dtype`, in buckets of about `bucket_bytes`: those of a
        tensor, as `+index:NAME` and `+value:NAME`, or, if more than MOST of it has changed or it has not
        been sent yet, the full tensor under its name. Sets `sums`, `changed` and `total`.

        Collective: every rank iterates to the end, in step; rank 0 gets the complete changes.
        """
        parts = [_Part.of(name, parameter) for name, parameter in weights]
        counts, sums = list[Tensor](), list[Tensor]()
        for part in parts:
            values = part.values(dtype)
            sums.append(part.checksum(values))
            counts.append(self._differing(part, values).sum())
        _add_over_ranks(parts, counts, sums)
        changed = dict(zip((part.name for part in parts), to_host(counts), strict=True))
        totals = zip(parts, to_host(sums), strict=True)
        self.sums = {
            part.name: TensorChecksum(total, part.parameter.numel(), kept_dtype(part.name, dtype))
            for part, total in totals
        }
        self.changed, self.total = sum(changed.values()), sum(part.parameter.numel() for part in parts)
        known = {part.name for part in parts if part.name in self._parts}
        sparse = [part for part in parts if part.name in known and changed[part.name] <= MOST * part.parameter.numel()]
        sparse_names = {part.name for part in sparse}
        yield from self._sparse([part for part in sparse if changed[part.name]], dtype, bucket_bytes)
        dense = [part for part in parts if part.name not in sparse_names]
        for part in dense:
            values, last = part.values(dtype), self._parts.get(part.name)
            self._parts[part.name] = self._memory.copy(values) if last is None else last.copy_(values)
        if dense:
            yield from buckets([(part.name, part.parameter) for part in dense], dtype, bucket_bytes)

    def _sparse(self, parts: list[_Part], dtype: torch.dtype, bucket_bytes: int) -> Iterator[list[NamedTensor]]:
        """The changes of `parts`, gathered for several consecutive ones at once. Updates `_parts`."""
        group: list[_Part] = []
        size = 0
        for part in parts:
            nbytes = int(MOST * part.parameter.numel() * (dtype.itemsize + part.index.itemsize))
            if group and (size + nbytes > bucket_bytes or part.group_key != group[0].group_key):
                yield self._gathered(group, dtype)
                group, size = [], 0
            group.append(part)
            size += nbytes
        if group:
            yield self._gathered(group, dtype)

    def _gathered(self, group: list[_Part], dtype: torch.dtype) -> list[NamedTensor]:
        """The changes of a group of parameters on all ranks. Updates `_parts`."""
        changes: list[tuple[Tensor, Tensor]] = []
        for part in group:
            values = part.values(dtype)
            index = self._differing(part, values).nonzero()[:, 0]
            changed_values = values[index]
            self._parts[part.name][index.cpu()] = changed_values.cpu()
            changes.append((index.to(part.index) + part.begin, changed_values))
        by_rank = [changes] if group[0].rows is None else _gather(group[0].rows, changes)
        tensors: list[NamedTensor] = []
        for part, of_ranks in zip(group, zip(*by_rank, strict=True), strict=True):
            tensors.append((INDEX + part.name, torch.cat([index for index, _ in of_ranks])))
            tensors.append((VALUE + part.name, torch.cat([value for _, value in of_ranks])))
        return tensors

    def _differing(self, part: _Part, values: Shaped[Tensor, " N"]) -> Bool[Tensor, " N"]:
        """True for values that differ in any bit from those sent last; for all if none were sent."""
        last = self._parts.get(part.name)
        if last is None:
            return torch.ones_like(values, dtype=torch.bool)
        bits = INTEGERS[values.itemsize]
        return values.view(bits) != last.to(values.device, non_blocking=True).view(bits)


@dataclass(frozen=True)
class _Part:
    """A rank's part of a parameter."""

    name: str
    """Name of the parameter."""
    parameter: Tensor
    """The parameter, which may be sharded, detached."""
    rows: Rows | None
    """The rows that the rank has; None: all."""
    begin: int
    """Elements of the parameter before this part."""
    index: torch.dtype
    """Integer type of an index into the full parameter."""

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> _Part:
        parameter = parameter.detach()
        index = torch.int32 if parameter.numel() < 1 << 31 else torch.int64
        rows = rows_of(parameter)
        return cls(name, parameter, rows, 0 if rows is None else rows.begin * parameter.shape[1:].numel(), index)

    @property
    def group_key(self) -> object:
        """Equal for parameters that are gathered over the same ranks."""
        return self.rows is not None and self.rows.ranks

    def values(self, dtype: torch.dtype) -> Shaped[Tensor, " N"]:
        """This rank's values, flat. May share memory with the parameter. dtype: of the model."""
        local = self.parameter
        if isinstance(local, DTensor):
            is_local = self.rows is not None or local.device_mesh.size() == 1
            local = local.to_local() if is_local else local.full_tensor()
        return local.to(kept_dtype(self.name, dtype)).reshape(-1)

    def checksum(self, values: Shaped[Tensor, " N"]) -> Int[Tensor, ""]:
        """The contribution of this rank's values to the checksum of the full tensor: int64."""
        columns = columns_of(self.parameter.shape)
        if self.parameter.ndim < 2:
            return part_checksum(values[None], keys(1, 0, values.device), self.begin)
        part = values.view(-1, columns)
        first = self.begin // columns
        return part_checksum(part, keys(first + len(part), 0, values.device)[first:], 0)


def _add_over_ranks(parts: list[_Part], *columns: list[Tensor]) -> None:
    """Add each column's scalars of the sharded `parts` over the ranks that share them, in place."""
    groups: dict[object, list[int]] = {}
    for number, part in enumerate(parts):
        if part.rows is not None:
            groups.setdefault(part.group_key, []).append(number)
    for numbers in groups.values():
        first = parts[numbers[0]]
        assert first.rows is not None
        device = cast(DTensor, first.parameter).to_local().device
        total = torch.stack([column[number].to(device, torch.int64) for column in columns for number in numbers])
        dist.all_reduce(total, group=first.rows.group)
        for value, (column, number) in zip(total, ((c, n) for c in columns for n in numbers), strict=True):
            column[number] = value


def _gather(rows: Rows, changes: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """The changes, (index, value) of each parameter of a group, of each rank that has some of `rows`."""
    group, ranks = rows.group, len(rows.counts)
    indices, values = torch.cat([index for index, _ in changes]), torch.cat([value for _, value in changes])
    lengths = torch.tensor([len(index) for index, _ in changes], device=indices.device)
    all_lengths = [torch.empty_like(lengths) for _ in range(ranks)]
    dist.all_gather(all_lengths, lengths, group=group)
    sizes = torch.stack(all_lengths).tolist()
    padded_size = max(map(sum, sizes))
    gathered = []
    for local in (indices, values):
        padded = local.new_zeros(padded_size)
        padded[: len(local)] = local
        received = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(received, padded, group=group)
        gathered.append([tensor[: sum(size)].split(size) for tensor, size in zip(received, sizes, strict=True)])
    return [list(zip(*of_rank, strict=True)) for of_rank in zip(*gathered, strict=True)]


class WeightCopy:
    """The receiver's side: all weights as they were sent, in host memory, independent of the engine's tensors.

    copy = WeightCopy()
    copy.take(received)
    if not copy.differences(sent):
        engine.load_weights(copy.named())
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._lost: set[str] = set()
        self._memory = HostMemory()

    def take(self, tensors: Iterable[NamedTensor]) -> None:
        """Apply the results of `LastSent.changes`, in their order, in place."""
        index: Tensor | None = None
        for name, tensor in tensors:
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
        """Write changes of one tensor. If it is missing, too short or of another dtype, its name goes into `_lost`."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.dtype != value.dtype or (len(index) and int(index.max()) >= tensor.numel()):
            self._lost.add(name)
        else:
            tensor.view(-1)[index] = value

    def differences(self, sent: dict[str, TensorChecksum]) -> list[str]:
        """Names of the tensors that differ from what was sent. Tensors that the sender does not list are dropped."""
        lost, self._lost = self._lost, set()
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name in sent}
        checksums = {
            name: _Part.of(name, tensor).checksum(tensor.reshape(-1)) for name, tensor in self._tensors.items()
        }
        sums = dict(zip(checksums, to_host(list(checksums.values())), strict=True))
        return [name for name, metadata in sent.items() if name in lost or sums.get(name) != metadata.checksum]

    def named(self) -> Iterator[NamedTensor]:
        """All weights, with their names."""
        yield from self._tensors.items()

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self._tensors.values())
