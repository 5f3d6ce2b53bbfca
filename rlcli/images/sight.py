"""How a model sees encoded pictures."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from rlcli.images.decoding import decode, size_of
from rlcli.images.rows import BadImage
from rlcli.images.rule import ImageRule
from rlcli.types import image_digest

if TYPE_CHECKING:
    import numpy as np


class Sight:
    """Prepares pictures for the model that `rule` is of. Equal ones are prepared once, and are one array as long as
    someone has it: so samples share what they show. Thread-safe."""

    def __init__(self, rule: ImageRule) -> None:
        self.rule = rule
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()

    def prepared(self, images: Sequence[bytes], most: int | None = None) -> tuple[np.ndarray, ...]:
        """Raises `BadImage`, too, if they have more than `most` tokens; that is known from their headers."""
        if most is not None:
            tokens = sum(self.rule.tokens(*self.rule.fitted(*size_of(image))) for image in images)
            if tokens > most:
                raise BadImage(f"its pictures have {tokens} tokens, and a conversation has at most {most}")
        with self._lock:  # one at a time: decoding may take 16 bytes a pixel
            return tuple(map(self._one, images))

    def _one(self, image: bytes) -> np.ndarray:
        digest = image_digest(image)
        found = self._known.get(digest)
        if found is None:
            found = self._known[digest] = self.rule.prepared(decode(image))
        return found
