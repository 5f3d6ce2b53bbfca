"""Speed of gathering weights for the engine, compared with a plain copy of as many bytes.

    .venv/bin/python scripts/bench/sync.py [--sizes 1m 10m 100m] [--ranks 1 2] [--json sync.json]

In turn, in the same processes, on a real model that FSDP2 has sharded over gloo (NCCL where there are GPUs):

    bucket N   as the sync gathers them: buckets of at most N MiB, each cast and flattened into one collective, the
               next one under way while the last one is used
    tensor     every parameter by itself: cast, then `full_tensor()`
    sums       as the bucket of 32 MiB, and of each tensor the checksum by which the engine's is checked
    copy       each whole parameter once more, from memory to memory (device to device): the bound

The engine's own loading is not in it. With `--engine` there is a second table, of one engine in one process, in turn:

    load       a sync into vLLM: its own loading, packing for CPU kernels, and the probe's log-probs
    checked    the same with all checks: checksums of what is sent and of what the engine holds, a cached prompt looked
               for before and after
    sender's   the checksums of what is sent alone

With `--transfer` there is a third table, of a trainer and one or two engines in processes of their own, in turn:

    broadcast     over a process group of them all (gloo, NCCL where there are GPUs), in buckets of 32 MiB
    object store  through Ray's object store, in buckets of 256 MiB

with the checksums of what is sent, and an engine that copies each tensor into its own instead of loading it. `peak` is
the memory that the first sync takes in new processes, of the sender and of an engine, on CPUs with the pages of the
object store that they map.

With `--delta` there is a fourth table, of a trainer in float32 and an engine in bfloat16, after each of `--repeats`
steps of AdamW on random gradients at `--lr`:

    delta    the values that differ from the last sync (`rollout.sync = delta`): found, sent and written into the
             engine's copy; `check` compares its checksums, and `load` copies each tensor into the engine's own
    full     all weights, by the same broadcast, copied as they are received

`of a step` is the median of what the checks add, as a share of `--step-s`, the seconds of a step: unless given, what
`scripts/bench/step.py` measures of a model of 1M parameters. In parentheses: of the process's CPU time, which other
processes on the machine hardly change.

Seconds are medians of `--repeats`; a ratio is the median of the quotients, turn
by turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import _sync_delta
import _sync_engine
import _sync_transfer
import torch
import torch.distributed as dist
from _common import interleaved, on_ranks, ratio, write_json
from rich.console import Console
from rich.table import Table

CONSOLE = Console(width=110)
SIZES: dict[str, dict[str, int]] = {
    "1m": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512},
    "10m": {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "vocab_size": 4096},
    "100m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 16384},
    "500m": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "vocab_size": 151936},
}


def whole_shape(size: str) -> dict[str, Any]:
    """Arguments of a Qwen2Config of the size."""
    shape = SIZES[size]
    return shape | {
        "intermediate_size": 4 * shape["hidden_size"],
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }


def sharded(size: str, mesh: Any, dtype: torch.dtype) -> Any:
    """A Qwen2 with random weights, in float32, that computes in `dtype`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlcli.model.parallel.fsdp_sharding import shard
    from rlcli.model.policy import PolicyModel

    config = Qwen2Config(**whole_shape(size))
    with torch.device(mesh.device_type):
        model = PolicyModel(Qwen2ForCausalLM(config), dtype=dtype, source=size)
    shard(model, mesh)
    return model


def timed(work: Callable[[], Iterable[Any]], device: str) -> Callable[[], float]:
    """Seconds that all ranks take to go through what `work` gives."""

    def run() -> float:
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in work():
            pass
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return run


def measured(
    rank: int, world: int, port: int, size: str, buckets_mb: list[int], repeats: int, report_path: str
) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from rlcli.model.parallel.buckets import buckets
    from rlcli.model.weight_check.checksum import Checksums

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = sharded(size, init_device_mesh(device, (world,)), dtype)
    parameters = [(name, parameter.detach()) for name, parameter in model.lm.named_parameters()]
    gathered = [torch.zeros(tensor.shape, dtype=dtype, device=device) for _, tensor in parameters]
    room = [torch.zeros_like(tensor) for tensor in gathered]

    def per_tensor() -> Iterable[Any]:
        return (tensor.to(dtype).full_tensor() for _, tensor in parameters)

    def copied() -> Iterable[Any]:
        return (into.copy_(tensor) for into, tensor in zip(room, gathered, strict=True))

    runs: dict[str, Callable[[], Iterable[Any]]] = {
        **{f"bucket {mb}": lambda mb=mb: buckets(parameters, dtype, mb << 20) for mb in buckets_mb},  # type: ignore[misc]
        "sums": lambda: Checksums().of(tensor for bucket in buckets(parameters, dtype) for tensor in bucket),
        "tensor": per_tensor,
        "copy": copied,
    }
    timings = interleaved({name: timed(work, device) for name, work in runs.items()}, repeats=repeats)
    if rank == 0:
        nbytes = sum(tensor.nbytes for tensor in gathered)
        write_json(report_path, {"device": device, "bytes": nbytes, "tensors": len(parameters), "seconds": timings})
    dist.barrier()
    dist.destroy_process_group()


def measure(size: str, ranks: int, buckets_mb: list[int], repeats: int) -> dict[str, Any]:
    figures: dict[str, Any] = on_ranks(measured, ranks, size, buckets_mb, repeats)
    return {"size": size, "ranks": ranks} | {name: figures[name] for name in ("device", "bytes", "tensors", "seconds")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1m", "10m", "100m"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--buckets-mb", nargs="+", type=int, default=[8, 32, 256])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--engine", action="store_true", help="measure an engine's loading with and without checks")
    parser.add_argument("--transfer", action="store_true", help="measure the way to engines in other processes")
    parser.add_argument("--delta", action="store_true", help="measure syncs of what has changed only")
    parser.add_argument("--lr", type=float, default=1e-6, help="of the steps between these")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"], help="of engines")
    parser.add_argument("--step-s", type=float, default=1.5)
    parser.add_argument("--json", default="")
    options = parser.parse_args()

    table = Table("model", "ranks", "MB", "tensors", "how", "ms", "GB/s", "× tensor", "of a copy")
    rows = []
    for size in options.sizes:
        for ranks in options.ranks:
            row = measure(size, ranks, options.buckets_mb, options.repeats)
            rows.append(row)
            seconds = row["seconds"]
            for method, each in seconds.items():
                table.add_row(
                    size,
                    str(ranks),
                    f"{row['bytes'] / 1e6:.0f}",
                    str(row["tensors"]),
                    method,
                    f"{median(each) * 1e3:.2f}",
                    f"{row['bytes'] / median(each) / 1e9:.2f}",
                    f"{ratio(seconds['tensor'], each):.2f}",
                    f"{ratio(seconds['copy'], each):.2f}",
                )
    if rows:
        CONSOLE.print(table)
    engines = []
    if options.engine:
        shapes = {size: whole_shape(size) for size in options.sizes}
        engines = [
            {"size": size, "dtype": dtype} | on_ranks(_sync_engine.measured, 1, shape, dtype, options.repeats)
            for size, shape in shapes.items()
            for dtype in options.dtypes
        ]
        CONSOLE.print(engine_table(engines, options.step_s))
    transfers = []
    if options.transfer:
        transfers = [
            {"size": size, "engines": count}
            | _sync_transfer.measured(whole_shape(size), options.dtypes[0], count, options.repeats)
            for size in options.sizes
            for count in (1, 2)
        ]
        CONSOLE.print(transfer_table(transfers))
    deltas = []
    if options.delta:
        for size in options.sizes:
            deltas.append({"size": size} | _sync_delta.measured(whole_shape(size), options.repeats, options.lr))
        CONSOLE.print(delta_table(deltas))
    write_json(options.json, {"rows": rows, "engines": engines, "transfers": transfers, "deltas": deltas})


def delta_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("model", "how", "MB", "% changed", "transfer s", "check s", "load s", "all ÷ full")
    for row in rows:
        full_transfers = [step["full"]["transfer_s"] for step in row["steps"]]
        shares = sorted(100 * step["share"] for step in row["steps"])
        for mode in ("full", "delta"):
            each = [step[mode] for step in row["steps"]]
            seconds = {part: [sync.get(f"{part}_s", 0.0) for sync in each] for part in ("transfer", "check", "load")}
            table.add_row(
                row["size"],
                mode,
                f"{median(sync['bytes'] for sync in each) / 1e6:.2f}",
                f"{shares[0]:.2f} to {shares[-1]:.2f}" if mode == "delta" else "",
                *(f"{median(part):.3f}" for part in seconds.values()),
                f"{ratio([sum(parts) for parts in zip(*seconds.values(), strict=True)], full_transfers):.2f}",
            )
    return table


def transfer_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("model", "MB", "engines", "how", "ms", "GB/s", "of the object store's", "peak MiB: sender", "engine")
    for row in rows:
        for method, each in row["seconds"].items():
            table.add_row(
                row["size"],
                f"{row['bytes'] / 1e6:.0f}",
                str(row["engines"]),
                method,
                f"{median(each) * 1e3:.1f}",
                f"{row['bytes'] / median(each) / 1e9:.2f}",
                f"{ratio(each, row['seconds']['object store']):.2f}",
                *(str(peak) for peak in row["peak_mib"][method]),
            )
    return table


def engine_table(rows: list[dict[str, Any]], step_s: float) -> Table:
    table = Table("model", "dtype", "MB", "tensors", "how", "ms", "GB/s", "of a step")
    for row in rows:
        seconds, cpu = row["seconds"], row["cpu_seconds"]
        added, added_cpu = (
            median(all_ - load for all_, load in zip(timings["load, checked"], timings["load"], strict=True))
            for timings in (seconds, cpu)
        )
        for method, each in seconds.items():
            table.add_row(
                row["size"],
                row["dtype"],
                f"{row['bytes'] / 1e6:.0f}",
                str(row["tensors"]),
                method,
                f"{median(each) * 1e3:.2f}",
                f"{row['bytes'] / median(each) / 1e9:.2f}",
                f"+{added / step_s:.2%} ({added_cpu / step_s:.2%})" if method == "load, checked" else "",
            )
    return table


if __name__ == "__main__":
    main()
