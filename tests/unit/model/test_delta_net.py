"""Gated DeltaNet over packs: the rule against plain loops from its paper, packs against each sample alone."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcli.errors import ModelError
from rlcli.model import delta_net
from rlcli.model.attention import Segments
from rlcli.model.packed import PackedBatch, pack
from rlcli.model.policy import PolicyModel
from rlcli.model.recurrence import CHUNK, ConcatenatedPieces, PaddedPieces, Pieces
from tests.model_fixtures import HYBRIDS, VOCABULARY, Row, tiny_lm

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", HYBRIDS)


def looped(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Equation 10 of arXiv 2412.06464, token by token."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + delta_net.EPSILON).sqrt() for x in (q, k))
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if start is None else start
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None, None] * state
        recalled = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        written = beta[:, t, :, None] * (v[:, t] - recalled)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / q.shape[-1] ** 0.5)
    return torch.stack(outputs, 1), state


def drawn(length: int, count: int = 2, heads: int = 3, seed: int = 0) -> list[Tensor]:
    """q, k, v, g, β and a first state, float64."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    q, k, v = (normal(count, length, heads, size) for size in (8, 8, 6))
    g, beta = -0.3 * normal(count, length, heads).exp(), normal(count, length, heads).sigmoid()
    return [q, k, v, g, beta, normal(count, heads, 8, 6)]


@pytest.mark.parametrize("length", [1, 5, CHUNK, CHUNK + 1, 3 * CHUNK - 7])
@pytest.mark.parametrize("with_state", [False, True])
def test_chunks_give_the_recurrence_of_the_paper(length: int, with_state: bool) -> None:
    *inputs, start = drawn(length)
    tensors = [x.requires_grad_() for x in [*inputs, *([start] if with_state else [])]]
    outputs, expected = (rule(*tensors) for rule in (delta_net.chunk_rule, looped))
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in expected]
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    ours, theirs = (
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(output, weights, strict=True)), tensors)
        for output in (outputs, expected)
    )
    for actual, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, plain, rtol=0, atol=1e-10)


def test_the_rule_has_the_gradient_of_finite_differences() -> None:
    tensors = [x.requires_grad_() for x in drawn(7, count=1, heads=1)]
    assert torch.autograd.gradcheck(lambda *args: delta_net.chunk_rule(*args, chunk=3), tensors)


def test_a_sequence_may_be_computed_in_parts() -> None:
    *inputs, start = drawn(50)
    full, last = delta_net.chunk_rule(*inputs, start)
    first, state = delta_net.chunk_rule(*(x[:, :21] for x in inputs), start)
    second, state = delta_net.chunk_rule(*(x[:, 21:] for x in inputs), state)
    torch.testing.assert_close(torch.cat([first, second], 1), full, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[Row], PackedBatch]:
    """Rows of which some share a prompt, and their pack. Each token is another number."""
    rows: list[Row] = []
    for group in range(draw(st.integers(1, 4))):
        prompt = 1000 * group + np.arange(draw(st.integers(1, 90)))
        for sample in range(draw(st.integers(1, 3))):
            response = 1000 * group + 100 + 300 * sample + np.arange(draw(st.integers(0, 150)))
            rows.append((np.concatenate([prompt, response]), len(prompt)))
    return rows, pack(draw(st.permutations(rows)), CPU)


@given(segments())
@settings(deadline=None, max_examples=50)
def test_pieces_divide_a_pack_and_follow_their_prompts(rows_and_batch: tuple[list[Row], PackedBatch]) -> None:
    _, batch = rows_and_batch
    pieces = Pieces.of(batch.segments.lengths, batch.segments.source)
    assert pieces.tokens == batch.tokens
    order = np.argsort(pieces.starts)
    assert (pieces.starts[order] == np.cumsum(pieces.sizes[order]) - pieces.sizes[order]).all()
    ends, sources = batch.boundaries.tolist(), batch.source.tolist()
    sequences = {tuple(sources[begin:end]) for begin, end in pairwise(ends)}
    piece_tokens = [tuple(range(start, start + size)) for start, size in zip(pieces.starts, pieces.sizes, strict=True)]
    joined = [
        piece_tokens[parent] + piece if parent >= 0 else piece
        for piece, parent in zip(piece_tokens, pieces.parents, strict=True)
    ]
    assert sequences <= set(joined), "each sequence is a piece, or a prompt and the piece that follows it"
    laid = PaddedPieces.of(batch.segments, width=3)
    assert laid.layout.source[laid.layout.home].tolist() == list(range(batch.tokens))
    assert not len(laid.layout.copies)
    assert sum(int(group.real.sum()) for group in laid.groups) == batch.tokens
    joined_runs = ConcatenatedPieces.of(batch.segments, width=3)
    assert torch.cat([run.tokens for run in joined_runs.runs])[joined_runs.order].tolist() == list(range(batch.tokens))
    assert joined_runs.convolved.source[joined_runs.convolved.home].tolist() == list(range(batch.tokens))


def rows_of(random: np.random.Generator, *sizes: tuple[int, int]) -> list[Row]:
    """sizes: tokens, and those of the prompt."""
    return [(random.integers(0, VOCABULARY, size), prompt) for size, prompt in sizes]


def ragged() -> list[Row]:
    """Beside each other: shorter and longer than a chunk, without a response, of two tokens."""
    sizes = (9, 4), (70, 20), (75, 3), (131, 100), (33, 33), (8, 1), (2, 1)
    return rows_of(np.random.default_rng(1), *sizes)


def with_shared_prompts() -> list[Row]:
    random = np.random.default_rng(2)
    rows = rows_of(random, (9, 4))
    for prompt in (random.integers(0, VOCABULARY, size) for size in (90, 64, 2)):
        rows += [
            (np.concatenate([prompt, random.integers(0, VOCABULARY, size)]), len(prompt)) for size in (5, 30, 66, 0)
        ]
    return [rows[index] for index in random.permutation(len(rows))]


def alone(lm: Any, rows: list[Row]) -> Tensor:
    """Log-probs of all responses by transformers alone, row by row: the independent reference."""
    parts = []
    for tokens, prompt in rows:
        ids = torch.tensor(tokens)[None]
        log_probs = lm(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        parts.append(log_probs[prompt - 1 : -1].gather(1, ids[0, prompt:, None])[:, 0])
    return torch.cat(parts)


def with_gradients(log_probs: Tensor, lm: Any) -> dict[str, Tensor]:
    """The gradient of a weighted sum of them."""
    lm.zero_grad()
    (log_probs * torch.sin(1.7 * torch.arange(len(log_probs)))).mean().backward()
    return {name: parameter.grad.clone() for name, parameter in lm.named_parameters() if parameter.grad is not None}


def assert_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor], atol: float) -> None:
    """atol: relative to the largest of each tensor."""
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=atol * gradient.abs().max().item(), msg=name)


@KINDS
@pytest.mark.parametrize("rows", [ragged(), with_shared_prompts()], ids=["ragged", "shared"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_pack_is_its_samples_each_alone(kind: str, rows: list[Row], checkpointed: bool) -> None:
    lm = tiny_lm(kind)
    expected = alone(lm, rows)
    gradients = with_gradients(expected, lm)
    policy = PolicyModel(lm, dtype=torch.float32, source="tiny").train()
    if checkpointed:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    log_probs = policy(pack(rows, CPU)).log_probs
    # Its own padded batch is 1e-6 from each alone, as the pack is; one unit in the last place is 5e-7.
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=5e-6)
    assert_alike(with_gradients(log_probs, lm), gradients, atol=1e-5)


@KINDS
def test_without_boundaries_states_would_leak(kind: str) -> None:
    """The error that the tests above look for is large enough for them to detect."""
    lm, rows = tiny_lm(kind), ragged()
    expected, policy = alone(lm, rows), PolicyModel(lm, dtype=torch.float32, source="tiny")
    for layer in delta_net.delta_layers(lm):
        layer.forward = lambda hidden_states, layer=layer, **rest: type(layer).forward(layer, hidden_states)
    with torch.no_grad():
        leaked = (policy(pack(rows, CPU)).log_probs - expected).abs()
    assert leaked[:5].max() < 1e-5, "nothing is before the first one"
    assert leaked[5:].max() > 0.1


@KINDS
def test_in_bfloat16_a_pack_is_as_exact_as_transformers(kind: str) -> None:
    lm, rows = tiny_lm(kind), ragged()
    exact = alone(lm, rows).detach()
    half = tiny_lm(kind).to(torch.bfloat16)
    with torch.no_grad():
        theirs = alone(half, rows).float()
        ours = PolicyModel(half, dtype=torch.bfloat16, source="tiny")(pack(rows, CPU)).log_probs
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean() + 1e-3


def test_the_tokens_of_a_pack_cannot_be_divided() -> None:
    (layer,) = delta_net.delta_layers(lm := tiny_lm("qwen3_5_text"))
    delta_net.packs(lm)
    with pytest.raises(ModelError, match="gated DeltaNet layers carry a state"):
        layer(torch.zeros(1, 3, 128), segments=Segments.of([3], CPU), divided=object())


def kernels() -> dict[str, ModuleType]:
    """The two packages with plain functions that promise what their kernels do, for one row."""

    def causal_conv1d_fn(x: Tensor, weight: Tensor, seq_idx: Tensor, activation: str) -> Tensor:
        assert x.stride(1) == 1, "boundaries need channels last"
        assert activation == "silu"
        output, width = torch.zeros_like(x), weight.shape[1]
        for t in range(x.shape[2]):
            for back in range(min(width, t + 1)):
                if seq_idx[0, t - back] == seq_idx[0, t]:
                    output[0, :, t] = output[0, :, t] + weight[:, width - 1 - back] * x[0, :, t - back]
        return F.silu(output)

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        ends, start = options["cu_seqlens"].tolist(), options["initial_state"]
        assert options["use_qk_l2norm_in_kernel"]
        assert g.dtype == torch.float32
        outputs, states = [], []
        for number, (begin, end) in enumerate(pairwise(ends)):
            initial_state = None if start is None else start[number : number + 1]
            output, state = looped(*(x[:, begin:end] for x in (q, k, v, g, beta)), initial_state)
            outputs.append(output)
            states.append(state)
        return torch.cat(outputs, 1), torch.cat(states) if options["output_final_state"] else None

    conv, fla, ops, rule = (
        ModuleType(name) for name in ("causal_conv1d", "fla", "fla.ops", "fla.ops.gated_delta_rule")
    )
    vars(conv)["causal_conv1d_fn"], vars(rule)["chunk_gated_delta_rule"] = causal_conv1d_fn, chunk_gated_delta_rule
    return {module.__name__: module for module in (conv, fla, ops, rule)}


@pytest.mark.parametrize("rows", [ragged()[:3], with_shared_prompts()[:6]], ids=["ragged", "shared"])
def test_kernels_get_the_boundaries_and_states_of_a_pack(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in kernels().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(delta_net, "_has_kernels", lambda device, dtype: True)
    lm = tiny_lm("qwen3_5_text")
    expected = alone(lm, rows)
    gradients = with_gradients(expected, lm)
    log_probs = PolicyModel(lm, dtype=torch.float32, source="tiny")(pack(rows, CPU)).log_probs
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=5e-6)
    assert_alike(with_gradients(log_probs, lm), gradients, atol=1e-5)


def test_kernels_are_for_16_bits_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_net, "_installed", lambda: True)
    assert delta_net._has_kernels(torch.device("cuda"), torch.bfloat16)
    assert not delta_net._has_kernels(torch.device("cuda"), torch.float32)
    assert not delta_net._has_kernels(CPU, torch.bfloat16)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_engine_s_steps_are_the_trainer_s_pass(transposed: bool) -> None:
    from rlcli.rollout.vllm.hooks.delta_net import _Steps

    torch.manual_seed(0)
    keys, values, key, value, width, slots = 2, 4, 8, 6, 4, 5
    channels = 2 * keys * key + values * value
    inputs = torch.randn(slots, width - 1, channels)
    layer = SimpleNamespace(
        num_k_heads=keys,
        num_v_heads=values,
        head_k_dim=key,
        head_v_dim=value,
        tp_size=1,
        layer_norm_epsilon=1e-6,
        A_log=torch.randn(values),
        dt_bias=torch.randn(values),
        conv1d=SimpleNamespace(weight=torch.randn(channels, 1, width)),
        kv_cache=[
            inputs.transpose(1, 2).contiguous() if transposed else inputs,
            torch.randn(slots, values, value, key),
        ],
    )
    count, length, request_slots = 2, 9, torch.tensor([3, 1])
    mixed, b, a = (torch.randn(count, length, size) for size in (channels, values, values))
    others = layer.kv_cache[1][[0, 2, 4]].clone()
    prefilled = _Steps(layer, request_slots, has_state=False).outputs(*(x[:, :6].flatten(0, 1) for x in (mixed, b, a)))
    steps = [
        _Steps(layer, request_slots, has_state=True).outputs(*(x[:, t] for x in (mixed, b, a)))
        for t in range(6, length)
    ]
    outputs = torch.cat([prefilled.view(count, 6, values, value), torch.stack(steps, 1)], 1)
    sizes = delta_net.Sizes(keys, values, key, value, width, 1e-6)
    padded = torch.cat([torch.zeros(count, width - 1, channels), mixed], 1)
    q, k, v = sizes.heads(delta_net.convolution(padded, layer.conv1d.weight[:, 0]))
    expected, last = looped(q, k, v, delta_net.decay_logs(a, layer.A_log, layer.dt_bias), b.sigmoid())
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.kv_cache[1][request_slots], last.transpose(-1, -2), rtol=0, atol=1e-5)
    assert torch.equal(layer.kv_cache[1][[0, 2, 4]], others), "states of other requests"


def test_layers_share_what_is_computed_of_a_pack_in_16_bits_too() -> None:
    """FSDP2 copies dataclasses among the arguments of each layer, field by field."""
    from dataclasses import replace

    segments = Segments.of([3, 2], CPU)
    copy = replace(segments)
    make = delta_net._padded_pieces(3)
    assert replace(copy).derived(make) is segments.derived(make)
    moved = segments.moved(lambda tensor: tensor.clone())
    assert moved.derived(make) is not segments.derived(make)
    assert torch.equal(moved.derived(make).groups[0].real, segments.derived(make).groups[0].real)
