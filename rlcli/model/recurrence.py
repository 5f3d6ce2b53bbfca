"""Where the sequences of a pack lie for layers that carry a state from token to token, such as those of linear
attention.

A pack is cut into pieces, each of which is computed from its first token to its last: a sequence that shares no prompt
is one piece; a shared prompt is one, and so is what follows it in each of its sequences. A piece that follows a prompt
starts from the prompt's last state and last inputs; every other piece starts from nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlcli.model.attention import Layout, Segments
from rlcli.model.device_copies import Move, upload

CHUNK = 64
"""Tokens of a chunk of the delta rule (`rlcli.model.delta_net`): of two pieces with as many chunks both cost the
same."""
STEP = 16
"""Among pieces of one chunk, those cost the same whose lengths are between the same multiples of this."""
_MAX_WASTE = 1.25
"""Pieces are computed together while the longest costs at most a quarter more than the shortest."""


@dataclass(frozen=True)
class PieceGroup:
    """B pieces of similar length that are computed together, padded at their ends to L tokens."""

    real: Tensor
    """bool [B, L]: places that hold a token."""
    parents: Tensor | None
    """int64 [B]: the prompt that each follows, by its number among all pieces that start from nothing, in the order of
    their groups; None if these start from nothing."""
    inputs: Tensor | None
    """int64 [B, W]: the last W tokens of that prompt, by their places in the pack; T, the number of the pack's tokens,
    where the prompt has fewer. None if these start from nothing."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)."""
        return self.real.shape[0], self.real.shape[1]

    def moved(self, move: Move) -> PieceGroup:
        """See `Movable`."""
        parents, inputs = (None if one is None else move(one) for one in (self.parents, self.inputs))
        return PieceGroup(move(self.real), parents, inputs)


@dataclass(frozen=True)
class PaddedPieces:
    """The pieces of a pack in groups, each padded. Groups whose pieces start from nothing come first.

    >>> source = np.array([0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7])
    >>> found = PaddedPieces.of(Segments.of([5, 6], torch.device("cpu"), source), width=3)
    >>> [group.shape for group in found.groups]  # a prompt of 3 tokens, and responses of 2 and 3
    [(1, 3), (2, 3)]
    >>> found.groups[1].parents.tolist(), found.groups[1].inputs.tolist()
    ([0, 0], [[0, 1, 2], [0, 1, 2]])
    """

    layout: Layout
    """Lays the pack's T tokens out to the Σ B · L places of the groups, and takes what was computed there back."""
    groups: tuple[PieceGroup, ...]

    @staticmethod
    def of(segments: Segments, width: int) -> PaddedPieces:
        """width: how many earlier inputs a convolution reads, besides the token's own."""
        pieces, device = Pieces.of(segments.lengths, segments.source), segments.boundaries.device
        places, filled = list[np.ndarray](), list[np.ndarray]()
        groups, numbers = list[PieceGroup](), dict[int, int]()
        for members in pieces.alike():
            sizes = pieces.sizes[members, None]
            column = np.arange(sizes.max())
            real = column < sizes
            places.append((pieces.starts[members, None] + np.minimum(column, sizes - 1)).ravel())
            filled.append(real.ravel())
            if pieces.parents[members[0]] < 0:
                numbers |= {int(piece): len(numbers) + place for place, piece in enumerate(members)}
                groups.append(PieceGroup(upload([torch.from_numpy(real)], device)[0], None, None))
                continue
            parents = np.array([numbers[int(piece)] for piece in pieces.parents[members]])
            arrays = real, parents, pieces.last(pieces.parents[members], width)
            groups.append(PieceGroup(*upload([torch.from_numpy(one) for one in arrays], device)))
        return PaddedPieces(Layout.of(np.concatenate(places), np.concatenate(filled), device), tuple(groups))

    def moved(self, move: Move) -> PaddedPieces:
        """See `Movable`."""
        return replace(self, layout=self.layout.moved(move), groups=tuple(group.moved(move) for group in self.groups))


@dataclass(frozen=True)
class Run:
    """N pieces that a kernel computes at once, concatenated."""

    tokens: Tensor
    """int64 [P]: the token of the pack at each place."""
    boundaries: Tensor
    """int32 [N + 1]: 0, then the end of each piece."""
    parents: Tensor | None
    """int64 [N]: the piece of the first run that each follows; None: they start from nothing."""

    def moved(self, move: Move) -> Run:
        """See `Movable`."""
        parents = None if self.parents is None else move(self.parents)
        return Run(move(self.tokens), move(self.boundaries), parents)


@dataclass(frozen=True)
class ConcatenatedPieces:
    """The pieces of a pack for kernels that take boundaries: at most two runs, the second of those that follow a shared
    prompt.

    >>> source = np.array([0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7])
    >>> found = ConcatenatedPieces.of(Segments.of([5, 6], torch.device("cpu"), source), width=3)
    >>> [(run.tokens.tolist(), run.boundaries.tolist()) for run in found.runs]
    [([0, 1, 2], [0, 3]), ([3, 4, 5, 6, 7], [0, 2, 5])]
    >>> found.convolved.source.tolist(), found.sequence.tolist()
    ([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7], [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    """

    runs: tuple[Run, ...]
    order: Tensor
    """int64 [T]: where each token of the pack is in the runs, one after another."""
    convolved: Layout
    """For the convolution: each piece, with the last inputs of its prompt before it."""
    sequence: Tensor
    """int32: the piece to which each place of `convolved` belongs."""

    @staticmethod
    def of(segments: Segments, width: int) -> ConcatenatedPieces:
        """width: as of `PaddedPieces`."""
        pieces, device = Pieces.of(segments.lengths, segments.source), segments.boundaries.device
        follows = pieces.parents >= 0
        roots, later = np.flatnonzero(~follows), np.flatnonzero(follows)
        number = np.cumsum(~follows) - 1
        runs = [_run(pieces, roots, None, device)]
        if len(later):
            runs.append(_run(pieces, later, number[pieces.parents[later]], device))
        tokens = np.concatenate([pieces.tokens_of(roots), pieces.tokens_of(later)])
        before = np.where(follows, np.minimum(width, pieces.sizes[pieces.parents]), 0)
        places, own = list[np.ndarray](), list[np.ndarray]()
        for piece, count in enumerate(before.tolist()):
            parent, start, size = pieces.parents[piece], pieces.starts[piece], pieces.sizes[piece]
            end = pieces.starts[parent] + pieces.sizes[parent]
            places += [np.arange(end - count, end), np.arange(start, start + size)]
            own.append(np.arange(count + size) >= count)
        source, is_own = np.concatenate(places), np.concatenate(own)
        sequence: np.ndarray = np.repeat(np.arange(len(before), dtype=np.int32), before + pieces.sizes)
        order, of_place = upload([torch.from_numpy(np.argsort(tokens)), torch.from_numpy(sequence)], device)
        return ConcatenatedPieces(tuple(runs), order, _layout(source, is_own, device), of_place)

    def moved(self, move: Move) -> ConcatenatedPieces:
        """See `Movable`."""
        runs = tuple(run.moved(move) for run in self.runs)
        return ConcatenatedPieces(runs, move(self.order), self.convolved.moved(move), move(self.sequence))


@dataclass(frozen=True)
class Pieces:
    """The pieces of a pack, which divide its tokens."""

    starts: np.ndarray
    """[pieces]: the first token of each in the pack."""
    sizes: np.ndarray
    """[pieces]: tokens of each."""
    parents: np.ndarray
    """[pieces]: the piece of the prompt that each follows; −1: it starts from nothing."""
    tokens: int
    """Of the pack."""

    @staticmethod
    def of(lengths: Sequence[int], source: np.ndarray | None) -> Pieces:
        """lengths, source: as of `Segments`."""
        sizes = np.asarray(lengths, dtype=np.int64)
        begins = np.cumsum(sizes) - sizes
        if source is None:
            return Pieces(begins, sizes, np.full(len(sizes), -1), int(sizes.sum()))
        shared = np.add.reduceat(np.bincount(source)[source] > 1, begins, dtype=np.int64)
        prompts: dict[int, int] = {}  # first token → piece
        found: list[tuple[int, int, int]] = []
        for begin, size, prompt in zip(begins.tolist(), sizes.tolist(), shared.tolist(), strict=True):
            first = int(source[begin])
            if not prompt:
                found.append((first, size, -1))
                continue
            if first not in prompts:
                prompts[first] = len(found)
                found.append((first, prompt, -1))
            if size > prompt:
                found.append((int(source[begin + prompt]), size - prompt, prompts[first]))
        starts, counts, parents = (np.array(values) for values in zip(*found, strict=True))
        return Pieces(starts, counts, parents, int(source.max()) + 1)

    def alike(self) -> list[np.ndarray]:
        """The numbers of pieces of similar length; first of those that start from nothing."""
        unit = np.where(self.sizes <= CHUNK, STEP, CHUNK)
        cost, follows = -(-self.sizes // unit) * unit, self.parents >= 0
        order, groups = np.lexsort((cost, follows)), list[np.ndarray]()
        while len(order):
            own = (follows[order] == follows[order[0]]) & (cost[order] <= _MAX_WASTE * cost[order[0]])
            groups.append(order[own])
            order = order[~own]
        return groups

    def tokens_of(self, which: np.ndarray) -> np.ndarray:
        """The tokens of these pieces, one piece after another: int64."""
        sizes = self.sizes[which]
        before = np.cumsum(sizes) - sizes
        found: np.ndarray = np.repeat(self.starts[which] - before, sizes) + np.arange(sizes.sum())
        return found

    def last(self, which: np.ndarray, width: int) -> np.ndarray:
        """[len(which), width]: the last tokens of these pieces; `tokens` where one has fewer."""
        back = self.sizes[which, None] + np.arange(-width, 0)
        found: np.ndarray = np.where(back >= 0, self.starts[which, None] + back, self.tokens)
        return found


def _run(pieces: Pieces, which: np.ndarray, parents: np.ndarray | None, device: torch.device) -> Run:
    ends = np.concatenate([[0], np.cumsum(pieces.sizes[which])]).astype(np.int32)
    arrays = [pieces.tokens_of(which), ends, *([] if parents is None else [parents])]
    uploaded = upload([torch.from_numpy(one) for one in arrays], device)
    return Run(uploaded[0], uploaded[1], uploaded[2] if parents is not None else None)


def _layout(source: np.ndarray, is_own: np.ndarray, device: torch.device) -> Layout:
    """Of places that all hold a token, whose result is taken from the one that `is_own`."""
    home = np.empty(source.max() + 1, np.int64)
    home[source[is_own]] = np.flatnonzero(is_own)
    copies = np.flatnonzero(~is_own)
    return Layout(*upload([torch.from_numpy(one) for one in (source, home, copies, source[copies])], device))
