"""Time to load a model, and to save and load a checkpoint, by layout and size.

    .venv/bin/python scripts/bench/loading.py [--sizes 100m] [--layouts alone "2 shards" …] [--json loading.json]

The code that workers and the controller call, on a random Qwen2 with bfloat16 files, trained in float32:

    load     `load_policy`: each rank reads its rows of the safetensors files
    save     a checkpoint of weights and AdamW's moments: the copy, for which a step waits (also by itself), then what
             is done behind the next steps: every rank writes and hashes its part, and rank 0 commits
    check    `read_checkpoint`: the sizes and hashes of all files, on rank 0, before a run is resumed
    restore  `load_state`: each rank reads its part of the tensors

Seconds of the slowest rank, medians. Ratios are to the floor, turn by turn: one process that reads the same files from
one end to the other into memory, or writes as many bytes and waits until they are on the disk. Files are in the page
cache when they are read; --cold drops them first. memory: the largest peak of any rank beyond what it held before, in
the first turn; pages of mapped files are in it. read: bytes of tensors that the ranks read together ÷ those in the
files. A layout that needs more memory than is free is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from _common import on_ranks, ratio, write_json
from rich.console import Console
from rich.table import Table
from sync import SIZES, whole_shape
from torch import Tensor

from rlcli.cluster.process.peak_memory import Process
from rlcli.model.io.loading import load_policy
from rlcli.model.io.model_state import copied, load_state, rng_state, save_state, trained_state
from rlcli.model.io.weight_files import WeightFiles
from rlcli.model.optim import build_optimizer
from rlcli.model.parallel.parallel_dims import ParallelDims
from rlcli.runs.checkpoint import Checkpoints, read_checkpoint
from rlcli.support.files import remove

GIB, BLOCK = 1 << 30, 64 << 20
LAYOUTS: dict[str, tuple[int, int, bool]] = {
    "alone": (1, 1, False),
    "alone, reference": (1, 1, True),
    "2 shards": (2, 1, False),
    "4 shards": (4, 1, False),
    "2 copies × 2 shards": (4, 2, False),
}
"""Number of ranks, and of copies; whether a frozen reference is loaded besides, and nothing saved."""
FLOOR = {"load": "read model", "save": "write", "check": "read", "restore": "read"}
PARAMETER_BYTES = 24
"""At most held of a trained parameter: weight, gradient or two moments, and the copy that is being written."""


class Turn:
    """Times one thing after another on all ranks. found: name → seconds; memory: name → GiB beyond what was held."""

    def __init__(self) -> None:
        self.process = Process()
        self.found: dict[str, float] = {}
        self.memory: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Collective: from a common start until the last rank is done."""
        dist.barrier()
        self.process.begin()
        held, began = self.process.now(), time.perf_counter()
        yield
        dist.barrier()
        self.found[name] = time.perf_counter() - began
        self.memory[name] = (self.process.peak() - held) / GIB


def read_plainly(files: Sequence[Path]) -> None:
    """All bytes of the files into one new buffer."""
    buffer = memoryview(bytearray(sum(path.stat().st_size for path in files)))
    offset = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer[offset : offset + BLOCK]):
                offset += read


def write_plainly(path: Path, size: int) -> None:
    """As many bytes, until they are on the disk."""
    block = os.urandom(BLOCK)
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, BLOCK):
            file.write(block[: size - start])
        os.fsync(file.fileno())


def drop(files: Sequence[Path]) -> None:
    """From the page cache, which holds no changes of them any more."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of the tensors that this process reads of safetensors files within the block."""
    nbytes, rows = [0], WeightFiles.rows

    def counting(files: WeightFiles, name: str, begin: int, count: int) -> Tensor:
        part = rows(files, name, begin, count)
        nbytes[0] += part.numel() * part.element_size()
        return part

    with patch.object(WeightFiles, "rows", counting):
        yield nbytes


def loaded(path: str, mesh: Any, reference: bool) -> tuple[Any, Any]:
    """A policy to train, with its optimizer; also a frozen reference if `reference`."""
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "mesh": mesh}
    policy = load_policy(path, **options)
    policy.beside = (load_policy(path, trainable=False, **options),) if reference else ()
    return policy, build_optimizer(policy, lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)


def saved(turn: Turn, policy: Any, optimizer: Any, root: Path) -> Path:
    """Write a checkpoint as workers and controller do; returns its folder."""
    for parameter in policy.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    checkpoints = Checkpoints(root, keep=1)
    with turn.timed("save"):
        folder = [str(checkpoints.begin(1)) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        began = time.perf_counter()
        state = copied(trained_state({"policy": (policy, optimizer)}))
        dist.barrier()
        turn.found["copy"] = time.perf_counter() - began
        written = save_state(state, rng_state(), Path(folder[0]) / "policy", dist.group.WORLD)
        files: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(files, {f"policy/{name}": facts for name, facts in written.items()})
        if dist.get_rank() == 0:
            listed = {name: facts for entries in files for name, facts in entries.items()}
            checkpoints.commit(1, {"step": 1}, "", listed, {})
    return checkpoints.path(1)


def floors(turn: Turn, model: Sequence[Path], checkpoint: Sequence[Path], root: Path) -> None:
    """Seconds of rank 0, while the others wait."""
    size = sum(path.stat().st_size for path in checkpoint)
    work: dict[str, Callable[[], None]] = {
        "read model": lambda: read_plainly(model),
        "write": lambda: write_plainly(root / "plain", size),
        "read": lambda: read_plainly(checkpoint),
    }
    for name, act in work.items():
        if name != "read model" and not checkpoint:
            continue
        with turn.timed(name):
            if dist.get_rank() == 0:
                act()


def one_turn(path: str, mesh: Any, reference: bool, cold: bool) -> dict[str, Any]:
    """Load, save and load again in a folder next to the model, which is empty afterwards."""
    turn, model = Turn(), sorted(Path(path).glob("*.safetensors"))
    root = Path(path).parent / "checkpoints"
    forget = drop if cold else (lambda files: None)
    forget(model)
    with turn.timed("load"), counted() as read:
        policy, optimizer = loaded(path, mesh, reference)
    written: list[Path] = []
    if not reference:
        folder = saved(turn, policy, optimizer, root)
        written = sorted((folder / "policy").iterdir())
        optimizer.state.clear()  # as in a process that has just begun
        forget(written)
        with turn.timed("check"):
            if dist.get_rank() == 0:
                read_checkpoint(folder)
        forget(written)
        with turn.timed("restore"):
            load_state({"policy": (policy, optimizer)}, folder / "policy")
    del policy, optimizer
    forget([*model, *written])
    root.mkdir(exist_ok=True)
    floors(turn, model, written, root)
    dist.barrier()
    if dist.get_rank() == 0:
        remove(root)
    sizes = {"model": sum(file.stat().st_size for file in model)}
    return {"seconds": turn.found, "memory": turn.memory, "read": read[0], **sizes}


def measured(
    rank: int, world: int, port: int, path: str, layout: str, repeats: int, cold: bool, report_path: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    _, copies, reference = LAYOUTS[layout]
    mesh = ParallelDims.of(world, copies).mesh("cpu")
    turns = [one_turn(path, mesh, reference, cold) for _ in range(repeats)]
    turns_by_rank: list[Any] = [None] * world
    dist.all_gather_object(turns_by_rank, turns)
    if rank == 0:
        Path(report_path).write_text(json.dumps(summed(turns_by_rank)))
    dist.barrier()
    dist.destroy_process_group()


def summed(ranks: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Summary over all ranks: rank 0's seconds from barrier to barrier, turn by turn; the first turn's memory."""
    first = ranks[0]
    seconds = {name: [turn["seconds"][name] for turn in first] for name in first[0]["seconds"]}
    memory = {name: max(turns[0]["memory"][name] for turns in ranks) for name in first[0]["memory"]}
    read = sum(turns[0]["read"] for turns in ranks) / first[0]["model"]
    floor = {name: ratio(seconds[name], seconds[below]) for name, below in FLOOR.items() if name in seconds}
    return {"seconds": seconds, "memory_gib": memory, "read": read, "ratio": floor}


def make_model(size: str, folder: Path) -> int:
    """Random weights in bfloat16; returns their number."""
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(Qwen2Config(**whole_shape(size)), dtype=torch.bfloat16)
    lm.save_pretrained(folder)
    return sum(parameter.numel() for parameter in lm.parameters())


def row_of(size: str, layout: str, figures: dict[str, Any]) -> list[str]:
    seconds, memory, ratios = figures["seconds"], figures["memory_gib"], figures["ratio"]
    cells = [size, layout]
    for name in FLOOR:
        if name in seconds:
            cells.append(f"{median(seconds[name]):.2f} s, {ratios[name]:.1f}×, {memory[name]:.2f} GiB")
        else:
            cells.append("–")
    cells.append(f"{median(seconds['copy']):.2f} s" if "copy" in seconds else "–")
    return [*cells, f"{figures['read']:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["100m"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache before they are read")
    parser.add_argument("--folder", type=Path, help="where to write: the file system to measure")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    table = Table("size", "layout", *(f"{name}: time, ÷ floor, memory" for name in FLOOR), "copy", "read", box=None)
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="rlcli-loading-") as folder:
            path = Path(folder) / "model"
            parameters = make_model(size, path)
            for layout in options.layouts:
                ranks, copies, _ = LAYOUTS[layout]
                needs = copies * parameters * PARAMETER_BYTES
                if needs > psutil.virtual_memory().available:
                    print(f"{size}, {layout}: needs {needs / GIB:.0f} GiB, which are not free")
                    continue
                figures = on_ranks(measured, ranks, str(path), layout, options.repeats, options.cold)
                rows.append({"size": size, "parameters": parameters, "layout": layout, **figures})
                table.add_row(*row_of(size, layout, figures))
                write_json(options.json, {"cold": options.cold, "rows": rows})  # a long run may be ended
    console = Console(highlight=False)
    console.width = max(console.width, 180)  # also into a file
    console.print(table)


if __name__ == "__main__":
    main()
