"""A sample's signature: 32 bits that tie its tokens, its engine log-probs and its score together.

The worker that generates a sample computes the signature once its verdict is known. The worker that trains on the
sample computes it again from the packed batch, and stops the run if the two differ. So a row, a mask or a reward
that was mixed up in between is found at the first step, for one pass of CRC-32 over the tokens.
"""

from __future__ import annotations

import struct
import zlib

from rlcli.data.trajectories import Trajectory


def tokens_digest(trajectory: Trajectory) -> int:
    """CRC-32 of a trajectory's tokens, response mask, branch starts and log-probs.

    >>> import numpy as np
    >>> ids, log_probs = np.array([5, 6, 7], np.int32), np.array([-0.5, -1.0], np.float32)
    >>> one, other = Trajectory.single(ids[:1], ids[1:], log_probs), Trajectory.single(ids[:2], ids[2:], log_probs[1:])
    >>> tokens_digest(one) == tokens_digest(other)  # another boundary
    False
    """
    import numpy as np

    runs = [0]  # run lengths of the response mask: first of False, then alternating; the last run is of True
    for span in trajectory.spans:
        if (span.speaker == "policy") == (len(runs) % 2 == 0):
            runs[-1] += span.end - span.start
        else:
            runs.append(span.end - span.start)
    runs += [0] * (len(runs) % 2)
    digest = zlib.crc32(struct.pack(f"<{len(runs) + 1}q", *runs, len(trajectory.log_probs)))
    if starts := trajectory.branch_starts[1:]:
        digest = zlib.crc32(struct.pack(f"<{len(starts)}q", *starts), digest)
    for values, dtype in ((trajectory.tokens, np.int32), (trajectory.log_probs, np.float32)):
        digest = zlib.crc32(np.ascontiguousarray(values, dtype).tobytes(), digest)
    return digest


def signature(digest: int, score: float) -> int:
    """The signature of a sample with this `tokens_digest` and this score: 1 … 2³² − 1. 0 stands for "not signed"."""
    return zlib.crc32(struct.pack("<d", score), digest) or 1
