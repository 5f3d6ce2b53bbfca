"""Rows that a step trains on, as the controller sends it to all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from rlcli.column_records import Column, Columns
from rlcli.data.step_files import Recording

if TYPE_CHECKING:
    import numpy as np

    from rlcli.data.messages import ShardRef

A = TypeVar("A")


@dataclass(eq=False, repr=False, kw_only=True)
class SampleColumns(Columns, Generic[A]):
    """Columns of the S samples that a step trains on: numpy arrays on the controller, tensors on ranks.

    Two responses to one prompt, of which only the first was right:

    >>> import numpy as np
    >>> columns = SampleColumns(rewards=np.array([1.0, 0.0]), groups=np.array([0, 0]), lengths=np.array([2, 1]))
    >>> columns.map(lambda values: values[[1]]).lengths.tolist()
    [1]
    >>> columns.has("advantages")
    False
    """

    shard: Column[A] = Column("int64", "S")
    """Index into `TrainRows.shards` of the shard that holds the sample's trajectory."""
    row: Column[A] = Column("int64", "S")
    """Its row in that shard."""
    rewards: Column[A] = Column("float64", "S")
    """Its reward: the score, and what `shaping` adds."""
    scores: Column[A] = Column("float64", "S")
    """The score of its verdict."""
    signatures: Column[A] = Column("int64", "S")
    """Its signature, of tokens, log-probs and score; 0 if it has none."""
    groups: Column[A] = Column("int64", "S")
    """Its group, 0 … G − 1: samples of equal number answer one prompt."""
    lengths: Column[A] = Column("int64", "S")
    """Its response tokens."""
    right: Column[A] = Column("bool", "S")
    """True if its answer is right."""
    group_tokens: Column[A] = Column("float32", "S")
    """Response tokens of all samples of its group; on a rank, minus those that a correction rejects."""
    parts: Column[A] = Column("float64", "S", "K")
    """The named parts of its reward."""
    baselines: Column[A] = Column("float64", "S")
    """Score of the greedy response to its prompt, if the advantage needs it."""
    turn_rewards: Column[A] = Column("float64", "S", "K")
    """Reward of each of its turns, 0 behind the last, if turns are rewarded."""
    advantages: Column[A] = Column("float64", "S")
    """Its advantage, or [S, K] of each of its turns, if rewards alone determine it."""
    pairs: Column[A] = Column("int64", "S")
    """Number of its pair, if the loss compares pairs."""
    teacher: Column[A] = Column("int64", "S")
    """Number of its teacher, if there are several."""


@dataclass(frozen=True)
class MinibatchCounts:
    """The denominators of one optimizer update: counts over all ranks."""

    tokens: int
    """Response tokens."""
    sequences: int
    """Responses."""
    groups: int
    """Prompts."""
    max_length: int
    """The longest response that the run allows, in tokens."""
    right_tokens: int
    """Response tokens of right samples."""


@dataclass(frozen=True)
class TrainRows:
    """A step's samples, as all ranks receive them. Each rank gets the indexes of its own samples separately.

    Each rank needs some of the shards, and receives all of them in this one object: a reference in the arguments of a
    call costs the controller more than the whole list costs a rank, and each of R ranks reads most of R shards.

    One minibatch of two samples, rows 0 and 1 of a single shard:

    >>> import numpy as np
    >>> counts = MinibatchCounts(tokens=12, sequences=2, groups=1, max_length=16, right_tokens=7)
    >>> columns = SampleColumns(shard=np.array([0, 0]), row=np.array([0, 1]), rewards=np.array([1.0, 0.0]))
    >>> rows = TrainRows([counts], columns, seed=5, shards=["reference"])
    >>> rows.minibatches[0].tokens, rows.columns.rewards.tolist(), rows.one_prompt
    (12, [1.0, 0.0], True)
    """

    minibatches: list[MinibatchCounts]
    """The denominators of each minibatch."""
    columns: SampleColumns[np.ndarray]
    """Columns of the samples."""
    seed: int
    """Seed of all random choices on this step's samples."""
    shards: list[ShardRef]
    """References to the generated `SampleShard`s."""
    one_prompt: bool = True
    """True if the samples of a group begin with the same prompt."""
    recording: Recording | None = None
    """Settings of the recording of tokens for viewers, if any are recorded."""
    version: int = 0
    """Policy version of the trainer's weights (number of weight syncs)."""
