"""Checks after a sync that stop the run: the engine holds other weights than it was sent, or old prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcli.errors import RunFailed

if TYPE_CHECKING:
    from rlcli.model.weight_check.engine_weights import Verified

NAMED = 3
"""Most differences that a message names."""
FAR, LEAST, SHARE = 2.0, 1e-3, 0.5
"""For `Follows`: engine errors that count as a move, the least error, and the least share of a move."""


def check_verified(verified: Verified, sent: int, rank: int) -> None:
    """RunFailed if the engine of worker `rank` does not hold the tensors, `sent` of them, exactly as they were sent."""
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
    """RunFailed if a prompt that was cached before a sync is still cached after it. cached: so many of its tokens."""
    if cached:
        raise RunFailed(
            f"after the weight sync the engine of worker {rank} still has prefixes cached that earlier weights "
            f"computed: {cached} tokens of the probe",
            "vLLM did not reset its prefix cache; report it with the output of rlcli doctor",
        )


class Follows:
    """Checks that the log-probs of an engine whose quantised weights cannot be compared move with the trainer's.

    Both are kept from a first sync, and the distance between them is the engine's error. Once the trainer's have moved
    from there by twice that, m, the engine's have moved by f, which has to be m plus an error: the share of m in f,
    m·f / m·m, is about 1 if it follows and 0 if it does not. Later syncs are then compared with this one.
    """

    def __init__(self) -> None:
        self._kept: tuple[Any, Any] | None = None

    def check(self, trainer: Any, engine: Any, rank: int) -> None:
        """RunFailed if the engine of worker `rank` does not follow. Log-probs of the probe, float `[n]`."""
        if self._kept is None:
            self._kept = trainer, engine
            return
        was_trainer, was_engine = self._kept
        moved, followed = trainer - was_trainer, engine - was_engine
        if not _rms(moved) > FAR * max(_rms(was_engine - was_trainer), LEAST):
            return
        share = float(moved @ followed / (moved @ moved))
        if not share >= SHARE:
            raise RunFailed(
                f"after the weight sync the log-probs of worker {rank}'s engine have moved by {share:.2f} of what the "
                f"trainer's have moved, {_rms(moved):.3g}",
                "its quantised weights do not follow the trained ones; leave out rollout.quantization, or report it "
                "with that worker's log and the output of rlcli doctor",
            )
        self._kept = trainer, engine


def _rms(values: Any) -> float:
    return float((values @ values / max(len(values), 1)) ** 0.5)
