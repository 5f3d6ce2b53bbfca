"""Counter-based sampling: the noise of each token is a function of the response's seed and the token's position only.

vLLM's first model runner keeps a torch generator for each seeded request and calls them one by one for each token: a
loop of tiny calls, one per concurrent response. Here the noise of a whole batch comes from one hash of (seed, position
in the sequence) and, on GPUs, the index in the vocabulary, so that no state is kept between tokens: an aborted response
that resumes from its tokens gets the same continuation, for any batch. vLLM's second model runner does the same and is
not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rlcli.model.logit_chunks import BLOCK_LOGITS
from rlcli.model.splitmix import GOLDEN, mixed, signed

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Float64, Int64, UInt64
    from torch import Generator, Tensor

    from rlcli.rollout.vllm.vllm_types import ModelRunner

    TopKTopP = Callable[
        [Float[Tensor, "B V"], dict[int, Generator], Int64[Tensor, " B"] | None, Float[Tensor, " B"] | None],
        tuple[Int64[Tensor, " B"], Float32[Tensor, "B V"] | None],
    ]
    """vLLM's `TopKTopPSampler.forward`."""

SEED = "rlcli_seed"
"""The key of a request's `extra_args` that holds its seed; with vLLM's own `seed` vLLM would create a generator."""

SPAN = 256
"""Tokens whose probabilities are added up first: about the square root of large vocabularies."""


class Draw(Protocol):
    """Samples one token per row from softmax(logits): `gumbel_argmax` or `inverse_cdf`."""

    def __call__(self, logits: Float[Tensor, "B V"], keys: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]: ...


def draw_keys(seeds: Int64[np.ndarray, " B"], positions: Int64[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
    """A 63-bit key for each (seed, position), all independent. A key determines all noise of a response at that
    position."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2⁶⁴
        mixed = _mixed(seeds.astype(np.uint64) + np.uint64(GOLDEN))
        keys = _mixed(mixed + positions.astype(np.uint64) * np.uint64(GOLDEN)) >> np.uint64(1)
    return keys.astype(np.int64)


def _mixed(state: UInt64[np.ndarray, " B"]) -> UInt64[np.ndarray, " B"]:
    """As `rlcli.model.splitmix.mixed`."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits: np.ndarray = state ^ (state >> np.uint64(31))
    return bits


def gumbel_argmax(logits: Float[Tensor, "B V"], keys: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """Sample one token per row from softmax(logits): the argmax of the logits plus Gumbel noise, which is a function of
    (key, index). A logit of −inf is never sampled."""
    import torch

    index = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int64)
    bits = mixed(keys[:, None] + (index * signed(GOLDEN))[None, :]) & 0xFFFFFFFF
    # Small numbers keep all 32 bits in float32, and they are the ones that win; exactly 1 would be infinite.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return (logits.float() - (-torch.log1p(-uniform)).log()).argmax(-1)


def inverse_cdf(logits: Float[Tensor, "B V"], keys: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """Sample one token per row from softmax(logits): the first one whose cumulative probability exceeds a uniform
    number, which is a function of the key. A logit of −inf is never sampled.

    For CPUs: an exponential for each token in place of a hash and two logarithms. Sums of spans are searched first,
    then the tokens of one span, both in float64.
    """
    import torch

    rows = max(1, BLOCK_LOGITS // logits.shape[1])  # the caches of a CPU hold these, which several passes read
    blocks = zip(logits.float().split(rows), _uniform(keys).split(rows), strict=True)
    return torch.cat([_first_above(block, uniform) for block, uniform in blocks])


def _uniform(keys: Int64[Tensor, " B"]) -> Float64[Tensor, " B"]:
    """Uniform numbers between 0 and 1, exclusive: from the upper half of keys of 63 bits, which are not negative."""
    return ((keys >> 31).double() + 0.5) * 2.0**-32


def _first_above(logits: Float32[Tensor, "B V"], uniform: Float64[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """Index of the first token of each row whose cumulative probability exceeds `uniform`."""
    import torch

    vocabulary = logits.shape[1]
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    even = vocabulary // SPAN * SPAN
    sums = weights[:, :even].unflatten(1, (even // SPAN, SPAN)).sum(-1)
    sums = torch.cat([sums, weights[:, even:].sum(-1, keepdim=True)], dim=1).double()
    ends = sums.cumsum(-1)
    threshold = uniform[:, None] * ends[:, -1:]
    span = torch.searchsorted(ends, threshold, right=True)
    # The threshold within its span, whose sum is not 0, as a share of that sum.
    share = (threshold - (ends - sums).gather(1, span)) / sums.gather(1, span)
    indexes = span * SPAN + torch.arange(SPAN)
    inside = weights.gather(1, indexes.clamp(max=vocabulary - 1)).double().masked_fill_(indexes >= vocabulary, 0.0)
    ends = inside.cumsum(-1)
    offset = torch.searchsorted(ends, share.clamp(0.0, 1.0 - 2.0**-32) * ends[:, -1:], right=True)
    return (span * SPAN + offset)[:, 0]


def install(worker: object) -> bool:
    """Make this vLLM worker's sampler draw by counter. Returns False if it has no such hook: then requests have `seed`.

    Called in the worker through `collective_rpc`. vLLM's processing before (temperature, top-p) and after (greedy
    requests, log-probs) is unchanged.
    """
    runner = getattr(worker, "model_runner", None)
    sampler = getattr(getattr(runner, "sampler", None), "topk_topp_sampler", None)
    batch = getattr(runner, "input_batch", None)
    attributes = ((sampler, "logprobs_mode"), (batch, "req_ids"), (batch, "num_tokens_no_spec"), (runner, "requests"))
    if runner is None or sampler is None or not all(hasattr(owner, name) for owner, name in attributes):
        return False
    sampler.forward = _Sampler(runner, sampler.forward, sampler.logprobs_mode)
    return True


def draws_by_position(worker: object) -> bool:
    """True if this vLLM worker's own draws depend only on (seed, position), as in its second model runner."""
    return type(getattr(worker, "model_runner", None)).__module__.startswith("vllm.v1.worker.gpu.")


def draw_keys_of(runner: ModelRunner, requests: int, rows: Sequence[int] = ()) -> Int64[np.ndarray, " B"] | None:
    """Keys of the requests in the batch of vLLM's first model runner, in its order; None if it has another number of
    requests (vLLM's own warm-up). Requests of vLLM itself are greedy, and their keys are not used. rows: number of keys
    of each request, for its next token and the following ones; empty: one each."""
    names = runner.input_batch.req_ids
    if not requests or len(names) != requests:
        return None
    extra = [runner.requests[name].sampling_params.extra_args or {} for name in names]
    seeds = np.array([arguments.get(SEED, 0) for arguments in extra], dtype=np.int64)
    # The number of tokens in a sequence is the position of the next one.
    positions: np.ndarray = runner.input_batch.num_tokens_no_spec[:requests]
    if len(rows):
        seeds = seeds.repeat(rows)
        positions = positions.repeat(rows) + np.concatenate([np.arange(count) for count in rows])
    return draw_keys(seeds, positions)


class _Sampler:
    """Replaces `TopKTopPSampler.forward`, with the same arguments and results."""

    def __init__(self, runner: ModelRunner, original: TopKTopP, logprobs_mode: str) -> None:
        import torch
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        self._runner, self._original, self._mode = runner, original, logprobs_mode
        self._filter = apply_top_k_top_p
        # On GPUs one pass over the logits, without an intermediate [B, V] tensor. vLLM's Gumbel kernel for CPUs takes
        # three times as long as the inverse, and in its first version neighbouring rows share noise
        # (vllm-project/vllm#59786).
        self.draw: Draw = inverse_cdf if runner.device.type == "cpu" else torch.compile(gumbel_argmax, dynamic=True)

    def __call__(
        self,
        logits: Float[Tensor, "B V"],
        generators: dict[int, Generator],
        k: Int64[Tensor, " B"] | None,
        p: Float[Tensor, " B"] | None,
    ) -> tuple[Int64[Tensor, " B"], Float32[Tensor, "B V"] | None]:
        import torch

        keys = draw_keys_of(self._runner, len(logits))
        if keys is None:
            return self._original(logits, generators, k, p)
        logits = self._filter(logits, k, p).to(torch.float32)
        returned = None
        if self._mode == "processed_logits":
            returned = logits
        elif self._mode == "processed_logprobs":
            returned = logits.log_softmax(dim=-1)
        return self.draw(logits, torch.from_numpy(keys).to(logits.device, non_blocking=True)), returned
