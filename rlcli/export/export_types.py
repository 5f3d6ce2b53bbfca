"""The options and the result of an export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlcli.runs.checkpoint import MANIFEST
from rlcli.support.files import described

EXACT, ROUNDED = 1e-4, 0.15
"""How far log-probs may be from the trainer's, in the mean: in float32, and if trainer or files have 16 bits. (Single
ones differ by ten times that there.)"""


@dataclass(frozen=True)
class Options:
    """merge: merge an adapter into its base's weights. dtype: of the files; empty: float32 for an adapter, else the
    trainer's. critic: the value or process reward model instead of the policy. check: verify what is written."""

    merge: bool = False
    dtype: str = ""
    critic: bool = False
    check: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """How much weights differ from the base's. tensors: how many were compared (for an adapter, the adapted layers);
    moved: how many differ at all. largest, mean: of the absolute differences of all elements."""

    tensors: int
    moved: int
    largest: float
    mean: float

    def __str__(self) -> str:
        return (
            f"{self.moved} of {self.tensors} tensors differ from the base, by {self.mean:.2g} on average and "
            f"{self.largest:.2g} at most"
        )


@dataclass(frozen=True)
class LogProbs:
    """Comparison on the trainer's probe: number of log-probs, the mean absolute difference, and its limit."""

    tokens: int
    mean: float
    bound: float

    def __str__(self) -> str:
        return f"within {self.mean:.2g} of the trainer's in the mean of {self.tokens} tokens (at most {self.bound:g})"


@dataclass(frozen=True)
class Export:
    """The export in `path`. kind: `model`, `adapter`, `value model` or `process reward model`. base: the model it was
    trained from. change, log_probs: results of the checks; None if not requested, or with nothing to compare. manifest:
    SHA-256 of the checkpoint's manifest."""

    path: str
    kind: str
    step: int
    dtype: str
    base: str
    manifest: str
    change: Change | None = None
    log_probs: LogProbs | None = None


def manifest_digest(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's manifest, which has those of all its files; empty if there is none."""
    manifest = checkpoint / MANIFEST
    return str(described(manifest)["sha256"]) if manifest.is_file() else ""


def shown(base: str) -> str:
    """A hub id unchanged; for a folder its name, for an export with the run's: the rest means nothing to others."""
    folder = Path(base)
    if not folder.is_dir():
        return base
    return f"{folder.parent.parent.name} {folder.name}" if folder.parent.name == "exports" else folder.name
