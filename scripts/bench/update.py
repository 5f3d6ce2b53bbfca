"""An update of the policy relative to its lower bound: the minimum time of a forward pass, a backward pass and AdamW.

    .venv/bin/python scripts/bench/update.py [--models 1m 10m] [--longest 64 256] [--json update.json]
    .venv/bin/python scripts/bench/update.py --models FOLDER --dtype bfloat16 --longest 32 --prompts 16 --threads 2

All run in this process on the same samples, in turn, on one rank and without Ray:

    ours       the policy's role, as a worker calls it: micro-batches, loss, metrics, clipping, optimizer
    floor      a bare model on the same packed micro-batches: log-probs times advantages, backward, AdamW
    unshared   that floor with each sample's prompt computed again
    padded     the model as transformers runs it: samples in order of length, padded, logits of every token
    compiled   (with --compile) ours with model.compile; the seconds of its first update, compilation included, are told
    products   the matrix products of ours alone, at the shapes of its largest micro-batch, and what share of ours it is

In 16 bits only ours runs, and its products. The process has a worker's heap.

Times are medians; a ratio is the median of the quotients, turn by turn. On a machine that others use, `--clock cpu`
counts this process's processor seconds instead.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from _common import in_workers_heap, interleaved, median_of, ratio, write_json
from rich.console import Console
from rich.table import Table

MODELS: dict[str, dict[str, Any]] = {
    "1m": {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2},
    "4m": {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 2},
    "10m": {"hidden": 384, "layers": 4, "heads": 6, "kv_heads": 2},
}
VARIANTS = ("ours", "floor", "unshared", "padded")


@dataclass(frozen=True)
class Workload:
    """Rows in groups of one prompt each. rows: tokens (prompt and response) and the length of the prompt."""

    rows: list[tuple[np.ndarray, int]]
    groups: list[int]
    advantages: np.ndarray

    @property
    def response_tokens(self) -> int:
        return sum(len(tokens) - prompt for tokens, prompt in self.rows)


def workload(prompts: int, samples: int, prompt_tokens: int, longest: int) -> Workload:
    """Responses of a quarter of `longest` up to `longest`."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(prompts):
        prompt = random.integers(6, 200, prompt_tokens, dtype=np.int32)
        for length in random.integers(longest // 4, longest + 1, samples):
            rows.append((np.concatenate([prompt, random.integers(6, 200, length, dtype=np.int32)]), prompt_tokens))
    groups = [prompt for prompt in range(prompts) for _ in range(samples)]
    return Workload(rows, groups, random.choice([-1.0, 1.0], len(rows)))


def train_batch(load: Workload, budget: int) -> Any:
    """The rows as a worker holds them."""
    import ray
    import torch

    from rlcli.data.packer import plan_batches
    from rlcli.data.sample_shard import ShardBuilder
    from rlcli.data.train_rows import MinibatchCounts, SampleColumns, TrainRows
    from rlcli.data.trajectories import Trajectory
    from rlcli.training.worker.train_batch import TrainBatch

    builder = ShardBuilder()
    for tokens, prompt in load.rows:
        response = tokens[prompt:]
        builder.add(Trajectory.single(tokens[:prompt], response, np.full(len(response), -5.0, np.float32)))
    lengths = np.array([len(tokens) - prompt for tokens, prompt in load.rows])
    plan = plan_batches(
        [prompt for _, prompt in load.rows],
        lengths.tolist(),
        load.groups,
        minibatches=1,
        ranks=1,
        tokens_per_microbatch=budget,
        max_response_tokens=int(lengths.max()),
        prompts=load.groups,
    )
    mini = plan.minibatches[0]
    denominators = MinibatchCounts(mini.tokens, mini.sequences, mini.groups, mini.max_length, mini.tokens)
    columns = SampleColumns(
        shard=np.zeros(len(lengths), np.int64),
        row=np.arange(len(lengths)),
        advantages=load.advantages,
        right=load.advantages > 0,
    )
    ray.get = lambda reference, timeout: reference  # the shard lies here
    return TrainBatch(plan.of_rank(0), TrainRows([denominators], columns, 0, [builder.build()]), torch.device("cpu"))


def ours(path: Path, batch: Any, compiled: bool = False, dtype: str = "float32") -> Callable[[], None]:
    return role_update(path, batch, 1, compiled, dtype)


def role_update(
    path: Path, batch: Any, ranks: int, compiled: bool = False, dtype: str = "float32"
) -> Callable[[], None]:
    """An update of the policy's role, sharded over all ranks."""
    import torch

    from rlcli.config.schema import RunConfig
    from rlcli.data.messages import Coefficients
    from rlcli.model.parallel.parallel_dims import ParallelDims
    from rlcli.training.worker.fsdp_backend import FsdpLoader
    from rlcli.training.worker.policy_role import PolicyRole

    config = RunConfig.model_validate({"model": {"path": str(path), "compile": compiled}})
    device = torch.device("cpu")
    role = PolicyRole(config, device, FsdpLoader(config, getattr(torch, dtype), device, ParallelDims.of(ranks, 1)))

    def update() -> None:
        role.update(batch, 0, Coefficients(lr=1e-6, kl=0.0, entropy=0.0))

    return update


def products(path: Path, batch: Any, dtype: str, clock: Callable[[], float]) -> float:
    """Seconds of the matrix products of an update alone: of each linear layer's forward pass, and the two of its
    backward pass; of the head one more, which computes its logits again."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlcli.model.logit_chunks import chunk_tokens

    config = AutoConfig.from_pretrained(path)
    with init_empty_weights():
        lm = AutoModelForCausalLM.from_config(config)
    head = lm.get_output_embeddings()
    shapes = Counter(tuple(layer.weight.shape) for layer in lm.modules() if isinstance(layer, torch.nn.Linear))
    shapes[tuple(head.weight.shape)] -= 1
    largest = max(batch, key=lambda micro: micro.packed.tokens).packed
    chunk = min(chunk_tokens(len(head.weight), on_gpu=False), len(largest.targets))

    def seconds(shape: tuple[int, ...], tokens: int, forward: int) -> float:
        """Seconds of one layer per token."""
        weight, inputs = torch.randn(shape).to(getattr(torch, dtype)), torch.randn(tokens, shape[1])
        inputs, outputs = inputs.to(weight.dtype), torch.randn(tokens, shape[0]).to(weight.dtype)
        passes = [partial(torch.mm, inputs, weight.t())] * forward
        passes += [partial(torch.mm, outputs, weight), partial(torch.mm, outputs.t(), inputs)]
        return sum(_median_seconds(product, clock) for product in passes) / tokens

    layers = sum(count * seconds(shape, largest.tokens, 1) for shape, count in shapes.items() if count)
    tokens, targets = (sum(f(micro.packed) for micro in batch) for f in (lambda x: x.tokens, lambda x: len(x.targets)))
    return layers * tokens + seconds(tuple(head.weight.shape), chunk, 2) * targets


def _median_seconds(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    def timed() -> float:
        began = clock()
        call()
        return clock() - began

    return median_of(timed)


def bare(path: Path, batch: Any) -> Callable[[], None]:
    """`batch`'s micro-batches through a model that nothing is wrapped around."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlcli.model.policy import PolicyModel

    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    policy = PolicyModel(lm, dtype=torch.float32, source="bench")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    tokens = sum(len(micro.packed.targets) for micro in batch)

    def update() -> None:
        for micro in batch:
            outputs = policy(micro.packed, want_entropy=False)
            (-(micro.tokens.advantages * outputs.log_probs).sum() / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def padded(path: Path, load: Workload, budget: int) -> Callable[[], None]:
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-6, fused=True)
    order = sorted(range(len(load.rows)), key=lambda i: len(load.rows[i][0]))
    micros, total = [], load.response_tokens
    while order:
        size = next(n for n in range(len(order), 0, -1) if n * len(load.rows[order[n - 1]][0]) <= budget)
        rows, order = [load.rows[i] + (load.advantages[i],) for i in order[:size]], order[size:]
        ids, mask = torch.zeros(2, size, len(rows[-1][0]), dtype=torch.int64)
        weight = torch.zeros(ids.shape)
        for row, (tokens, prompt, advantage) in enumerate(rows):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
            weight[row, prompt : len(tokens)] = float(advantage)
        micros.append((ids, mask, weight[:, 1:].flatten()))

    def update() -> None:
        for ids, mask, weight in micros:
            logits = lm(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            ((weight * nll).sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


@contextmanager
def not_shared() -> Iterator[None]:
    from rlcli.model import packed

    with patch.object(packed, "WORTH_SHARING", 2.0):
        yield


def measure(
    path: Path, load: Workload, budget: int, repeats: int, clock: Callable[[], float], compiled: bool, dtype: str
) -> dict[str, Any]:
    batch = train_batch(load, budget)
    with not_shared():
        unshared = train_batch(load, budget)
    updates = {"ours": ours(path, batch, dtype=dtype)}
    if dtype == "float32":
        updates |= {"floor": bare(path, batch), "unshared": bare(path, unshared), "padded": padded(path, load, budget)}

    def timed(name: str) -> float:
        began = clock()
        updates[name]()
        return clock() - began

    first = None
    if compiled:
        updates["compiled"] = ours(path, batch, compiled=True, dtype=dtype)
        first = timed("compiled")
    seconds = interleaved({name: partial(timed, name) for name in updates}, repeats=repeats)
    return {
        "tokens": sum(micro.packed.tokens for micro in unshared),
        "shared_tokens": sum(micro.packed.tokens for micro in batch),
        "micro_batches": len(batch.minibatches[0]),
        "seconds": seconds,
        "products_s": products(path, batch, dtype, clock),
        "ours_to": {name: ratio(seconds["ours"], seconds[name]) for name in updates if name != "ours"},
        "first_compiled_s": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["1m", "10m"], help=f"{', '.join(MODELS)}, or folders")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of computation")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as many as it takes by itself")
    parser.add_argument("--longest", nargs="+", type=int, default=[64, 256], help="responses, in tokens")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--budget", nargs="+", type=int, default=[8192], help="train.tokens_per_microbatch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--compile", action="store_true", help="also with model.compile")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    in_workers_heap()

    import torch
    import torch.distributed as dist

    from rlcli.model.io.tiny_model import make_tiny_model

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    variants = VARIANTS if arguments.dtype == "float32" else VARIANTS[:1]
    variants = (*variants, "compiled") if arguments.compile else variants
    ratios = [f"ours ÷ {name}" for name in variants[1:]]
    table = Table("model", "longest", "micro-batch", "tokens", *variants, *ratios, "products", "products ÷ ours")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            path = make_tiny_model(Path(folder) / model, **MODELS[model]) if model in MODELS else Path(model)
            for longest in arguments.longest:
                load = workload(arguments.prompts, arguments.samples, arguments.prompt_tokens, longest)
                for budget in arguments.budget:
                    row = measure(path, load, budget, arguments.repeats, clock, arguments.compile, arguments.dtype)
                    rows.append({"model": model, "longest": longest, "budget": budget, **row})
                    times = [f"{median(row['seconds'][name]):.3f} s" for name in variants]
                    ratios = [f"{row['ours_to'][name]:.2f}" for name in variants[1:]]
                    tokens, alone = f"{row['tokens']} → {row['shared_tokens']}", row["products_s"]
                    times += [*ratios, f"{alone:.3f} s", f"{alone / median(row['seconds']['ours']):.0%}"]
                    table.add_row(path.name, str(longest), str(budget), tokens, *times)
                    if arguments.compile:
                        print(f"{model}: the first compiled update took {row['first_compiled_s']:.1f} s")
    dist.destroy_process_group()
    console = Console()
    console.width = max(console.width, 140)  # also into a file
    console.print(table)
    write_json(arguments.json, {"clock": arguments.clock, "dtype": arguments.dtype, "rows": rows})


if __name__ == "__main__":
    main()
