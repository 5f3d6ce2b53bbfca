"""Image preprocessing of a vision-language model: how an image is resized, cut, and placed among the tokens.

An image is processed once, by the worker that generates from it. Engine and trainer get the result, which neither
resizes again, so both see the same pixels. It is sent as 8-bit RGB: an eighth of the patches' bytes, a quarter of the
tiles'.

`ImageRule` is the interface; `rlcli.images.families` has the implementations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class ImageRule(ABC):
    """Image preprocessing of one model."""

    token: int
    """Id of the image token, one for each merged patch."""
    never: tuple[int, ...]
    """Ids that are never sampled, since they stand for images or videos."""

    @classmethod
    @abstractmethod
    def of(cls, path: str, config: Any) -> Self:
        """The rule of the model at `path`, a folder or hub id, with this config. Raises `OSError` if its files have no
        image preprocessing."""

    @classmethod
    def refused(cls, config: Any) -> str:
        """Why a model of this config cannot be trained, or an empty text."""
        return ""

    @abstractmethod
    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the result of `preprocess` for an image of this size. Raises `ValueError` for an image
        with an aspect ratio of more than 200."""

    @abstractmethod
    def preprocess(self, image: Any) -> np.ndarray:
        """Resize a PIL image in RGB for the model: uint8 `[height, width, 3]`."""

    @abstractmethod
    def tokens(self, width: int, height: int) -> int:
        """Number of image tokens of a processed image."""

    @abstractmethod
    def inputs(self, images: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Arguments of transformers' model for processed images, by name: float32 and int64."""

    @property
    @abstractmethod
    def blank(self) -> np.ndarray:
        """The smallest processed image, for a pack without images: all ranks that share a vision encoder take part in
        each of its passes."""

    def engine_inputs(self, images: Sequence[np.ndarray]) -> Mapping[str, np.ndarray] | None:
        """Inputs of vLLM's model for processed images, under the names that its processor gives them; None if that
        processor leaves processed images unchanged, so that they are passed to it."""
        return None

    def placed(self, width: int, height: int) -> list[int]:
        """The ids that take the place of a placeholder for a processed image."""
        return [self.token] * self.tokens(width, height)

    def expanded(self, ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """The ids of a prompt that has one placeholder for each image, with as many as the image has tokens. sizes:
        width and height of the processed images."""
        each = iter([self.placed(width, height) for width, height in sizes])
        return [token for token_id in ids for token in (next(each) if token_id == self.token else [token_id])]

    def collapsed(self, ids: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """The reverse of `expanded`: int32."""
        import numpy as np

        mask: np.ndarray = np.ones(len(ids), bool)
        for start, image in zip(self.starts(ids, images), images, strict=True):
            placed = self.placed(image.shape[1], image.shape[0])
            begin = start - placed.index(self.token)
            mask[begin : begin + len(placed)] = False
            mask[start] = True
        collapsed_ids: np.ndarray = ids[mask]
        return collapsed_ids

    def starts(self, ids: np.ndarray, images: Sequence[np.ndarray]) -> list[int]:
        """Index of the first token of each image."""
        import numpy as np

        indexes, counts = np.flatnonzero(ids == self.token), [self.tokens(p.shape[1], p.shape[0]) for p in images]
        assert len(indexes) == sum(counts), "as many tokens as the images have"
        return [int(indexes[at]) for at in np.cumsum([0, *counts])[:-1]]

    def positions(self, ids: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """The position of each token, counting from 0: int64 `[T]`, or `[3, T]` for a model with three of them."""
        import numpy as np

        index: np.ndarray = np.arange(len(ids))
        return index


def identity(image: np.ndarray) -> tuple[int, ...]:
    """Key that is equal for views of one array. Samples of a group mostly share their images, which then need not be
    compared."""
    return image.__array_interface__["data"][0], *image.shape
