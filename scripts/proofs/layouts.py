"""Does every layout of the trainer's processes train as one process does? Compared in float64, gradient by gradient.

    .venv/bin/python scripts/proofs/layouts.py [--kinds dense experts] [--worlds 1 2 4] [--features plain …]
                                               [--dtype float64] [--json layouts.json]

Runs the policy's and the critic's role, as a worker calls them, on groups of gloo processes: in each layout that so
many allow (parallel.replicate, parallel.context, parallel.expert, shards over the rest), with each feature. The
reference is plain torch in one process in float64 (_layouts_plain.py). Compared are the losses of three updates, each
of their gradients after clipping, and the weights after them, all relative and by tensor norm; the largest difference
over all ranks, updates and tensors counts. Then the state of each layout is loaded into each other one: it must be the
same to the last bit, and a fourth update is compared.

--dtype float64 (the default) shows that the mathematics is the same; float32, in which the product trains, how far
rounding takes it. The exit status is 1 if a difference is above --most.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MOST = {"float64": 1e-6, "float32": 1e-2}
QUANTITIES = ("loss", "norm", "gradients", "weights")
KINDS = ("dense", "experts")
IMPORTED = ("ray", "rlcli.model.io.loading", "rlcli.model.io.model_state", "torch.distributed.fsdp")


def differences(
    folder: Path, kinds: Sequence[str], worlds: Sequence[int], features: Sequence[str], dtype: str, load: bool = True
) -> list[dict[str, Any]]:
    """A dict for each layout, feature, rank and, of loads, saver. folder: empty, for models and states."""
    import torch
    import torch.multiprocessing as mp
    from _layouts_plain import make_models
    from _layouts_product import Case, act

    # Each group forks from one process that has imported, which takes longer than most runs.
    mp.get_context("forkserver").set_forkserver_preload(list(IMPORTED))
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        make_models(folder / kind, kind == "experts")
        for loads in (False, True)[: 1 + load]:
            for world in sorted({1, *worlds}):
                prefix = str(folder / f"found-{kind}-{loads}-{world}")
                case = Case(folder, kind, getattr(torch, dtype), tuple(features), loads)
                mp.start_processes(act, (world, free_port(), case, prefix), nprocs=world, start_method="forkserver")
                rows += [row for rank in range(world) for row in json.loads(Path(f"{prefix}-{rank}.json").read_text())]
    return rows


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def largest(rows: Iterable[dict[str, Any]], name: str) -> float:
    return max((row[name] for row in rows if name in row), default=0.0)


def table(rows: Sequence[dict[str, Any]], by: str) -> list[str]:
    """Markdown: by layout or feature the largest difference of each quantity, and of what was loaded."""
    lines = [f"| {by} | loss | gradient norm | each gradient | each weight | loaded state | update after it |"]
    lines.append("|---|---|---|---|---|---|---|")
    groups = dict.fromkeys((row["kind"], row[by]) for row in rows)
    for kind, name in groups:
        variant_rows = [row for row in rows if (row["kind"], row[by]) == (kind, name)]
        trained, loaded = (
            [row for row in variant_rows if "from" not in row],
            [row for row in variant_rows if "from" in row],
        )
        figures = [f"{largest(trained, quantity):.0e}" for quantity in QUANTITIES]
        reload_update = max((largest(loaded, quantity) for quantity in QUANTITIES), default=0.0)
        figures += [f"{largest(loaded, 'loaded'):.0e}", f"{reload_update:.0e}"] if loaded else ["–", "–"]
        lines.append(f"| {kind}: {name} | {' | '.join(figures)} |")
    return lines


def main() -> int:
    from _layouts_plain import FEATURES

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--worlds", nargs="+", type=int, choices=(1, 2, 4), default=[1, 2, 4], help="processes")
    parser.add_argument("--features", nargs="+", choices=list(FEATURES), default=list(FEATURES))
    parser.add_argument("--dtype", choices=list(MOST), default="float64")
    parser.add_argument("--no-load", action="store_true", help="do not load what was saved")
    parser.add_argument("--most", type=float, default=None, help="largest difference (1e-6; in float32 1e-2)")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlcli-layouts-") as folder:
        rows = differences(
            Path(folder), options.kinds, options.worlds, options.features, options.dtype, load=not options.no_load
        )
    print("\n".join([*table(rows, "layout"), "", *table(rows, "feature")]))
    if options.json:
        options.json.write_text(json.dumps({"dtype": options.dtype, "rows": rows}, indent=1) + "\n")
    worst = max(largest(rows, quantity) for quantity in (*QUANTITIES, "loaded"))
    tolerance = MOST[options.dtype] if options.most is None else options.most
    print(
        f"\n{len(rows)} runs in {options.dtype}, each rank's: "
        f"the largest difference is {worst:.1e} (at most {tolerance:.0e})"
    )
    return int(worst > tolerance)


if __name__ == "__main__":
    sys.exit(main())
