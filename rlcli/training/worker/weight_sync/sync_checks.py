"""Checks after a sync that stop the run: the engine holds other weights than it was sent, or old prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcli.errors import RunFailed

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

    from rlcli.model.weight_check.engine_weights import Verified

MAX_LISTED = 3
"""Maximum number of differences in a message."""
MIN_MOVE = 2.0
"""Least change of the trainer's log-probs that `QuantizedSyncCheck` judges, in units of the engine's error."""
MIN_ERROR = 1e-3
"""Lower bound of the engine's error, in nats."""
MIN_SHARE = 0.5
"""Least share of the trainer's change that the engine's log-probs must have made."""


def check_verified(verified: Verified, sent: int, rank: int) -> None:
    """RunFailed if the engine of worker `rank` does not hold the tensors, `sent` of them, exactly as they were sent."""
    differences = verified.differences
    if not differences:
        return
    listed = ", ".join(differences[:MAX_LISTED]) + (
        f" and {len(differences) - MAX_LISTED} more" if len(differences) > MAX_LISTED else ""
    )
    raise RunFailed(
        f"after the weight sync the engine of worker {rank} does not hold the weights that the trainer sent: {listed} "
        f"({sent} were sent)",
        "it would generate with other weights than the trained ones; report it with that worker's log and the output "
        "of rlcli doctor",
    )


def check_prefixes(cached: int, rank: int) -> None:
    """RunFailed if a prompt that was cached before a sync is still cached after it. cached: number of its tokens."""
    if cached:
        raise RunFailed(
            f"after the weight sync the engine of worker {rank} still has prefixes cached that earlier weights "
            f"computed: {cached} tokens of the probe",
            "vLLM did not reset its prefix cache; report it with the output of rlcli doctor",
        )


class QuantizedSyncCheck:
    """Checks that the log-probs of an engine whose quantised weights cannot be compared move with the trainer's.

    The reference is the first sync; the distance between its two log-probs is the engine's error. Once the trainer's
    have moved by m, at least twice that error, the engine's have moved by f = m plus an error: the share of m in f,
    m·f / m·m, is about 1 if the engine follows and 0 if not. This sync is then the new reference.
    """

    def __init__(self) -> None:
        self._reference: tuple[np.ndarray, np.ndarray] | None = None

    def check(self, trainer: Float[np.ndarray, " R"], engine: Float[np.ndarray, " R"], rank: int) -> None:
        """RunFailed if the engine of worker `rank` does not follow. Log-probs of the probe."""
        if self._reference is None:
            self._reference = trainer, engine
            return
        last_trainer, last_engine = self._reference
        moved, followed = trainer - last_trainer, engine - last_engine
        if not _rms(moved) > MIN_MOVE * max(_rms(last_engine - last_trainer), MIN_ERROR):
            return
        share = float(moved @ followed / (moved @ moved))
        if not share >= MIN_SHARE:
            raise RunFailed(
                f"after the weight sync the log-probs of worker {rank}'s engine have moved by {share:.2f} of what the "
                f"trainer's have moved, {_rms(moved):.3g}",
                "its quantised weights do not follow the trained ones; leave out rollout.quantization, or report it "
                "with that worker's log and the output of rlcli doctor",
            )
        self._reference = trainer, engine


def _rms(values: Float[np.ndarray, " R"]) -> float:
    return float((values @ values / max(len(values), 1)) ** 0.5)
