"""What a vision-language model sees of a picture: how it is resized, cut, and placed among the tokens.

A picture is prepared once, by the worker that generates from it. Engine and trainer are given the result, which neither
resizes again, so both see the same pixels. Between them it travels as 8-bit RGB: an eighth of the patches' bytes, a
quarter of the tiles'.

`ImageRule` is what the rest of the code knows of that; `rlcli.images.families` has the rules of the families.
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
    """The rule of one model. token: the id that stands for a piece of a picture. never: ids that are not drawn, since
    they stand for pictures."""

    token: int
    never: tuple[int, ...]

    @classmethod
    @abstractmethod
    def of(cls, path: str, config: Any) -> Self:
        """Of the model at `path`, a folder or hub id, with this config. Raises `OSError` if its files do not say how it
        sees pictures."""

    @classmethod
    def refused(cls, config: Any) -> str:
        """Why a model of this config cannot be trained, or an empty text."""
        return ""

    @abstractmethod
    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of what `prepared` makes of a picture of this size. Raises `ValueError` for a picture more
        than 200 times as long as wide."""

    @abstractmethod
    def prepared(self, picture: Any) -> np.ndarray:
        """A PIL picture in RGB as the model sees it: uint8 `[height, width, 3]`."""

    @abstractmethod
    def tokens(self, width: int, height: int) -> int:
        """How many tokens stand for a prepared picture."""

    @abstractmethod
    def inputs(self, pictures: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """What transformers' model takes of prepared pictures, by the names of its arguments: float32 and int64."""

    @property
    @abstractmethod
    def blank(self) -> np.ndarray:
        """The smallest prepared picture, for a pack that has none: on ranks that share a tower each takes part in each
        pass."""

    def engine_inputs(self, pictures: Sequence[np.ndarray]) -> Mapping[str, np.ndarray] | None:
        """What vLLM's model takes of prepared pictures, by the names that its processor gives it; None if that
        processor leaves prepared pictures as they are, and so is given these."""
        return None

    def placed(self, width: int, height: int) -> list[int]:
        """The ids that take the place of a placeholder for a prepared picture."""
        return [self.token] * self.tokens(width, height)

    def expanded(self, ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """The ids of a prompt that has one placeholder for each picture, with as many as the picture has tokens. sizes:
        width and height of the prepared pictures."""
        each = iter([self.placed(*size) for size in sizes])
        return [token for one in ids for token in (next(each) if one == self.token else [one])]

    def collapsed(self, ids: np.ndarray, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """The reverse of `expanded`: int32."""
        import numpy as np

        kept: np.ndarray = np.ones(len(ids), bool)
        for start, picture in zip(self.starts(ids, pictures), pictures, strict=True):
            placed = self.placed(picture.shape[1], picture.shape[0])
            begin = start - placed.index(self.token)
            kept[begin : begin + len(placed)] = False
            kept[start] = True
        found: np.ndarray = ids[kept]
        return found

    def starts(self, ids: np.ndarray, pictures: Sequence[np.ndarray]) -> list[int]:
        """Where in the ids each picture's tokens begin."""
        import numpy as np

        places, counts = np.flatnonzero(ids == self.token), [self.tokens(p.shape[1], p.shape[0]) for p in pictures]
        assert len(places) == sum(counts), "as many tokens as the pictures have"
        return [int(places[at]) for at in np.cumsum([0, *counts])[:-1]]

    def positions(self, ids: np.ndarray, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """The position of each token, counting from 0: int64 `[T]`, or `[3, T]` for a model with three of them."""
        import numpy as np

        places: np.ndarray = np.arange(len(ids))
        return places


def identity(picture: np.ndarray) -> tuple[int, ...]:
    """Equal for views of one array. Samples of a group mostly share their pictures, which then need not be compared."""
    return picture.__array_interface__["data"][0], *picture.shape
