"""Converts padded tensors to the packed ones of this library and back, so that each formula exists once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Padded:
    """Responses as the rows of [B, L] tensors, whose tokens are where `mask` (bool [B, L]) is true.

    Padding may be anywhere: before, after, or inside a response, such as the words of a tool that were not generated.
    Its values are never read and get no gradient. A row without tokens is an empty response.

    >>> from rlcli.algorithms.aggregation import Denominators, seq_mean_token_mean
    >>> from rlcli.algorithms.inputs import LossInputs
    >>> padded = Padded(torch.tensor([[True, False, True], [False, False, False], [False, True, False]]))
    >>> losses = padded.pack(torch.tensor([[1.0, 9.0, 3.0], [9.0, 9.0, 9.0], [9.0, 5.0, 9.0]]))
    >>> losses
    tensor([1., 3., 5.])
    >>> padded.sequence, padded.lengths
    (tensor([0, 0, 2]), tensor([2, 0, 1]))
    >>> denominators = Denominators(tokens=3, sequences=3, max_length=3)
    >>> inputs = LossInputs(sequence=padded.sequence, lengths=padded.lengths)
    >>> seq_mean_token_mean(losses, inputs, denominators)  # (2 + 0 + 5) / 3
    tensor(2.3333)
    >>> padded.unpack(losses)
    tensor([[1., 0., 3.],
            [0., 0., 0.],
            [0., 5., 0.]])
    """

    mask: Tensor

    @property
    def sequence(self) -> Tensor:
        """Row of each token: int64 [R]."""
        return self.mask.nonzero()[:, 0]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row: int64 [B]."""
        return self.mask.sum(1)

    def pack(self, values: Tensor) -> Tensor:
        """The tokens of `values` ([B, L]) concatenated, row after row: [R]."""
        assert values.shape == self.mask.shape, f"values {tuple(values.shape)}, mask {tuple(self.mask.shape)}"
        return values[self.mask]

    def unpack(self, values: Tensor) -> Tensor:
        """`values` ([R]) where the tokens are, and 0 elsewhere: [B, L]."""
        tokens = int(self.mask.sum())
        assert values.shape == (tokens,), f"values {tuple(values.shape)}, {tokens} tokens"
        return torch.zeros(self.mask.shape, dtype=values.dtype, device=values.device).masked_scatter(self.mask, values)
