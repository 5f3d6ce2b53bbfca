"""Aggregations: reduce the loss terms of tokens to one number.

A function sees one micro-batch but divides by counts of the whole minibatch, over all its micro-batches and ranks. So
its results add up: summed over any split, value and gradient are those of the one large batch.

Every function takes `values` (float [R]), `LossInputs`, of which it may declare `sequence`, `lengths` and
`group_tokens`, and the minibatch's `Denominators`, and returns a scalar. An empty response counts among the sequences
and adds 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlcli.algorithms.function_registry import FunctionRegistry
from rlcli.algorithms.inputs import LossInputs
from rlcli.algorithms.lazy import Tensor


@dataclass(frozen=True)
class Denominators:
    """Counts of a minibatch, over all micro-batches and ranks: samples that need no forward pass are counted, tokens
    that a correction rejects are not."""

    tokens: int
    """Response tokens."""
    sequences: int
    """Responses."""
    max_length: int
    """Longest response that the run allows, in tokens."""
    groups: int = 1
    """Groups, one a prompt."""


AggregationFunction = Callable[..., Tensor]
"""Takes the values, `LossInputs` and `Denominators`, and options."""

COLUMNS = frozenset({"sequence", "lengths", "group_tokens"})
"""The columns that an aggregation may declare."""

_aggregation: FunctionRegistry[Tensor] = FunctionRegistry(
    "aggregation", ("values", "inputs", "denominators"), lambda rules: COLUMNS
)
get = _aggregation.get
part = _aggregation.part
names = _aggregation.names
register = _aggregation.register


@_aggregation.register("token-mean")
def token_mean(values: Tensor, inputs: LossInputs, denominators: Denominators) -> Tensor:
    """Σ / tokens: every token has the same weight, so long responses weigh more. DAPO, arXiv 2503.14476.

    >>> from torch import tensor
    >>> values = tensor([1.0, 3.0, 8.0])  # of two responses
    >>> token_mean(values, LossInputs(), Denominators(tokens=3, sequences=2, max_length=4))  # 12 / 3
    tensor(4.)
    """
    return values.sum() / max(denominators.tokens, 1)


@_aggregation.register("seq-mean-token-sum")
def seq_mean_token_sum(values: Tensor, inputs: LossInputs, denominators: Denominators) -> Tensor:
    """Σ / sequences: the policy gradient of the response as one action. REINFORCE; RLOO, arXiv 2402.14740.

    >>> from torch import tensor
    >>> values = tensor([1.0, 3.0, 8.0])  # of two responses
    >>> seq_mean_token_sum(values, LossInputs(), Denominators(tokens=3, sequences=2, max_length=4))  # 12 / 2
    tensor(6.)
    """
    return values.sum() / max(denominators.sequences, 1)


@_aggregation.register("seq-mean-token-mean", needs=("sequence", "lengths"))
def seq_mean_token_mean(values: Tensor, inputs: LossInputs, denominators: Denominators) -> Tensor:
    """Σ_i (Σ_t / length_i) / sequences: every response has the same weight. GRPO, arXiv 2402.03300.

    >>> from torch import tensor
    >>> values = tensor([1.0, 3.0, 8.0])
    >>> inputs = LossInputs(sequence=tensor([0, 0, 1]), lengths=tensor([2, 1]))
    >>> seq_mean_token_mean(values, inputs, Denominators(3, 2, max_length=4))  # (4 / 2 + 8 / 1) / 2
    tensor(5.)
    """
    return (values / inputs.lengths[inputs.sequence]).sum() / max(denominators.sequences, 1)


@_aggregation.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(values: Tensor, inputs: LossInputs, denominators: Denominators) -> Tensor:
    """Σ / (sequences · max_length): a constant instead of the length, so no length bias. Dr. GRPO, arXiv 2503.20783.

    >>> from torch import tensor
    >>> values = tensor([1.0, 3.0, 8.0])  # of two responses
    >>> seq_mean_token_sum_norm(values, LossInputs(), Denominators(3, 2, max_length=4))  # 12 / (2 · 4)
    tensor(1.5000)
    """
    return values.sum() / (max(denominators.sequences, 1) * denominators.max_length)


@_aggregation.register("group-mean-token-mean", needs=("sequence", "group_tokens"))
def group_mean_token_mean(values: Tensor, inputs: LossInputs, denominators: Denominators) -> Tensor:
    """Σ_g (Σ_t over g / tokens of g) / groups: every prompt has the same weight, and so has every token within it.

    The objective as DAPO writes it, arXiv 2503.14476 eq. 8; the "prompt average" of ScaleRL, arXiv 2510.13786. A group
    without tokens adds 0.

    The first two of three responses answer one prompt, with four tokens in total, so (12 / 4 + 5 / 1) / 2:

    >>> from torch import tensor
    >>> values, sequence = tensor([1.0, 3.0, 6.0, 2.0, 5.0]), tensor([0, 0, 1, 1, 2])
    >>> inputs = LossInputs(sequence=sequence, group_tokens=tensor([4.0, 4.0, 1.0]))
    >>> group_mean_token_mean(values, inputs, Denominators(5, 3, max_length=4, groups=2))
    tensor(4.)
    """
    return (values / inputs.group_tokens.to(values.dtype)[inputs.sequence]).sum() / max(denominators.groups, 1)
