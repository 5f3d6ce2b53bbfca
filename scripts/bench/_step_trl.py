"""TRL's GRPOTrainer on the same workload, in a separate interpreter: one process a mode, one step at a time."""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from _step_work import Workload

MICRO = 64
"""Samples of a micro-batch where nothing else is asked for."""


class TrlError(Exception):
    """TRL does not run here in this mode; the end of its log says why."""


class TrlGroup:
    """A trainer that waits before each of its steps."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._log = process, log
        self._asks: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout

    def ready(self, limit_s: float | None = None) -> None:
        """Wait until it can begin a step; TrlError where it does not get there in `limit_s` seconds or at all."""
        if limit_s is not None and not select.select([self._answers], [], [], limit_s)[0]:
            raise TrlError(f"not ready after {limit_s:g} s")
        if self._answers.readline().strip() != "ready":
            self._process.wait()
            raise TrlError(" | ".join(self._log.read_text(errors="replace").strip().splitlines()[-3:]))

    def step(self, limit_s: float | None = None) -> float:
        """Seconds of one step: generation, rewards, forward and backward passes, optimizer."""
        started = time.perf_counter()
        print("go", file=self._asks, flush=True)
        self.ready(limit_s)
        return time.perf_counter() - started


@contextmanager
def trl_group(work: Workload, name: str, options: argparse.Namespace, folder: Path, device: str) -> Iterator[TrlGroup]:
    """Start TRL on all cores; it ends with the block. name: a mode, and after a colon TRL's
    per_device_train_batch_size. TrlError where it does not get to the end of its first step."""
    mode, _, micro = name.partition(":")
    settings_path = folder / f"trl-{name}.json"
    settings_path.write_text(
        json.dumps(
            {
                "mode": mode,
                "model": work.model,
                "dtype": work.dtype,
                "questions": [prompt.question for prompt in work.prompts],
                "prompt_ids": [prompt.ids for prompt in work.prompts],
                "lengths": work.lengths,
                "max_tokens": work.max_tokens,
                "prompt_tokens": work.prompt_tokens,
                "micro": int(micro or MICRO),
                "kv_cache_bytes": options.kv_cache_mb << 20,
                "device": device,
                "out": str(folder / f"trl-{name}"),
            }
        )
    )
    environment = os.environ | {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        environment["TORCH_COMPILE_DISABLE"] = "1"
    else:  # it refuses to share several among one process
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    log = folder / f"trl-{name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [options.trl_python, str(Path(__file__).with_name("_step_trl_child.py")), str(settings_path)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        group = TrlGroup(process, log)
        group.ready(options.trl_limit_s)
        group.step(options.trl_limit_s)
        yield group
    finally:
        process.kill()
        process.wait()
