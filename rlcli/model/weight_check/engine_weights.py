"""Compares the weights of an engine's model with those that were sent to it, exactly, by checksums.

An engine does not store tensors as they are sent. It fuses projections, shards them over tensor-parallel ranks, pads
the vocabulary and ties the head; on CPUs it packs matrices for their kernels and drops the originals. None of that is
hard-coded here for any architecture. While the engine's loaders run for the first time, their copies are recorded:
which part of which sent tensor goes to which region of which parameter (`Layout`). After each sync the checksums of
these regions are computed from the engine's memory and combined over all tensor-parallel ranks; their sum must equal
the checksum that the sender computed (see `rlcli.model.weight_check.checksum`).

A matrix that a CPU kernel has packed is read through that kernel, by multiplying it with the identity matrix: one
product per number, which is exact. That shows the values that the kernel computes with, whatever happened to the memory
that it was packed from, and costs as much as a forward pass over as many tokens as the layer has inputs. A large matrix
is a `PackedMatrix`: it is read through its kernel at the first sync, and by unpacking at later ones, which costs as
much as packing it.

A tensor whose values a loader changes (or an engine that quantises) cannot be compared: `Verified.unchecked` counts
those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.model.weight_check.checksum import TensorChecksum, columns_of, keys, part_checksum, to_host
from rlcli.model.weight_check.cpu_packed_matrix import PackedMatrix

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

PEFT_PREFIX = "base_model.model."
"""Prefix of the base model's layer names in peft's files."""
DECODER = ("language_model.model.", "model.language_model.")
"""Prefixes of the decoder's names in a model with a vision encoder: in vLLM, and in transformers."""
ATTENTION = (".attn.", ".self_attn.")
"""Names of GPT-OSS's attention in vLLM, and in transformers."""

DIGIT_BITS = 7
"""Bits of integers that bfloat16 represents exactly."""
UNIT_ROWS = 512
"""Rows of the identity matrix in one product."""

Elements = tuple[Any, ...]
"""Identifies the elements of a sent tensor that a part consists of: offset, (size, stride) of its dimensions, width."""


class Part(NamedTuple):
    """The elements of a sent tensor that one rank of an engine has."""

    name: str
    """Name of the sent tensor."""
    elements: Elements
    """Its elements that the part has; equal for parts with the same elements."""
    numel: int
    """Number of elements."""
    checksum: int | None
    """Contribution to the checksum of the sent tensor; None if its values are not stored as they were sent."""


class Verified(NamedTuple):
    """The result of a comparison."""

    tensors: int
    """Number of tensors that were equal, byte by byte."""
    unchecked: int
    """Number of tensors that could not be compared."""
    differences: list[str]
    """A message for each tensor that differs."""


@dataclass(frozen=True)
class Region:
    """A part of a sent tensor and its location in a parameter of the engine, both viewed as `[rows, width]` with the
    dimensions sorted by their strides in the sent tensor."""

    owner: str
    """Name of the parameter."""
    offset: int
    """First element in the parameter."""
    sizes: tuple[int, ...]
    """Sizes of the dimensions; the last one is the width."""
    strides: tuple[int, ...]
    """Strides of these dimensions in the parameter."""
    rows: Int[Tensor, " rows"]
    """int64: the rows of the sent tensor."""
    column: int
    """First column in the sent tensor."""
    elements: Elements
    """As `Part.elements`."""
    row_keys: dict[torch.device, Tensor] = field(default_factory=dict, compare=False)
    """Cache of the checksum keys of `rows`."""

    @classmethod
    def of(
        cls, owner: str, parameter: Tensor, target: Tensor, source: Tensor, offset: int, shape: torch.Size
    ) -> Region | None:
        """The region of a copy from `source`, which begins `offset` elements into a contiguous sent tensor of `shape`,
        to `target`, a view of the parameter named `owner`. None if it is not a block of rows and columns."""
        columns = columns_of(shape)
        source_strides = source.expand(target.shape).stride()
        # (size, stride in the parameter, stride in the sent tensor) of each dimension.
        dims = [dim for dim in zip(target.shape, target.stride(), source_strides, strict=True) if dim[0] > 1]
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
        elements = (offset, tuple((size, stride) for size, _, stride in lead), width)
        steps = (*(step for _, step, _ in lead), dims[-1][1])
        target_offset = int(target.storage_offset() - parameter.storage_offset())
        return cls(owner, target_offset, sizes, steps, rows.reshape(-1), column, elements)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return len(self.rows) * self.sizes[-1]

    def checksum(self, parameter: Tensor, dtype: torch.dtype) -> Int[Tensor, ""]:
        """The contribution of this region of `parameter` to the checksum of the sent tensor, whose dtype is `dtype`."""
        values = parameter.as_strided(self.sizes, self.strides, parameter.storage_offset() + self.offset)
        row_keys = self._row_keys(parameter.device)
        return part_checksum(values.to(dtype).reshape(-1, self.sizes[-1]), row_keys, self.column)

    def _row_keys(self, device: torch.device) -> Tensor:
        """Keys of `rows`, cached for later syncs."""
        if device not in self.row_keys:
            self.row_keys[device] = keys(int(self.rows.max()) + 1, 0, device)[self.rows.to(device)]
        return self.row_keys[device]


class _CopyRecorder(TorchDispatchMode):
    """Calls `_record` for each copy from tensor to tensor while the mode is active."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def _record(self, target: Tensor, source: Tensor) -> None:
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            self._record(args[0], args[1])
        return func(*args, **(kwargs or {}))


EngineTensors = Callable[[str, torch.Size], Sequence[Tensor]]
"""Maps name and shape of a parameter to all tensors that the engine computes with in its place."""


@dataclass
class Layout:
    """The locations of sent tensors in a model."""

    regions: dict[str, list[tuple[str, Region]]] = field(default_factory=lambda: defaultdict(list))
    """Name of a parameter → its regions, each with the name of the sent tensor."""
    forms: dict[str, tuple[torch.Size, tuple[int, ...]]] = field(default_factory=dict)
    """Name of a parameter → shape and strides."""
    changed: set[str] = field(default_factory=set)
    """Names of sent tensors that the loaders transformed."""
    untouched: list[str] = field(default_factory=list)
    """Names of parameters that were not filled, or only in part."""

    def add(self, name: str, region: Region | None, owner: Tensor) -> None:
        """Add the region of `name` in `owner`; None if it is unknown."""
        if region is None:
            self.changed.add(name)
            return
        self.forms[region.owner] = owner.shape, owner.stride()
        known = [(other_name, other.elements) for other_name, other in self.regions[region.owner]]
        if (name, region.elements) not in known:
            self.regions[region.owner].append((name, region))

    def parts(self, engine_tensors: EngineTensors, sent: Mapping[str, TensorChecksum]) -> list[Part]:
        """The parts of the sent tensors that this rank has."""
        unchecked = [Part(name, (), 0, None) for name in self.changed if name in sent]
        checksums: list[tuple[str, Region, Tensor]] = []
        for owner, regions in self.regions.items():
            tensors = engine_tensors(owner, self.forms[owner][0])
            for name, region in regions:
                if name not in sent:
                    continue
                comparable = [tensor for tensor in tensors if self._is_comparable(owner, tensor, sent[name])]
                checksums += [(name, region, region.checksum(tensor, sent[name].dtype)) for tensor in comparable]
                if not comparable:
                    unchecked.append(Part(name, region.elements, region.numel, None))
        sums = to_host([checksum for _, _, checksum in checksums])
        checked = [
            Part(name, region.elements, region.numel, checksum)
            for (name, region, _), checksum in zip(checksums, sums, strict=True)
        ]
        return unchecked + checked

    def _is_comparable(self, owner: str, tensor: Tensor, sent: TensorChecksum) -> bool:
        """True if `tensor` still has the recorded shape and strides, and at least the precision of what was sent."""
        return (tensor.shape, tensor.stride()) == self.forms[owner] and tensor.itemsize >= sent.dtype.itemsize


def compare(sent: Mapping[str, TensorChecksum], ranks: Sequence[Sequence[Part]]) -> Verified:
    """Compare the sent tensors with the parts on all ranks of one engine."""
    parts: dict[str, list[tuple[int, Part]]] = defaultdict(list)
    for rank, parts_of_rank in enumerate(ranks):
        for part in parts_of_rank:
            parts[part.name].append((rank, part))
    differences, unchecked = [], 0
    for name, tensor in sent.items():
        if any(part.checksum is None for _, part in parts[name]):
            unchecked += 1
        elif difference := _difference(tensor, parts[name], len(ranks)):
            differences.append(f"{name} {difference}")
    return Verified(len(sent) - unchecked - len(differences), unchecked, differences)


def _difference(tensor: TensorChecksum, parts: Sequence[tuple[int, Part]], ranks: int) -> str:
    """Description of how the ranks' parts of one tensor differ from it; empty if they do not."""
    if not parts:
        return "was not loaded"
    wrong = sorted({rank for rank, part in parts if part.numel == tensor.numel and part.checksum != tensor.checksum})
    if wrong:
        return _on(wrong, ranks)
    slices: dict[Elements, tuple[int, int]] = {}
    for _, part in parts:
        if part.numel < tensor.numel:
            numel_and_checksum = part.numel, part.checksum or 0
            if slices.setdefault(part.elements, numel_and_checksum) != numel_and_checksum:
                return "is not the same in all places that keep it"
    elements = sum(numel for numel, _ in slices.values())
    if slices and elements != tensor.numel:
        return f"was loaded in part: {elements:,} of {tensor.numel:,} elements"
    if slices and (sum(total for _, total in slices.values()) - tensor.checksum) % (1 << 64):
        return _on(sorted({rank for rank, _ in parts}), ranks)
    return ""


def _on(wrong: Sequence[int], ranks: int) -> str:
    """The message for a tensor that differs on the ranks `wrong`."""
    return "differs" if ranks == 1 else f"differs on rank {', '.join(map(str, wrong))} of the engine"


class _SentTensor(NamedTuple):
    """A tensor that a loader has received, by its memory."""

    begin: int
    """Address of the first byte."""
    end: int
    """Address after the last byte."""
    name: str
    """Name in the checkpoint."""
    shape: torch.Size
    """Shape as sent."""
    contiguous: bool
    """Regions can only be computed for contiguous tensors."""


class LayoutRecorder(_CopyRecorder):
    """Records the layout of a model while weights are loaded into it for the first time.

    with LayoutRecorder(model) as recorder:
        load(recorder.observe(weights))
    layout = recorder.layout()
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._names = one_name(model)
        self._owners: dict[int, tuple[str, Tensor]] = {}  # parameters by their storage
        self._sent: list[_SentTensor] = []
        self._layout = Layout()
        self._changed: dict[str, int] = {}  # parameter → number of elements that no region describes
        self._empty: frozenset[str] = frozenset()

    def observe(
        self,
        weights: Iterable[tuple[str, Tensor]],
        written: Mapping[str, Tensor] = MappingProxyType({}),
        empty: Collection[str] = (),
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields `weights` for a loader to read. written: by name, parameters that are filled without the loader, which
        sees substitutes. empty: names of parameters that another rank fills."""
        self._owners |= {_storage(parameter): (owner, parameter) for owner, parameter in written.items()}
        self._empty = frozenset(empty)
        for name, tensor in weights:
            if not self._sent:  # Only now the model has its final parameters: vLLM first creates empty ones.
                for owner, parameter in self._model.named_parameters(remove_duplicate=False):
                    self._owners.setdefault(_storage(parameter), (self._names[owner], parameter))
            begin = tensor.data_ptr()
            self._sent.append(_SentTensor(begin, begin + tensor.nbytes, name, tensor.shape, tensor.is_contiguous()))
            yield name, tensor

    def layout(self) -> Layout:
        """The layout, once all weights are loaded."""
        layout = self._layout
        loaded = {name for regions in layout.regions.values() for name, _ in regions}
        layout.changed |= {sent.name for sent in self._sent if sent.shape.numel() == 1} - loaded
        # Elements of each parameter.
        filled = {owner: sum(region.numel for _, region in regions) for owner, regions in layout.regions.items()}
        filled |= self._changed
        for owner, parameter in self._owners.values():
            expected = int(getattr(parameter, "weight_loader_numel", parameter.numel()))
            if owner in self._empty:
                continue
            if expected == 1:  # vLLM fills these with a number, without a copy
                continue
            if expected > filled.get(owner, 0) and not (filled.get(owner) and self._is_padded(owner)):
                layout.untouched.append(owner)
        return layout

    def _is_padded(self, owner: str) -> bool:
        """True for the parameter of an embedding, which may have rows beyond the vocabulary."""
        return hasattr(self._model.get_submodule(owner.rpartition(".")[0]), "num_embeddings_padded")

    def _record(self, target: Tensor, source: Tensor) -> None:
        owner_of_target = self._owners.get(_storage(target))
        if owner_of_target is None or _storage(source) in self._owners:  # vLLM copies some parameters onto themselves
            return
        owner, parameter = owner_of_target
        begin = source.data_ptr() if source.device.type != "meta" else 0
        sent = next((sent for sent in reversed(self._sent) if sent.begin <= begin < sent.end), self._sent[-1])
        region = None
        if sent.contiguous and sent.begin <= begin < sent.end:
            offset = (begin - sent.begin) // source.itemsize
            region = Region.of(owner, parameter, target, source, offset, sent.shape)
        self._layout.add(sent.name, region, parameter)
        if region is None:
            self._changed[owner] = parameter.numel()


def one_name(model: nn.Module) -> dict[str, str]:
    """Name of each parameter → the first of its names, which differs from it for tied parameters."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


class AdapterLayoutRecorder(_CopyRecorder):
    """Like `LayoutRecorder`, for a LoRA adapter in vLLM's `manager`, on its first load as `adapter`."""

    def __init__(self, manager: Any, adapter: int) -> None:
        super().__init__()
        self._manager, self._adapter = manager, adapter
        self._slots = {_storage(tensor): (name, tensor) for name, tensor in adapter_slots(manager).items()}
        self._copies: list[tuple[Tensor, Tensor]] = []

    def layout(self) -> Layout:
        """The layout, once the adapter is loaded."""
        layout = Layout()
        loaded = {_storage(tensor): (name, tensor) for name, tensor in self._loaded().items()}
        for target, source in self._copies:
            if _storage(source) in loaded:
                (owner, slot), (name, tensor) = self._slots[_storage(target)], loaded[_storage(source)]
                offset = int(source.storage_offset() - tensor.storage_offset())
                layout.add(name, Region.of(owner, slot, target, source, offset, tensor.shape), slot)
        # vLLM reorders the factors of experts, which are not compared.
        experts = [path for path in self._manager.list_adapters()[self._adapter].loras if path.endswith(".experts")]
        for path in experts:
            peft_path = f"{PEFT_PREFIX}{path.replace(*DECODER)}"
            layout.changed |= {f"{peft_path}{layer}.lora_{ab}.weight" for layer in ("", ".base_layer") for ab in "AB"}
        return layout

    def _record(self, target: Tensor, source: Tensor) -> None:
        if _storage(target) in self._slots:
            self._copies.append((target, source))

    def _loaded(self) -> dict[str, Tensor]:
        """The tensors of the adapter that vLLM has loaded, by their names in peft's files."""
        loaded: dict[str, Tensor] = {}
        for path, layer in self._manager.list_adapters()[self._adapter].loras.items():
            paths = self._manager.packed_modules.get(path, [path])
            names = [name.replace(*DECODER).replace(*ATTENTION) for name in paths]
            for kind, factors in (("lora_A", layer.lora_a), ("lora_B", layer.lora_b)):
                tensors = factors if isinstance(factors, (list, tuple)) else [factors]
                loaded |= {f"{PEFT_PREFIX}{name}.{kind}.weight": t for name, t in zip(names, tensors, strict=False)}
        return {name: tensor for name, tensor in loaded.items() if tensor is not None}


def adapter_slots(manager: Any) -> dict[str, Tensor]:
    """The tensors that vLLM's LoRA kernels read."""
    return {
        f"{path}.{kind}.{index}": tensor
        for path, module in manager.modules.items()
        for kind in ("lora_a_stacked", "lora_b_stacked")
        for index, tensor in enumerate(getattr(module, kind, ()))
    }


def base_parts(
    layouts: Sequence[Layout], engine_tensors: EngineTensors, sent: Mapping[str, TensorChecksum]
) -> list[Part]:
    """The parts of an adapter's base model that this rank has. Tensors that no recorded loader has read cannot be
    compared: a checkpoint may have other names, and vLLM itself rejects one with a missing tensor."""
    parts = [part for layout in layouts for part in layout.parts(engine_tensors, sent)]
    known = {part.name for part in parts}
    return parts + [Part(name, (), 0, None) for name in sent if name not in known]


def weights_of(model: nn.Module, *, through_kernels: bool = True) -> EngineTensors:
    """The tensors with which `model` computes: its parameters; for a matrix that a CPU kernel has packed, the matrix
    that the kernel multiplies by; for packed experts, the unpacked ones. Names omit the wrappers that vLLM puts around
    layers for LoRA. through_kernels: read a `PackedMatrix` by a product, too.
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

    def engine_tensors(owner: str, shape: torch.Size) -> list[Tensor]:
        parameter = parameters[owner].detach()
        if owner in experts:
            return [_unpacked(parameter, experts[owner])]
        packed = [_kernel_matrix(module, shape[1], parameter.dtype, through_kernels) for module in kernels[owner]]
        return [parameter, *packed] if parameter.numel() or not packed else packed

    return engine_tensors


def _kernel_matrix(
    module: nn.Module, inputs: int, dtype: torch.dtype, through_kernels: bool
) -> Shaped[Tensor, "outputs inputs"]:
    """The matrix by which the CPU kernel of `module` multiplies."""
    kernel: Callable[[Tensor, Tensor, None], Tensor] = vars(module)["cpu_linear"]
    if isinstance(kernel, PackedMatrix) and not through_kernels:
        return kernel.read()
    weight = cast(Tensor, module.weight)
    rows = [kernel(part, weight, None) for part in torch.eye(inputs, dtype=dtype).split(UNIT_ROWS)]
    matrix = (torch.cat(rows) if len(rows) > 1 else rows[0]).t().contiguous()
    return matrix.flatten().view(matrix.shape)  # with the usual strides if it has only one row, too


def packed_experts(module: nn.Module) -> str:
    """The instruction set for which vLLM's kernel has packed the experts of `module`; empty if they are not packed."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if not hasattr(module, "w13_weight") or experts is None or getattr(experts, "_use_zentorch", False):
        return ""
    return str(getattr(experts, "isa", ""))


def _unpacked(packed: Shaped[Tensor, "E N K"], isa: str) -> Shaped[Tensor, "E N K"]:
    """The experts' matrices in the order before packing, which permutes the elements of each expert."""
    order = _packed_order(packed.shape[1:], packed.dtype, isa)
    return torch.empty_like(packed).view(len(packed), -1).index_copy_(1, order, packed.flatten(1)).view_as(packed)


@cache
def _packed_order(shape: torch.Size, dtype: torch.dtype, isa: str) -> Tensor:
    """int64 [N · K]: for each element of a packed matrix its index before packing. Computed by packing the digits of
    the indices: every dtype represents small integers exactly."""
    index, order = torch.arange(shape.numel()), torch.zeros(shape.numel(), dtype=torch.int64)
    for power in range(0, shape.numel().bit_length(), DIGIT_BITS):
        digit = ((index >> power) % (1 << DIGIT_BITS)).to(dtype).view(1, *shape)
        packed = torch.empty_like(digit)
        torch.ops._C.prepack_moe_weight(digit, packed, isa)
        order += packed.view(-1).to(torch.int64) << power
    return order


def _storage(tensor: Tensor) -> int:
    """The identity of the tensor's storage."""
    return int(tensor.untyped_storage()._cdata)
