"""Speculative decoding without a second model: drafts are copied from earlier continuations of the same tokens.

vLLM proposes the drafts and computes the logits of all of them in one forward pass. Sampling is done here:
each position is sampled as without drafts, by the noise of (seed, position), and drafts are kept as long as they equal
the sampled tokens. A draft is a fixed token d, so this accepts it with the target's probability p(d), and a
rejected one is replaced by a token from p without d: the rule of Leviathan et al. (2022, arXiv:2211.17192) for such a
draft. Besides, the tokens are those that the same seeds give without drafts, except for rounding.

vLLM 0.32's own rule is replaced for a second reason: on CPUs its kernel `expand_kernel` writes the temperatures into a
copy, so that the result holds uninitialised memory, and log-probs are nats off at any temperature above 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcli.errors import SetupError
from rlcli.rollout.sampling import draw_keys_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Float32, Int64
    from torch import Tensor
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from rlcli.rollout.sampling import Draw
    from rlcli.rollout.vllm.vllm_types import ModelRunner, Worker

    Verify = Callable[
        [SpecDecodeMetadata, Float[Tensor, "drafts V"] | None, Float[Tensor, "rows V"], SamplingMetadata], SamplerOutput
    ]

SUPPORTED = ((0, 32), (0, 33))
"""vLLM releases whose verification of drafts this file can replace: at least the first, below the second."""

LONGEST, SHORTEST = 4, 2
"""The most and the fewest last tokens of a response that are looked for in its prompt and in the response so far."""


def settings(drafts: int) -> dict[str, object]:
    """vLLM's arguments to draft this many tokens in each step. Raises `SetupError` if the installed vLLM is another one
    than this file was written for."""
    import vllm

    numbers = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        raise SetupError(
            f"rollout.speculate = {drafts}: drafts have been verified with vLLM 0.32 only, and {vllm.__version__} is "
            "installed",
            "leave rollout.speculate out, or pip install 'vllm==0.32.*'",
        )
    method = {"method": "ngram", "num_speculative_tokens": drafts}
    lengths = {"prompt_lookup_max": LONGEST, "prompt_lookup_min": SHORTEST}
    return {"speculative_config": method | lengths, "async_scheduling": False}


def install(worker: object) -> bool:
    """Make this vLLM worker verify drafts as described above; False if its runner has no such hook. After
    `sampling.install`, whose way to draw it uses. Called in the worker through `collective_rpc`."""
    runner = getattr(worker, "model_runner", None)
    verifier = getattr(runner, "rejection_sampler", None)
    sampler = getattr(getattr(runner, "sampler", None), "topk_topp_sampler", None)
    if runner is None or verifier is None or sampler is None or not hasattr(getattr(sampler, "forward", None), "draw"):
        return False
    verifier.forward = Verifier(runner, verifier.forward, sampler.forward.draw)
    return True


def counted(worker: Worker) -> tuple[int, int]:
    """Drafted and accepted tokens of this vLLM worker so far. Called in the worker through `collective_rpc`."""
    verifier = worker.model_runner.rejection_sampler.forward
    assert isinstance(verifier, Verifier), "called after `install`"
    return verifier.drafted, verifier.accepted


class Verifier:
    """Replaces `RejectionSampler.forward`: the same arguments, the same results. drafted, accepted: tokens so far.
    draw: as `sampling.gumbel_argmax`."""

    def __init__(self, runner: ModelRunner, original: Verify, draw: Draw) -> None:
        self.drafted = self.accepted = 0
        self._runner, self._original, self._draw = runner, original, draw

    def __call__(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Float[Tensor, "drafts V"] | None,
        logits: Float[Tensor, "rows V"],
        sampling: SamplingMetadata,
    ) -> SamplerOutput:
        """logits: of each request the rows of its drafts and then one more. The result has −1 in place of what is
        rejected."""
        import torch
        from vllm.v1.outputs import SamplerOutput

        rows = [count + 1 for count in metadata.num_draft_tokens]
        keys = draw_keys_of(self._runner, len(rows), rows)
        if keys is None:
            return self._original(metadata, draft_probs, logits, sampling)
        owner = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).to(logits.device)
        logits = processed(logits, owner, sampling)
        row_tokens = logits.argmax(-1)
        if not sampling.all_greedy:
            sampled = self._draw(logits, torch.from_numpy(keys).to(logits.device))
            row_tokens = (
                sampled if sampling.all_random else row_tokens.where((sampling.temperature == 0)[owner], sampled)
            )
        tokens, row_indexes = accepted(row_tokens, metadata.draft_token_ids, rows)
        self.drafted += sum(metadata.num_draft_tokens)
        self.accepted += int((tokens >= 0).sum()) - len(rows)
        log_probs = None
        if sampling.max_num_logprobs is not None:
            # One row for each place in `tokens`: vLLM leaves out those of rejected tokens.
            token_log_probs, token_ids = logits.log_softmax(-1)[row_indexes.flatten()], tokens.flatten().clamp(min=0)
            log_probs = self._runner.sampler.gather_logprobs(token_log_probs, sampling.max_num_logprobs, token_ids)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32), logprobs_tensors=log_probs)


def processed(
    logits: Float[Tensor, "rows V"], owner: Int64[Tensor, " rows"], sampling: SamplingMetadata
) -> Float32[Tensor, "rows V"]:
    """Logits after temperature and top-p. owner: the request of each row."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = logits.to(torch.float32)
    if sampling.all_greedy:
        return logits
    temperature = sampling.temperature.where(sampling.temperature != 0, 1.0)[owner]
    top_k, top_p = (None if values is None else values[owner] for values in (sampling.top_k, sampling.top_p))
    filtered: Tensor = apply_top_k_top_p(logits / temperature[:, None], top_k, top_p)
    return filtered


def accepted(sampled: Tensor, drafts: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    """The tokens that each request gets, int64 `[requests, most rows]` with −1 for none, and the row of each place, of
    the same shape: of a request its sampled tokens up to the first that differs from its draft, or all of them.

    sampled: int64 `[rows]`, of each request one for each draft and one more. drafts: `[drafts]`, without the one more.

    >>> import torch
    >>> accepted(torch.tensor([5, 6, 7, 8]), torch.tensor([5, 9]), [3, 1])[0].tolist()
    [[5, 6, -1], [8, -1, -1]]
    """
    import torch

    count = torch.tensor(rows)
    start, offset = count.cumsum(0) - count, torch.arange(max(rows))
    row = (start[:, None] + offset).clamp(max=len(sampled) - 1)
    is_draft, exists = offset < count[:, None] - 1, offset < count[:, None]
    draft = sampled.new_full(row.shape, -1)
    row, is_draft, exists = row.to(sampled.device), is_draft.to(sampled.device), exists.to(sampled.device)
    draft[is_draft] = drafts.to(sampled.dtype)
    matches = (sampled[row] == draft).cumprod(1)
    preceding_match = torch.cat([matches.new_ones(len(rows), 1), matches[:, :-1]], dim=1).bool()
    return sampled[row].where(preceding_match & exists, -1), row
