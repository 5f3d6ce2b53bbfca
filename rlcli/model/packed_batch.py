"""Packed batches: several sequences concatenated without padding, the input of one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rlcli.data.expert_routes import padded, unknown
from rlcli.data.packer import WORTH_SHARING
from rlcli.images.image_rule import ImageRule, identity
from rlcli.model.attention import Segments
from rlcli.model.device_copies import Move, all_moved


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """S sequences of T tokens in total, of which the policy drew R. All tensors but those of `shown` are on one device.

    input_ids [T] int64; position_ids [T] int64, counting from 0 in each segment, or [3, T] for a model with three of
    them; segments: the sequences, or their branches, which do not see each other;
    response_index [R] int64: the position whose hidden state predicts each drawn token (that of the token before);
    targets [R] int64: those tokens; sequence [R] int64: the sequence to which each belongs; candidates [R, K] int64:
    other tokens whose log-probs at the same positions are wanted, too, if any are. routes [T, layers, chosen] int16:
    the experts that the engine chose, -1 where that is unknown; None if nothing is. shown: what the model sees of the
    pictures, in the order of their tokens, by the names of its arguments (`ImageRule.inputs`), on the CPU until the
    pass. never: ids that no policy draws, int64, if there are any. places: `response_index` on the host.

    A prompt shared by several sequences is stored once, before the first of them:

    >>> rows = [(np.array([5, 6, 7]), 2), (np.array([5, 6, 8, 9]), 2)]
    >>> batch = pack(rows, torch.device("cpu"))
    >>> batch.input_ids.tolist(), batch.position_ids.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 2, 3])
    >>> batch.response_index.tolist(), batch.targets.tolist(), batch.sequence.tolist()
    ([1, 1, 3], [7, 8, 9], [0, 1, 1])
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Segments
    response_index: Tensor
    targets: Tensor
    sequence: Tensor
    places: np.ndarray
    candidates: Tensor | None = None
    routes: Tensor | None = None
    shown: Mapping[str, Tensor] = field(default_factory=dict)
    never: Tensor | None = None

    @property
    def boundaries(self) -> Tensor:
        """int32: 0, then the end of each segment if all are concatenated, each whole."""
        return self.segments.boundaries

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    @property
    def source(self) -> Tensor:
        """[boundaries[-1]] int64: the token of the pack at each place of those segments."""
        whole = np.arange(self.tokens) if self.segments.source is None else self.segments.source
        return torch.tensor(whole, device=self.input_ids.device)

    def moved(self, move: Move) -> PackedBatch:
        """See `Movable`. `shown` stays."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else move(tensor)

        return replace(
            self,
            input_ids=move(self.input_ids),
            position_ids=move(self.position_ids),
            segments=self.segments.moved(move),
            response_index=move(self.response_index),
            targets=move(self.targets),
            sequence=move(self.sequence),
            candidates=moved(self.candidates),
            routes=moved(self.routes),
            never=moved(self.never),
        )


def pack(
    rows: Sequence[tuple[np.ndarray, int]],
    device: torch.device,
    drawn: Sequence[np.ndarray] | None = None,
    sequences: Sequence[int] | None = None,
    routes: Sequence[np.ndarray | None] = (),
    pictures: Sequence[Sequence[np.ndarray]] = (),
    rule: ImageRule | None = None,
) -> PackedBatch:
    """Concatenate `rows`: each has the tokens of a segment, and how many of them are its prompt. drawn: for each row a
    mask of the tokens that the policy drew; None: all that follow the prompts. sequences: which sequence each row is a
    branch of, ascending; None: each is one by itself. routes: of each row's first tokens, or nothing. pictures: of each
    row, as `ImageRule.prepared` gives them, if there are any. rule: of a model that sees pictures. Such a model's pack
    has at least one: on each of the ranks that share its tower, each pass computes it.

    A prompt has at least one token (nothing would predict the first one drawn); a response may be empty.
    """
    assert rows, "a pack holds at least one sequence; a rank without work takes dummy()"
    if rule is not None and not any(pictures):
        rows, pictures = [*rows, blank := _blank_row(rule)], [*[()] * len(rows), [rule.blank]]
        drawn = None if drawn is None else [*drawn, np.zeros(blank[1], bool)]
        sequences = None if sequences is None else [*sequences, 0]
    lengths = np.array([len(tokens) for tokens, _ in rows])
    prompts = np.array([prompt for _, prompt in rows])
    assert (prompts >= 1).all(), "a prompt has at least one token"
    assert (prompts <= lengths).all(), "a prompt is no longer than its sequence"
    starts = np.cumsum(lengths) - lengths
    sequence: np.ndarray = np.repeat(np.arange(len(rows)), lengths)
    position = np.arange(lengths.sum()) - starts[sequence]
    tokens = np.concatenate([tokens for tokens, _ in rows])
    places = position if rule is None else _places(rule, rows, pictures)
    # From here on [Σ lengths] places; `first` marks those stored in the pack, `source` maps all places to the pack.
    in_prompt = position < prompts[sequence]
    asked = _of_prompts(rule, rows, pictures)
    like = starts[alike := _first_alike(rows, prompts >= WORTH_SHARING * lengths, asked)]
    first = ~in_prompt | (like == starts)[sequence]
    stored = [one for row, own in enumerate(pictures) for one in (own if alike[row] == row else own[len(asked[row]) :])]
    shown = {} if rule is None else rule.inputs(stored)
    source = (np.cumsum(first) - 1)[np.where(first, np.arange(len(tokens)), like[sequence] + position)]
    mask = ~in_prompt if drawn is None else np.concatenate(drawn)
    assert not (mask & in_prompt).any(), "no token of a prompt is drawn"
    response = np.flatnonzero(mask)

    def tensor(values: np.ndarray) -> Tensor:
        # A copy: arrays from the object store are read-only, which torch does not support.
        return torch.tensor(values, dtype=torch.int64)

    packed = PackedBatch(
        input_ids=tensor(tokens[first]),
        position_ids=tensor(places[..., first]),
        segments=Segments.of(lengths.tolist(), torch.device("cpu"), None if first.all() else source),
        response_index=tensor(source[response - 1]),
        targets=tensor(tokens[response]),
        places=source[response - 1],
        sequence=tensor((sequence if sequences is None else np.asarray(sequences)[sequence])[response]),
        routes=None if all(one is None for one in routes) else torch.from_numpy(_packed_routes(routes, lengths)[first]),
        shown={name: torch.from_numpy(values) for name, values in shown.items()},
        never=None if rule is None else tensor(np.array(rule.never)),
    )
    return all_moved([packed], device)[0]


def dummy(device: torch.device, rule: ImageRule | None = None) -> PackedBatch:
    """A short sequence without a response, for a rank without work while others still forward.

    It takes part in every collective; its loss is `outputs.log_probs.sum() * 0`, which gives zero gradients.
    """
    return pack([(np.zeros(2, dtype=np.int64), 2)], device, rule=rule)


def _blank_row(rule: ImageRule) -> tuple[np.ndarray, int]:
    """The blank picture's tokens and one more, all of them a prompt."""
    tokens = np.array([*rule.placed(rule.blank.shape[1], rule.blank.shape[0]), 0])
    return tokens, len(tokens)


def _places(
    rule: ImageRule, rows: Sequence[tuple[np.ndarray, int]], pictures: Sequence[Sequence[np.ndarray]]
) -> np.ndarray:
    """The positions of all rows' tokens: int64 `[Σ lengths]` or `[3, Σ lengths]`."""
    each = [rule.positions(tokens, own) for (tokens, _), own in zip(rows, pictures, strict=True)]
    found: np.ndarray = np.concatenate(each, axis=-1)
    return found


def _of_prompts(
    rule: ImageRule | None, rows: Sequence[tuple[np.ndarray, int]], pictures: Sequence[Sequence[np.ndarray]]
) -> Sequence[Sequence[np.ndarray]]:
    """The pictures that each row's prompt has: the first ones of the row's."""
    if rule is None:
        return [()] * len(rows)
    return [
        own[: sum(start < prompt for start in rule.starts(tokens, own))]
        for (tokens, prompt), own in zip(rows, pictures, strict=True)
    ]


def _packed_routes(routes: Sequence[np.ndarray | None], lengths: np.ndarray) -> np.ndarray:
    """[Σ lengths, layers, chosen] int16, -1 where unknown."""
    known = next(one for one in routes if one is not None)
    none = unknown(0, known)
    whole = np.concatenate(
        [padded(none if one is None else one, length) for one, length in zip(routes, lengths, strict=True)]
    )
    found: np.ndarray = np.where(whole == np.iinfo(whole.dtype).max, -1, whole.astype(np.int16))
    return found


def _first_alike(
    rows: Sequence[tuple[np.ndarray, int]], worth: np.ndarray, asked: Sequence[Sequence[np.ndarray]]
) -> np.ndarray:
    """[S]: for each row the first one with the same prompt among those (`worth`, [S] bool) that may share it. asked:
    the pictures in the prompts, which have to be the same too."""
    found: dict[bytes, list[int]] = {}

    def like(row: int, prompt: bytes) -> int:
        first = next((one for one in found.get(prompt, ()) if all(map(_same, asked[one], asked[row]))), None)
        if first is None:
            found.setdefault(prompt, []).append(row)
        return row if first is None else first

    alike = [like(row, tokens[:prompt].tobytes()) if worth[row] else row for row, (tokens, prompt) in enumerate(rows)]
    first: np.ndarray = np.asarray(alike)
    return first


def _same(picture: np.ndarray, other: np.ndarray) -> bool:
    """Samples of a group have views of one array, unless they were generated in several slices."""
    return identity(picture) == identity(other) or np.array_equal(picture, other)
