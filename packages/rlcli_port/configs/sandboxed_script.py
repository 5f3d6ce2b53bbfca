"""Runs an untrusted script in the sandbox, with the small files of its folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlcli_sandbox import Limits, Sandbox

from rlcli.errors import ConfigError
from rlcli.support.reading import UnfitFile, parse_json, read_text

WALL_S = 10.0
MEMORY_BYTES = 256 << 20
PROCESSES = 32
OUTPUT_BYTES = 8 << 20

BESIDE = (".sh", ".bash", ".slurm", ".sbatch", ".py", ".yaml", ".yml", ".json", ".jinja", ".txt", ".md", ".toml")
"""Endings of files in a script's folder that are copied into the sandbox."""
MOST_FILES = 200
LARGEST_FILE = 256 << 10
LARGEST_SUM = 4 << 20

ENDED = {
    "cpu": f"it ran for more than {WALL_S:.0f} s",
    "time": f"it ran for more than {WALL_S:.0f} s: it may wait for something that does not happen here",
    "memory": f"it needed more than {MEMORY_BYTES >> 20} MiB",
    "output": "it printed too much",
    "disk": "it filled the disk",
    "processes": f"it started more than {PROCESSES} processes at once",
}


class Ended(ConfigError):
    """The script broke a limit, and was ended."""


def run_confined(
    sandbox: Sandbox, main: str, order: Mapping[str, Any], path: Path, *, processes: int = 1
) -> dict[str, Any]:
    """Run `main` with `order` as JSON on its standard input; returns the JSON that it prints. path: the script, for
    messages.

    Raises `Ended` if it broke a limit, `ConfigError` if it printed something else, `SetupError` if the sandbox does not
    start.
    """
    limits = Limits(
        wall_s=WALL_S, cpu_s=WALL_S, memory_bytes=MEMORY_BYTES, output_bytes=OUTPUT_BYTES, processes=processes
    )
    with sandbox.start(main, limits) as child:
        with contextlib.suppress(BrokenPipeError):  # it has ended
            child.stdin.write(json.dumps(dict(order)).encode())
        end = child.wait()
    if end.killed_for:
        raise Ended(
            f"{path} was run in the sandbox to be imported, and ended: {ENDED[end.killed_for]}",
            "import the command that starts the training, in a separate script",
        )
    try:
        printed = parse_json(end.stdout.decode())
    except ValueError:
        printed = None
    if not isinstance(printed, dict):
        last = end.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"status {end.status}"]
        raise ConfigError(
            f"{path} was run in the sandbox to be imported, and ended: {last[0][:160]}",
            "import the command that starts the training, in a separate script",
        )
    return printed


@cache
def text_of(name: str) -> str:
    """The source of a file of this package that runs inside."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def files_beside(path: Path) -> dict[str, str]:
    """Name → text of the small text files in the script's folder, without links and the script itself."""
    texts: dict[str, str] = {}
    total = 0
    try:
        files = sorted(path.resolve().parent.iterdir())
    except OSError:  # a folder that cannot be listed
        return {}
    for file in files:
        if file.suffix in BESIDE and file.name != path.name and len(texts) < MOST_FILES:
            with contextlib.suppress(UnfitFile, OSError, UnicodeDecodeError):  # not a small text file of this folder
                text = read_text(file, LARGEST_FILE)
                total += len(text)
                if total > LARGEST_SUM:
                    break
                texts[file.name] = text
    return texts
