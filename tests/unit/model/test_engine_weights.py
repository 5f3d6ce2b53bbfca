"""The weights in an engine's model: located by recording its loaders, however these transform the tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcli.model.weight_check.checksum import Checksums, TensorChecksum
from rlcli.model.weight_check.engine_weights import (
    Layout,
    LayoutRecorder,
    Part,
    Verified,
    base_parts,
    compare,
    weights_of,
)

HIDDEN, HEADS, VOCAB, EXPERTS = 8, 4, 10, 3
Named = Iterable[tuple[str, Tensor]]


class Embedding(nn.Module):
    """With rows that no token has."""

    num_embeddings_padded = VOCAB + 6

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.num_embeddings = rows
        self.weight = nn.Parameter(torch.zeros(rows, HIDDEN))


class Packed(nn.Module):
    """A layer whose kernel keeps a copy of its own, and whose weight goes."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))

    def pack(self) -> None:
        copy = self.weight.detach().clone()
        self.cpu_linear = lambda x, weight, bias: x @ copy.t()
        self.weight = nn.Parameter(torch.empty(0))


class Engine(nn.Module):
    """As engines keep a model: rank `rank` of `ranks`, fused, padded, tied, experts stacked, one tensor changed."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.embed = Embedding((VOCAB + 6) // ranks)
        self.lm_head = Embedding(1)
        self.lm_head.weight = self.embed.weight
        self.qkv = Packed(3 * HIDDEN // ranks, HIDDEN)
        self.out = nn.Parameter(torch.zeros(HIDDEN, HIDDEN // ranks))
        self.experts = nn.Parameter(torch.zeros(EXPERTS, 2 * HEADS // ranks, HIDDEN))
        self.turned = nn.Parameter(torch.zeros(HIDDEN, HEADS))
        self.norm = nn.Parameter(torch.zeros(HIDDEN))
        self.decay = nn.Parameter(torch.zeros(HEADS))
        self.scale = nn.Parameter(torch.zeros(1))

    def own(self, tensor: Tensor, dim: int = 0) -> Tensor:
        size = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * size, size)

    def load(self, weights: Named) -> None:
        with torch.no_grad():
            if not self.qkv.weight.numel():
                self.qkv.weight = nn.Parameter(torch.zeros(3 * HIDDEN // self.ranks, HIDDEN))
            for name, tensor in weights:
                self.take(name, tensor)
            self.qkv.pack()
            rows = self.lm_head.weight.detach().clone()
            self.lm_head.cpu_linear = lambda x, weight, bias: x @ rows.t()

    def take(self, name: str, tensor: Tensor) -> None:
        kind, _, index = name.partition(".")
        if kind == "embed":
            size = (VOCAB + 6) // self.ranks
            part = tensor[self.rank * size : (self.rank + 1) * size]
            self.embed.weight.data[: len(part)].copy_(part)
        elif kind in ("q", "k", "v"):
            size = HIDDEN // self.ranks
            self.qkv.weight.data.narrow(0, "qkv".index(kind) * size, size).copy_(self.own(tensor))
        elif kind == "out":
            self.out.data.copy_(self.own(tensor, 1))
        elif kind in ("gate", "up"):
            size = HEADS // self.ranks
            self.experts.data[int(index)].narrow(0, size * (kind == "up"), size).copy_(self.own(tensor))
        elif kind == "turned":
            self.turned.data.copy_(tensor.t())
        elif kind == "decay":
            self.decay.data.copy_(-tensor.exp())
        elif kind == "scale":
            self.scale.data.fill_(tensor.item())
        elif kind == "norm":
            self.norm.data.copy_(tensor)


def trained(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = dict.fromkeys(("q", "k", "v", "out"), (HIDDEN, HIDDEN)) | {"turned": (HEADS, HIDDEN)}
    shapes |= {f"{kind}.{expert}": (HEADS, HIDDEN) for kind in ("gate", "up") for expert in range(EXPERTS)}
    small = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,), "decay": (HEADS,), "scale": (1,)}
    return {name: torch.randn(shape, generator=random) for name, shape in (shapes | small).items()}


def sent_of(weights: dict[str, Tensor]) -> dict[str, TensorChecksum]:
    sums = Checksums()
    for _ in sums.of(weights.items()):
        pass
    return sums.sent()


def recorded(engine: Engine, weights: Named) -> Layout:
    with LayoutRecorder(engine) as recorder:
        engine.load(recorder.observe(weights))
    return recorder.layout()


def verify(engines: list[Engine], layouts: list[Layout], weights: dict[str, Tensor]) -> Verified:
    sent = sent_of(weights)
    return compare(
        sent, [layout.parts(weights_of(engine), sent) for engine, layout in zip(engines, layouts, strict=True)]
    )


@pytest.fixture(params=[1, 2])
def engines(request: Any) -> list[Engine]:
    return [Engine(rank, request.param) for rank in range(request.param)]


def test_an_engine_that_holds_what_was_sent_is_found_to_at_every_sync(engines: list[Engine]) -> None:
    first = trained(0)
    layouts = [recorded(engine, first.items()) for engine in engines]
    assert all(layout.untouched == [] and layout.changed == {"decay", "scale"} for layout in layouts)
    assert verify(engines, layouts, first) == (len(first) - 2, 2, [])
    second = trained(1)
    for engine in engines:
        engine.load(second.items())
    assert verify(engines, layouts, second) == (len(first) - 2, 2, [])


@pytest.mark.parametrize("name", sorted(set(trained(0)) - {"decay", "scale"}))
def test_each_tensor_that_a_sync_leaves_out_is_named(engines: list[Engine], name: str) -> None:
    first, second = trained(0), trained(1)
    layouts = [recorded(engine, first.items()) for engine in engines]
    for engine in engines:
        rest = {other: second[other] if other != name else first[other] for other in second}
        engine.load(rest.items())
    report = verify(engines, layouts, second)
    assert [difference.split(" differs")[0] for difference in report.differences] == [name]


def test_a_sync_that_loads_nothing_is_found_to_have_loaded_nothing(engines: list[Engine]) -> None:
    first = trained(0)
    layouts = [recorded(engine, first.items()) for engine in engines]
    assert len(verify(engines, layouts, trained(1)).differences) == len(first) - 2
    never = verify(engines, [Layout() for _ in engines], first)
    assert sorted(never.differences) == sorted(f"{name} was not loaded" for name in first)


def test_a_head_that_was_packed_before_the_sync_shows() -> None:
    engine, first, second = Engine(), trained(0), trained(1)
    layout = recorded(engine, first.items())
    stale = engine.lm_head.cpu_linear
    engine.load(second.items())
    engine.lm_head.cpu_linear = stale
    assert verify([engine], [layout], second).differences == ["embed differs"]


class WithAdapter(nn.Module):
    """As vLLM puts LoRA's layers around a model's."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "base_layer" else getattr(self.base_layer, name)


def test_a_base_read_before_the_adapters_is_compared_at_its_new_place() -> None:
    engine, weights = Engine(), trained(0)
    layout = recorded(engine, weights.items())
    engine.qkv = WithAdapter(engine.qkv)
    sent = sent_of(weights | {"other": torch.ones(2, 2)})
    assert compare(sent, [base_parts([layout], weights_of(engine), sent)]) == (len(weights) - 2, 3, [])
    kernel = engine.qkv.base_layer.cpu_linear
    engine.qkv.base_layer.cpu_linear = lambda *args: kernel(*args) * (1 + 2**-20)
    report = compare(sent, [base_parts([layout], weights_of(engine), sent)])
    assert report.differences == ["q differs", "k differs", "v differs"]


def test_the_rank_that_differs_is_named_where_it_holds_all_of_a_tensor() -> None:
    engines, first, second = [Engine(0, 2), Engine(1, 2)], trained(0), trained(1)
    layouts = [recorded(engine, first.items()) for engine in engines]
    for engine in engines:
        engine.load(second.items())
    with torch.no_grad():
        engines[1].norm[3] += 1
        engines[0].out[0, 0] += 1
    assert verify(engines, layouts, second).differences == [
        "out differs on rank 0, 1 of the engine",
        "norm differs on rank 1 of the engine",
    ]


def test_a_parameter_that_nothing_came_to_is_named_and_padding_is_not() -> None:
    weights = {name: tensor for name, tensor in trained(0).items() if name not in ("norm", "k", "up.1")}
    assert sorted(recorded(Engine(), weights.items()).untouched) == ["experts", "norm", "qkv.weight"]


def test_a_tensor_that_the_engine_does_not_know_was_not_loaded() -> None:
    weights = trained(0) | {"bias": torch.ones(HIDDEN)}
    engine = Engine()
    layout = recorded(engine, weights.items())
    assert verify([engine], [layout], weights).differences == ["bias was not loaded"]


def test_a_parameter_that_was_made_anew_in_another_form_is_not_compared() -> None:
    engine, weights = Engine(), trained(0)
    layout = recorded(engine, weights.items())
    engine.out = nn.Parameter(engine.out.detach().to(torch.int8), requires_grad=False)
    report = verify([engine], [layout], weights)
    assert (report.unchecked, report.differences) == (3, [])


def test_parts_that_overlap_or_leave_a_gap_are_no_whole() -> None:
    sent = {"w": TensorChecksum(5, 10, torch.float32)}
    half, rest = Part("w", (0,), 5, 2), Part("w", (5,), 5, 3)
    assert compare(sent, [[half], [rest]]).tensors == 1
    assert compare(sent, [[half], [half]]).differences == ["w was loaded in part: 5 of 10 elements"]
    other = half._replace(checksum=1)
    assert compare(sent, [[half, rest], [other, rest]]).differences == ["w is not the same in all places that keep it"]
