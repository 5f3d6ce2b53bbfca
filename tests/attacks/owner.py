"""The process that attacks are made on: it verifies what the harness sends it, one request at a time.

Requests are lines of JSON on the descriptor given first, replies go to the one given second; its standard output and
error are files, in which nothing may appear.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.types import Verdict, VerifyRequest

POOLED = "code(wall_s=4.0)"
"""Programs that sleep are ended soon."""


def main() -> None:
    from rlcli_verifiers.code import verify

    pool: ScoringPool | None = None
    with os.fdopen(int(sys.argv[1])) as requests, os.fdopen(int(sys.argv[2]), "w", buffering=1) as replies:
        for line in requests:
            ask = json.loads(line)
            request = VerifyRequest(completion=ask["completion"], ground_truth=ask["ground_truth"])
            initial_descriptors = descriptors()
            started = time.monotonic()
            try:
                if ask["pool"]:
                    pool = pool or ScoringPool(1, 10.0, [POOLED])
                    verdict = pool.submit(POOLED, request).result()
                else:
                    verdict = verify(request, timeout_s=ask["timeout_s"], wall_s=ask["timeout_s"])
            except Exception as error:
                reply: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
            else:
                reply = fields_of(verdict)
            reply |= {"seconds": time.monotonic() - started, "descriptors": [initial_descriptors, descriptors()]}
            replies.write(json.dumps(reply) + "\n")


def fields_of(verdict: Verdict) -> dict[str, Any]:
    return {"score": verdict.score, "outcome": verdict.outcome.value, "detail": verdict.detail}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    main()
