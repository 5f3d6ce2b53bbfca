"""Where checkpoints lie, and which are kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class Checkpoints:
    """Folders `step-000050` below `root`, each a Hugging Face model; `latest` links to the newest.

    A folder appears under its name only when it is whole: it is written under another and renamed.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self.keep = keep

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def committed(self, step: int) -> None:
        """Point `latest` at this step and drop what is older than the newest `keep`."""
        link = self.root / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.path(step).name)
        os.replace(link, self.root / "latest")
        for old in sorted(self.root.glob("step-*"))[: -self.keep]:
            shutil.rmtree(old)
