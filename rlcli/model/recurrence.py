"""Layouts of a pack for recurrent layers, such as linear attention.

A pack is cut into pieces, each of which is computed from its first token to its last: a sequence that shares no prompt
is one piece, a shared prompt is one, and so is the continuation of the prompt in each of its sequences. A continuation
starts from the prompt's last state and last inputs; every other piece starts from a zero state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlcli.model.attention import Layout, Segments
from rlcli.model.device_copies import Move, upload

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

CHUNK = 64
"""Tokens of a chunk of the delta rule (`rlcli.model.delta_net`): pieces with equally many chunks cost the same."""
STEP = 16
"""Within one chunk, pieces cost the same if their lengths round up to the same multiple of this."""
_MAX_WASTE = 1.25
"""Pieces are batched while the longest costs at most a quarter more than the shortest."""


@dataclass(frozen=True)
class PieceGroup:
    """B pieces of similar length that are batched, padded at their ends to L tokens."""

    real: Bool[Tensor, "B L"]
    """False for padding."""
    parents: Int[Tensor, " B"] | None
    """int64: the prompt that each piece continues, as an index into all pieces that start from a zero state, in the
    order of their groups; None if these start from a zero state."""
    inputs: Int[Tensor, "B W"] | None
    """int64: the last W tokens of that prompt, as indices into the pack; T, the number of the pack's tokens, where the
    prompt has fewer. None if these start from a zero state."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)."""
        return self.real.shape[0], self.real.shape[1]

    def moved(self, move: Move) -> PieceGroup:
        """See `Movable`."""
        parents, inputs = (None if x is None else move(x) for x in (self.parents, self.inputs))
        return PieceGroup(move(self.real), parents, inputs)


@dataclass(frozen=True)
class PaddedPieces:
    """The pieces of a pack in padded groups. Groups whose pieces start from a zero state come first.

    >>> source = np.array([0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7])
    >>> pieces = PaddedPieces.of(Segments.of([5, 6], torch.device("cpu"), source), width=3)
    >>> [group.shape for group in pieces.groups]  # a prompt of 3 tokens, and responses of 2 and 3
    [(1, 3), (2, 3)]
    >>> pieces.groups[1].parents.tolist(), pieces.groups[1].inputs.tolist()
    ([0, 0], [[0, 1, 2], [0, 1, 2]])
    """

    layout: Layout
    """Maps the pack's T tokens to the Σ B · L slots of the groups, and results back to the tokens."""
    groups: tuple[PieceGroup, ...]

    @staticmethod
    def of(segments: Segments, width: int) -> PaddedPieces:
        """width: number of preceding inputs that a convolution reads."""
        pieces, device = Pieces.of(segments.lengths, segments.source), segments.boundaries.device
        tokens, filled = list[np.ndarray](), list[np.ndarray]()
        groups, state_index = list[PieceGroup](), dict[int, int]()
        for members in pieces.similar():
            sizes = pieces.sizes[members, None]
            column = np.arange(sizes.max())
            real = column < sizes
            tokens.append((pieces.starts[members, None] + np.minimum(column, sizes - 1)).ravel())
            filled.append(real.ravel())
            if pieces.parents[members[0]] < 0:
                state_index |= {int(piece): len(state_index) + row for row, piece in enumerate(members)}
                groups.append(PieceGroup(upload([torch.from_numpy(real)], device)[0], None, None))
                continue
            parents = np.array([state_index[int(piece)] for piece in pieces.parents[members]])
            arrays = real, parents, pieces.last(pieces.parents[members], width)
            groups.append(PieceGroup(*upload([torch.from_numpy(array) for array in arrays], device)))
        return PaddedPieces(Layout.of(np.concatenate(tokens), np.concatenate(filled), device), tuple(groups))

    def moved(self, move: Move) -> PaddedPieces:
        """See `Movable`."""
        return replace(self, layout=self.layout.moved(move), groups=tuple(group.moved(move) for group in self.groups))


@dataclass(frozen=True)
class Run:
    """N concatenated pieces that one kernel call computes."""

    tokens: Int[Tensor, " P"]
    """int64: the pack's token in each slot."""
    boundaries: Int[Tensor, " N_plus_1"]
    """int32: 0, then the end of each piece."""
    parents: Int[Tensor, " N"] | None
    """int64: the piece of the first run that each piece continues; None: they start from a zero state."""

    def moved(self, move: Move) -> Run:
        """See `Movable`."""
        parents = None if self.parents is None else move(self.parents)
        return Run(move(self.tokens), move(self.boundaries), parents)


@dataclass(frozen=True)
class ConcatenatedPieces:
    """The pieces of a pack for variable-length kernels.

    >>> source = np.array([0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7])
    >>> pieces = ConcatenatedPieces.of(Segments.of([5, 6], torch.device("cpu"), source), width=3)
    >>> [(run.tokens.tolist(), run.boundaries.tolist()) for run in pieces.runs]
    [([0, 1, 2], [0, 3]), ([3, 4, 5, 6, 7], [0, 2, 5])]
    >>> pieces.convolved.source.tolist(), pieces.sequence.tolist()
    ([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7], [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    """

    runs: tuple[Run, ...]
    """At most two: of the pieces that start from a zero state, and of the continuations of shared prompts."""
    order: Int[Tensor, " T"]
    """int64: the index of each token of the pack in the concatenated runs."""
    convolved: Layout
    """For the convolution: each piece, preceded by the last inputs of its prompt."""
    sequence: Int[Tensor, " P"]
    """int32: the piece to which each slot of `convolved` belongs."""

    @staticmethod
    def of(segments: Segments, width: int) -> ConcatenatedPieces:
        """width: as of `PaddedPieces`."""
        pieces, device = Pieces.of(segments.lengths, segments.source), segments.boundaries.device
        follows = pieces.parents >= 0
        roots, continuations = np.flatnonzero(~follows), np.flatnonzero(follows)
        root_index = np.cumsum(~follows) - 1
        runs = [_run(pieces, roots, None, device)]
        if len(continuations):
            runs.append(_run(pieces, continuations, root_index[pieces.parents[continuations]], device))
        tokens = np.concatenate([pieces.tokens_of(roots), pieces.tokens_of(continuations)])
        repeated = np.where(follows, np.minimum(width, pieces.sizes[pieces.parents]), 0)
        slot_tokens, homes = list[np.ndarray](), list[np.ndarray]()
        for piece, count in enumerate(repeated.tolist()):
            parent, start, size = pieces.parents[piece], pieces.starts[piece], pieces.sizes[piece]
            end = pieces.starts[parent] + pieces.sizes[parent]
            slot_tokens += [np.arange(end - count, end), np.arange(start, start + size)]
            homes.append(np.arange(count + size) >= count)
        source, is_home = np.concatenate(slot_tokens), np.concatenate(homes)
        sequence: np.ndarray = np.repeat(np.arange(len(repeated), dtype=np.int32), repeated + pieces.sizes)
        order, slot_piece = upload([torch.from_numpy(np.argsort(tokens)), torch.from_numpy(sequence)], device)
        return ConcatenatedPieces(tuple(runs), order, _layout(source, is_home, device), slot_piece)

    def moved(self, move: Move) -> ConcatenatedPieces:
        """See `Movable`."""
        runs = tuple(run.moved(move) for run in self.runs)
        return ConcatenatedPieces(runs, move(self.order), self.convolved.moved(move), move(self.sequence))


@dataclass(frozen=True)
class Pieces:
    """The pieces of a pack, which divide its tokens."""

    starts: Int[np.ndarray, " pieces"]
    """First token of each piece in the pack."""
    sizes: Int[np.ndarray, " pieces"]
    """Tokens of each piece."""
    parents: Int[np.ndarray, " pieces"]
    """The prompt's piece that each piece continues; −1: it starts from a zero state."""
    tokens: int
    """T, tokens of the pack."""

    @staticmethod
    def of(lengths: Sequence[int], source: Int[np.ndarray, " P"] | None) -> Pieces:
        """lengths, source: as of `Segments`."""
        sizes = np.asarray(lengths, dtype=np.int64)
        begins = np.cumsum(sizes) - sizes
        if source is None:
            return Pieces(begins, sizes, np.full(len(sizes), -1), int(sizes.sum()))
        shared = np.add.reduceat(np.bincount(source)[source] > 1, begins, dtype=np.int64)
        prompts: dict[int, int] = {}  # first token → piece
        pieces: list[tuple[int, int, int]] = []  # start, size, parent
        for begin, size, prompt in zip(begins.tolist(), sizes.tolist(), shared.tolist(), strict=True):
            first = int(source[begin])
            if not prompt:
                pieces.append((first, size, -1))
                continue
            if first not in prompts:
                prompts[first] = len(pieces)
                pieces.append((first, prompt, -1))
            if size > prompt:
                pieces.append((int(source[begin + prompt]), size - prompt, prompts[first]))
        starts, counts, parents = (np.array(values) for values in zip(*pieces, strict=True))
        return Pieces(starts, counts, parents, int(source.max()) + 1)

    def similar(self) -> list[np.ndarray]:
        """Groups of pieces of similar length, by their indices; first those that start from a zero state."""
        unit = np.where(self.sizes <= CHUNK, STEP, CHUNK)
        cost, follows = -(-self.sizes // unit) * unit, self.parents >= 0
        order, groups = np.lexsort((cost, follows)), list[np.ndarray]()
        while len(order):
            similar = (follows[order] == follows[order[0]]) & (cost[order] <= _MAX_WASTE * cost[order[0]])
            groups.append(order[similar])
            order = order[~similar]
        return groups

    def tokens_of(self, selected: Int[np.ndarray, " N"]) -> Int[np.ndarray, " P"]:
        """The tokens of the selected pieces, one piece after another: int64."""
        sizes = self.sizes[selected]
        offsets = np.cumsum(sizes) - sizes
        tokens: np.ndarray = np.repeat(self.starts[selected] - offsets, sizes) + np.arange(sizes.sum())
        return tokens

    def last(self, selected: Int[np.ndarray, " N"], width: int) -> Int[np.ndarray, "N width"]:
        """The last tokens of the selected pieces; `tokens` where a piece has fewer."""
        offsets = self.sizes[selected, None] + np.arange(-width, 0)
        tokens: np.ndarray = np.where(offsets >= 0, self.starts[selected, None] + offsets, self.tokens)
        return tokens


def _run(
    pieces: Pieces, selected: Int[np.ndarray, " N"], parents: Int[np.ndarray, " N"] | None, device: torch.device
) -> Run:
    """A run of the selected pieces, on `device`."""
    ends = np.concatenate([[0], np.cumsum(pieces.sizes[selected])]).astype(np.int32)
    arrays = [pieces.tokens_of(selected), ends, *([] if parents is None else [parents])]
    uploaded = upload([torch.from_numpy(array) for array in arrays], device)
    return Run(uploaded[0], uploaded[1], uploaded[2] if parents is not None else None)


def _layout(source: Int[np.ndarray, " P"], is_home: Bool[np.ndarray, " P"], device: torch.device) -> Layout:
    """The layout of slots without padding. is_home: slots from which a token's result is read; the others are
    copies."""
    home = np.empty(source.max() + 1, np.int64)
    home[source[is_home]] = np.flatnonzero(is_home)
    copies = np.flatnonzero(~is_home)
    arrays = (source, home, copies, source[copies])
    return Layout(*upload([torch.from_numpy(array) for array in arrays], device))
