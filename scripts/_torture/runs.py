"""One short run of `rlcli train`: started, watched, and restarted where nothing else restarts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil
from aims import EVALUATE_EVERY, STEPS, Kind
from processes import MARK, drivers, line_of, marked, wait_gone

from rlcli.runs.folder import progress_of

RESTARTS = 100
PATIENCE_S = 360.0
"""Longest that a run may take to the next thing that is waited for."""
GONE_S = 60.0
"""After a run has ended, or its supervisor was killed, all its processes are gone within so many seconds, even where
other tests load the machine."""
STEP_PHASES = {
    "generate",
    "plan",
    "load",
    "old_log_probs",
    "reference",
    "critic",
    "advantages",
    "update",
    "wait_for_rollout",
}
IN_FLIGHT = {"rollout.workers": 1, "async.staleness": 2, "async.engine_steps": 7}
"""Separate engines, whose weight updates interrupt responses."""
RLCLI = [sys.executable, "-P", "-m", "rlcli.cli.main"]


class Stuck(Exception):
    """A run has not done what was waited for."""


class Over(Exception):
    """A run has come to its end before what was waited for."""


@dataclass(frozen=True)
class Place:
    """Where a run is: of the driver `pid`, which is 0 where there is none."""

    step: int
    phase: str
    pid: int

    @property
    def stepping(self) -> bool:
        return self.step > 0 and self.phase in STEP_PHASES


def flags(kind: Kind, work: Path) -> list[str]:
    """Arguments of a small run of `kind`, different at each step. grpo on two ranks generates with vLLM, the others
    with transformers, which starts sooner."""
    starts_vllm = kind.recipe == "grpo" and kind.workers == 2
    settings = {
        "rollout.prompts_per_step": 16 if kind.recipe == "ppo" else 4,
        "rollout.samples_per_prompt": 1 if kind.recipe == "ppo" else 4,
        "rollout.max_response_tokens": 24,
        **({"rollout.kv_cache_mb": 64} if starts_vllm else {"rollout.engine": "transformers"}),
        "shaping.overlong_buffer": 8 if kind.recipe == "dapo" else 0,
        "data.max_prompt_tokens": 32,
        "train.minibatches": 2,
        "train.tokens_per_microbatch": 256,
        "train.lr": 1e-3,
        "train.warmup_steps": 2,
        "train.deterministic": "true",
        "verifier.processes": 1,
        "evaluation.every": EVALUATE_EVERY,
        "checkpoint.every": kind.every,
        "fault_tolerance.max_restarts": RESTARTS,
        **(IN_FLIGHT if kind.recipe == "async" else {}),
    }
    words = ["--model", str(work / "model"), "--data", str(work / "data"), "--eval-data", str(work / "data")]
    words += ["--steps", str(STEPS), "--workers", str(kind.workers)]
    # Random text earns it half the time, so that there is something to learn.
    words += ["--verifier", 'regex(pattern="[a-c]", match=search)']
    return words + [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


class Run:
    """The run in the folder `out`. cluster: variables of the cluster that it runs on, or nothing. It says what it says
    in OUT.log; TMPDIR of its processes is `scratch`."""

    def __init__(
        self, kind: Kind, run_folder: Path, work: Path, scratch: Path, cluster: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.kind, self.out, self.work, self._cluster = kind, run_folder, work, cluster
        self.mark = f"{os.getpid()}-{run_folder.name}"
        self.scratch = scratch
        self.scratch.mkdir()
        self.log = run_folder.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._begin("train", self.kind.trains, *flags(self.kind, self.work), "--out", str(self.out))

    def resume(self) -> None:
        """As a person would, once nothing runs any more."""
        self._begin("train", "--resume", str(self.out))

    def _begin(self, *words: str) -> None:
        environment = {MARK: self.mark, "TMPDIR": str(self.scratch), **self._cluster}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*RLCLI, *words],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def supervisor(self) -> int:
        assert self._process is not None
        return self._process.pid

    def code(self) -> int | None:
        """Exit code of the supervisor: None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def ended(self) -> bool:
        return self.code() is not None

    def driver(self) -> int:
        processes = drivers(self.supervisor)
        return processes[0].pid if processes else 0

    def place(self) -> Place:
        """The last that a driver noted; its pid is 0 where that driver is gone."""
        progress = progress_of(self.out)
        pid = int(progress.get("pid", 0))
        with contextlib.suppress(psutil.Error):
            if pid and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                pid = 0
        return Place(int(progress.get("step", 0)), str(progress.get("phase", "")), pid if psutil.pid_exists(pid) else 0)

    def checkpoint(self) -> int:
        """Step of the newest checkpoint; 0 where there is none."""
        link = self.out / "checkpoints" / "latest"
        with contextlib.suppress(OSError, ValueError):
            return int(os.readlink(link).rpartition("-")[2])
        return 0

    def writing(self, step: int) -> bool:
        """True if the checkpoint of `step` is being written, or is complete."""
        folder = self.out / "checkpoints"
        return (folder / f".step-{step:06d}.partial").exists() or (folder / f"step-{step:06d}").exists()

    def until(self, condition: Callable[[], bool], event: str, pause_s: float = 0.05) -> None:
        """Wait. Raises Over where the run ends well before, Stuck where it fails or PATIENCE_S pass."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.ended() and not condition():
                if self.code() == 0:
                    raise Over
                raise Stuck(
                    f"{self.out.name}: it ended with exit code {self.code()} before {event}: {self.error_line()}"
                )
            if time.monotonic() > deadline:
                raise Stuck(f"{self.out.name}: {event} has not come in {PATIENCE_S:.0f} s; see {self.log}")
            time.sleep(pause_s)

    def orphans(self, patience_s: float = GONE_S) -> list[str]:
        """Processes of an ended run that still exist after `patience_s` seconds: listed, and killed."""
        return wait_gone(lambda: marked(self.mark) + self._on_cluster(), patience_s)

    def _on_cluster(self) -> list[psutil.Process]:
        """Workers on machines of a cluster carry the mark of the machine, and the run's folder in no word."""
        if not self._cluster:
            return []
        logs = str(self.out)
        return [process for process in psutil.process_iter() if logs in line_of(process)]

    def end(self) -> None:
        """Kill all that is left of it."""
        self.orphans(patience_s=0.0)
        if self._process is not None:
            self._process.wait()

    def error_line(self) -> str:
        """The last line that reports an error."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if "error" in line.lower()]
        return lines[-1][:2000] if lines else ""
