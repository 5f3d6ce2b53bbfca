"""Packed batches: several sequences concatenated without padding, the input of one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlcli.data.expert_routes import padded, unknown
from rlcli.data.packer import WORTH_SHARING
from rlcli.images.image_rule import ImageRule, identity
from rlcli.model.attention import Segments
from rlcli.model.device_copies import Move, all_moved

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """S sequences of T tokens in total, of which R are response tokens. All tensors but those of `shown` are on one
    device.

    A prompt shared by several sequences is stored once, before the first of them:

    >>> rows = [(np.array([5, 6, 7]), 2), (np.array([5, 6, 8, 9]), 2)]
    >>> batch = pack(rows, torch.device("cpu"))
    >>> batch.input_ids.tolist(), batch.position_ids.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 2, 3])
    >>> batch.response_index.tolist(), batch.targets.tolist(), batch.sequence.tolist()
    ([1, 1, 3], [7, 8, 9], [0, 1, 1])
    """

    input_ids: Int[Tensor, " T"]
    """int64."""
    position_ids: Int[Tensor, "... T"]
    """int64, counting from 0 in each segment; [3, T] for a model with three position ids per token."""
    segments: Segments
    """The sequences, or their branches, which do not attend to each other."""
    response_index: Int[Tensor, " R"]
    """int64: the token whose hidden state predicts each response token, which is the one before it."""
    targets: Int[Tensor, " R"]
    """int64: the response tokens."""
    sequence: Int[Tensor, " R"]
    """int64: the sequence to which each response token belongs."""
    host_response_index: Int[np.ndarray, " R"]
    """`response_index` on the host."""
    candidates: Int[Tensor, "R K"] | None = None
    """int64: other tokens whose log-probs at the same positions are computed, too."""
    routes: Int[Tensor, "T layers K"] | None = None
    """int16: the experts that the engine chose, -1 where unknown; None if all are unknown."""
    shown: Mapping[str, Tensor] = field(default_factory=dict)
    """Image inputs by the names of the model's arguments (`ImageRule.inputs`), in the order of the image tokens; on the
    CPU until the forward pass."""
    never: Int[Tensor, " masked"] | None = None
    """int64: ids that are never sampled; None if there are none."""

    @property
    def boundaries(self) -> Tensor:
        """int32: 0, then the end of each segment after concatenation, each with its prompt."""
        return self.segments.boundaries

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def source(self) -> Int[Tensor, " P"]:
        """int64: the index of the pack's token at each position of the concatenated segments."""
        index = np.arange(self.tokens) if self.segments.source is None else self.segments.source
        return torch.tensor(index, device=self.input_ids.device)

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
    response_masks: Sequence[Bool[np.ndarray, " row"]] | None = None,
    sequences: Sequence[int] | None = None,
    routes: Sequence[np.ndarray | None] = (),
    images: Sequence[Sequence[np.ndarray]] = (),
    rule: ImageRule | None = None,
) -> PackedBatch:
    """Concatenate `rows`, each the tokens of a segment and the length of its prompt.

    response_masks: for each row a mask of the response tokens; None: all that follow the prompt. sequences: the
    sequence of which each row is a branch, ascending; None: each row is a sequence. routes: those of each row's first
    tokens, if known. images: each row's processed images (`ImageRule.preprocess`). rule: of a vision-language model.
    Its packs have at least one image, since all ranks that shard its vision encoder have to run it in each pass.

    A prompt has at least one token (nothing would predict the first response token); a response may be empty.
    """
    assert rows, "a pack holds at least one sequence; a rank without work takes dummy()"
    if rule is not None and not any(images):
        rows, images = [*rows, blank := _blank_row(rule)], [*[()] * len(rows), [rule.blank]]
        response_masks = None if response_masks is None else [*response_masks, np.zeros(blank[1], bool)]
        sequences = None if sequences is None else [*sequences, 0]
    lengths = np.array([len(tokens) for tokens, _ in rows])
    prompts = np.array([prompt for _, prompt in rows])
    assert (prompts >= 1).all(), "a prompt has at least one token"
    assert (prompts <= lengths).all(), "a prompt is no longer than its sequence"
    starts = np.cumsum(lengths) - lengths
    sequence: np.ndarray = np.repeat(np.arange(len(rows)), lengths)
    position = np.arange(lengths.sum()) - starts[sequence]
    tokens = np.concatenate([tokens for tokens, _ in rows])
    positions = position if rule is None else _positions(rule, rows, images)
    # From here on arrays of Σ lengths; `first` marks the tokens stored in the pack, `source` maps all to the pack.
    in_prompt = position < prompts[sequence]
    prompt_images = _prompt_images(rule, rows, images)
    like = starts[first_row := _first_alike(rows, prompts >= WORTH_SHARING * lengths, prompt_images)]
    first = ~in_prompt | (like == starts)[sequence]
    stored = list[np.ndarray]()
    for row, row_images in enumerate(images):
        stored += row_images if first_row[row] == row else row_images[len(prompt_images[row]) :]
    shown = {} if rule is None else rule.inputs(stored)
    source = (np.cumsum(first) - 1)[np.where(first, np.arange(len(tokens)), like[sequence] + position)]
    mask = ~in_prompt if response_masks is None else np.concatenate(response_masks)
    assert not (mask & in_prompt).any(), "no token of a prompt is a response token"
    response = np.flatnonzero(mask)

    def tensor(values: np.ndarray) -> Tensor:
        # A copy: arrays from the object store are read-only, which torch does not support.
        return torch.tensor(values, dtype=torch.int64)

    packed = PackedBatch(
        input_ids=tensor(tokens[first]),
        position_ids=tensor(positions[..., first]),
        segments=Segments.of(lengths.tolist(), torch.device("cpu"), None if first.all() else source),
        response_index=tensor(source[response - 1]),
        targets=tensor(tokens[response]),
        host_response_index=source[response - 1],
        sequence=tensor((sequence if sequences is None else np.asarray(sequences)[sequence])[response]),
        routes=None
        if all(route is None for route in routes)
        else torch.from_numpy(_packed_routes(routes, lengths)[first]),
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
    """A prompt of the blank image's tokens and one more."""
    tokens = np.array([*rule.placed(rule.blank.shape[1], rule.blank.shape[0]), 0])
    return tokens, len(tokens)


def _positions(
    rule: ImageRule, rows: Sequence[tuple[np.ndarray, int]], images: Sequence[Sequence[np.ndarray]]
) -> np.ndarray:
    """The positions of all rows' tokens: int64 `[Σ lengths]` or `[3, Σ lengths]`."""
    each = [rule.positions(tokens, row_images) for (tokens, _), row_images in zip(rows, images, strict=True)]
    positions: np.ndarray = np.concatenate(each, axis=-1)
    return positions


def _prompt_images(
    rule: ImageRule | None, rows: Sequence[tuple[np.ndarray, int]], images: Sequence[Sequence[np.ndarray]]
) -> Sequence[Sequence[np.ndarray]]:
    """The images in each row's prompt: the first ones of the row."""
    if rule is None:
        return [()] * len(rows)
    return [
        row_images[: sum(start < prompt for start in rule.starts(tokens, row_images))]
        for (tokens, prompt), row_images in zip(rows, images, strict=True)
    ]


def _packed_routes(routes: Sequence[np.ndarray | None], lengths: np.ndarray) -> np.ndarray:
    """[Σ lengths, layers, chosen] int16, -1 where unknown."""
    known = next(route for route in routes if route is not None)
    none = unknown(0, known)
    packed = np.concatenate(
        [padded(none if route is None else route, length) for route, length in zip(routes, lengths, strict=True)]
    )
    signed: np.ndarray = np.where(packed == np.iinfo(packed.dtype).max, -1, packed.astype(np.int16))
    return signed


def _first_alike(
    rows: Sequence[tuple[np.ndarray, int]], worth: np.ndarray, prompt_images: Sequence[Sequence[np.ndarray]]
) -> np.ndarray:
    """[S]: for each row the first row with the same prompt among those (`worth`, [S] bool) that may share it.
    prompt_images: the images in the prompts, which have to be the same, too."""
    rows_by_prompt: dict[bytes, list[int]] = {}

    def like(row: int, prompt: bytes) -> int:
        first = next(
            (
                candidate
                for candidate in rows_by_prompt.get(prompt, ())
                if all(map(_same, prompt_images[candidate], prompt_images[row]))
            ),
            None,
        )
        if first is None:
            rows_by_prompt.setdefault(prompt, []).append(row)
        return row if first is None else first

    first_rows = [
        like(row, tokens[:prompt].tobytes()) if worth[row] else row for row, (tokens, prompt) in enumerate(rows)
    ]
    first: np.ndarray = np.asarray(first_rows)
    return first


def _same(image: np.ndarray, other: np.ndarray) -> bool:
    """True if both are the same image. Samples of a group have views of one array, unless they were generated in
    several slices."""
    return identity(image) == identity(other) or np.array_equal(image, other)
