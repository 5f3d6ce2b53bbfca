"""Preprocesses encoded images for a model, with a cache."""

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
"""Small copies that are kept for images that come again."""


class NoRoom(BadImage):
    """Images with more tokens than allowed."""


@dataclass(frozen=True)
class ProcessedImages:
    """images: processed, in their order. copies: digest → a small copy, for people."""

    images: tuple[np.ndarray, ...]
    copies: dict[str, bytes]


class ImageProcessor:
    """Preprocesses images for the model that `rule` is of. Equal ones are processed once, and are one array as long as
    someone has it: so samples share their images. Thread-safe."""

    def __init__(self, rule: ImageRule) -> None:
        self.rule = rule
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()
        self._copies: OrderedDict[str, bytes] = OrderedDict()

    def process(self, images: Sequence[bytes]) -> tuple[np.ndarray, ...]:
        """Raises `BadImage`."""
        with self._lock:  # one at a time: decoding may take 16 bytes a pixel
            return tuple(self._process(image, image_digest(image)) for image in images)

    def process_with_copies(self, images: Sequence[bytes], most: int) -> ProcessedImages:
        """The same with small copies. Raises `NoRoom` if the images have more than `most` tokens together, which
        their headers show."""
        tokens = sum(self.rule.tokens(*self.rule.fitted(*size_of(image))) for image in images)
        if tokens > most:
            raise NoRoom(f"its images have {tokens} tokens, and a conversation has at most {most}")
        arrays, copies = [], {}
        for image in images:
            digest = image_digest(image)
            with self._lock:
                arrays.append(self._process(image, digest, copied=True))
                copies[digest] = self._copies[digest]
        return ProcessedImages(tuple(arrays), copies)

    def _process(self, image: bytes, digest: str, *, copied: bool = False) -> np.ndarray:
        array = self._known.get(digest)
        if array is None or (copied and digest not in self._copies):
            decoded = decode(image)
            array = self._known.setdefault(digest, self.rule.preprocess(decoded)) if array is None else array
            if copied:
                self._copies[digest] = small_copy(decoded)
        if copied:
            self._copies.move_to_end(digest)
            if len(self._copies) > COPIES:
                self._copies.popitem(last=False)
        return array
