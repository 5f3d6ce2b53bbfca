"""Counter-based sampling: the noise of each token is a function of the response's seed and the token's position only.

vLLM's first model runner keeps a torch generator for each seeded request and calls each of them in turn, token by
token: a loop of tiny calls, one per concurrent response. Here the noise of a whole batch comes from one hash of (seed,
position in the sequence) and, on GPUs, the index in the vocabulary, so nothing is kept between tokens: an aborted
response that resumes from its tokens draws what it would have drawn, whatever else is in the batch. The second model
runner does the same by itself and is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcli.model.logit_chunks import BLOCK_LOGITS

if TYPE_CHECKING:
    from torch import Tensor

SEED = "rlcli_seed"
"""The key of a request's `extra_args` that holds its seed; with vLLM's own `seed` vLLM would create a generator."""

GOLDEN = 0x9E3779B97F4A7C15

SPAN = 256
"""Tokens whose probabilities are added up first: about the square root of large vocabularies."""


def draw_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A 63-bit key for each (seed, position), all independent: int64, from int64 arrays of one shape. A key determines
    all noise of a response at that position."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2⁶⁴
        mixed = _mixed(seeds.astype(np.uint64) + np.uint64(GOLDEN))
        keys: np.ndarray = _mixed(mixed + positions.astype(np.uint64) * np.uint64(GOLDEN)) >> np.uint64(1)
    return keys.astype(np.int64)


def _mixed(state: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every output bit depends on every input bit."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    last: np.ndarray = state ^ (state >> np.uint64(31))
    return last


def gumbel_argmax(logits: Tensor, keys: Tensor) -> Tensor:
    """One draw from softmax(logits) per row, `[B]` int64: the largest of logits `[B, V]` plus Gumbel noise, which is a
    function of (key, index). keys: `[B]` int64. A logit of −inf is never drawn.

    Integer arithmetic wraps, and shifts of signed numbers extend the sign, which the masks remove.
    """
    import torch

    index = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int64)
    state = keys[:, None] + (index * _signed(GOLDEN))[None, :]
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
    bits = (state ^ ((state >> 31) & 0x1FFFFFFFF)) & 0xFFFFFFFF
    # Small numbers keep all 32 bits in float32, and they are the ones that win; exactly 1 would be infinite.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return (logits.float() - (-torch.log1p(-uniform)).log()).argmax(-1)


def inverse_cdf(logits: Tensor, keys: Tensor) -> Tensor:
    """One draw from softmax(logits) per row, `[B]` int64: the first token up to which the probabilities add up to more
    than a uniform number, which is a function of the key. keys: `[B]` int64. A logit of −inf is never drawn.

    For CPUs: an exponential for each token in place of a hash and two logarithms. Sums of spans are searched first,
    then the tokens of one, both in float64.
    """
    import torch

    return torch.cat([_first_above(*part) for part in zip(*_blocks(logits.float(), _uniform(keys)), strict=True)])


def _blocks(logits: Tensor, uniform: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Rows that the caches of a CPU hold at once: several passes read them."""
    rows = max(1, BLOCK_LOGITS // logits.shape[1])
    return logits.split(rows), uniform.split(rows)


def _uniform(keys: Tensor) -> Tensor:
    """float64, more than 0 and less than 1: the upper half of keys of 63 bits, which are not negative."""
    return ((keys >> 31).double() + 0.5) * 2.0**-32


def _first_above(logits: Tensor, uniform: Tensor) -> Tensor:
    import torch

    vocabulary = logits.shape[1]
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    even = vocabulary // SPAN * SPAN
    sums = weights[:, :even].unflatten(1, (even // SPAN, SPAN)).sum(-1)
    sums = torch.cat([sums, weights[:, even:].sum(-1, keepdim=True)], dim=1).double()
    ends = sums.cumsum(-1)
    wanted = uniform[:, None] * ends[:, -1:]
    span = torch.searchsorted(ends, wanted, right=True)
    # The same in the span, whose sum is not 0: where in it the number lies, as a share.
    share = (wanted - (ends - sums).gather(1, span)) / sums.gather(1, span)
    places = span * SPAN + torch.arange(SPAN)
    inside = weights.gather(1, places.clamp(max=vocabulary - 1)).double().masked_fill_(places >= vocabulary, 0.0)
    ends = inside.cumsum(-1)
    within = torch.searchsorted(ends, share.clamp(0.0, 1.0 - 2.0**-32) * ends[:, -1:], right=True)
    return (span * SPAN + within)[:, 0]


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def install(worker: Any) -> bool:
    """Make this vLLM worker's sampler draw by counter; False if it has no such hook: then requests carry `seed`.

    Called in the worker through `collective_rpc`. vLLM's processing before (temperature, top-p) and after (greedy
    requests, log-probs) is unchanged.
    """
    runner: Any = getattr(worker, "model_runner", None)
    sampler: Any = getattr(getattr(runner, "sampler", None), "topk_topp_sampler", None)
    batch: Any = getattr(runner, "input_batch", None)
    wanted = ((sampler, "logprobs_mode"), (batch, "req_ids"), (batch, "num_tokens_no_spec"), (runner, "requests"))
    if not all(hasattr(owner, name) for owner, name in wanted):
        return False
    sampler.forward = _Sampler(runner, sampler.forward, sampler.logprobs_mode)
    return True


def draws_by_place(worker: Any) -> bool:
    """Whether this vLLM worker's own draws depend only on (seed, position), as in its second model runner."""
    return type(getattr(worker, "model_runner", None)).__module__.startswith("vllm.v1.worker.gpu.")


def draw_keys_of(runner: Any, requests: int, rows: Sequence[int] = ()) -> np.ndarray | None:
    """Keys, int64, of the requests in the batch of vLLM's first model runner, in its order; None if it does not have so
    many (vLLM's own warm-up). Those that are not ours are greedy, and their keys are not used. rows: of each request,
    how many keys: for its next token and those after it; one if not given."""
    names = runner.input_batch.req_ids
    if not requests or len(names) != requests:
        return None
    extra = [runner.requests[name].sampling_params.extra_args or {} for name in names]
    seeds = np.array([one.get(SEED, 0) for one in extra], dtype=np.int64)
    # The number of tokens in a sequence is the position of the next one.
    positions: np.ndarray = runner.input_batch.num_tokens_no_spec[:requests]
    if len(rows):
        seeds = seeds.repeat(rows)
        positions = positions.repeat(rows) + np.concatenate([np.arange(count) for count in rows])
    return draw_keys(seeds, positions)


class _Sampler:
    """Replaces `TopKTopPSampler.forward`: the same arguments, the same results. draw: as `gumbel_argmax`."""

    def __init__(self, runner: Any, original: Any, logprobs_mode: str) -> None:
        import torch
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        self._runner, self._original, self._mode = runner, original, logprobs_mode
        self._filter = apply_top_k_top_p
        # On GPUs one pass over the logits, without an intermediate [B, V] tensor. vLLM's Gumbel kernel for CPUs takes
        # three times as long as the inverse, and in its first version neighbouring rows share noise
        # (vllm-project/vllm#59786).
        self.draw = inverse_cdf if runner.device.type == "cpu" else torch.compile(gumbel_argmax, dynamic=True)

    def __call__(
        self, logits: Tensor, generators: dict[int, Any], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        import torch

        keys = draw_keys_of(self._runner, len(logits))
        if keys is None:
            drawn: tuple[Tensor, Tensor | None] = self._original(logits, generators, k, p)
            return drawn
        logits = self._filter(logits, k, p).to(torch.float32)
        returned = None
        if self._mode == "processed_logits":
            returned = logits
        elif self._mode == "processed_logprobs":
            returned = logits.log_softmax(dim=-1)
        return self.draw(logits, torch.from_numpy(keys).to(logits.device, non_blocking=True)), returned
