"""Cost of the controller per step: its time and memory, by the number of ranks, of samples and of their tokens.

    python scripts/bench/controller.py [--ranks 1 8 64 256] [--transport loopback ray] [--lengths 1024 8192 32768]
        [--prompts 2048] [--samples 8] [--steps 5] [--json FILE]

Runs the real `Trainer` (its dispatch, collection, choice, plan, metrics, record and view) over ranks that answer with
reports of the right shape and do nothing else; see _controller.py for the two ways to them. Each row is a process of
its own. Time is CPU seconds of the driver's process, all of its threads: what it would take of a core beside ranks that
run elsewhere. Peak is memory above what the idle driver has, growth what twenty steps leave behind.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from _common import write_json
from _controller import FakeRank, Loopback, over_ray
from rich.console import Console
from rich.table import Table

from rlcli.cluster.worker_group import WorkerGroup
from rlcli.config.schema import RunConfig
from rlcli.context import RunContext, RunFacts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.rollout.scheduler import sync_rollouts
from rlcli.rollout.scheduler.sync_rollouts import SyncRollouts
from rlcli.runs.folder import RunFolder
from rlcli.runs.tracking import Trackers
from rlcli.runs.tracking.run_console import View
from rlcli.training.loop import trainer
from rlcli.training.loop.trainer import Trainer
from rlcli.training.worker.calls import Workers
from rlcli.training.worker.worker_pools import WorkerPools
from rlcli.types import Prompt

MEMORY_STEPS = 20
HOSTS = 4
"""Processes that stand for all ranks behind Ray."""
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "calls": ((WorkerGroup, "call"), (Loopback, "call")),
    "gather": ((sync_rollouts, "gather"),),
    "source": ((SyncRollouts, "take"),),
    "select": ((trainer, "select_batch"),),
    "plan": ((trainer, "plan_step"),),
    "work": ((trainer, "build_train_rows"),),
    "metrics": ((trainer, "sample_metrics"), (trainer, "plan_metrics"), (trainer, "time_metrics")),
    "record": ((RunFolder, "append_metrics"), (RunFolder, "at"), (View, "step")),
}
"""Where the driver's time goes: what of it lies within these functions and in no other of them."""


@dataclass(frozen=True)
class Row:
    """The measurement of one configuration."""

    ranks: int
    """Number of simulated ranks."""
    transport: str
    """Transport of the calls."""
    samples: int
    """Samples of a step."""
    length: int
    """Response tokens of a sample."""
    cpu_s: float
    """CPU seconds of a step, median."""
    wall_s: float
    """Seconds of a step, median."""
    parts: dict[str, float]
    """Part of the driver → its CPU seconds in a step, median."""
    sent: int
    """Bytes that the driver sends in a step."""
    received: int
    """Bytes that it receives in a step."""
    peak_mib: float
    """The driver's peak memory."""
    growth_mib: float
    """Growth of its memory during the steps."""


class Parts:
    """CPU seconds of this process within the functions of PARTS, each without the others that it calls."""

    def __init__(self, outside: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._outside = outside
        self._stack: list[str] = []
        self._since = 0.0

    def wrap(self) -> None:
        for name, functions in PARTS.items():
            for owner, attribute in functions:
                setattr(owner, attribute, self._timed(name, getattr(owner, attribute)))

    def _switch(self) -> None:
        now = time.process_time() - self._outside()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._stack.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._stack.pop()

        return timed


def prompts_of(count: int) -> TokenizedPrompts:
    """`count` questions of 400 characters and 120 tokens."""
    rows = tuple(
        Prompt(f"bench:train:{n}", ({"role": "user", "content": f"{n} " * 80},), "bench", "math", "math", str(n))
        for n in range(count)
    )
    return TokenizedPrompts(rows, 0, np.arange(120 * count, dtype=np.int32), np.arange(count + 1) * 120)


def config_of(args: argparse.Namespace, steps: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "rollout": {
                "prompts_per_step": args.prompts,
                "samples_per_prompt": args.samples,
                "max_response_tokens": 4 * args.length,
            },
            "train": {"steps": steps, "tokens_per_microbatch": 4 * args.length + 1024, "minibatches": args.minibatches},
            "cluster": {"workers": args.rank_count},
            "checkpoint": {"every": 0},
        }
    )


@contextmanager
def trainer_over(workers: Workers, args: argparse.Namespace, steps: int) -> Iterator[Trainer]:
    with tempfile.TemporaryDirectory() as temporary, RunFolder.create(Path(temporary) / "run") as folder:
        view = View(console=Console(file=StringIO()))
        trackers = Trackers(folder, [], view.note)
        stop: Any = SimpleNamespace(requested=False, armed=False)
        unbuilt: Any = None  # what workers are built from: these are not
        groups = WorkerPools(workers, None, None, unbuilt)
        args_of_trainer = (prompts_of(2 * args.prompts), None, groups, folder, trackers, view, stop)
        facts = RunFacts("cpu", "bfloat16", 5 * args.length, None, frozenset({"policy", "engine"}))
        trainer = Trainer(RunContext(config_of(args, steps), facts), *args_of_trainer)
        yield trainer
        trainer.records.flush()  # which are written in the background, into a folder that is removed here


def measured(args: argparse.Namespace) -> Row:
    """One row, in this process."""
    import torch  # noqa: F401  an idle driver has it

    from rlcli.cluster.ray_session import ray_session

    fakes = [FakeRank(rank, args.rank_count, args.length, args.progress) for rank in range(args.rank_count)]
    over = args.transport == "ray"
    with ray_session("", HOSTS) if over else nullcontext(), tempfile.TemporaryDirectory() as logs:
        workers = over_ray(fakes, min(HOSTS, len(fakes)), Path(logs)) if over else Loopback(fakes)
        with trainer_over(workers, args, args.steps + MEMORY_STEPS + 2) as loop:
            return _steps(loop, workers, args)


def _steps(loop: Trainer, workers: Workers, args: argparse.Namespace) -> Row:
    account = workers.account if isinstance(workers, Loopback) else None
    parts = Parts(lambda: account.outside if account else 0.0)
    idle = _rss()
    for number in range(1, MEMORY_STEPS + 2):
        loop.after_step(number, loop.step(number))
        if number == 1 + MEMORY_STEPS // 4:  # the allocator has seen what a step takes
            settled = _rss()
    peak, growth = _peak() - idle, _rss() - settled
    parts.wrap()
    cpu, wall, by_part = [], [], []
    for number in range(MEMORY_STEPS + 2, MEMORY_STEPS + 2 + args.steps):
        parts.seconds.clear()
        if account:
            account.clear()
        started, began = time.process_time(), time.perf_counter()
        loop.after_step(number, loop.step(number))
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - started - (account.outside if account else 0.0))
        by_part.append(dict(parts.seconds) | {"rest": cpu[-1] - sum(parts.seconds.values())})
    return Row(
        ranks=args.rank_count,
        transport=args.transport,
        samples=args.prompts * args.samples,
        length=args.length,
        cpu_s=statistics.median(cpu),
        wall_s=statistics.median(wall),
        parts={
            name: statistics.median(step_parts.get(name, 0.0) for step_parts in by_part) for name in (*PARTS, "rest")
        },
        sent=sum(account.sent.values()) if account else 0,
        received=sum(account.received.values()) if account else 0,
        peak_mib=peak,
        growth_mib=growth,
    )


def _rss() -> float:
    """MiB of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    args = arguments()
    if args.one:
        args.rank_count, args.transport, args.length = args.ranks[0], args.transport[0], args.lengths[0]
        print(json.dumps(asdict(measured(args))), file=sys.__stdout__)
        return
    rows = [
        one_row(ranks, transport, length)
        for transport in args.transport
        for length in args.lengths
        for ranks in (args.ranks if length == args.lengths[0] else args.ranks[-1:])
    ]
    show(rows)
    write_json(args.json, {"rows": rows})


def one_row(ranks: int, transport: str, length: int) -> dict[str, Any]:
    """A row, from a separate process with the other arguments unchanged."""
    own_options = ["--one", "--ranks", str(ranks), "--transport", transport, "--lengths", str(length)]
    done = subprocess.run([sys.executable, *sys.argv, *own_options], stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("ranks", "to them by", "samples", "tokens", "CPU s", "wall s", "peak MiB", "growth MiB", "MB sent")
    for name in (*PARTS, "rest"):
        table.add_column(f"{name} s", justify="right")
    for row in rows:
        table.add_row(
            str(row["ranks"]),
            row["transport"],
            str(row["samples"]),
            str(row["length"]),
            f"{row['cpu_s']:.3f}",
            f"{row['wall_s']:.3f}",
            f"{row['peak_mib']:.0f}",
            f"{row['growth_mib']:.1f}",
            f"{row['sent'] / 1e6:.1f}" if row["sent"] else "–",
            *(f"{row['parts'][name]:.3f}" for name in (*PARTS, "rest")),
        )
    Console(width=200).print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--transport", nargs="+", choices=("loopback", "ray"), default=["loopback", "ray"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 1024, 32768], help="mean response tokens")
    parser.add_argument("--prompts", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="that are measured, after those for memory")
    parser.add_argument("--progress", type=int, default=4, help="how often each rank tells of its progress in a step")
    parser.add_argument("--json", default="")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
