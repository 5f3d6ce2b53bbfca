"""What the checks of each step cost (docs/checks.md), beside the load and the update that they check.

    .venv/bin/python scripts/bench/checks.py [--tokens 64 256] [--ranks 1 2] [--json checks.json]

On each rank, without Ray: sign the step's samples as a rollout does, load them into a batch and update a model of 1M
parameters, with all checks and with none, in turn. 32 prompts of 40 tokens, 8 samples each. `share` is the median of
the differences, turn by turn, ÷ the median time without checks; generation and weight sync, which a whole step has
besides, are not in it. Seconds are of the processor, so that a loaded machine changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from _common import interleaved, on_ranks, write_json
from rich.console import Console
from rich.table import Table

PROMPTS, SAMPLES, PROMPT_TOKENS = 32, 8, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256], help="of each response (64 256)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", default="", help="write the figures to this file, too")
    options = parser.parse_args()
    from rlcli.model.io.tiny_model import make_tiny_model

    os.environ["OMP_NUM_THREADS"] = "1"
    table = Table("ranks", "tokens", "without, s", "with, s", "checks, ms", "share", box=None, pad_edge=False)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_model(Path(folder) / "model", hidden=128, layers=4, heads=4, kv_heads=2))
        for ranks in options.ranks:
            for tokens in options.tokens:
                found = on_ranks(measure, ranks, model, tokens, options.repeats)
                without, checked = found["without"], found["with"]
                extra = median(b - a for a, b in zip(without, checked, strict=True))
                row = {"ranks": ranks, "tokens": tokens, "without_s": median(without), "with_s": median(checked)}
                row |= {"checks_s": extra, "share": extra / median(without)}
                rows.append(row)
                cells = [f"{row['without_s']:.3f}", f"{row['with_s']:.3f}", f"{1e3 * extra:.1f}", f"{row['share']:.1%}"]
                table.add_row(str(ranks), str(tokens), *cells)
    Console().print(table)
    write_json(options.json, {"rows": rows})


def measure(rank: int, world: int, port: int, model: str, tokens: int, repeats: int, out: str) -> None:
    """On each rank; rank 0 writes the seconds of each turn."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from rlcli.config.schema import RunConfig
    from rlcli.model.parallel.parallel_dims import ParallelDims
    from rlcli.training.worker.fsdp_backend import FsdpLoader
    from rlcli.training.worker.policy_role import PolicyRole

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo")
    config = RunConfig.model_validate(
        {
            "model": {"path": model},
            "data": {"max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {"max_response_tokens": tokens, "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
        }
    )
    device, mesh = torch.device("cpu"), init_device_mesh("cpu", (world,))
    role = PolicyRole(config, device, FsdpLoader(config, torch.float32, device, ParallelDims.of(mesh.size(), 1)))
    step = step_of(config, role, rank, world, tokens)
    runs: dict[str, Callable[[], float]] = {"without": lambda: unchecked(role, step), "with": step}
    with patch("ray.get", lambda reference, timeout: reference):
        found = interleaved(runs, repeats=repeats, warm_up=2)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def step_of(config: Any, role: Any, rank: int, world: int, tokens: int) -> Callable[[], float]:
    """Sign, load and update; returns its seconds."""
    import torch
    import torch.distributed as dist

    from rlcli.data.columns import SampleTable
    from rlcli.data.messages import Coefficients, RolloutBatch
    from rlcli.data.sample_shard import ShardBuilder
    from rlcli.data.signature import signature, tokens_digest
    from rlcli.data.trajectories import Trajectory
    from rlcli.training.loop.batch_selection import plan_step, select_batch, step_work
    from rlcli.training.loop.checks.invariants import Invariants
    from rlcli.training.worker.train_batch import TrainBatch
    from rlcli.types import Outcome, Sample, Verdict

    random, builder, rows = np.random.default_rng(0), ShardBuilder(), []
    for index in range(PROMPTS * SAMPLES):
        prompt = np.arange(PROMPT_TOKENS, dtype=np.int32) + index // SAMPLES % 30
        response = random.integers(5, 70, tokens, dtype=np.int32)
        log_probs = np.full(tokens, -4.6, np.float32)
        trajectory = Trajectory.single(prompt, response, log_probs)
        builder.add(trajectory)
        rows.append((trajectory, Verdict(float(index % 2), Outcome.OK)))
    shard = builder.build()

    def step() -> float:
        dist.barrier()
        began = time.process_time()
        own = range(rank, len(rows), world)  # each rank has generated its share
        signed = {i: signature(tokens_digest(rows[i][0]), rows[i][1].score) if checks() else 0 for i in own}
        signing = time.process_time() - began
        samples = SampleTable.of(
            Sample(i // SAMPLES, i % SAMPLES, 0, i, PROMPT_TOKENS, tokens, "stop", row[1], 1, i + 1, signed.get(i, 0))
            for i, row in enumerate(rows)
        )
        chosen = select_batch(RolloutBatch(samples, [shard]), role.algorithm, config, 0)
        plan = plan_step(chosen, config, world)
        dist.barrier()
        began = time.process_time()
        batch = TrainBatch(plan.of_rank(rank), step_work(plan, chosen, 0), torch.device("cpu"))
        sums = role.update(batch, 0, Coefficients(1e-6, 0.0, 0.0))
        if world == 1:
            Invariants().check_update(plan, chosen, 0, sums)
        return signing + time.process_time() - began

    return step


_checked = True


def checks() -> bool:
    return _checked


def unchecked(role: Any, step: Callable[[], float]) -> float:
    """The same without any check."""
    global _checked
    from rlcli.training.worker import plan_integrity

    with ExitStack() as stack:
        stack.enter_context(patch.object(plan_integrity.RowCheck, "check", lambda *_: None))
        stack.enter_context(patch.object(plan_integrity.ReductionCheck, "check", lambda check: check._found.clear()))
        stack.enter_context(patch.object(plan_integrity.StepCheck, "before", lambda *_: None))
        stack.enter_context(patch.object(plan_integrity.StepCheck, "after", lambda *_: {}))
        stack.enter_context(patch.object(role, "_row_sums", lambda *_: ({}, None)))
        stack.enter_context(patch.object(role, "_checks", lambda *_: {}))
        _checked = False
        try:
            return step()
        finally:
            _checked = True


if __name__ == "__main__":
    main()
