"""What ends a run after a sync: an engine that holds other weights than it was sent, or prefixes of earlier ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcli.errors import RunFailed

if TYPE_CHECKING:
    from rlcli.model.held import Verified

NAMED = 3
"""Differences that a message names."""


def check_verified(verified: Verified, sent: int, rank: int) -> None:
    """RunFailed where the engine of worker `rank` does not hold the tensors, `sent` of them, as they were sent."""
    found = verified.differences
    if not found:
        return
    named = ", ".join(found[:NAMED]) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")
    raise RunFailed(
        f"after the weight sync the engine of worker {rank} does not hold the weights that the trainer sent: {named} "
        f"({sent} were sent)",
        "it would generate with other weights than the trained ones; report it with that worker's log and the output "
        "of rlcli doctor",
    )


def check_prefixes(cached: int, rank: int) -> None:
    """RunFailed where a prompt that was cached before a sync still is after it. cached: so many of its tokens."""
    if cached:
        raise RunFailed(
            f"after the weight sync the engine of worker {rank} still has prefixes cached that earlier weights "
            f"computed: {cached} tokens of the probe",
            "vLLM did not reset its prefix cache; report it with the output of rlcli doctor",
        )
