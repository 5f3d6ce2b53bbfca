"""Memory and time of log-probs and entropy, straight from hidden states and the head, compared with other methods.

    .venv/bin/python scripts/bench/logprobs.py [--tokens 4096] [--vocabulary 151936] [--width 896] [--json FILE]
    .venv/bin/python scripts/bench/logprobs.py --tokens 32768 --ways ours      # the target: under 1.5 GiB

    ours        chunks of tokens, projected again in the backward pass
    checkpoint  chunks of tokens under torch's checkpoint
    plain       all logits at once, where they fit
    torch       torch.nn.functional.linear_cross_entropy, which gives log-probs alone
    liger       Liger's fused linear cross entropy (CUDA), which gives log-probs alone

Each way runs forward and backward in a process of its own. Memory is the peak above the inputs (hidden states and
weight), the gradients of both counted: on a GPU what torch allocated, on a CPU the resident set. On CPUs bfloat16 is
not tried. `equal` is the largest difference of log-probs, entropies and gradients from `plain` in float64 on a slice,
relative to the largest value of each.

A way that takes longer than --limit-s is ended, and told as such. Ours takes 8 · tokens · vocabulary · width operations
for a forward and a backward pass: 36 · 10¹² for the target, which --repeats 1 (the default) does once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from _common import write_json
from rich.console import Console
from rich.table import Table

WAYS = ("ours", "checkpoint", "plain", "torch", "liger")
MIB = 2**20
TARGET_MIB = 1536
PLAIN_MOST = 2**30
"""Logits of which three copies are still made: 12 GiB in float32."""
SLICE = (512, 8192)
"""Tokens and vocabulary on which results are compared."""

Way = Callable[[Any, Any, Any], "tuple[Any, Any]"]
"""hidden, weight, targets → log-probs and entropies; None where it gives none."""


def ours(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    from rlcli.model.logit_chunks import chunk_tokens
    from rlcli.model.logprobs import token_log_probs

    return token_log_probs(hidden, weight, targets, 1.0, chunk_tokens(len(weight), weight.is_cuda), True)


def plain(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    import torch

    exact = torch.promote_types(hidden.dtype, torch.float32)
    log_p = (hidden @ weight.t()).to(exact).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def checkpointed(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    import torch
    from torch.utils.checkpoint import checkpoint

    parts = [
        checkpoint(plain, h, weight, t, use_reentrant=False)
        for h, t in zip(hidden.split(512), targets.split(512), strict=True)
    ]
    return torch.cat([log_probs for log_probs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def of_torch(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    import torch
    import torch.nn.functional as F

    # Options unset would be the plain computation.
    options = torch.nn.LinearCrossEntropyOptions()
    return -F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options), None


def liger(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="none")
    return -loss(weight, hidden, targets), None


FUNCTIONS: dict[str, Way] = {
    "ours": ours,
    "checkpoint": checkpointed,
    "plain": plain,
    "torch": of_torch,
    "liger": liger,
}


def missing(method: str, device: str, logits: int) -> str:
    """Why `method` cannot be tried here; empty: it can."""
    import torch

    if method == "plain" and logits > PLAIN_MOST:
        return f"{logits * 4 / 2**30:.0f} GiB of logits"
    if method == "torch" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"torch {torch.__version__}"
    if method == "liger" and device != "cuda":
        return "CUDA only"
    if method == "liger" and importlib.util.find_spec("liger_kernel") is None:
        return "not installed"
    return ""


def inputs(tokens: int, vocabulary: int, width: int, dtype: Any, device: str) -> tuple[Any, ...]:
    """Hidden states and a weight that give logits of a trained model's spread, targets, and gradients from above."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    hidden, weight = drawn(tokens, width), drawn(vocabulary, width).mul_(2 / math.sqrt(width))
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    above = torch.randn(2, tokens, generator=generator).to(device)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, above


def run(method: str, tensors: Sequence[Any]) -> list[Any]:
    """Log-probs, entropies and the gradients of hidden and weight; tensors: as `inputs` returns them."""
    hidden, weight, targets, above = tensors
    log_probs, entropies = FUNCTIONS[method](hidden, weight, targets)
    total = (above[0] * log_probs).sum()
    if entropies is not None:
        total = total + (above[1] * entropies).sum()
    _say(f"{method}: forward done")
    total.backward()
    return [log_probs.detach(), None if entropies is None else entropies.detach(), hidden.grad, weight.grad]


def difference(method: str, dtype: Any, device: str, width: int) -> float:
    """From the plain computation in float64, on a slice."""
    import torch

    tensors = inputs(*SLICE, width, dtype, device)
    if method in ("torch", "liger"):
        tensors[3][1] = 0  # without entropies, no gradient of theirs
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors[:2]]
    computed = run(method, tensors)
    expected = run("plain", [*exact, tensors[2], tensors[3].double()])
    pairs = [(a, b) for a, b in zip(computed, expected, strict=True) if a is not None]
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs if torch.is_tensor(b))


def child(method: str, tokens: int, vocabulary: int, width: int, repeats: int) -> dict[str, Any]:
    """Measure one way in this process."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    why = missing(method, device, tokens * vocabulary)
    if why:
        return {"way": method, "missing": why}
    warm = inputs(64, 1024, width, dtype, device)
    run(method, warm)  # what libraries allocate once is not the way's
    tensors = inputs(tokens, vocabulary, width, dtype, device)
    _say(f"{method}: inputs are there")
    seconds, processor, baseline = [], [], _memory(device, reset=True)
    for number in range(repeats):
        tensors[0].grad = tensors[1].grad = None
        began, worked = time.perf_counter(), time.process_time()
        run(method, tensors)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - worked)
        _say(f"{method}: {number + 1} of {repeats} done")
    peak = (_memory(device) - baseline) / MIB
    return {
        "way": method,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "peak_mib": round(peak),
        "gradients_mib": round((tokens + vocabulary) * width * dtype.itemsize / MIB),
        "seconds": statistics.median(seconds),
        "processor_seconds": statistics.median(processor),
        "difference": difference(method, dtype, device, width),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measured(method: str, limit_s: float) -> dict[str, Any]:
    """The row of `child` from a separate process; `missing` gives the reason where it exceeds `limit_s` seconds."""
    words = [sys.executable, *sys.argv, "--child", method]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"way": method, "missing": f"not done after {limit_s:g} s"}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _memory(device: str, reset: bool = False) -> int:
    """Bytes at the peak so far; with `reset` bytes now, from where the peak then counts."""
    import torch

    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return int(torch.cuda.memory_allocated())
        return int(torch.cuda.max_memory_allocated())
    if reset:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=1, help="the median counts")
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds that a way may take")
    parser.add_argument("--json", default="")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = (arguments.tokens, arguments.vocabulary, arguments.width)
    if arguments.child:
        print(json.dumps(child(arguments.child, *sizes, arguments.repeats)))
        return 0
    table = Table("way", "peak above inputs", "of it gradients", "forward + backward", "equal to")
    rows = []
    for method in arguments.ways:
        rows.append(row := measured(method, arguments.limit_s))
        if "missing" in row:
            table.add_row(method, row["missing"], "", "", "")
        else:
            memory = (f"{row['peak_mib']} MiB", f"{row['gradients_mib']} MiB")
            table.add_row(method, *memory, f"{row['seconds']:.2f} s", f"{row['difference']:.1e}")
    console = Console()
    console.print(f"{arguments.tokens} tokens × {arguments.vocabulary} words, width {arguments.width}")
    console.print(table)
    write_json(arguments.json, {"sizes": sizes, "target_mib": TARGET_MIB, "rows": rows})
    # Of ours the memory has to be known.
    over = [row["way"] for row in rows if row["way"] == "ours" and row.get("peak_mib", math.inf) > TARGET_MIB]
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
