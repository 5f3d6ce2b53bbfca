"""The trajectories of one worker, as columns: stored in Ray's object store, where other workers read rows zero-copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlcli.data.trajectories import SPEAKERS, Span, Trajectory
from rlcli.images.image_rule import identity
from rlcli.types import FinishReason

if TYPE_CHECKING:
    import numpy as np

STOP_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
"""The values that `SampleShard.stop_reasons` indexes."""
UNKNOWN = -1
"""The version of a span that has none."""
FETCH_TIMEOUT_S = 600.0
"""Longest wait for an object of another worker: for one that Ray has lost, the wait would never end."""


@dataclass(frozen=True)
class SampleShard:
    """Trajectories, flat: M rows of T tokens, R of them response tokens, in P spans. Checkpoints have the arrays by the
    names of these fields, some of which call images pictures.

    >>> import numpy as np
    >>> builder = ShardBuilder()
    >>> ids, log_probs = np.array([1, 2, 7], np.int32), np.array([-0.5], np.float32)
    >>> builder.add(Trajectory.single(ids[:2], ids[2:], log_probs))
    0
    >>> row = builder.build().row(0)
    >>> row.tokens.tolist(), row.response_mask.tolist(), row.log_probs.tolist(), row.stop_reason
    ([1, 2, 7], [False, False, True], [-0.5], 'stop')
    """

    tokens: np.ndarray
    """Ids, row after row: int32 `[T]`."""
    offsets: np.ndarray
    """Start of each row in `tokens`, and their end: int64 `[M + 1]`, as all offsets."""
    log_probs: np.ndarray
    """Log-probs of the response tokens, as the engine reported them: float32 `[R]`."""
    log_prob_offsets: np.ndarray
    """Start of each row in `log_probs`."""
    span_ends: np.ndarray
    """The end of each span within its row: int64 `[P]`."""
    span_speakers: np.ndarray
    """Its speaker, an index into `SPEAKERS`: int64 `[P]`."""
    span_versions: np.ndarray
    """The version of the weights that generated it, or UNKNOWN: int64 `[P]`."""
    span_offsets: np.ndarray
    """Start of each row in the spans' arrays."""
    stop_reasons: np.ndarray
    """Indexes into `STOP_REASONS`: int8 `[M]`."""
    routes: np.ndarray | None = None
    """The experts of the rows' first tokens, row after row; None if no row has any."""
    route_offsets: np.ndarray | None = None
    """Start of each row in `routes`."""
    pixels: np.ndarray | None = None
    """Pixels of all images, one after another, each once however many rows it is in: uint8. None, as the next four, if
    no row has an image."""
    picture_sizes: np.ndarray | None = None
    """Height and width of each image: int64 `[images, 2]`."""
    pictures: np.ndarray | None = None
    """Images of the rows, row after row: int64, indexes into `picture_sizes`."""
    row_pictures: np.ndarray | None = None
    """Start of each row in `pictures`."""
    span_pictures: np.ndarray | None = None
    """Number of images in each span: int64 `[P]`. None too in a checkpoint of before spans had images."""

    def __len__(self) -> int:
        return len(self.stop_reasons)

    def row(self, index: int) -> Trajectory:
        """A trajectory, whose arrays are views."""
        at = slice(self.span_offsets[index], self.span_offsets[index + 1])
        ends, speakers = self.span_ends[at].tolist(), self.span_speakers[at].tolist()
        versions = self.span_versions[at].tolist()
        spans, start = [], 0
        for end, speaker, version, images in zip(ends, speakers, versions, self._images_of_spans(index), strict=True):
            spans.append(Span(SPEAKERS[speaker], start, end, None if version == UNKNOWN else version, images))
            start = end
        return Trajectory(
            self.tokens[self.offsets[index] : self.offsets[index + 1]],
            tuple(spans),
            self.log_probs[self.log_prob_offsets[index] : self.log_prob_offsets[index + 1]],
            STOP_REASONS[self.stop_reasons[index]],
            self._routes(index),
            self._images(index),
        )

    def _routes(self, index: int) -> np.ndarray | None:
        if self.routes is None or self.route_offsets is None:
            return None
        return self.routes[self.route_offsets[index] : self.route_offsets[index + 1]]

    def _images_of_spans(self, index: int) -> list[int]:
        """Number of images in each span of a row. In an older checkpoint all images are in the prompt."""
        start, end = self.span_offsets[index], self.span_offsets[index + 1]
        if self.span_pictures is None:
            rows = self.row_pictures
            prompt_images = 0 if rows is None else int(rows[index + 1] - rows[index])
            return [prompt_images, *[0] * int(end - start - 1)]
        counts: list[int] = self.span_pictures[start:end].tolist()
        return counts

    def _images(self, index: int) -> tuple[np.ndarray, ...]:
        """The images of a row: views, uint8 `[height, width, 3]`."""
        import numpy as np

        if self.pictures is None:
            return ()
        assert self.pixels is not None
        assert self.picture_sizes is not None
        assert self.row_pictures is not None
        ends = np.cumsum(3 * self.picture_sizes.prod(1))
        indexes = self.pictures[self.row_pictures[index] : self.row_pictures[index + 1]].tolist()
        flat = [self.pixels[ends[at - 1] if at else 0 : ends[at]] for at in indexes]
        return tuple(pixels.reshape(*self.picture_sizes[at], 3) for at, pixels in zip(indexes, flat, strict=True))

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> SampleShard:
        """From its fields by name, as in a checkpoint. Older checkpoints have `prompt_lengths` in place of spans."""
        import numpy as np

        if "prompt_lengths" not in arrays:
            return cls(**arrays)
        fields = dict(arrays)
        prompts: np.ndarray = fields.pop("prompt_lengths").astype(np.int64)
        rows = len(prompts)
        return cls(
            **fields,
            span_ends=np.stack([prompts, np.diff(fields["offsets"])], axis=1).ravel(),
            span_speakers=np.tile(np.array([SPEAKERS.index("prompt"), SPEAKERS.index("policy")]), rows),
            span_versions=np.full(2 * rows, UNKNOWN),
            span_offsets=2 * np.arange(rows + 1),
            stop_reasons=np.zeros(rows, np.int8),
        )


@dataclass
class ShardBuilder:
    """Collects trajectories as they finish."""

    _rows: list[Trajectory] = field(default_factory=list)

    def add(self, trajectory: Trajectory) -> int:
        """Append one; returns its row."""
        self._rows.append(trajectory)
        return len(self._rows) - 1

    def build(self) -> SampleShard:
        import numpy as np

        def joined(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
            flat: np.ndarray = np.concatenate([np.zeros(0, dtype), *arrays])
            return flat

        def offsets(lengths: list[int]) -> np.ndarray:
            starts: np.ndarray = np.cumsum([0, *lengths], dtype=np.int64)
            return starts

        rows = self._rows
        spans = [span for row in rows for span in row.spans]
        routes = [row.routes for row in rows if row.routes is not None]
        routed = [0 if row.routes is None else len(row.routes) for row in rows]
        unique_images = {identity(image): image for row in rows for image in row.images}
        image_index = {each: number for number, each in enumerate(unique_images)}
        return SampleShard(
            tokens=joined([row.tokens for row in rows], np.int32),
            offsets=offsets([len(row.tokens) for row in rows]),
            log_probs=joined([row.log_probs for row in rows], np.float32),
            log_prob_offsets=offsets([len(row.log_probs) for row in rows]),
            span_ends=np.array([span.end for span in spans], np.int64),
            span_speakers=np.array([SPEAKERS.index(span.speaker) for span in spans], np.int64),
            span_versions=np.array([UNKNOWN if span.version is None else span.version for span in spans], np.int64),
            span_offsets=offsets([len(row.spans) for row in rows]),
            stop_reasons=np.array([STOP_REASONS.index(row.stop_reason) for row in rows], np.int8),
            routes=np.concatenate(routes) if routes else None,
            route_offsets=offsets(routed) if routes else None,
            pixels=joined([image.ravel() for image in unique_images.values()], np.uint8) if unique_images else None,
            picture_sizes=np.array([image.shape[:2] for image in unique_images.values()], np.int64)
            if unique_images
            else None,
            pictures=np.array([image_index[identity(p)] for row in rows for p in row.images], np.int64)
            if unique_images
            else None,
            row_pictures=offsets([len(row.images) for row in rows]) if unique_images else None,
            span_pictures=np.array([span.image_count for span in spans], np.int64) if unique_images else None,
        )
