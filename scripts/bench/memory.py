"""What saves memory, and what it costs: activation checkpointing, offload, and the measuring itself.

    .venv/bin/python scripts/bench/memory.py [--tokens 4096] [--hidden 256] [--layers 8] [--json memory.json]

Of a random model, each setting in a process of its own, so that none finds what another has left:

    peak       the most that forward, backward and AdamW of one micro-batch took (two came before), beyond what was held
               before the first: AdamW's states are in it
    seconds    of one such update, median
    phase      what measuring one phase costs
    away, back train.offload = all: GiB/s to host memory and back (on GPUs alone)

On CPUs memory is that of the process, and `offload` of activations is left out: they are in host memory as it is. A
setting that takes longer than --limit-s is ended, and told as such.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import write_json
from rich.console import Console
from rich.table import Table

GIB = 1 << 30


def child(model: str, setting: str, tokens: int, repeats: int) -> dict[str, float]:
    """In a process of its own: one setting of `model.gradient_checkpointing`, as JSON writes it."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from rlcli.cluster.process.peak_memory import Device, Process
    from rlcli.model.io.loading import load_policy
    from rlcli.model.optim import build_optimizer
    from rlcli.model.packed_batch import pack

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    policy = load_policy(
        model,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        device=device,
        mesh=init_device_mesh(device.type, (1,)),
        gradient_checkpointing=json.loads(setting),
    )
    optimizer = build_optimizer(policy, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0)
    length = min(512, tokens)
    rows: list[tuple[Any, int]] = [(np.arange(length, dtype=np.int32) % 200 + 6, 16) for _ in range(tokens // length)]
    packed, gauge = pack(rows, device), Device() if device.type == "cuda" else Process()
    seconds, peaks = [], []
    held = gauge.now()
    for number in range(2 + repeats):
        started = time.perf_counter()
        gauge.begin()
        outputs = policy(packed, temperature=1.0, want_entropy=True)
        outputs.log_probs.mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            seconds.append(time.perf_counter() - started)
            print(f"update {number - 1} of {repeats}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
            peaks.append((gauge.peak() - held) / GIB)
    found = {"seconds": statistics.median(seconds), "peak_gib": max(peaks)}
    if device.type == "cuda":
        found |= offloaded(policy, optimizer, device)
    else:
        found["phase_us"] = measuring()
    dist.destroy_process_group()
    return found


def offloaded(policy: Any, optimizer: Any, device: Any) -> dict[str, float]:
    """GiB/s of all weights and optimizer states, the second time, when the pinned memory is there."""
    import torch

    from rlcli.model.parallel.offload import KINDS, Offload

    offload = Offload(KINDS["all"], device)
    offload.add("policy", policy, optimizer)
    found: dict[str, float] = {}
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        offload.to_host(*offload.names)
        sent = time.perf_counter()
        moved = (before - torch.cuda.memory_allocated()) / GIB
        offload.to_device(*offload.names)
        torch.cuda.synchronize()
        found = {"away_gib_s": moved / (sent - started), "back_gib_s": moved / (time.perf_counter() - sent)}
    return found


def measuring() -> float:
    """Microseconds of one measured phase, beside the block itself."""
    from rlcli.cluster.process import peak_memory

    peak_memory.start("cpu")
    started = time.perf_counter()
    for _ in range(1000):
        with peak_memory.measured("update"):
            pass
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of the micro-batch")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=180.0, help="seconds that a setting may take")
    parser.add_argument("--json", default="", help="also write the figures here")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "SETTING"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        model, setting = given.child
        print(json.dumps(child(model, setting, given.tokens, given.repeats)))
        return
    import torch

    from rlcli.model.io.tiny_model import make_tiny_model

    settings = ["false", "true", *(['"offload"'] if torch.cuda.is_available() else [])]
    table = Table("gradient_checkpointing", "peak of an update, GiB", "seconds", "besides")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = make_tiny_model(Path(folder) / "model", hidden=given.hidden, layers=given.layers)
        for setting in settings:
            sizes = ["--tokens", str(given.tokens), "--repeats", str(given.repeats)]
            words = [sys.executable, __file__, *sizes, "--child", str(made), setting]
            name = setting.strip('"')
            print(f"gradient_checkpointing = {name} …", file=sys.stderr, flush=True)
            try:
                done = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True, timeout=given.limit_s)
            except subprocess.TimeoutExpired:
                found[name] = {"missing": f"not done after {given.limit_s:g} s"}
                table.add_row(name, found[name]["missing"], "", "")
                continue
            one = found[name] = json.loads(done.stdout.splitlines()[-1])
            besides = ", ".join(f"{k} {v:.3g}" for k, v in one.items() if k not in ("seconds", "peak_gib"))
            table.add_row(name, f"{one['peak_gib']:.3f}", f"{one['seconds']:.2f}", besides)
    Console().print(table)
    write_json(given.json, {"arguments": vars(given), "settings": found})


if __name__ == "__main__":
    main()
