"""What FSDP2's messages cost an update: a model gathered whole, layer by layer, and one that is not sharded at all.

    .venv/bin/python scripts/bench/sharding.py [--models 1m 4m 10m] [--ranks 2] [--json sharding.json]

In turn, in the same processes over gloo, each rank with as many samples:

    whole    the policy's role as a worker calls it, gathered whole (as models of up to `WHOLE_BYTES` are)
    layers   the same, every decoder layer and the rest by themselves (as larger ones are)
    alone    a bare model on each rank's packs: no rank hears of another

Seconds of the slowest rank, medians; a ratio is the median of the quotients, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _common import interleaved, on_ranks, ratio, write_json
from rich.console import Console
from rich.table import Table
from update import MODELS, bare, role_update, train_batch, workload


def slowest(update: Callable[[], None]) -> Callable[[], float]:
    """Seconds from a common start until the last rank is done."""

    def run() -> float:
        dist.barrier()
        began = time.perf_counter()
        update()
        dist.barrier()
        return time.perf_counter() - began

    return run


def measured(rank: int, world: int, port: int, path: str, longest: int, repeats: int, out: str) -> None:
    from unittest.mock import patch

    from rlcli.model.parallel import fsdp_sharding

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    batch = train_batch(workload(32 // world, 8, 32, longest), 8192)
    with patch.object(fsdp_sharding, "WHOLE_BYTES", 1 << 40):
        whole = role_update(Path(path), batch, world)
    with patch.object(fsdp_sharding, "WHOLE_BYTES", 0):
        layers = role_update(Path(path), batch, world)
    updates = {"whole": whole, "layers": layers, "alone": bare(Path(path), batch)}
    found = interleaved({name: slowest(update) for name, update in updates.items()}, repeats=repeats)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(model: str, ranks: int, longest: int, repeats: int) -> dict[str, list[float]]:
    from rlcli.model.io.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(Path(folder) / "model", **MODELS[model])
        found: dict[str, list[float]] = on_ranks(measured, ranks, str(path), longest, repeats)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1m", "4m", "10m"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--longest", type=int, default=64, help="responses, in tokens")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", default="")
    options = parser.parse_args()

    table = Table("model", "ranks", "whole", "layers", "alone", "layers ÷ whole", "whole ÷ alone")
    rows: list[dict[str, Any]] = []
    for model in options.models:
        seconds = measure(model, options.ranks, options.longest, options.repeats)
        rows.append({"model": model, "seconds": seconds})
        table.add_row(
            *(model, str(options.ranks)),
            *(f"{median(each):.3f} s" for each in seconds.values()),
            f"{ratio(seconds['layers'], seconds['whole']):.2f}",
            f"{ratio(seconds['whole'], seconds['alone']):.2f}",
        )
    Console().print(table)
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
