"""A sample's signature: 32 bits that tie its tokens, its engine log-probs and its score together.

The worker that generates a sample computes the signature once its verdict is known. The worker that trains on the
sample computes it again from the packed batch, and stops the run if the two differ. So a row, a mask or a reward
that was mixed up in between is found at the first step, for one pass of CRC-32 over the tokens.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any


def tokens_digest(prompt: Any, response: Any, log_probs: Any) -> int:
    """CRC-32 of a sample's tokens. prompt `[P]`, response `[R]`: token ids; log_probs `[R]`: the engine's.

    >>> import numpy as np
    >>> ids, log_probs = np.array([5, 6, 7], np.int32), np.array([-0.5, -1.0], np.float32)
    >>> tokens_digest(ids[:1], ids[1:], log_probs) == tokens_digest(ids[:2], ids[2:], log_probs)  # another boundary
    False
    """
    import numpy as np

    digest = zlib.crc32(struct.pack("<qqq", len(prompt), len(response), len(log_probs)))
    for values, dtype in ((prompt, np.int32), (response, np.int32), (log_probs, np.float32)):
        digest = zlib.crc32(np.ascontiguousarray(values, dtype).tobytes(), digest)
    return digest


def signature(digest: int, score: float) -> int:
    """The signature of a sample with this `tokens_digest` and this score: 1 … 2³² − 1. 0 stands for "not signed"."""
    return zlib.crc32(struct.pack("<d", score), digest) or 1
