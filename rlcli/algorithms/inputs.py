"""The records that the functions of an algorithm read: `LossInputs` and `AdvantageInputs`.

A function declares the columns that it reads where it is registered, and reads them as attributes. The letters in
shapes are those of `rlcli.column_records`: R response tokens, S sequences, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rlcli.algorithms.lazy import Tensor, torch
from rlcli.algorithms.ranks import ALONE, Ranks
from rlcli.column_records import Column, Columns
from rlcli.errors import RlcliError


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Inputs(Columns):
    """A record of columns for a function that declares some of them."""

    reader: str = ""
    """The function that this record was made for by `only`, for errors; empty: no particular one."""
    declared: frozenset[str] = frozenset()
    """The columns that `reader` declares."""

    def only(self, names: frozenset[str], reader: str) -> Self:
        """The record for `reader`, which declares the columns `names`: it has no others."""
        others = dict.fromkeys(self.present().keys() - names)
        return self.replace(**others, reader=reader, declared=names)

    def absent(self, name: str) -> RlcliError:
        """The error for reading a column that is absent."""
        if self.reader and name not in self.declared:
            return RlcliError(
                f"{self.reader} reads '{name}', which it does not declare",
                f"add '{name}' to the needs that it is registered with",
            )
        if self.reader:
            return RlcliError(f"{self.reader} needs '{name}', which this batch does not have")
        return super().absent(name)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LossInputs(Inputs):
    """Inputs of losses, corrections, aggregations and KL estimates from one micro-batch.

    Two responses, of two tokens and of one, of which only the first was right:

    >>> inputs = LossInputs(
    ...     log_probs=torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
    ...     old_log_probs=torch.tensor([-1.0, -2.0, -3.5]),
    ...     advantages=torch.tensor([1.0, 1.0, -1.0]),
    ...     sequence=torch.tensor([0, 0, 1]),
    ...     lengths=torch.tensor([2, 1]),
    ... )
    >>> (inputs.log_probs - inputs.old_log_probs).detach()
    tensor([0.0000, 0.0000, 0.5000])
    >>> inputs.has("reference_log_probs")
    False
    >>> inputs.only(frozenset({"log_probs"}), "the policy loss 'mine'").advantages
    Traceback (most recent call last):
    rlcli.errors.RlcliError: the policy loss 'mine' reads 'advantages', which it does not declare; \
add 'advantages' to the needs that it is registered with
    """

    log_probs: Column[Tensor] = Column("float", "R")
    """log π in this update, nats, with gradient. From the forward pass. A correction sees it without gradient."""
    old_log_probs: Column[Tensor] = Column("float", "R")
    """log π_old, of the policy at the start of the step, as the trainer computes it: filled in by
    `PolicyRole.compute_old_log_probs`, else the detached `log_probs`. With the correction `bypass` a loss sees the
    engine's in its place."""
    rollout_log_probs: Column[Tensor] = Column("float", "R")
    """log μ, as the engine reported it while it sampled. From the trajectory; absent if no engine sampled."""
    reference_log_probs: Column[Tensor] = Column("float", "R")
    """log π_ref, of the frozen reference model. From `PolicyRole.compute_reference_log_probs`; a loss that declares it
    adds a reference model to the run."""
    teacher_log_probs: Column[Tensor] = Column("float", "R")
    """log ν, of the teacher. From the teacher's workers; a loss that declares it adds a teacher to the run."""
    teacher_agrees: Column[Tensor] = Column("bool", "R")
    """True if the token is the teacher's likeliest. From the teacher's workers; for metrics."""
    teacher_top_log_probs: Column[Tensor] = Column("float", "R", "K")
    """log ν of the teacher's K likeliest tokens at each position, K = `teacher.top_k`. From the teacher's workers."""
    candidate_log_probs: Column[Tensor] = Column("float", "R", "K")
    """log π of the same K tokens, with gradient. From the forward pass."""
    advantages: Column[Tensor] = Column("float", "R")
    """A of each token. From the controller, or from `fill_advantages` where it depends on tokens."""
    weights: Column[Tensor] = Column("float", "R")
    """Weight of each token's loss, without gradient: the product of the corrections; 1 if no engine sampled. A loss
    that does not declare it is multiplied by it."""
    entropy: Column[Tensor] = Column("float", "R")
    """Entropy of π at each position, nats, with gradient if there is an entropy bonus. From the forward pass."""
    selected: Column[Tensor] = Column("bool", "R")
    """The tokens that the selector of the loss's name chose. From `fill_selected`."""
    kept: Column[Tensor] = Column("bool", "R")
    """The tokens that no correction rejects. From `fill_kept`; absent if no correction may reject any."""
    kept_indexes: Column[Tensor] = Column("int64", "kept tokens")
    """Positions where `kept` is true, if that is known without waiting for the device. From `fill_kept`."""
    sequence: Column[Tensor] = Column("int64", "R")
    """Sequence of each token, of the S, from 0, non-decreasing. From packing."""
    lengths: Column[Tensor] = Column("int64", "S")
    """Response tokens of each sequence, 0 for an empty one. From packing."""
    pairs: Column[Tensor] = Column("int64", "S")
    """Label of the pair of each sequence: two of equal label are compared. From the controller, with
    `algorithm.select = pairs`."""
    right: Column[Tensor] = Column("bool", "S")
    """True if the sequence's answer is right. From the controller."""
    group_tokens: Column[Tensor] = Column("float", "S")
    """Response tokens of all sequences of each one's group in the minibatch, over all micro-batches and ranks. From the
    controller; `fill_kept` subtracts rejected ones."""

    def without_rejected(self) -> LossInputs:
        """The same for only the `kept` tokens: R becomes smaller, and so do `lengths`.

        >>> sequence, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
        >>> inputs = LossInputs(kept=torch.tensor([True, False, False]), sequence=sequence, lengths=lengths)
        >>> inputs.without_rejected().sequence, inputs.without_rejected().lengths
        (tensor([0]), tensor([1, 0]))
        """
        indexes = self.kept_indexes if self.has("kept_indexes") else self.kept.nonzero()[:, 0]
        lengths = torch.zeros_like(self.lengths).index_add(0, self.sequence, self.kept.to(self.lengths.dtype))
        of_tokens = [name for name, column in self.columns().items() if column.shape[0] == "R" and self.has(name)]
        tokens = {name: getattr(self, name).index_select(0, indexes) for name in of_tokens}
        return self.replace(**tokens, lengths=lengths, kept_indexes=None)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AdvantageInputs(Inputs):
    """Inputs of advantages. S sequences: all of the step for the levels `response` and `turn`; those of this rank
    for the level `token`, which may be parts of groups that other ranks hold parts of too.

    Two responses to one prompt, of which only the first was right:

    >>> inputs = AdvantageInputs(
    ...     rewards=torch.tensor([1.0, 0.0]), groups=torch.tensor([7, 7]), lengths=torch.tensor([2, 1])
    ... )
    >>> inputs.rewards - inputs.rewards.mean()
    tensor([ 0.5000, -0.5000])
    """

    rewards: Column[Tensor] = Column("float", "S")
    """Reward of each sequence: the verifier's score and the shaping, at the level `response` less the KL penalty of
    `algorithm.kl_in = reward`."""
    groups: Column[Tensor] = Column("int64", "S")
    """Label of each sequence's group, in any order; at the level `token` dense, 0 … `group_count` − 1."""
    lengths: Column[Tensor] = Column("int64", "S")
    """Response tokens of each sequence, 0 for an empty one."""
    baselines: Column[Tensor] = Column("float", "S")
    """Reward of the greedy response to the same prompt; a function that declares it adds a greedy response a prompt."""
    parts: Column[Tensor] = Column("float", "S", "K")
    """The K named parts of each reward, which the composed verifiers give."""
    part_weights: Column[Sequence[float]] = Column("float", "K")
    """The weight of each part in the reward."""
    turn_rewards: Column[Tensor] = Column("float", "S", "K")
    """Reward of each of at most K turns; 0 behind the last. What a verifier and the shaping give beyond the
    environment's own rewards is in the last turn's."""
    turn_states: Column[Tensor] = Column("int64", "S", "K")
    """A hash of what the environment wrote before each turn; 0 behind the last."""
    turns: Column[Tensor] = Column("int64", "S")
    """Number of turns of each sequence; a single response is one turn."""
    token_rewards: Column[Tensor] = Column("float", "R")
    """Reward of each token: that of a turn on its last token, and the KL penalty of `algorithm.kl_in = reward`."""
    values: Column[Tensor] = Column("float", "R")
    """The critic's V of the state before each token; a function that declares it adds a critic."""
    process_rewards: Column[Tensor] = Column("float", "R")
    """The implicit process reward of each token; a function that declares it adds a process reward model."""
    old_log_probs: Column[Tensor] = Column("float", "R")
    """log π_old, of the policy at the start of the step, nats."""
    teacher_log_probs: Column[Tensor] = Column("float", "R")
    """log ν, of the teacher, nats; a function that declares it adds a teacher."""
    sequence: Column[Tensor] = Column("int64", "R")
    """Sequence of each token, of the S, from 0, non-decreasing. What an environment added between two response
    tokens is left out, so that the later one follows the earlier one directly."""
    group_count: int = 0
    """G, the groups of the step over all ranks, at the level `token`."""
    ranks: Ranks = ALONE
    """The ranks that share the step, over which moments are taken, at the level `token`."""
