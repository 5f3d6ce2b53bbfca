"""A GPU that computes on the CPU: it fails where tensors of two devices meet, and records where the host waits for it.

torch's FakeTensorMode does the first, but its backward pass needs a torch that is built for CUDA, and it has no values:
what depends on them stops it. Here tensors on the device `cuda` have values, so that whole updates run, and give what
they give on the CPU.

    with PretendGpu() as gpu:
        x = torch.ones(3, device="cuda")
        (x > 0).nonzero()
    gpu.waits                   # [Wait("shape", "aten.nonzero.default", "mine.py:3")]
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("cuda", 0)
ROOT = Path(__file__).parents[1]
aten = torch.ops.aten

SHAPES_FROM_VALUES = {
    "nonzero",
    "argwhere",
    "masked_select",
    "unique_dim",
    "unique_consecutive",
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
}
"""Operations whose result the host must know before it continues: their CUDA kernels copy a number to it."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""They accept indices of the host, which are copied to the device, and masks, which are made into indices."""


@dataclass(frozen=True)
class Wait:
    """The host waits for the device. kind: `upload` and `download`, of tensors; `scalar`, a number that Python reads;
    `shape`, one that torch reads; `synchronize`. where: the innermost line of this project."""

    kind: str
    operation: str
    where: str


class OnGpu(Tensor):
    """A tensor on the device. host: its values, on the CPU."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: Tensor) -> OnGpu:
        # torch's own code sees a device for which a CPU build has autograd, and which is not the CPU.
        wrapper: OnGpu = Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device="meta",
        )
        wrapper.host = real
        return wrapper

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    # Where torch makes tensors of Python's values on `meta`, it makes them without these.
    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=DEVICE)

    def __getitem__(self, index: Any) -> Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        indexed: Tensor = super().__getitem__(
            tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
        )
        return indexed

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        """torch has none for classes of one's own."""
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} of a tensor on the pretended GPU, outside of the block")


class PretendGpu(TorchDispatchMode):
    """In the block, tensors may be on the device `cuda`. waits: of the host, in their order. made_on_meta: tensors that
    are made on the device `meta` are on the GPU: those that torch makes beside tensors of it. Off while a model is
    loaded, which begins on `meta`."""

    _current: ClassVar[PretendGpu | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self.made_on_meta = True
        self._pinned: set[int] = set()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> PretendGpu:
        stream = SimpleNamespace(
            synchronize=self._synchronized,
            record_event=lambda: SimpleNamespace(synchronize=self._synchronized),
            wait_event=lambda event: None,
            wait_stream=lambda stream: None,
        )
        self._patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        self._patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        self._patch.setattr(torch.accelerator, "current_stream", lambda *_: stream)
        self._patch.setattr(torch.accelerator, "synchronize", lambda *_: self._synchronized())
        devices = torch.utils._foreach_utils._get_foreach_kernels_supported_devices()
        self._patch.setattr(
            torch.utils._foreach_utils, "_get_foreach_kernels_supported_devices", lambda: [*devices, "meta"]
        )
        # Else torch.tensor copies its values to the device where no mode sees it.
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        self._patch.undo()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A model is loaded, which begins on the device `meta`."""
        self.made_on_meta = False
        try:
            yield
        finally:
            self.made_on_meta = True

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Wait]]:
        """The waits within the block."""
        waits, recorded_count = list[Wait](), len(self.waits)
        try:
            yield waits
        finally:
            waits += self.waits[recorded_count:]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        tensors = _tensors((args, kwargs))
        on_gpu = any(isinstance(tensor, OnGpu) for tensor in tensors)
        if name in ("_pin_memory", "is_pinned"):
            return self._pinning(name, args[0])
        if name == "_to_copy":
            return self._converted(function, args, kwargs)
        if name == "copy_":
            return self._copied(function, args, kwargs)
        if name == "set_" and not on_gpu:
            return function(*args, **kwargs)
        device = kwargs.get("device")
        made_here = device is not None and (device.type == "cuda" or (device.type == "meta" and self.made_on_meta))
        if made_here:
            kwargs["device"] = torch.device("cpu")
        if not (on_gpu or made_here):
            pinned = kwargs.pop("pin_memory", False)
            result = function(*args, **kwargs)
            if pinned:
                self._pinned.add(result.untyped_storage().data_ptr())
            return result
        self._check_devices(name, function, tensors)
        self._note_wait(name, function, args, kwargs)
        return self._on_real(function, args, kwargs, wraps=device is None or device.type != "cpu")

    def _on_real(self, function: Any, args: Any, kwargs: Any, *, wraps: bool = True) -> Any:
        compute = _KERNELS.get(function.overloadpacket.__name__, function)
        results = compute(*_real(args), **_real(kwargs))
        if not wraps:
            return results
        if all(value.alias_info is None for value in function._schema.returns):
            # Some results share memory, which nothing but their storage says: autograd would write to a wrapper's.
            gpu_inputs = [value for value in _tensors((args, kwargs)) if isinstance(value, OnGpu)]
            shared = {value.host.untyped_storage().data_ptr() for value in gpu_inputs}
            results = _mapped(
                lambda value: value.clone() if value.untyped_storage().data_ptr() in shared else value, results
            )
        wrapped = _mapped(OnGpu, results)
        return return_and_correct_aliasing(function, args, kwargs, wrapped) if function.namespace == "aten" else wrapped

    def _converted(self, function: Any, args: Any, kwargs: Any) -> Any:
        """`_to_copy`: to another device, another dtype, or both."""
        source, device = args[0], kwargs.pop("device", None)
        blocks = not kwargs.pop("non_blocking", False)
        was = "cuda" if isinstance(source, OnGpu) else source.device.type
        to = was if device is None else device.type
        if to == "meta" and self.made_on_meta:
            to = "cuda"
        if was == "meta" or to == "meta":
            return function(source, **kwargs, device=device)
        if (was, to) == ("cpu", "cuda") and (blocks or not self.is_pinned(source)):
            self._wait("upload", function)
        elif (was, to) == ("cuda", "cpu") and blocks:
            self._wait("download", function)
        kwargs.pop("pin_memory", None)
        real = function(_real(source), **kwargs)
        return OnGpu(real) if to == "cuda" else real

    def _copied(self, function: Any, args: Any, kwargs: Any) -> Any:
        """`copy_(into, source, non_blocking)`."""
        into, source = args[:2]
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if isinstance(into, OnGpu) and not isinstance(source, OnGpu):
            if blocks or not self.is_pinned(source):
                self._wait("upload", function)
        elif isinstance(source, OnGpu) and not isinstance(into, OnGpu) and (blocks or not self.is_pinned(into)):
            self._wait("download", function)
        function(_real(into), _real(source))
        return into

    def _check_devices(self, name: str, function: Any, tensors: list[Tensor]) -> None:
        """Host tensors may only be numbers where GPU tensors are operands, or indices of these."""
        others = [tensor for tensor in tensors if not isinstance(tensor, OnGpu)]
        if name in INDEXED and others and not any(tensor.is_meta for tensor in others):
            self._wait("upload", function)
            return
        mixed = [tensor for tensor in others if tensor.ndim]
        assert not mixed or len(others) == len(tensors), f"{function}: tensors of two devices, at {_line()}"

    def _note_wait(self, name: str, function: Any, args: Any, kwargs: Any) -> None:
        makes_shape = name in SHAPES_FROM_VALUES
        if name == "repeat_interleave":
            makes_shape = kwargs.get("output_size") is None and isinstance(args[-1], Tensor)
        elif name in INDEXED:
            makes_shape = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if name == "_local_scalar_dense" or makes_shape:
            self._wait("shape" if makes_shape else "scalar", function)

    def _pinning(self, name: str, tensor: Tensor) -> Any:
        if name == "is_pinned":
            return self.is_pinned(tensor)
        copy = tensor.clone()
        self._pinned.add(copy.untyped_storage().data_ptr())
        return copy

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _synchronized(self) -> None:
        self.waits.append(Wait("synchronize", "", _line()))

    def _wait(self, kind: str, function: Any) -> None:
        self.waits.append(Wait(kind, str(function), _line()))


def _mapped(change: Callable[[Tensor], Any], values: Any) -> Any:
    """`values` with `change` of each tensor in it. (torch's own function for any tree takes most of the time here.)"""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, (tuple, list)):
        return type(values)([_mapped(change, value) for value in values])
    if isinstance(values, dict):
        return {name: _mapped(change, value) for name, value in values.items()}
    return values


def _tensors(values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    _mapped(tensors.append, values)
    return tensors


def _real(values: Any) -> Any:
    return _mapped(lambda value: value.host if isinstance(value, OnGpu) else value, values)


def _line() -> str:
    """The innermost line of this project that is being run, but for this file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)) and "/.venv/" not in path and path != __file__:
            return f"{Path(path).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    longest: int,
    key_longest: int,
    is_causal: bool = False,
    scale: float | None = None,
    window: Sequence[int] = (-1, -1),
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output of torch's variable-length attention kernel, computed sequence by sequence in float32."""
    outputs, sums = [], []
    for _, _, v, scores in _sequences(query, key, value, ends, scale, window):
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs).to(query.dtype), torch.cat(sums, 1), torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    longest: int,
    key_longest: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window: Sequence[int] = (-1, -1),
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients."""
    factor, groups = scale or query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
    gradients, sequences = [], _sequences(query, key, value, ends, scale, window)
    for (q, k, v, scores), (start, end) in zip(sequences, pairwise(ends.tolist()), strict=True):
        p, grad_output = scores.softmax(-1), grad[start:end].float().transpose(0, 1)
        of_p = grad_output @ v.transpose(1, 2)
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * factor
        of_q, of_k, of_v = of_scores @ k, of_scores.transpose(1, 2) @ q, p.transpose(1, 2) @ grad_output
        gradients.append([of_q, *(tensor.unflatten(0, (-1, groups)).sum(1) for tensor in (of_k, of_v))])
    joined = (torch.cat(parts, 1).transpose(0, 1).to(query.dtype) for parts in zip(*gradients, strict=True))
    of_query, of_key, of_value = (tensor.contiguous() for tensor in joined)
    return of_query, of_key, of_value


def _sequences(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None, window: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each sequence: query, key and value, `[heads, T, D]`, and the masked scores, `[heads, T, T]`."""
    groups, offsets = query.shape[1] // key.shape[1], ends.tolist()
    for start, end in pairwise(offsets):
        q = query[start:end].float().transpose(0, 1)
        k, v = (tensor[start:end].float().transpose(0, 1).repeat_interleave(groups, 0) for tensor in (key, value))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
        seen = (distance >= 0) & ((window[0] < 0) | (distance <= window[0]))
        scores = q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)
        yield q, k, v, scores.masked_fill(~seen, -torch.inf)


def _histc(values: Tensor, *bounds: Any) -> Tensor:
    """On the CPU there is none for integers."""
    return torch.histc(values.float(), *bounds).to(values.dtype)


_KERNELS = {"_varlen_attn": _varlen, "_varlen_attn_backward": _varlen_backward, "histc": _histc}
"""Operations that the CPU lacks."""
