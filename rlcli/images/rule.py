"""What a vision-language model sees of a picture: how it is resized, cut into patches, and placed among the tokens.

A picture is resized once, by the worker that generates from it. Engine and trainer are given the result, of a size that
neither changes, so both see the same pixels. Between them it travels as 8-bit RGB: an eighth of the patches' bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

KINDS = ("qwen2_5_vl", "qwen3_vl")
"""`model_type`s of vision-language models whose packed log-probs are tested against their own padded forward pass."""
PROJECTOR = ("merger", "deepstack_merger_list")
"""Modules of their towers that bring what these see to the width of the decoder."""


@dataclass(frozen=True)
class ImageRule:
    """The rule of one model. Patches have `patch` × `patch` pixels; `merge` × `merge` of them become one token.

    token: the id that stands for each of them. never: ids that are not drawn, since they stand for pictures. least,
    most: pixels of a resized picture. mean, std: of each channel. frames: how often a picture is repeated in a patch,
    which may hold several frames of a film.

    >>> rule = ImageRule(token=9, never=(9,), patch=14, merge=2, frames=2, least=56 * 56, most=1 << 20)
    >>> rule.fitted(100, 60)
    (112, 56)
    >>> rule.tokens(112, 56)
    8
    """

    token: int
    never: tuple[int, ...]
    patch: int
    merge: int
    frames: int
    least: int
    most: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, path: str, config: Any) -> ImageRule | None:
        """Of the model at `path`, a folder or hub id, with this config; None for a model of text alone. Raises
        `OSError` if its files do not say how it sees pictures."""
        if config.model_type not in KINDS:
            return None
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil.from_pretrained(path)
        return cls(
            token=config.image_token_id,
            never=(config.image_token_id, config.video_token_id),
            patch=processor.patch_size,
            merge=processor.merge_size,
            frames=processor.temporal_patch_size,
            least=processor.size["shortest_edge"],
            most=processor.size["longest_edge"],
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
        )

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size to which a picture is resized: what the model's processor would choose, and would leave as it is.
        Raises `ValueError` for a picture more than 200 times as long as wide."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = height, width
        while (found := smart_resize(*size, self.side, self.least, self.most)) != size:
            size = found
        return size[1], size[0]

    def tokens(self, width: int, height: int) -> int:
        """How many tokens stand for a resized picture."""
        return (width // self.side) * (height // self.side)

    def prepared(self, picture: Any) -> np.ndarray:
        """A PIL picture in RGB, resized: uint8 `[height, width, 3]`."""
        import numpy as np
        from PIL import Image

        size = self.fitted(*picture.size)
        fitting = picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC)
        pixels: np.ndarray = np.asarray(fitting)
        return pixels

    def expanded(self, ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """The ids of a prompt that has one placeholder for each picture, with as many as the picture has tokens. sizes:
        width and height of the resized pictures.

        >>> rule = ImageRule(token=9, never=(9,), patch=14, merge=2, frames=2, least=56 * 56, most=1 << 20)
        >>> rule.expanded([1, 9, 2], [(84, 56)])
        [1, 9, 9, 9, 9, 9, 9, 2]
        """
        counts = iter([self.tokens(*size) for size in sizes])
        return [token for one in ids for token in ([one] * next(counts) if one == self.token else [one])]

    def collapsed(self, ids: np.ndarray, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """The reverse of `expanded`: int32."""
        import numpy as np

        kept: np.ndarray = np.ones(len(ids), bool)
        for start, picture in zip(self._starts(ids, pictures), pictures, strict=True):
            kept[start + 1 : start + self.tokens(picture.shape[1], picture.shape[0])] = False
        found: np.ndarray = ids[kept]
        return found

    def positions(self, ids: np.ndarray, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """int64 `[3, T]`: the place of each token in time, height and width (M-RoPE, arXiv 2409.12191, section 2.1).
        Of text all three count on by one; a picture's tokens stand still in time, and text goes on after the larger of
        its sides."""
        import numpy as np

        found, at, place = [], 0, 0
        for start, picture in zip(self._starts(ids, pictures), pictures, strict=True):
            found.append(np.tile(np.arange(place, place + start - at), (3, 1)))
            place += start - at
            height, width = picture.shape[0] // self.side, picture.shape[1] // self.side
            rows, columns = np.divmod(np.arange(height * width), width)
            found.append(place + np.stack([np.zeros_like(rows), rows, columns]))
            at, place = start + height * width, place + max(height, width)
        found.append(np.tile(np.arange(place, place + len(ids) - at), (3, 1)))
        places: np.ndarray = np.concatenate(found, axis=1)
        return places

    def _starts(self, ids: np.ndarray, pictures: Sequence[np.ndarray]) -> Iterator[int]:
        """Where each picture's tokens begin."""
        import numpy as np

        places = np.flatnonzero(ids == self.token)
        assert len(places) == sum(self.tokens(p.shape[1], p.shape[0]) for p in pictures), "a token for each patch"
        at = 0
        for picture in pictures:
            yield int(places[at])
            at += self.tokens(picture.shape[1], picture.shape[0])

    def patches(self, pictures: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The P patches of resized pictures, float32 `[P, 3 · frames · patch²]`, and of each picture how many it has in
        time, height and width: int64 `[pictures, 3]`."""
        found = self._processor([*pictures], do_resize=False, return_tensors="np", input_data_format="channels_last")
        return found["pixel_values"], found["image_grid_thw"]

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(
            patch_size=self.patch,
            merge_size=self.merge,
            temporal_patch_size=self.frames,
            image_mean=list(self.mean),
            image_std=list(self.std),
        )

    @property
    def blank(self) -> np.ndarray:
        """The smallest picture, for a pack that has none: on ranks that share a tower each takes part in each pass."""
        import numpy as np

        return np.zeros((self.side, self.side, 3), np.uint8)


def identity(picture: np.ndarray) -> tuple[int, ...]:
    """Equal for views of one array. Samples of a group share their pictures, which so need not be compared."""
    return picture.__array_interface__["data"][0], *picture.shape
