"""Several sequences laid end to end, so that no token is padding: what one forward pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlcli.model.attention import Segments


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """S sequences of T tokens in all, of which R are response tokens. All tensors lie on one device.

    input_ids [T] int64; position_ids [T] int64, counting from 0 in each sequence; segments: where the sequences lie;
    response_index [R] int64: the position whose hidden state predicts each response token (one before the token);
    targets [R] int64: those tokens; sequence [R] int64: the sequence that each belongs to.

    >>> batch = pack([(np.array([5, 6, 7]), 1), (np.array([8, 9]), 1)], torch.device("cpu"))
    >>> batch.response_index.tolist(), batch.targets.tolist(), batch.sequence.tolist()
    ([0, 1, 3], [6, 7, 9], [0, 0, 1])
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Segments
    response_index: Tensor
    targets: Tensor
    sequence: Tensor

    @property
    def boundaries(self) -> Tensor:
        """[S + 1] int32: 0, then the end of each sequence."""
        return self.segments.boundaries

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    @property
    def responses(self) -> int:
        return len(self.targets)


def pack(rows: Sequence[tuple[np.ndarray, int]], device: torch.device) -> PackedBatch:
    """Lay `rows` end to end: each the tokens of a prompt and its response, and how many of them are the prompt's.

    A prompt has at least one token (nothing would predict the first of the response); a response may be empty.
    """
    assert rows, "a pack holds at least one sequence; a rank without work takes dummy()"
    lengths = np.array([len(tokens) for tokens, _ in rows])
    prompts = np.array([prompt for _, prompt in rows])
    assert (prompts >= 1).all(), "a prompt has at least one token"
    assert (prompts <= lengths).all(), "a prompt is no longer than its sequence"
    starts = np.cumsum(lengths) - lengths
    sequence: np.ndarray = np.repeat(np.arange(len(rows)), lengths)
    position = np.arange(lengths.sum()) - starts[sequence]
    tokens = np.concatenate([tokens for tokens, _ in rows])
    response = np.flatnonzero(position >= prompts[sequence])

    def tensor(values: np.ndarray) -> Tensor:
        # A copy: arrays from the object store are read-only, which torch does not support.
        return torch.tensor(values, dtype=torch.int64, device=device)

    return PackedBatch(
        input_ids=tensor(tokens),
        position_ids=tensor(position),
        segments=Segments.of(lengths.tolist(), device),
        response_index=tensor(response - 1),
        targets=tensor(tokens[response]),
        sequence=tensor(sequence[response]),
    )


def dummy(device: torch.device) -> PackedBatch:
    """A short sequence without a response, for a rank that has nothing to do while others still forward.

    It takes part in every collective; its loss is `outputs.log_probs.sum() * 0`, which gives zero gradients.
    """
    return pack([(np.zeros(2, dtype=np.int64), 2)], device)
