"""How long ranks wait for each other by the way in which samples are packed, and how long planning takes.

    python scripts/bench/packing.py [--seeds 5] [--json FILE]

A simulation: log-normal responses, as reasoning models write them, in micro-batches that ranks forward in lockstep. Of
a micro-batch a rank has the work a · tokens + b · Σ length², by the shape of a model (b / a is layers × hidden size ÷
parameters, as floating-point operations go), and the slowest rank sets the pace. Told is how far a step is above the
bound, where no rank ever waits. `tokens`: our packer as it would be if attention were free. `Karmarkar–Karp`: samples
parted over ranks by that heuristic, and each rank's share over its micro-batches, by tokens or by work; it keeps no
budget, so the most that a micro-batch holds of it is shown beside.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _common import write_json
from rich.console import Console
from rich.table import Table

from rlcli.data import packer

MODELS = {"0.5B": 24 * 896 / 0.49e9, "7B": 28 * 3584 / 7.6e9}
"""b / a of Qwen2.5's shapes."""
CASES = [  # samples, ranks, mean, longest, budget
    (512, 8, 200, 1024, 8192),
    (2048, 8, 2000, 8192, 16384),
    (2048, 64, 3000, 8192, 16384),
    (1024, 8, 8000, 32768, 32768),
    (1024, 8, 8000, 32768, 65536),
    (4096, 64, 8000, 32768, 32768),
]
MOST_FOR_KK = 2**21
"""Samples × ranks² beyond which differencing takes too long here."""

Rows = list[list[Sequence[int]]]
"""[micro-batch][rank] → samples"""


def lengths_of(samples: int, mean: int, longest: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.32, 0.8, samples)
    found: np.ndarray = np.minimum(drawn.astype(np.int64) + 64, longest)
    return found


def ours(lengths: np.ndarray, ranks: int, budget: int) -> Rows:
    n = len(lengths)
    plan = packer.plan_batches(
        [0] * n,
        lengths.tolist(),
        list(range(n)),
        minibatches=1,
        ranks=ranks,
        tokens_per_microbatch=budget,
        max_response_tokens=int(lengths.max()),
    )
    return [list(row) for row in zip(*plan.minibatches[0].ranks, strict=True)]


def by_tokens(lengths: np.ndarray, ranks: int, budget: int) -> Rows:
    """Our packer where squares only break ties."""
    attention, microbatch = packer.ATTENTION, packer.MICROBATCH
    packer.ATTENTION, packer.MICROBATCH = 1 << 40, microbatch // attention << 40
    try:
        return ours(lengths, ranks, budget)
    finally:
        packer.ATTENTION, packer.MICROBATCH = attention, microbatch


def differencing(items: Sequence[int], work: np.ndarray, parts: int) -> list[list[int]]:
    """Karmarkar–Karp: the two partitions that differ most within are joined, the largest part to the smallest."""
    heap: list[Any] = [(-work[i], n, [(work[i], [i]), *[(0, [])] * (parts - 1)]) for n, i in enumerate(items)]
    heapq.heapify(heap)
    for n in range(len(items), 2 * len(items) - 1):
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        both = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        both.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], n, both))
    return [part for _, part in heap[0][2]]


def karmarkar_karp(lengths: np.ndarray, work: np.ndarray, ranks: int, budget: int) -> Rows:
    shares = differencing(range(len(lengths)), work, ranks)
    count = max(-(-int(lengths[share].sum()) // budget) for share in shares)
    cut = [sorted(differencing(share, work, count), key=lambda part: -work[part].sum()) for share in shares]
    return [list(row) for row in zip(*cut, strict=True)]


def above_bound(rows: Rows, work: np.ndarray, ranks: int) -> float:
    """A step's time ÷ that of ranks which never wait, − 1."""
    return float(sum(max(work[list(bin)].sum() for bin in row) for row in rows) * ranks / work.sum()) - 1


def case(samples: int, ranks: int, mean: int, longest: int, budget: int, model: str, seeds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    fullest, micro = 0.0, 0
    for seed in range(seeds):
        lengths = lengths_of(samples, mean, longest, seed)
        work = lengths + MODELS[model] * lengths.astype(np.float64) ** 2
        ways: dict[str, Callable[[], Rows]] = {
            "ours": lambda lengths=lengths: ours(lengths, ranks, budget),
            "tokens": lambda lengths=lengths: by_tokens(lengths, ranks, budget),
        }
        if samples * ranks**2 <= MOST_FOR_KK:
            ways["kk tokens"] = lambda lengths=lengths: karmarkar_karp(lengths, lengths, ranks, budget)
            ways["kk work"] = lambda lengths=lengths, work=work: karmarkar_karp(lengths, work, ranks, budget)
        for name, way in ways.items():
            rows = way()
            found.setdefault(name, []).append(above_bound(rows, work, ranks))
            if name == "ours":
                micro = len(rows)
            if name == "kk work":
                fullest = max(fullest, max(lengths[list(bin)].sum() for row in rows for bin in row) / budget)
    return {
        "samples": samples,
        "ranks": ranks,
        "mean": mean,
        "longest": longest,
        "budget": budget,
        "model": model,
        "microbatches": micro,
        "above_bound": {name: statistics.median(values) for name, values in found.items()},
        "kk_fullest": fullest,
    }


def planning(samples: int, ranks: int) -> dict[str, Any]:
    """CPU seconds to plan a step of 8k-token responses, groups of 8 whose prompts may be shared."""
    lengths = lengths_of(samples, 8192, 32768, 0).tolist()
    groups = [number // 8 for number in range(samples)]
    seconds = []
    for _ in range(5):
        started = time.process_time()
        packer.plan_batches(
            [120] * samples,
            lengths,
            groups,
            minibatches=1,
            ranks=ranks,
            tokens_per_microbatch=33792,
            max_response_tokens=32768,
            prompts=groups,
        )
        seconds.append(time.process_time() - started)
    return {"samples": samples, "ranks": ranks, "cpu_s": statistics.median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    found = [case(*numbers, model, args.seeds) for numbers in CASES for model in MODELS]
    table = Table("samples", "ranks", "mean", "longest", "budget", "model", "micro-batches", "ours", "tokens")
    for name in ("Karmarkar–Karp: tokens", "work", "fullest"):
        table.add_column(name, justify="right")
    for row in found:
        shares = [row["above_bound"].get(name) for name in ("ours", "tokens", "kk tokens", "kk work")]
        shown = ["–" if share is None else f"{share:.1%}" for share in shares]
        fullest = f"{row['kk_fullest']:.2f}" if row["kk_fullest"] else "–"
        names = ("samples", "ranks", "mean", "longest", "budget", "model", "microbatches")
        table.add_row(*(str(row[name]) for name in names), *shown, fullest)
    console = Console(width=160)
    console.print(table)
    plans = [planning(16384, ranks) for ranks in (1, 8, 64, 256)]
    for row in plans:
        console.print(f"planning {row['samples']} samples on {row['ranks']} ranks: {row['cpu_s']:.3f} CPU s")
    write_json(args.json, {"cases": found, "planning": plans})


if __name__ == "__main__":
    main()
