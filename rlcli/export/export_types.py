"""The options and the result of an export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlcli.runs.checkpoint import MANIFEST
from rlcli.support.files import described

EXACT, ROUNDED = 1e-4, 0.15
"""Largest mean difference of log-probs from the trainer's: in float32, and if trainer or files have 16 bits. (Single
tokens then differ by ten times that.)"""


@dataclass(frozen=True)
class Options:
    """Options of `rlcli export`."""

    merge: bool = False
    """Merge an adapter into its base's weights."""
    dtype: str = ""
    """Dtype of the files; empty: float32 for an adapter, else the trainer's."""
    critic: bool = False
    """Export the value or process reward model instead of the policy."""
    check: bool = True
    """Verify the written files."""


@dataclass(frozen=True, slots=True)
class Change:
    """Difference of weights from the base model's."""

    tensors: int
    """Number of tensors compared; for an adapter, of adapted layers."""
    moved: int
    """Number of tensors that differ."""
    largest: float
    """Largest absolute difference of an element."""
    mean: float
    """Mean absolute difference of all elements."""

    def __str__(self) -> str:
        return (
            f"{self.moved} of {self.tensors} tensors differ from the base, by {self.mean:.2g} on average and "
            f"{self.largest:.2g} at most"
        )


@dataclass(frozen=True)
class LogProbs:
    """Comparison of log-probs on the trainer's probe."""

    tokens: int
    """Number of log-probs compared."""
    mean: float
    """Mean absolute difference."""
    bound: float
    """Largest mean difference allowed."""

    def __str__(self) -> str:
        return f"within {self.mean:.2g} of the trainer's in the mean of {self.tokens} tokens (at most {self.bound:g})"


@dataclass(frozen=True)
class Export:
    """A finished export."""

    path: str
    """The exported folder."""
    kind: str
    """`model`, `adapter`, `value model` or `process reward model`."""
    step: int
    """Step of the checkpoint."""
    dtype: str
    """Dtype of the files."""
    base: str
    """The model that it was trained from."""
    manifest: str
    """SHA-256 of the checkpoint's manifest."""
    change: Change | None = None
    """Change from the base; None if not checked."""
    log_probs: LogProbs | None = None
    """Comparison with the trainer; None if not checked or without log-probs to compare with."""


def manifest_digest(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's manifest, which has the hashes of all its files; empty if there is none."""
    manifest = checkpoint / MANIFEST
    return str(described(manifest)["sha256"]) if manifest.is_file() else ""


def shown(base: str) -> str:
    """The base model's name for others: a hub id unchanged; a folder's name, for an export preceded by its run's."""
    folder = Path(base)
    if not folder.is_dir():
        return base
    return f"{folder.parent.parent.name} {folder.name}" if folder.parent.name == "exports" else folder.name
