"""Our whole step: a run of rlcli on real workers that calls the other contestants between its steps."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _step_work import Workload, write_prompts

from rlcli.config.load import resolve
from rlcli.config.schema import RunConfig
from rlcli.data.messages import sample_seed
from rlcli.runs.tracking.run_console import View
from rlcli.training.worker.worker import Worker

PURPOSE = "train"


@dataclass
class Step:
    """One measured step."""

    seconds: float
    """From the end of the previous step."""
    metrics: dict[str, float]
    """The run's metrics of the step."""

    def phases(self) -> dict[str, float]:
        """Seconds by phase; the remainder is bookkeeping. `check` is part of the log-prob check and of sync."""
        times = {name[5:-2]: value for name, value in self.metrics.items() if name.startswith("time/")}
        # Sums of phases, and bookkeeping, which counts what runs between our steps.
        for excluded in ("step", "checkpoint", "evaluate", "bookkeeping", "trainer_idle", "engine_idle"):
            times.pop(excluded, None)
        times["verify"] = times.pop("verify_wait", 0.0)
        times["generate"] -= times["verify"] + times.get("idle", 0.0)
        times["log-prob check"] = times["sync"] - times["transfer"]
        times["sync"] = times.pop("transfer")
        times["bookkeeping"] = self.seconds - sum(times.values()) + times.get("check", 0.0)
        return times


class StepsDone(Exception):
    """All steps are measured: ends the run without its final checkpoint."""


class PacedView(View):
    """Records each step, and calls `between` before the next one starts. Ends the run after `max_steps` steps."""

    def __init__(self, between: Callable[[], None], max_steps: int) -> None:
        super().__init__()
        self.between, self.max_steps = between, max_steps
        self.steps: list[Step] = []
        self._began = time.perf_counter()

    def phase(self, name: str) -> None:
        if not self.steps:
            super().phase(name)

    def step(self, metrics: Mapping[str, float]) -> None:
        self.steps.append(Step(time.perf_counter() - self._began, dict(metrics)))
        self.between()
        if len(self.steps) == self.max_steps:
            raise StepsDone
        self._began = time.perf_counter()


class NeverStop:
    requested = False
    armed = False


def config_of(
    work: Workload, data: Path, *, steps: int, workers: int, device: str, kv_cache_mb: int, sets: Sequence[str]
) -> RunConfig:
    """The run of the workload. sets: further settings, each KEY=VALUE, which override these."""
    keys = {
        "model.path": work.model,
        "model.dtype": work.dtype,
        "data.path": str(data),
        "data.max_prompt_tokens": work.prompt_tokens,
        "data.shuffle": False,
        "rollout.prompts_per_step": len(work.prompts),
        "rollout.samples_per_prompt": work.samples,
        "rollout.max_response_tokens": work.max_tokens,
        "rollout.kv_cache_mb": kv_cache_mb,
        "train.steps": steps,
        "train.tokens_per_microbatch": work.micro,
        "train.lr": 1e-6,
        "verifier.name": f"{Path(__file__).with_name('_step_work.py')}:reward",
        "cluster.workers": workers,
        "cluster.device": device,
        "checkpoint.every": 0,
    }
    return resolve("grpo", keys, sets).config


def lengths_by_seed(work: Workload, steps: int, seed: int) -> dict[int, int]:
    """Sampling seed → length of the response."""
    return {
        sample_seed(seed, PURPOSE, step, f"bench:train:{prompt + half * len(work.prompts)}", sample): length
        for step in range(1, steps + 1)
        for half in (0, 1)
        for prompt, row in enumerate(work.lengths)
        for sample, length in enumerate(row)
    }


def bench_worker(lengths: dict[int, int]) -> type[Worker]:
    """A worker whose responses have the given lengths, by sampling seed."""

    class BenchWorker(Worker):
        def _build_engine(self) -> Any:
            engine: Any = super()._build_engine()
            params = engine._params

            def imposed(request: Any) -> Any:
                sampling_params = params(request)
                sampling_params.max_tokens = lengths[request.seed]
                sampling_params.ignore_eos, sampling_params.stop_token_ids = True, []
                return sampling_params

            engine._params = imposed
            return engine

    return BenchWorker


@contextmanager
def run_ours(
    work: Workload,
    *,
    steps: int,
    workers: int,
    device: str,
    kv_cache_mb: int,
    equal: float,
    sets: Sequence[str] = (),
) -> Iterator[Callable[[Callable[[], None]], Sequence[Step]]]:
    """Start the workers. Yields a function that trains for `steps` steps and calls its argument between them."""
    from ray import cloudpickle

    from rlcli.launch import launch
    from rlcli.launch.preflight import prepare
    from rlcli.runs.folder import RunFolder
    from rlcli.runs.tracking import open_trackers

    with tempfile.TemporaryDirectory(prefix="bench-step-") as name:
        folder = Path(name)
        write_prompts(work, folder / "data", equal)
        prepared = prepare(
            config_of(
                work,
                folder / "data",
                steps=steps + 1,
                workers=workers,
                device=device,
                kv_cache_mb=kv_cache_mb,
                sets=sets,
            )
        )
        for number, prompt in enumerate(work.prompts * 2):
            assert prepared.prompts.tokens(number).tolist() == list(prompt.ids), f"the run has another prompt {number}"
        cloudpickle.register_pickle_by_value(__import__(__name__))
        worker = bench_worker(lengths_by_seed(work, steps, prepared.config.train.seed))
        setattr(launch, "Worker", worker)  # noqa: B010
        os.environ.setdefault("HF_HUB_OFFLINE", "1")

        def run(between: Callable[[], None]) -> Sequence[Step]:
            view = PacedView(between, steps)
            with suppress(StepsDone), RunFolder.create(folder / "run") as home:
                trackers = open_trackers((), home, "bench", {}, view.note, None)
                launch.make_trainer(prepared, groups, home, trackers, view, NeverStop()).run()
            return view.steps

        with launch.running_workers(prepared, folder / "logs", on_phase=lambda name: None) as groups:
            yield run
