"""How long a checkpoint keeps the driver from its next step: its bookkeeping, with simulated workers.

    python scripts/bench/checkpoint.py                       # 128 engines × 50 steps between two checkpoints
    python scripts/bench/checkpoint.py --ranks 8 --steps 10 --json checkpoint.json

Each simulated rank writes its sample file of every step and its two files of the checkpoint, as the workers do, by the
same code. That is not counted: workers do it beside each other. Counted is what the driver then does by itself, with
its own code: begin a checkpoint, and commit it once every rank has written its part (sync the record, check the files,
write state and manifest, rename, prune). The calls to the ranks are not in it: scripts/bench/controller.py has those.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _common import write_json
from rich.console import Console
from rich.table import Table

from rlcli.data.sample_files import sample_row, write_samples
from rlcli.rollout.scheduler.rollout_source import by_rank
from rlcli.runs.checkpoint import Checkpoints
from rlcli.runs.folder import RunFolder
from rlcli.support.files import described
from rlcli.training.loop.checkpointer import Checkpointer
from rlcli.types import Outcome, Prompt, Verdict

THREADS = 8
ROW = sample_row(
    Prompt("p", ({"role": "user", "content": "1+1="},), "bench", "math", "exact", "2"),
    0,
    "2",
    Verdict(1.0, Outcome.OK, "2"),
    prompt_tokens=4,
    response_tokens=1,
    finish_reason="stop",
)


class Ranks:
    """In the place of the policy's workers. bytes_each: of a rank's part of the checkpoint."""

    def __init__(self, count: int, bytes_each: int) -> None:
        self.count, self.content = count, bytes(bytes_each)
        self.files: list[dict[str, Any]] = []

    def call(self, method: Any, *args: Any) -> Any:
        return getattr(self, method.__name__)(*args)

    def save_state(self, folder: str) -> None:
        place = Path(folder)
        place.mkdir()
        self.files = []
        for rank in range(self.count):
            paths = [place / f"rank-{rank}.pt", place / f"__{rank}_0.distcp"]
            for path in paths:
                path.write_bytes(self.content)
            self.files.append({f"{place.name}/{path.name}": described(path) for path in paths})

    def state_saved(self, wait: bool) -> list[dict[str, Any]]:
        return self.files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=128, help="simulated engines (128)")
    parser.add_argument("--steps", type=int, default=50, help="between two checkpoints (50)")
    parser.add_argument("--repeats", type=int, default=3, help="checkpoints (3)")
    parser.add_argument("--kilobytes", type=int, default=64, help="of each of a rank's files of the checkpoint (64)")
    parser.add_argument(
        "--folder", type=Path, help="where to write: the file system to measure (the default for files)"
    )
    parser.add_argument("--json", default="", help="write the result to this file, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(Path(folder) / "run", args.ranks, args.steps, args.repeats, args.kilobytes << 10)
    table = Table("ranks", "steps", "sample files", "begin s", "commit s", "driver s", "a rank, a step s", box=None)
    middle = {name: statistics.median(values) for name, values in found.items()}
    times = [f"{middle[name]:.3f}" for name in ("begin_s", "commit_s", "driver_s", "sample_file_s")]
    table.add_row(str(args.ranks), str(args.steps), str(args.ranks * args.steps), *times)
    Console(highlight=False).print(table)
    write_json(args.json, {"ranks": args.ranks, "steps": args.steps, "medians": middle, "all": found})


def measure(path: Path, ranks: int, steps: int, repeats: int, bytes_each: int) -> dict[str, list[float]]:
    """Seconds of each checkpoint: of `begin` without what the ranks do in it, of `commit`, and of both (`driver_s`);
    and of one rank to write one sample file."""
    found: dict[str, list[float]] = {name: [] for name in ("begin_s", "commit_s", "driver_s", "sample_file_s")}
    workers = Ranks(ranks, bytes_each)
    with RunFolder.create(path) as folder, ThreadPoolExecutor(THREADS) as pool:
        folder.write_config("[train]\nsteps = 9\n")
        notes: list[str] = []
        checkpointer = Checkpointer(Checkpoints(folder.checkpoints, keep=1), folder, workers, None, notes.append)  # type: ignore[arg-type]
        for number in range(repeats):
            for step in range(number * steps + 1, (number + 1) * steps + 1):
                folder.append_metrics({"step": step, "reward/mean": 0.5})
                names = [by_rank(folder.samples, step).replace("{rank}", str(rank)) for rank in range(ranks)]
                found["sample_file_s"] += pool.map(_write, names, itertools.repeat(step))
            _checkpoint(checkpointer, workers, (number + 1) * steps, found)
            assert not notes, notes
    return found


def _checkpoint(checkpointer: Checkpointer, workers: Ranks, step: int, found: dict[str, list[float]]) -> None:
    by_ranks = 0.0

    def saving(folder: str) -> None:
        nonlocal by_ranks
        since = time.perf_counter()
        Ranks.save_state(workers, folder)
        by_ranks = time.perf_counter() - since

    workers.save_state = saving  # type: ignore[method-assign]
    began = time.perf_counter()
    checkpointer.begin(step, {"step": step, "waiting": []}, [])
    started = time.perf_counter()
    checkpointer.poll(wait=True)
    done = time.perf_counter()
    found["begin_s"].append(started - began - by_ranks)
    found["commit_s"].append(done - started)
    found["driver_s"].append(done - began - by_ranks)


def _write(name: str, step: int) -> float:
    began = time.perf_counter()
    write_samples(Path(name), step, [ROW])
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
