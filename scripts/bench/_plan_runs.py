"""Short real trainings whose figures a plan can be compared with: random rewards, and responses of maximum length."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
from rlcli_planner.forecast import Forecast
from rlcli_planner.known_devices import GIB
from rlcli_planner.launch.memory_auto import planned

from rlcli.errors import SetupError

ENDING_S, SAMPLED_S = 20.0, 0.05
COMMON = [
    *("data.max_prompt_tokens=24", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=8"),
    *("rollout.max_response_tokens=104", "train.tokens_per_microbatch=4096", "train.lr=1e-5", "checkpoint.every=0"),
    *("checkpoint.keep=1", "train.steps=6"),
]
WARM_UP = 3
"""Steps whose seconds do not count: the first one warms up, and in them the log-prob check measures the trainer's
noise and probes, as later only in every tenth and third step."""
REWARD = """
import hashlib

from rlcli.types import Outcome, Verdict


def verify(request):
    score = hashlib.sha256(request.completion.encode()).digest()[0] / 255
    return Verdict(score=score, outcome=Outcome.OK if score else Outcome.WRONG, answer="")


def gold(request):
    return "x"
"""
"""Different for each response, so that every sample has an advantage and is trained on."""
Sizes = dict[str, int]


def measured(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest memory of each phase, in bytes, as `memory/PHASE`, and its median seconds after WARM_UP steps, as
    `time/PHASE`."""
    figures: dict[str, float] = {}
    for name in sorted({name for record in records for name in record}):
        kind, _, rest = name.partition("/")
        if kind == "memory" and rest.endswith("_gb"):
            figures[name.removesuffix("_gb")] = max(record.get(name, 0.0) for record in records) * GIB
        elif kind == "time" and rest.endswith("_s"):
            figures[name.removesuffix("_s")] = statistics.median(record.get(name, 0.0) for record in records[WARM_UP:])
    return figures


class CpuSeconds(threading.Thread):
    """Samples the CPU time of a run's workers by the method that they are in, which is in their title: with one thread
    a worker, that is what a phase takes on a machine that nothing else uses."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self.run_folder, self.child = run, 0
        self.steps: list[dict[str, float]] = [{}]
        """For each step, phase → seconds of the first worker."""
        self._ended = threading.Event()

    def run(self) -> None:
        worker: psutil.Process | None = None
        last = 0.0
        while not self._ended.wait(SAMPLED_S):
            try:
                worker = worker or self._worker()
                if worker is None:
                    continue
                title, times = worker.cmdline()[0], worker.cpu_times()
            except (psutil.Error, IndexError):
                worker = None
                continue
            phase, now = title.partition(".")[2], times.user + times.system
            self.steps[-1][phase] = self.steps[-1].get(phase, 0.0) + now - last
            last = now
            metrics = self.run_folder / "metrics.jsonl"
            if metrics.is_file() and len(metrics.read_text().splitlines()) >= len(self.steps):
                self.steps.append({})

    def _worker(self) -> psutil.Process | None:
        if not self.child:
            return None
        for process in psutil.Process(self.child).children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith("ray::Worker"):
                    return process
        return None

    def end(self) -> list[dict[str, float]]:
        """The seconds of whole steps."""
        self._ended.set()
        self.join()
        return self.steps[:-1]


def trained(
    folder: Path, name: str, model: Sizes | Path, recipe: str, sets: Sequence[str], data: Path | None, limit_s: float
) -> tuple[Forecast, list[dict[str, float]], list[dict[str, float]]]:
    """Predict and run a training of a few steps: its forecast, the metrics of each step, and the CPU seconds of a
    worker in each, by method.

    model: a folder, or the sizes of one to make, with random weights, whose responses never end. data: a dataset, or
    None for sums. Raises `SetupError` if the run fails or takes longer than `limit_s` seconds.
    """
    if not isinstance(model, Path):
        sizes, model = model, folder / "-".join(str(size) for size in model.values())
        if not model.exists():
            rlcli("tiny-model", "--out", str(model), *(f"--{key}={size}" for key, size in sizes.items()))
            _never_end(model)
    verifier = folder / "reward.py"
    verifier.write_text(REWARD)
    if data is None:
        data = folder / "data"
        if not data.exists():
            rlcli("prep", "arithmetic", "--out", str(data))
    sets = [*COMMON, *sets, *([] if recipe == "sft" else [f"verifier.name={verifier}:verify"])]
    plan, _ = planned(recipe, {"model.path": str(model), "data.path": str(data)}, sets, "", lambda note: None)
    paths = ("--model", str(model), "--data", str(data), "--out", str(folder / name))
    clock = CpuSeconds(folder / name)
    clock.start()
    keys = (word for text in sets for word in ("--set", text))
    rlcli("train", recipe, *paths, *keys, limit_s=limit_s, on_start=lambda pid: setattr(clock, "child", pid))
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return plan, records, clock.end()


def _never_end(model: Path) -> None:
    """Change the embedding, which is tied to the head, so that the end token is never sampled: one component dominates
    every row and the last layer's output, and has the opposite sign in the row of the end token."""
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0] = 1.0
    embedding[json.loads((model / "config.json").read_text())["eos_token_id"], 0] = -1.0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def rlcli(*words: str, limit_s: float = 300.0, on_start: Callable[[int], None] = lambda pid: None) -> None:
    """Run a command of rlcli. Raises `SetupError` if it fails or takes longer than `limit_s` seconds, by when all that
    it started is ended."""
    command = [sys.executable, "-P", "-m", "rlcli.cli.main", *words]
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, env=os.environ, stdout=output, stderr=output, start_new_session=True)
        try:
            on_start(child.pid)
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise SetupError(
                f"rlcli {words[0]} did not end within {limit_s:g} s", "end other work, and retry"
            ) from None
        finally:
            if child.returncode is None:  # also on Ctrl-C, which the child's session does not receive
                _end(child)
        if child.returncode:
            output.seek(0)
            last = " | ".join(output.read().splitlines()[-3:])
            raise SetupError(f"rlcli {words[0]} ended with exit code {child.returncode}: {last}", "see: rlcli doctor")


def _end(child: subprocess.Popen[bytes]) -> None:
    """First so that it ends its own processes, then all that are left."""
    family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    child.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(family, timeout=ENDING_S)
    for process in alive:
        process.kill()
    child.wait()
