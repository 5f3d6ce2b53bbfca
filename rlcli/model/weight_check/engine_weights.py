"""Compares the tensors of an engine's model with those that were sent to it: by checksums, so exactly.

An engine does not keep tensors as they are sent. It fuses projections, gives each tensor-parallel rank its part, pads
the vocabulary and ties the head; on CPUs it packs matrices for their kernels and drops the original. None of that is
hard-coded here for any architecture. While the engine's own loaders run for the first time, their copies are recorded:
which part of which sent tensor goes to which place of which parameter (`Layout`). After each sync the checksums of
these places are computed from the engine's memory, those of all tensor-parallel ranks are combined, and their sum must
equal the one that the sender computed while it sent (see `rlcli.model.weight_check.checksum`).

A matrix that a CPU kernel has packed is read through that kernel, by multiplying it with the unit matrix: one product
per number, which is exact. That shows what the kernel computes with, whatever happened to the memory that it was packed
from, and costs as much as a forward pass over as many tokens as the layer has inputs. A large one is a `PackedMatrix`:
read through its kernel at the first sync, and at later ones by bringing its bits back into their first order, which
costs as much as packing it.

A tensor that a loader changes (or an engine that quantises) cannot be compared: `Verified.unchecked` counts those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.model.weight_check.checksum import Sent, columns_of, keys, part_checksum, to_host
from rlcli.model.weight_check.cpu_packed_matrix import PackedMatrix

PEFT_PREFIX = "base_model.model."
DECODER = ("language_model.model.", "model.language_model.")
"""How the names of a decoder beside a tower begin in vLLM, and in transformers."""
ATTENTION = (".attn.", ".self_attn.")
"""What vLLM calls the attention of GPT-OSS, and transformers."""
"""The prefix of the base model's layer names in peft's files."""

DIGIT_BITS = 7
"""Of whole numbers that bfloat16 holds exactly."""
UNIT_ROWS = 512
"""Rows of the unit matrix in one product."""


class Part(NamedTuple):
    """A rank's part of the tensor `name`. place: which elements of it; equal parts have equal places. checksum: None if
    it is not kept as it was sent."""

    name: str
    place: tuple[Any, ...]
    numel: int
    checksum: int | None


class Verified(NamedTuple):
    """The result of a comparison. tensors: how many were equal, byte by byte. unchecked: how many could not be
    compared. differences: one text for each that differs."""

    tensors: int
    unchecked: int
    differences: list[str]


@dataclass(frozen=True)
class Region:
    """A part of a sent tensor and its place in the tensor `owner`, both as `[rows, width]` after sorting by the strides
    in the sent one. rows: its rows in the sent tensor, int64. column: its first column there."""

    owner: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    rows: Tensor
    column: int
    place: tuple[Any, ...]
    row_keys: dict[torch.device, Tensor] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, owner: str, held: Tensor, to: Tensor, source: Tensor, offset: int, shape: torch.Size) -> Region | None:
        """The copy of `source`, which begins `offset` elements into a contiguous tensor of `shape`, to the part `to` of
        `held`. None if it is not a block of rows and columns."""
        columns = columns_of(shape)
        strides = source.expand(to.shape).stride()
        dims = [(size, *both) for size, *both in zip(to.shape, to.stride(), strides, strict=True) if size > 1]
        dims.sort(key=lambda dim: -dim[2])
        if not dims or dims[-1][2] != 1:
            dims.append((1, 1, 1))
        *lead, (width, step, _) = dims
        if not lead and width > columns and offset % columns == width % columns == 0:  # concatenated rows
            lead, width = [(width // columns, step * columns, columns)], columns
        column = offset % columns
        if column + width > columns or any(stride % columns or not stride for _, _, stride in lead):
            return None
        rows = torch.tensor(offset // columns)
        for size, _, stride in lead:
            rows = rows[..., None] + torch.arange(size) * (stride // columns)
        sizes = (*(size for size, _, _ in lead), width)
        place = (offset, tuple((size, stride) for size, _, stride in lead), width)
        steps = (*(step for _, step, _ in lead), dims[-1][1])
        return cls(owner, to.storage_offset() - held.storage_offset(), sizes, steps, rows.reshape(-1), column, place)

    @property
    def numel(self) -> int:
        return len(self.rows) * self.sizes[-1]

    def checksum(self, owner: Tensor, dtype: torch.dtype) -> Tensor:
        """Checksum of the contents of `owner` there, as a part of the sent tensor. dtype: of the sent tensor."""
        held = owner.as_strided(self.sizes, self.strides, owner.storage_offset() + self.offset)
        return part_checksum(held.to(dtype).reshape(-1, self.sizes[-1]), self._row_keys(owner.device), self.column)

    def _row_keys(self, device: torch.device) -> Tensor:
        """Keys of `rows`. Cached: they are the same at every sync."""
        if device not in self.row_keys:
            self.row_keys[device] = keys(int(self.rows.max()) + 1, 0, device)[self.rows.to(device)]
        return self.row_keys[device]


class _Copies(TorchDispatchMode):
    """Notes each copy from tensor to tensor while it is entered."""

    def _note(self, to: Tensor, source: Tensor) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))


Held = Callable[[str, torch.Size], Sequence[Tensor]]
"""For a parameter, by its name and shape, all tensors with which the engine computes in its place."""


@dataclass
class Layout:
    """Where sent tensors are placed in a model. regions: by the name of the parameter, each with the name of the sent
    tensor. forms: shape and strides of these parameters. changed: names of tensors that reached the model in another
    form. untouched: parameters that were not, or only partly, filled."""

    regions: dict[str, list[tuple[str, Region]]] = field(default_factory=lambda: defaultdict(list))
    forms: dict[str, tuple[torch.Size, tuple[int, ...]]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    untouched: list[str] = field(default_factory=list)

    def add(self, name: str, region: Region | None, owner: Tensor) -> None:
        """Add the region of `name` in `owner`; None if it is unknown."""
        if region is None:
            self.changed.add(name)
            return
        self.forms[region.owner] = owner.shape, owner.stride()
        if (name, region.place) not in [(other, one.place) for other, one in self.regions[region.owner]]:
            self.regions[region.owner].append((name, region))

    def parts(self, held: Held, sent: Mapping[str, Sent]) -> list[Part]:
        """All parts of the sent tensors that are here."""
        found = [Part(name, (), 0, None) for name in self.changed if name in sent]
        computed: list[tuple[str, Region, Tensor]] = []
        for owner, regions in self.regions.items():
            tensors = held(owner, self.forms[owner][0])
            for name, region in regions:
                fit = [one for one in tensors if name in sent and self._fits(owner, one, sent[name])]
                computed += [(name, region, region.checksum(one, sent[name].dtype)) for one in fit]
                found += [Part(name, region.place, region.numel, None)] if name in sent and not fit else []
        sums = to_host([total for _, _, total in computed])
        kept = zip(computed, sums, strict=True)
        return found + [Part(name, region.place, region.numel, total) for (name, region, _), total in kept]

    def _fits(self, owner: str, tensor: Tensor, sent: Sent) -> bool:
        return (tensor.shape, tensor.stride()) == self.forms[owner] and tensor.itemsize >= sent.dtype.itemsize


def compare(sent: Mapping[str, Sent], ranks: Sequence[Sequence[Part]]) -> Verified:
    """Compare the sent tensors with the parts that the ranks of one engine hold together."""
    parts: dict[str, list[tuple[int, Part]]] = defaultdict(list)
    for rank, held in enumerate(ranks):
        for part in held:
            parts[part.name].append((rank, part))
    differences, unchecked = [], 0
    for name, tensor in sent.items():
        if any(part.checksum is None for _, part in parts[name]):
            unchecked += 1
        elif why := _difference(tensor, parts[name], len(ranks)):
            differences.append(f"{name} {why}")
    return Verified(len(sent) - unchecked - len(differences), unchecked, differences)


def _difference(tensor: Sent, parts: Sequence[tuple[int, Part]], ranks: int) -> str:
    """How the ranks' parts of one tensor differ from it, or an empty text."""
    if not parts:
        return "was not loaded"
    wrong = sorted({rank for rank, part in parts if part.numel == tensor.numel and part.checksum != tensor.checksum})
    if wrong:
        return _on(wrong, ranks)
    slices: dict[tuple[Any, ...], tuple[int, int]] = {}
    for _, part in parts:
        if part.numel < tensor.numel:
            one = part.numel, part.checksum or 0
            if slices.setdefault(part.place, one) != one:
                return "is not the same in all places that keep it"
    elements = sum(numel for numel, _ in slices.values())
    if slices and elements != tensor.numel:
        return f"was loaded in part: {elements:,} of {tensor.numel:,} elements"
    if slices and (sum(total for _, total in slices.values()) - tensor.checksum) % (1 << 64):
        return _on(sorted({rank for rank, _ in parts}), ranks)
    return ""


def _on(wrong: Sequence[int], ranks: int) -> str:
    return "differs" if ranks == 1 else f"differs on rank {', '.join(map(str, wrong))} of the engine"


class Recorder(_Copies):
    """Records the layout of a model while weights are loaded into it for the first time.

    with Recorder(model) as recorder:
        load(recorder.given(weights))
    layout = recorder.layout()
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._names = one_name(model)
        self._owners: dict[int, tuple[str, Tensor]] = {}
        self._given: list[tuple[int, int, str, torch.Size, bool]] = []
        self._layout = Layout()
        self._changed: dict[str, int] = {}
        self._empty: frozenset[str] = frozenset()

    def given(
        self,
        weights: Iterable[tuple[str, Tensor]],
        written: Mapping[str, Tensor] = MappingProxyType({}),
        empty: Collection[str] = (),
    ) -> Iterator[tuple[str, Tensor]]:
        """`weights`, for a loader to read. written: parameters that are filled past the loader, while it has others in
        their places, by their names. empty: names of those that another rank fills."""
        self._owners |= {_storage(parameter): (owner, parameter) for owner, parameter in written.items()}
        self._empty = frozenset(empty)
        for name, tensor in weights:
            if not self._given:  # Now the parameters are the ones to fill: vLLM first creates empty ones.
                for owner, parameter in self._model.named_parameters(remove_duplicate=False):
                    self._owners.setdefault(_storage(parameter), (self._names[owner], parameter))
            begin = tensor.data_ptr()
            self._given.append((begin, begin + tensor.nbytes, name, tensor.shape, tensor.is_contiguous()))
            yield name, tensor

    def layout(self) -> Layout:
        layout = self._layout
        loaded = {name for regions in layout.regions.values() for name, _ in regions}
        layout.changed |= {name for _, _, name, shape, _ in self._given if shape.numel() == 1} - loaded
        # Elements of each parameter.
        filled = {owner: sum(one.numel for _, one in regions) for owner, regions in layout.regions.items()}
        filled |= self._changed
        for owner, parameter in self._owners.values():
            wanted = int(getattr(parameter, "weight_loader_numel", parameter.numel()))
            if owner in self._empty:
                continue
            if wanted == 1:  # vLLM fills these with a number, without a copy
                continue
            if wanted > filled.get(owner, 0) and not (filled.get(owner) and self._is_padded(owner)):
                layout.untouched.append(owner)
        return layout

    def _is_padded(self, owner: str) -> bool:
        """Whether it belongs to an embedding, which may have rows beyond the vocabulary."""
        return hasattr(self._model.get_submodule(owner.rpartition(".")[0]), "num_embeddings_padded")

    def _note(self, to: Tensor, source: Tensor) -> None:
        found = self._owners.get(_storage(to))
        if found is None or _storage(source) in self._owners:  # vLLM copies some parameters onto themselves
            return
        owner, parameter = found
        begin = source.data_ptr() if source.device.type != "meta" else 0
        given = [one for one in self._given if one[0] <= begin < one[1]] or [self._given[-1]]
        start, end, name, shape, contiguous = given[-1]
        region = None
        if contiguous and start <= begin < end:
            region = Region.of(owner, parameter, to, source, (begin - start) // source.itemsize, shape)
        self._layout.add(name, region, parameter)
        if region is None:
            self._changed[owner] = parameter.numel()


def one_name(model: nn.Module) -> dict[str, str]:
    """Name of each parameter → the first of its names, if it is tied."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


class AdapterRecorder(_Copies):
    """Like `Recorder`, for a LoRA adapter in vLLM's `manager`, while it is loaded for the first time as `adapter`."""

    def __init__(self, manager: Any, adapter: int) -> None:
        super().__init__()
        self._manager, self._adapter = manager, adapter
        self._slots = {_storage(tensor): (name, tensor) for name, tensor in adapter_slots(manager).items()}
        self._made: list[tuple[Tensor, Tensor]] = []

    def layout(self) -> Layout:
        layout = Layout()
        read = {_storage(tensor): (name, tensor) for name, tensor in self._read().items()}
        for to, source in self._made:
            if _storage(source) in read:
                (owner, held), (name, tensor) = self._slots[_storage(to)], read[_storage(source)]
                offset = source.storage_offset() - tensor.storage_offset()
                layout.add(name, Region.of(owner, held, to, source, offset, tensor.shape), held)
        # vLLM holds the factors of experts in an order of its own, which is not compared.
        experts = [path for path in self._manager.list_adapters()[self._adapter].loras if path.endswith(".experts")]
        for path in experts:
            own = f"{PEFT_PREFIX}{path.replace(*DECODER)}"
            layout.changed |= {f"{own}{at}.lora_{one}.weight" for at in ("", ".base_layer") for one in "AB"}
        return layout

    def _note(self, to: Tensor, source: Tensor) -> None:
        if _storage(to) in self._slots:
            self._made.append((to, source))

    def _read(self) -> dict[str, Tensor]:
        """The tensors of the adapter that vLLM has read, by the names in peft's files."""
        found: dict[str, Tensor] = {}
        for path, layer in self._manager.list_adapters()[self._adapter].loras.items():
            own = self._manager.packed_modules.get(path, [path])
            names = [name.replace(*DECODER).replace(*ATTENTION) for name in own]
            for kind, tensors in (("lora_A", layer.lora_a), ("lora_B", layer.lora_b)):
                each = tensors if isinstance(tensors, (list, tuple)) else [tensors]
                found |= {f"{PEFT_PREFIX}{name}.{kind}.weight": t for name, t in zip(names, each, strict=False)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def adapter_slots(manager: Any) -> dict[str, Tensor]:
    """The tensors that vLLM's LoRA kernels read."""
    return {
        f"{path}.{kind}.{index}": tensor
        for path, module in manager.modules.items()
        for kind in ("lora_a_stacked", "lora_b_stacked")
        for index, tensor in enumerate(getattr(module, kind, ()))
    }


def base_parts(layouts: Sequence[Layout], held: Held, sent: Mapping[str, Sent]) -> list[Part]:
    """All parts of an adapter's base that are here. Tensors that no recorded loader has read cannot be compared: a
    checkpoint may have other names, and vLLM refuses one with a missing tensor."""
    found = [part for layout in layouts for part in layout.parts(held, sent)]
    known = {part.name for part in found}
    return found + [Part(name, (), 0, None) for name in sent if name not in known]


def weights_of(model: nn.Module, *, through_kernels: bool = True) -> Held:
    """The tensors with which `model` computes: its parameters, and for each matrix that a CPU kernel has packed the one
    by which the kernel multiplies; of experts that a CPU kernel has packed, the packed ones in their first order. Names
    omit the layers that vLLM wraps around a model's for LoRA. through_kernels: read a `PackedMatrix` by a product too.
    """
    parameters: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    kernels: dict[str, list[nn.Module]] = defaultdict(list)
    experts: dict[str, str] = {}
    head = getattr(model, "lm_head", None)
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(path.replace(".base_layer", ""), recurse=False):
            parameters[key] = parameter
            first.setdefault(id(parameter), key)
        looked_up = hasattr(module, "num_embeddings") and module is not head
        if "cpu_linear" in vars(module) and not looked_up:  # a LoRA layer exposes its base's attribute
            kernels[first[id(module.weight)]].append(module)
        if isa := packed_experts(module):
            path = path.replace(".base_layer", "")
            experts.update({f"{path}.w13_weight": isa, f"{path}.w2_weight": isa})

    def held(owner: str, shape: torch.Size) -> list[Tensor]:
        own = parameters[owner].detach()
        if owner in experts:
            return [_unpacked(own, experts[owner])]
        packed = [_by_kernel(module, shape[1], own.dtype, through_kernels) for module in kernels[owner]]
        return [own, *packed] if own.numel() or not packed else packed

    return held


def _by_kernel(module: nn.Module, inputs: int, dtype: torch.dtype, through_kernels: bool) -> Tensor:
    """The matrix `[outputs, inputs]` by which a CPU kernel multiplies."""
    if isinstance(module.cpu_linear, PackedMatrix) and not through_kernels:
        return module.cpu_linear.read()
    unit = torch.eye(inputs, dtype=dtype)
    rows = [module.cpu_linear(part, module.weight, None) for part in unit.split(UNIT_ROWS)]
    whole = (torch.cat(rows) if len(rows) > 1 else rows[0]).t().contiguous()
    return whole.flatten().view(whole.shape)  # with the usual strides if it is one row, too


def packed_experts(module: nn.Module) -> str:
    """The instruction set for which a kernel of vLLM's has packed the experts of `module`; empty if none has."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if not hasattr(module, "w13_weight") or experts is None or getattr(experts, "_use_zentorch", False):
        return ""
    return str(getattr(experts, "isa", ""))


def _unpacked(packed: Tensor, isa: str) -> Tensor:
    """[E, N, K] in the order before packing, which is another order of each expert's elements."""
    order = _packed_order(packed.shape[1:], packed.dtype, isa)
    return torch.empty_like(packed).view(len(packed), -1).index_copy_(1, order, packed.flatten(1)).view_as(packed)


@cache
def _packed_order(shape: torch.Size, dtype: torch.dtype, isa: str) -> Tensor:
    """int64 [N · K]: for each place of a packed matrix the place before. Found by packing the digits of the places:
    every dtype holds small whole numbers exactly."""
    place, order = torch.arange(shape.numel()), torch.zeros(shape.numel(), dtype=torch.int64)
    for power in range(0, shape.numel().bit_length(), DIGIT_BITS):
        digit = ((place >> power) % (1 << DIGIT_BITS)).to(dtype).view(1, *shape)
        packed = torch.empty_like(digit)
        torch.ops._C.prepack_moe_weight(digit, packed, isa)
        order += packed.view(-1).to(torch.int64) << power
    return order


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
