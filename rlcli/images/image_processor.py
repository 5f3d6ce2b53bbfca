"""Prepares encoded images for a model, with a cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from rlcli.images.decoding import decode, size_of
from rlcli.images.image_rule import ImageRule
from rlcli.images.row_images import BadImage
from rlcli.images.thumbnails import small_copy
from rlcli.types import image_digest

if TYPE_CHECKING:
    import numpy as np

COPIES = 256
"""Small copies that are kept for pictures that come again."""


class NoRoom(BadImage):
    """Images with more tokens than allowed."""


@dataclass(frozen=True)
class Shown:
    """pictures: as the model sees them, in their order. copies: digest → a small copy, for people."""

    pictures: tuple[np.ndarray, ...]
    copies: dict[str, bytes]


class Sight:
    """Prepares pictures for the model that `rule` is of. Equal ones are prepared once, and are one array as long as
    someone has it: so samples share what they show. Thread-safe."""

    def __init__(self, rule: ImageRule) -> None:
        self.rule = rule
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()
        self._copies: OrderedDict[str, bytes] = OrderedDict()

    def prepared(self, images: Sequence[bytes]) -> tuple[np.ndarray, ...]:
        """Raises `BadImage`."""
        with self._lock:  # one at a time: decoding may take 16 bytes a pixel
            return tuple(self._prepared(image, image_digest(image)) for image in images)

    def shown(self, images: Sequence[bytes], most: int) -> Shown:
        """The same with small copies. Raises `NoRoom` if the pictures have more than `most` tokens together, which
        their headers tell."""
        tokens = sum(self.rule.tokens(*self.rule.fitted(*size_of(image))) for image in images)
        if tokens > most:
            raise NoRoom(f"its pictures have {tokens} tokens, and a conversation has at most {most}")
        arrays, copies = [], {}
        for image in images:
            digest = image_digest(image)
            with self._lock:
                arrays.append(self._prepared(image, digest, copied=True))
                copies[digest] = self._copies[digest]
        return Shown(tuple(arrays), copies)

    def _prepared(self, image: bytes, digest: str, *, copied: bool = False) -> np.ndarray:
        array = self._known.get(digest)
        if array is None or (copied and digest not in self._copies):
            picture = decode(image)
            array = self._known.setdefault(digest, self.rule.prepared(picture)) if array is None else array
            if copied:
                self._copies[digest] = small_copy(picture)
        if copied:
            self._copies.move_to_end(digest)
            if len(self._copies) > COPIES:
                self._copies.popitem(last=False)
        return array
