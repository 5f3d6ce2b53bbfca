"""One long run of a tiny model, watched from outside until it ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from growth import Point
from processes import gcs_address, measured, object_store, shared_memory

from rlcli.runs.folder import progress_of

RLCLI = [sys.executable, "-P", "-m", "rlcli.cli.main"]
MODES = {
    "synchronous": {"cluster.workers": 1},
    "one step off": {"cluster.workers": 1, "rollout.workers": 1, "async.staleness": 1},
}
SMALL = {
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 4,
    "rollout.max_response_tokens": 8,
    "rollout.kv_cache_mb": 64,
    "data.max_prompt_tokens": 32,
    "train.tokens_per_microbatch": 256,
    "train.lr": 1e-5,
    "verifier.processes": 1,
    "evaluation.max_prompts": 2,
}

Series = dict[tuple[str, str], list[Point]]
"""Process and quantity → (step, value), in time order."""


@dataclass
class Soaked:
    """One measured run."""

    mode: str
    """Key of MODES."""
    code: int
    """Exit code of the command."""
    steps: int
    """Number of steps completed."""
    seconds: float
    """Duration of the run."""
    series: Series = field(default_factory=dict)
    """Measured values by process and quantity."""


def soak(mode: str, steps: int, save_every: int, sample_s: float, work: Path) -> Soaked:
    """Train for `steps` steps, with a checkpoint and an evaluation every `save_every`, and look at all processes every
    `sample_s` seconds. work: holds `model` and `data`, and takes the run."""
    run_folder = work / mode.replace(" ", "-")
    settings = SMALL | MODES[mode] | {"checkpoint.every": save_every, "evaluation.every": save_every}
    words = ["train", "grpo", "--model", str(work / "model"), "--data", str(work / "data"), "--out", str(run_folder)]
    words += ["--eval-data", str(work / "data"), "--steps", str(steps)]
    # Random text earns it at times, so that there are updates.
    words += ["--verifier", 'regex(pattern="[a-c]", match=search)']
    words += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    soaked, began = Soaked(mode, 0, 0, 0.0), time.monotonic()
    with run_folder.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen([*RLCLI, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                _look(process.pid, run_folder, soaked)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(sample_s)
        finally:
            process.terminate()
            soaked.code = process.wait()
    soaked.seconds = time.monotonic() - began
    return soaked


def _look(supervisor: int, run_folder: Path, soaked: Soaked) -> None:
    step = int(progress_of(run_folder).get("step", 0))
    if step <= 0:
        return
    values = measured(supervisor) | shared_memory()
    if address := gcs_address(supervisor):
        with contextlib.suppress(Exception):  # it is going
            values |= object_store(address)
    soaked.steps = step
    for key, value in values.items():
        soaked.series.setdefault(key, []).append((float(step), value))


def make_model_and_data(work: Path) -> None:
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.model.io.tiny_model import make_tiny_model
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    make_tiny_model(work / "model")
    for split, prompts in prepare(converter_named("arithmetic"), ConvertOptions(count=64, test_count=8)).splits.items():
        write_prompts(work / "data" / f"{split}.parquet", prompts)


def tail(run_folder: Path, lines: int = 5) -> str:
    """The end of what the command printed."""
    with contextlib.suppress(OSError):
        return "\n".join(run_folder.with_suffix(".log").read_text(errors="replace").splitlines()[-lines:])
    return os.devnull
