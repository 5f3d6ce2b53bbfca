from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcli.model.logit_chunks import chunk_tokens
from rlcli.model.logprobs import likeliest_tokens, token_log_probs


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(n: int = 11, width: int = 8, vocabulary: int = 17, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(n, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, vocabulary, (n,))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor made inside the block, and of all that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.at_once = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._alive:
                    self._alive[storage.data_ptr()] = size = storage.nbytes() // 4
                    weakref.finalize(storage, self._alive.pop, storage.data_ptr(), None)
                    self.elements = max(self.elements, size)
        self.at_once = max(self.at_once, sum(self._alive.values()))
        return result


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_values_and_gradients_equal_a_plain_log_softmax(temperature: float, chunk: int) -> None:
    hidden, weight, targets = inputs()
    log_probs, entropy = token_log_probs(hidden, weight, targets, temperature, chunk, True)
    expected = reference(hidden, weight, targets, temperature)
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=1e-5)
    scale = torch.randn(2, len(hidden))
    ours = torch.autograd.grad((scale[0] * log_probs + scale[1] * entropy).sum(), (hidden, weight))
    theirs = torch.autograd.grad((scale[0] * expected[0] + scale[1] * expected[1]).sum(), (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("output_index", [0, 1])
def test_gradcheck_of_each_output(output_index: int) -> None:
    hidden, weight, targets = inputs(5, 4, 7, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: token_log_probs(h, w, targets, 0.7, 2, True)[output_index], (hidden, weight)
    )


def test_bfloat16_stays_near_the_exact_value() -> None:
    hidden, weight, targets = inputs(64, 32, 50, torch.bfloat16)
    log_probs, _ = token_log_probs(hidden, weight * 0.2, targets, 1.0, 7, False)
    assert log_probs.dtype == torch.float32
    expected, _ = reference(hidden, weight * 0.2, targets, 1.0)
    assert (log_probs.double() - expected).abs().max() < 0.05
    log_probs.sum().backward()
    ours = hidden.grad.double()
    theirs = torch.autograd.grad(expected.sum(), hidden)[0].double()
    assert ((ours - theirs).norm() / theirs.norm()) < 0.02


def test_no_tokens_give_no_log_probs_and_zero_gradients() -> None:
    hidden, weight, targets = inputs(0)
    log_probs, entropy = token_log_probs(hidden, weight, targets, 1.0, 4, True)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() * 0).backward()
    assert hidden.grad.shape == (0, 8)
    assert not weight.grad.any()


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, targets = inputs()
    weight.requires_grad_(False)
    token_log_probs(hidden, weight, targets, 1.0, 4, False)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_without_entropy_there_is_none() -> None:
    assert token_log_probs(*inputs(), 1.0, 4, False)[1] is None


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = inputs()
    log_probs, entropy = token_log_probs(hidden * 1e4, weight, targets, 1.0, 4, True)
    assert log_probs.isfinite().all()
    assert entropy.isfinite().all()


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_several_tokens_of_each_position_are_those_of_a_plain_log_softmax(chunk: int) -> None:
    hidden, weight, _ = inputs()
    targets = torch.randint(0, 17, (11, 3))
    targets[0] = 5  # the same token thrice
    log_probs, entropy = token_log_probs(hidden, weight, targets, 0.7, chunk, True)
    log_p = (hidden.double() @ weight.double().t() / 0.7).log_softmax(-1)
    expected, spread = log_p.gather(-1, targets), -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-5)
    scale, other = torch.randn(11, 3), torch.randn(11)
    ours = torch.autograd.grad((scale * log_probs).sum() + (other * entropy).sum(), (hidden, weight))
    theirs = torch.autograd.grad((scale * expected).sum() + (other * spread).sum(), (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_gradcheck_of_several_tokens() -> None:
    hidden, weight, _ = inputs(5, 4, 7, torch.float64)
    targets = torch.randint(0, 7, (5, 2))
    assert torch.autograd.gradcheck(lambda h, w: token_log_probs(h, w, targets, 0.7, 2, False)[0], (hidden, weight))


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_likeliest_tokens_are_those_of_a_plain_log_softmax(k: int, chunk: int) -> None:
    hidden, weight, targets = inputs()
    likeliest = likeliest_tokens(hidden, weight, targets, 0.7, chunk, k, 12)
    assert torch.equal(likeliest.log_probs, token_log_probs(hidden, weight, targets, 0.7, chunk, False)[0])
    log_p = (hidden.double() @ weight.double().t() / 0.7).log_softmax(-1)
    top, ids = log_p[:, :12].topk(k, dim=-1)
    assert torch.equal(likeliest.ids, ids), "none from 12 on"
    torch.testing.assert_close(likeliest.top.double(), top, rtol=0, atol=1e-5)
    assert likeliest.agrees.tolist() == (log_p.argmax(-1) == targets).tolist()


def test_logits_of_all_tokens_are_not_held_for_several_of_each_either() -> None:
    hidden, weight, _ = inputs(64, 4, 999)
    targets = torch.randint(0, 999, (64, 8))
    with Largest() as seen:
        likeliest = likeliest_tokens(hidden, weight, targets[:, 0], 1.0, 4, 8, 999)
        token_log_probs(hidden, weight, likeliest.ids, 1.0, 4, True)[0].sum().backward()
    assert seen.elements < 3 * 4 * 999
    assert seen.at_once < 64 * 999 / 2


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("vocabulary", [262, 32_000, 151_936, 2**30])
def test_chunks_bound_the_logits_held(vocabulary: int, on_gpu: bool) -> None:
    chunk = chunk_tokens(vocabulary, on_gpu)
    assert chunk >= 1
    assert chunk * vocabulary <= max(2**28 if on_gpu else 2**26, vocabulary)
    assert not on_gpu or chunk == 1 or chunk % 128 == 0


def test_a_cpu_chunk_fits_its_caches_and_has_enough_tokens() -> None:
    assert chunk_tokens(262, on_gpu=False) == 2**18 // 262
    assert chunk_tokens(32_000, on_gpu=False) == 512


@pytest.mark.parametrize("entropy", [False, True])
def test_no_more_than_two_chunks_of_logits_exist_at_a_time(entropy: bool) -> None:
    """Of what is allocated beside the gradients themselves."""
    tokens, width, vocabulary, chunk = 64, 4, 1000, 16
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with Largest() as largest:
        log_probs, entropies = token_log_probs(hidden, weight, targets, 0.7, chunk, entropy)
        ((log_probs * 2).sum() + (entropies.sum() if entropies is not None else 0)).backward()
    assert largest.elements <= max(chunk * vocabulary, tokens * width)
    assert chunk * vocabulary + vocabulary * width < largest.at_once
    assert largest.at_once <= 2 * chunk * vocabulary + 2 * vocabulary * width + 8 * tokens * width
