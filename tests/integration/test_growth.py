"""Nothing of a run grows with its steps: memory, descriptors and threads of its processes, their number, and Ray's
object store."""

from __future__ import annotations

import contextlib
import itertools
import re
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from commands import RLCLI, SMALL, descendants

STEPS, WARM_UP = 1000, 200
QUARTERS = 4
LEAST = 1.0
"""Growth from each quarter of the steps to the next, of medians: a MiB or a descriptor in 200 steps. What happens once,
such as a late import, is in one of them."""
TINY_STEPS = [
    *("--set", "rollout.prompts_per_step=2", "--set", "rollout.max_response_tokens=8"),
    *("--set", "rollout.kv_cache_mb=64", "--set", "verifier.processes=1", "--set", "train.lr=1e-5"),
    *("--set", "checkpoint.every=20", "--set", "evaluation.every=20", "--set", "evaluation.max_prompts=2"),
]
OWN = re.compile(r"^(?:RssAnon|RssFile):\s+(\d+) kB", re.M)
STORE = re.compile(r"^RssShmem:\s+(\d+) kB", re.M)
"""Of the raylet; the object store is mapped into other processes too."""


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("staleness", [None, 1], ids=["synchronous", "one step off"])
def test_nothing_of_a_run_grows(tiny: Path, sums: Path, tmp_path: Path, staleness: int | None) -> None:
    run = tmp_path / "run"
    words = ["train", "grpo", "--model", tiny, "--data", sums, "--eval-data", sums, "--out", run, "--steps", STEPS]
    # Random text earns it at times, so that there are updates.
    words += ["--workers", 1, "--verifier", 'regex(pattern="[a-c]", match=search)', *SMALL, *TINY_STEPS]
    if staleness:
        words += ["--set", "rollout.workers=1", "--set", f"async.staleness={staleness}"]
    series: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*RLCLI, *map(str, words)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                if (step := steps_of(run)) > WARM_UP:
                    for key, value in measured(process.pid).items():
                        series[key].append((step, value))
                time.sleep(0.3)
        finally:
            process.terminate()
            process.wait()
    assert process.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    medians = {key: quarters(points) for key, points in series.items()}
    judged = {key: values for key, values in medians.items() if len(values) == QUARTERS}
    assert ("object store", "MiB") in judged
    assert sum("ray::Worker" in name for name, _ in judged) == (6 if staleness else 3)
    assert sum("rlcli.cli.main" in name for name, _ in judged) == 6, "supervisor and driver"
    growing = {key: values for key, values in judged.items() if rises(values)}
    assert not growing


def rises(values: list[float]) -> bool:
    return all(later - earlier >= LEAST for earlier, later in itertools.pairwise(values))


def test_a_leak_rises_and_a_jump_does_not() -> None:
    steps = range(WARM_UP + 1, STEPS)
    assert rises(quarters([(step, 100 + step / 100 + step % 7) for step in steps]))
    assert rises(quarters([(step, 40 + step // 50) for step in steps]))
    assert not rises(quarters([(step, 100 + 50 * (step > 500) + step % 7) for step in steps]))


def quarters(points: list[tuple[int, float]]) -> list[float]:
    """The median of each quarter of the steps that has any values."""
    values: dict[int, list[float]] = defaultdict(list)
    for step, value in points:
        quarter = QUARTERS * (step - WARM_UP - 1) // (STEPS - WARM_UP)
        values[min(quarter, QUARTERS - 1)].append(value)
    return [statistics.median(values[quarter]) for quarter in sorted(values)]


def measured(supervisor: int) -> dict[tuple[str, str], float]:
    """By process and quantity. Ray's own processes are not judged."""
    family = [psutil.Process(supervisor), *descendants(supervisor)]
    values: dict[tuple[str, str], float] = {("run", "processes"): len(family)}
    for process in family:
        with contextlib.suppress(psutil.Error, OSError):  # it has ended meanwhile
            line = " ".join(process.cmdline())
            status = Path(f"/proc/{process.pid}/status").read_text()
            if process.name() == "raylet":
                values["object store", "MiB"] = sum(map(int, STORE.findall(status))) / 1024
            elif named := re.search(r"^ray::Worker|-m (rlcli\.\S+)", line):
                name = f"{process.pid} {named[0]}"
                values[name, "MiB"] = sum(map(int, OWN.findall(status))) / 1024
                values[name, "descriptors"] = process.num_fds()
                values[name, "threads"] = process.num_threads()
    return values


def steps_of(run: Path) -> int:
    """Lines of metrics; the evaluation before the first step has one, too."""
    lines = run / "metrics.jsonl"
    return lines.read_bytes().count(b"\n") if lines.exists() else 0
