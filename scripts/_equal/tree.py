"""A checkout whose command line is run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Tree:
    """A checkout with its virtual environment, and the folder of public datasets, which may be missing."""

    path: Path
    data: Path

    @classmethod
    def at(cls, path: Path | None, data: Path | None) -> Tree:
        path = (path or ROOT).resolve()
        return cls(path, data or Path(os.environ.get("RLCLI_SHARED_DATA") or path.parent / "shared" / "data"))

    def rlcli(self, *words: object, writes: Path | None = None) -> str:
        """The standard output of `rlcli WORDS`. Ends the program where it fails, with its last lines, unless
        the file `writes` is there: `verifiers run` fails where every row crashes, which is a verdict too."""
        command = [str(self.path / ".venv" / "bin" / "rlcli"), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.path)
        if done.returncode and not (writes and writes.exists()):
            sys.exit(f"scripts/equal: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return done.stdout
