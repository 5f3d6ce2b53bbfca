"""Measures the planner's constants on this machine: short trainings of small models, and a fit to their metrics."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil

from rlcli.cluster.ray_session import resolve_device
from rlcli.errors import SetupError
from rlcli.launch.planning.memory_auto import planned
from rlcli.planner.calibration import Constants, save
from rlcli.planner.device import GIB
from rlcli.planner.forecast import Forecast
from rlcli.planner.memory import base_bytes, phases
from rlcli.planner.setting import Setting
from rlcli.planner.timing import times

LIMIT_S = 300.0
"""Maximum seconds of one training."""
ENDING_S = 20.0
COMMON = [
    *("data.max_prompt_tokens=24", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=8"),
    *("rollout.max_response_tokens=104", "train.tokens_per_microbatch=4096", "train.lr=1e-5", "checkpoint.every=1"),
    *("checkpoint.keep=1", "train.steps=3"),
]
LONGER = ["rollout.prompts_per_step=16", "rollout.max_response_tokens=488", "train.tokens_per_microbatch=16384"]
"""On GPUs, which a small batch does not fill."""
LORA = ["lora.rank=16", "train.lr=1e-4"]
Sizes = dict[str, int]
SMALL = {"hidden": 128, "layers": 4, "heads": 4, "kv-heads": 2}
CPU_CASES: list[tuple[Sizes, list[str]]] = [
    (SMALL, []),
    ({"hidden": 384, "layers": 4, "heads": 6, "kv-heads": 2}, []),
    ({"hidden": 384, "layers": 4, "heads": 6, "kv-heads": 2}, ["cluster.workers=2"]),
    ({"hidden": 512, "layers": 6, "heads": 8, "kv-heads": 8}, ["train.tokens_per_microbatch=1760"]),
    ({"hidden": 576, "layers": 6, "heads": 9, "kv-heads": 3}, LORA),
]
GPU_CASES: list[tuple[Sizes, list[str]]] = [
    (SMALL, LONGER),
    ({"hidden": 1024, "layers": 8, "heads": 16, "kv-heads": 4}, LONGER),
    ({"hidden": 2048, "layers": 16, "heads": 16, "kv-heads": 8}, LONGER),
    ({"hidden": 2048, "layers": 16, "heads": 16, "kv-heads": 8}, [*LONGER, *LORA]),
]
REWARD = """
import hashlib

from rlcli.types import Outcome, Verdict


def verify(request):
    score = hashlib.sha256(request.completion.encode()).digest()[0] % 2
    return Verdict(score=float(score), outcome=Outcome.OK if score else Outcome.WRONG, answer="")


def gold(request):
    return "x"
"""
PULL = 1e-3
"""Weight of a constant's relative change, beside the squared relative errors: one that no case depends on stays."""


@dataclass(frozen=True)
class Case:
    """A training's setting, and its metrics: bytes as `memory/PHASE`, seconds as `time/PHASE`."""

    setting: Setting
    measured: dict[str, float]


@dataclass(frozen=True)
class Calibration:
    """The figures found, their file, and each case's row: (case, figure, predicted before and after, measured)."""

    constants: Constants
    file: Path
    rows: list[tuple[int, str, float, float, float]]


def calibrate(on_case: Callable[[int, int], None] = lambda number, total: None) -> Calibration:
    """Train the cases of this machine's device, fit the constants, and save them for later plans. on_case: called
    before each with its number, from 0. Raises `SetupError` if a training fails."""
    kind = resolve_device("auto", "")
    chosen = CPU_CASES if kind == "cpu" else GPU_CASES
    cases = []
    with tempfile.TemporaryDirectory(prefix="rlcli-calibrate-") as folder:
        for number, (sizes, sets) in enumerate(chosen):
            on_case(number, len(chosen))
            found, records = trained(Path(folder), str(number), sizes, "grpo", [*sets, f"cluster.device={kind}"])
            cases.append(Case(found.setting, measured(records)))
    device = cases[0].setting.device
    constants = replace(fit(cases, device.constants), measured=f"{datetime.now(UTC):%Y-%m-%d}")
    rows = [
        (number, what, before[what], after[what], real)
        for number, case in enumerate(cases)
        for before, after in [(predicted(case.setting, device.constants), predicted(case.setting, constants))]
        for what, real in case.measured.items()
        if what in after
    ]
    return Calibration(constants, save(device.name, constants), rows)


def predicted(setting: Setting, constants: Constants) -> dict[str, float]:
    """What the planner expects of a run, under the names of `Case.measured`."""
    setting = replace(setting, device=replace(setting.device, constants=constants))
    found = {f"memory/{phase.name}": phase.total for phase in phases(setting)}
    found["memory/base"] = base_bytes(setting, setting.hosts_engine)
    return found | {f"time/{phase.name}": phase.seconds for phase in times(setting)}


def measured(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest memory of each phase, in bytes, and its median seconds, without the first step's warm-up."""
    found: dict[str, float] = {}
    for name in sorted({name for record in records for name in record}):
        kind, _, rest = name.partition("/")
        if kind == "memory" and rest.endswith("_gb"):
            found[name.removesuffix("_gb")] = max(record.get(name, 0.0) for record in records) * GIB
        elif kind == "time" and rest.endswith("_s"):
            found[name.removesuffix("_s")] = statistics.median(record.get(name, 0.0) for record in records[1:])
    return found


def fit(cases: Sequence[Case], start: Constants) -> Constants:
    """The constants with the least squared relative errors over all figures of all cases, by Gauss-Newton steps; a
    memory that is a maximum of several is linear only piecewise."""
    names = [field.name for field in fields(Constants) if field.name != "measured"]
    constants, step = start, 1e-3
    for _ in range(20):
        rows, errors = [], []
        values = asdict(constants)
        for case in cases:
            here = predicted(case.setting, constants)
            moved = [predicted(case.setting, replace(constants, **{n: values[n] * (1 + step)})) for n in names]
            for what, real in case.measured.items():
                if what in here and real > 0:
                    rows.append([(there[what] - here[what]) / step / real for there in moved])
                    errors.append(1 - here[what] / real)
        slopes = np.array(rows)
        change = np.linalg.solve(slopes.T @ slopes + PULL * np.eye(len(names)), slopes.T @ np.array(errors))
        change = np.clip(change, -0.5, 1.0)  # a step's; no constant becomes 0 or negative
        constants = replace(constants, **{n: values[n] * (1 + float(c)) for n, c in zip(names, change, strict=True)})
    return constants


def trained(
    folder: Path, name: str, sizes: Sizes, recipe: str, sets: Sequence[str]
) -> tuple[Forecast, list[dict[str, float]]]:
    """Predict and run a training of a few steps with random weights, random rewards (or nothing would be learned from)
    and responses of maximum length: its forecast, and the metrics of each step. Raises `SetupError` if it fails or
    takes longer than LIMIT_S."""
    model = folder / "-".join(str(size) for size in sizes.values())
    if not model.exists():
        rlcli("tiny-model", "--out", str(model), *(f"--{key}={size}" for key, size in sizes.items()))
        _never_end(model)
    data, verifier = folder / "data", folder / "reward.py"
    if not data.exists():
        rlcli("prep", "arithmetic", "--out", str(data))
        verifier.write_text(REWARD)
    sets = [*COMMON, *sets, f"verifier.name={verifier}:verify"]
    found, _ = planned(recipe, {"model.path": str(model), "data.path": str(data)}, sets, "", lambda note: None)
    paths = ("--model", str(model), "--data", str(data), "--out", str(folder / name))
    rlcli("train", recipe, *paths, *(word for text in sets for word in ("--set", text)))
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    if any(record["response_tokens/truncated"] < 1 for record in records):
        raise SetupError(f"a response of the training {name} ended before it should", "report this")
    return found, records


def _never_end(model: Path) -> None:
    """Change the embedding, which is the head too, so that the end is not drawn: one number stands out in every row, so
    too in the last layer's output, and in that of the end is its opposite."""
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0] = 16.0
    embedding[json.loads((model / "config.json").read_text())["eos_token_id"], 0] = -16.0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def rlcli(*words: str, limit_s: float = LIMIT_S) -> None:
    """Run a command of rlcli, on one thread a worker. Raises `SetupError` if it fails or takes longer than `limit_s`
    seconds, by when all that it started is ended."""
    command = [sys.executable, "-P", "-m", "rlcli.cli.main", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
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
    _, left = psutil.wait_procs(family, timeout=ENDING_S)
    for process in left:
        process.kill()
    child.wait()
