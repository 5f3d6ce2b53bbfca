"""Asynchrony: how much faster steps are with `async.staleness` 0, 1, 2, 4, against what the planner predicts.

    .venv/bin/python scripts/bench/async_rollout.py [--model tiny-1m] [--repeats 3] [--json FILE]
    .venv/bin/python scripts/bench/async_rollout.py --learns [--seeds 5]
    .venv/bin/python scripts/bench/async_rollout.py --simulate

Two workers on a core each, and responses with a long tail: log-normal lengths, a function of the prompt and the place
in its group, so that all runs generate the same. `shared`: both train and generate; `1 + 1`: one trains, one generates.
Runs with each staleness take turns on the same workers. Measured is the mean time of a step once the pipeline is full.
Predicted are the steps of an engine and a trainer of known speeds: the seconds of an engine step by the number of its
responses and new tokens, and those of an update and a sync, and the lengths in the order drawn. `alone`: speeds of the
runs without staleness, in which engine and trainer take turns, which is all that the planner knows. `beside`: the same,
and by how much engine and trainer slow each other down, as two threads of one core do: measured with staleness 1, and
with 2 and 4 in proportion to the share of its time that the other one works.

--learns: the quickstart's task from its warm start, once with each staleness: steps and seconds until the held-out
accuracy is 0.9. --simulate: what the planner says of larger models on 8 to 256 GPUs; nothing is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from _common import interleaved, write_json
from _step_work import make_model
from numpy.typing import NDArray

from rlcli.data.sample_files import sample_files
from rlcli.runs.tracking.run_console import View
from rlcli.types import ConvertOptions

STALENESS = (0, 1, 2, 4)
LAYOUTS = {"shared": ("cluster.workers=2",), "1 + 1": ("cluster.workers=1", "rollout.workers=1")}
WARM_UP = 1
ROUNDS = 8
"""Iterations of a prediction until the busy shares of engine and trainer agree with those that it assumes."""
PAUSE = 20
"""Factor on the median: a longer engine step includes an update or the end of a slice, and is left out."""
PROMPT_TOKENS = 40
"""Approximate tokens of an arithmetic prompt."""
TARGET = 0.9
QWEN_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
QWEN_32B = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
QWEN_7B |= {"num_key_value_heads": 4, "vocab_size": 152064}
QWEN_32B |= {"num_key_value_heads": 8, "vocab_size": 152064}
SIMULATED = {
    "7B": (QWEN_7B, ["model.gradient_checkpointing=true", "train.offload=all"]),
    "32B": (QWEN_32B, ["model.gradient_checkpointing=true", "train.offload=all", "rollout.tensor_parallel=4"]),
}


@dataclass(frozen=True)
class Slowed:
    """Slowdown of engine and trainer by each other, measured in one run."""

    engine: float
    """Time of an engine step while the trainer is busy, relative to that alone."""
    trainer: float
    """Time of an update while the engine is busy, relative to that alone."""
    engine_works: float
    """Share of the run's time in which the engine is busy."""
    trainer_works: float
    """Share of the run's time in which the trainer is busy."""

    def speeds(self, alone: Any, engine_works: float, trainer_works: float) -> Any:
        """Speeds of an engine and a trainer that are busy for these shares of the time. alone: their speeds alone."""
        engine = 1 + (self.engine - 1) * trainer_works / self.trainer_works
        trainer = 1 + (self.trainer - 1) * engine_works / self.engine_works
        return dataclasses.replace(
            alone,
            decode=lambda running, tokens: engine * alone.decode(running, tokens),
            prefill=engine * alone.prefill,
            update=trainer * alone.update,
        )


class RecordingView(View):
    """Prints nothing, and records the metrics of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Mapping[str, float]] = []

    def start(self, *_: object) -> None: ...

    def phase(self, name: str) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, metrics: Mapping[str, float]) -> None:
        self.steps.append(metrics)


def give_lengths(worker: Any, middle: float, spread: float, samples: int) -> None:
    """Run in a worker: make the length of each response a function of its prompt and its index in the group, and record
    the engine's steps."""
    import math
    import time
    import zlib

    from rlcli.rollout.worker import rollout_role

    engine = worker.engine
    if engine is None or hasattr(engine, "recorded"):
        return
    params, step, abort, seed_of = engine._params, engine.step, engine.abort, rollout_role.sample_seed
    engine.recorded, last, added, step_count = [], [0.0], [0], [0]
    normal_by_seed: dict[int, float] = {}
    begun_at: dict[int, int] = {}
    """Request → its tokens when it started, minus the number of engine steps until then."""

    def normal(*seed: int) -> float:
        return float(np.random.default_rng(seed).normal())

    def seeded(run_seed: int, purpose: str, number: int, prompt_id: str, sample: int) -> int:
        seed, prompt = seed_of(run_seed, purpose, number, prompt_id, sample), zlib.crc32(prompt_id.encode())
        normal_by_seed[seed] = (normal(prompt) + normal(prompt, sample % samples)) / math.sqrt(2)
        return seed

    def bounded(request: Any) -> Any:
        sampling_params = params(request)
        prefix_tokens = 0 if request.response_prefix is None else len(request.response_prefix)
        length = round(middle * math.exp(spread * normal_by_seed[request.seed]))
        added[0] += len(request.prompt) + prefix_tokens
        begun_at[request.key] = len(request.prompt) + prefix_tokens - step_count[0]
        sampling_params.max_tokens = max(1, min(sampling_params.max_tokens, length - prefix_tokens))
        sampling_params.ignore_eos, sampling_params.stop_token_ids = True, []
        return sampling_params

    def timed() -> Any:
        running, began = engine.unfinished, time.perf_counter()
        tokens = sum(begun_at.values()) + len(begun_at) * step_count[0]
        outputs = step()
        ended = time.perf_counter()
        engine.recorded.append((running, tokens, added[0], ended - (last[0] or began)))
        for output in outputs:
            begun_at.pop(output.key, None)
        added[0] = 0
        step_count[0] += 1
        last[0] = ended if engine.unfinished else 0.0
        return outputs

    def aborted() -> Any:
        begun_at.clear()
        return abort()

    engine._params, engine.step, engine.abort, rollout_role.sample_seed = bounded, timed, aborted, seeded


def recorded(worker: Any) -> list[tuple[int, int, int, float]]:
    """Run in a worker: return and clear its engine steps: responses, their tokens, tokens of new prompts, seconds."""
    steps = getattr(worker.engine, "recorded", [])
    return [steps.pop() for _ in range(len(steps))]


class Contest:
    """Runs of one workload on the same workers, in one folder."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder, self.number = arguments, folder, 0
        self.sets = [
            f"rollout.prompts_per_step={arguments.prompts}",
            f"rollout.samples_per_prompt={arguments.samples}",
            f"rollout.max_response_tokens={arguments.tokens}",
            # The same engine for every staleness.
            *("data.max_prompt_tokens=64", "train.tokens_per_microbatch=4096", "rollout.kv_cache_mb=512"),
            # Whatever the reward: every sample is forwarded, and has a gradient.
            *("algorithm.entropy_coef=0.001", "checkpoint.every=0"),
        ]
        few = ConvertOptions(count=max(arguments.prompts * (arguments.steps + 8), 64), test_count=64)
        self.flags: dict[str, object] = {
            "model.path": make_model(arguments.model, folder / "model"),
            "data.path": str(make_data(folder / "data", few)),
        }
        self.forget()

    def forget(self) -> None:
        """Clear the measurements by staleness: counted steps, and engine steps (`recorded`)."""
        self.seen: dict[int, list[Mapping[str, float]]] = {staleness: [] for staleness in STALENESS}
        self.engine_steps: dict[int, list[tuple[int, int, int, float]]] = {staleness: [] for staleness in STALENESS}

    def steps(self, staleness: int) -> int:
        """Steps of a run: counted ones, and those in which the pipeline fills and drains."""
        return int(self.arguments.steps) + WARM_UP + 2 * staleness

    def prepared(self, overrides: tuple[str, ...], staleness: int, steps: int) -> Any:
        from rlcli.config.load import resolve
        from rlcli.launch.preflight import prepare

        flags = self.flags | {"train.steps": steps}
        return prepare(resolve("grpo", flags, [*self.sets, *overrides, f"async.staleness={staleness}"]).config)

    @contextmanager
    def workers(self, overrides: tuple[str, ...]) -> Iterator[Any]:
        """Start workers whose KV cache is large enough for the largest staleness."""
        import ray
        from ray import cloudpickle

        from rlcli.launch.launch import running_workers

        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        logs = Path(tempfile.mkdtemp(prefix="logs-", dir=self.folder))
        ready = self.prepared(overrides, max(STALENESS), self.steps(0))
        distribution = self.arguments.median, self.arguments.spread, self.arguments.samples
        with running_workers(ready, logs, on_phase=lambda name: None) as groups:
            self.actors = [actor for pool in groups.by_name.values() for actor in pool._actors]
            ray.get([actor.__ray_call__.remote(lambda w: give_lengths(w, *distribution)) for actor in self.actors])
            yield groups

    def run(self, groups: Any, overrides: tuple[str, ...], staleness: int, steps: int = 0) -> float:
        """Train once. Returns the mean seconds of the counted steps. steps: their number in all; 0: by the method
        `steps`."""
        from rlcli.cluster.supervisor.stop_signals import StopOnSignal
        from rlcli.launch.launch import make_trainer, worker_spec
        from rlcli.runs.folder import RunFolder
        from rlcli.runs.tracking import open_trackers
        from rlcli.training.worker.calls import WorkerCalls

        ready, logs = self.prepared(overrides, staleness, steps or self.steps(staleness)), Path(groups.spec.logs)
        spec = worker_spec(ready.context, logs, groups.spec.group_id)
        groups.policy.call(WorkerCalls.build, spec)
        self.number += 1
        view = RecordingView()
        path = self.folder / f"run-{self.number}"
        with RunFolder.create(path) as folder, StopOnSignal(lambda: None) as stop:
            folder.write_config("")
            trackers = open_trackers((), folder, "", {}, print)
            make_trainer(ready, dataclasses.replace(groups, spec=spec), folder, trackers, view, stop).run()
            trackers.close()
        counted = view.steps[self.counted(staleness, len(view.steps))]
        self.seen[staleness] += counted
        self.engine_steps[staleness] += self.recorded()
        return mean(step["time/step_s"] for step in counted)

    def counted(self, staleness: int, steps: int) -> slice:
        """The counted steps of a run: those in which the pipeline is full."""
        return slice(WARM_UP + staleness, steps - staleness)

    def lengths(self) -> NDArray[np.int64]:
        """Response lengths `[steps, prompts, samples]` of the latest, synchronous run, in sampling order."""
        samples = self.folder / f"run-{self.number}" / "samples"
        lengths_by_group: dict[tuple[int, int], list[int]] = {}
        for number in range(1, len(list(samples.glob("step-*"))) + 1):
            for file in sample_files(samples, number):
                table = pq.read_table(file, columns=["group", "response_tokens"]).to_pylist()
                for row in table:
                    lengths_by_group.setdefault((number, row["group"]), []).append(row["response_tokens"])
        ordered = np.array([lengths_by_group[group] for group in sorted(lengths_by_group)], np.int64)
        return ordered.reshape(-1, self.arguments.prompts, self.arguments.samples)

    def recorded(self) -> list[tuple[int, int, int, float]]:
        """Steps of all engines since the last call."""
        import ray

        steps_by_actor = ray.get([actor.__ray_call__.remote(recorded) for actor in self.actors])
        return [step for engine_steps in steps_by_actor for step in engine_steps]

    def decoding(self, staleness: int) -> NDArray[np.float64]:
        """Engine steps `[steps, 4]` as in `recorded`, without interrupted ones."""
        steps = np.array(self.engine_steps[staleness], np.float64)
        return steps[steps[:, 3] < PAUSE * np.median(steps[:, 3])]

    def update_s(self, staleness: int, lengths: NDArray[np.int64]) -> float:
        """Mean seconds of an update, if batches were as large as those of `lengths`."""
        waits = ("time/generate_s", "time/wait_for_rollout_s", "time/sync_s")
        seconds = mean(
            metrics["time/step_s"] - sum(metrics[name] for name in waits) for metrics in self.seen[staleness]
        )
        counted_lengths = lengths[self.counted(staleness, self.steps(staleness))]
        return float(seconds * lengths.mean() / counted_lengths.mean())

    def speeds(self, lengths: NDArray[np.int64]) -> Any:
        """Speeds of engine and trainer alone, fitted to the runs without staleness."""
        from rlcli_planner.asynchrony.simulate import Speeds

        steps = self.decoding(0)
        known = np.column_stack([np.ones(len(steps)), steps[:, :3]])
        base, each, read, prefill = np.linalg.lstsq(known, steps[:, 3], rcond=None)[0]
        update, sync = self.update_s(0, lengths), mean(metrics["time/sync_s"] for metrics in self.seen[0])
        decoding = f"{base:.5f} + {each:.7f} a response + {read:.9f} a token"
        print(f"decode {decoding}, prefill {prefill:.7f}, update {update:.3f}, sync {sync:.3f}", file=sys.stderr)

        def decode(running: int, tokens: float) -> float:
            return float(base + running * (each + read * tokens))

        return Speeds(decode, float(prefill), update, sync)

    def slowed(self, alone: Any, lengths: NDArray[np.int64]) -> Slowed:
        """Slowdown in the runs with staleness 1, against the speeds of engine and trainer alone."""
        steps, seen, update = self.decoding(1), self.seen[1], self.update_s(1, lengths)
        step_s = mean(metrics["time/step_s"] for metrics in seen)
        expected = sum(alone.decode(some, total / some) + added * alone.prefill for some, total, added, _ in steps)
        idle = mean(metrics["time/engine_idle_s"] for metrics in seen)
        # Faster is noise: both have the same work beside each other.
        engine, trainer = max(1.0, float(steps[:, 3].sum() / expected)), max(1.0, update / alone.update)
        slowdown = Slowed(engine, trainer, 1 - idle / step_s, update / step_s)
        print(slowdown, file=sys.stderr)
        return slowdown


def make_data(folder: Path, options: ConvertOptions) -> Path:
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.prep.pipeline import converter_named, prepare

    for split, prompts in prepare(converter_named("arithmetic"), options).splits.items():
        write_prompts(folder / f"{split}.parquet", prompts)
    return folder


def pays(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Step times of both layouts by staleness, measured and predicted."""
    measured: dict[tuple[str, int], float] = {}
    speeds: dict[str, tuple[Any, Slowed]] = {}
    for name, overrides in LAYOUTS.items():
        contest = Contest(arguments, folder / name.replace(" ", ""))
        with contest.workers(overrides) as groups:

            def runner(
                staleness: int, contest: Any = contest, groups: Any = groups, overrides: Any = overrides
            ) -> Callable[[], float]:
                return lambda: contest.run(groups, overrides, staleness)

            runner(0)()
            contest.run(groups, overrides, 0, contest.steps(max(STALENESS)))
            lengths = contest.lengths()
            contest.forget()
            times = interleaved(
                {str(value): runner(value) for value in STALENESS},
                repeats=arguments.repeats,
                warm_up=0,
            )
        alone = contest.speeds(lengths)
        speeds[name] = alone, contest.slowed(alone, lengths)
        measured |= {(name, value): median(times[str(value)]) for value in STALENESS}
    return compared(contest, measured, speeds, lengths)


def compared(
    contest: Contest,
    measured: Mapping[tuple[str, int], float],
    speeds: Mapping[str, tuple[Any, Slowed]],
    lengths: NDArray[np.int64],
) -> dict[str, Any]:
    """Each layout's gain over synchronous steps on both devices, measured and predicted."""
    from rlcli_planner.asynchrony.simulate import Layout, simulate

    def predicted(name: str, staleness: int, with_slowdown: bool) -> float:
        step_lengths, separate, (alone, slowed) = lengths[: contest.steps(staleness)], name != "shared", speeds[name]
        alone = dataclasses.replace(alone, update=alone.update * step_lengths.mean() / lengths.mean())
        layout, run_speeds = Layout(1 if separate else 2, 256, separate, staleness), alone
        if slows := with_slowdown and staleness > 0:
            run_speeds = slowed.speeds(alone, slowed.engine_works, slowed.trainer_works)
        simulation = simulate(
            step_lengths, run_speeds, layout, PROMPT_TOKENS, WARM_UP
        )  # of the steps that were measured
        for _ in range(ROUNDS if slows and separate else 0):  # on the same devices they take turns
            run_speeds = slowed.speeds(alone, 1 - simulation.engine_idle, run_speeds.update / simulation.step_s)
            simulation = simulate(step_lengths, run_speeds, layout, PROMPT_TOKENS, WARM_UP)
        return simulation.step_s

    rows = []
    for (name, staleness), seconds in measured.items():
        gain, synchronous_s = measured["shared", 0] / seconds, predicted("shared", 0, with_slowdown=False)
        row: dict[str, Any] = {"layout": name, "staleness": staleness, "step_s": seconds, "gain": gain}
        for known, with_slowdown in (("alone", False), ("beside", True)):
            predicted_gain = synchronous_s / predicted(name, staleness, with_slowdown)
            row |= {f"predicted_gain_{known}": predicted_gain, f"error_{known}": predicted_gain / gain - 1}
        rows.append(row)
    return {
        "lengths": {"mean": float(lengths.mean()), "longest": int(lengths.max())},
        "rows": rows,
        "largest_error": {known: max(abs(row[f"error_{known}"]) for row in rows) for known in ("alone", "beside")},
    }


def learns(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Steps and seconds of the quickstart's task until the held-out accuracy is 0.9, for each staleness and seed."""
    from rlcli_quickstart.sum_lessons import Sums
    from rlcli_quickstart.warm_start import warm_start

    rows: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        data = make_data(folder / f"data-{seed}", ConvertOptions(seed=seed))
        warm = warm_start(arguments.cache or folder / "cache", Sums(data), seed)
        for staleness in STALENESS:
            run_folder = folder / f"run-{seed}-{staleness}"
            paths = ("--model", warm.path, "--data", data, "--eval-data", data, "--out", run_folder)
            sets = ["rollout.workers=1", f"async.staleness={staleness}", "evaluation.every=5", "checkpoint.every=0"]
            words = [word for text in sets for word in ("--set", text)]
            command = [sys.executable, "-P", "-m", "rlcli.cli.main", "train", "quickstart", *map(str, paths), *words]
            command += ["--seed", str(seed), "--workers", "1", "--json"]
            result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
            reports = {int(step): report["pass"]["pass@1"] for step, report in result["evaluations"].items()}
            curve = {step: reports[step]["mean"] for step in sorted(reports)}
            until = min((step for step, accuracy in curve.items() if accuracy >= TARGET), default=None)
            spent = [line["time/step_s"] for line in lines if line["step"] and (until is None or line["step"] <= until)]
            facts = {"seed": seed, "staleness": staleness, "steps": until, "seconds": sum(spent) if until else None}
            rows.append({**facts, "last": list(curve.values())[-1], "curve": curve})
            print(f"seed {seed}, staleness {staleness}: {until} steps, {sum(spent):.1f} s", file=sys.stderr)
    return {"learns": rows}


def simulations(folder: Path) -> dict[str, Any]:
    """The best layout of each staleness, as `rlcli plan` simulates it: lengths and speeds are assumed."""
    from rlcli_planner.launch.memory_auto import planned

    from rlcli.model.io.tiny_model import make_tiny_model

    rows = []
    for name, (sizes, overrides) in SIMULATED.items():
        model_folder = make_tiny_model(folder / name)
        config = json.loads((model_folder / "config.json").read_text())
        config |= {**sizes, "head_dim": 128, "max_position_embeddings": 32768, "layer_types": None}
        (model_folder / "config.json").write_text(json.dumps(config))
        sets = [
            *overrides,
            "rollout.prompts_per_step=512",
            "rollout.samples_per_prompt=16",
            "train.tokens_per_microbatch=20480",
        ]
        sets += ["rollout.max_response_tokens=16384", "rollout.max_concurrent=256"]
        for gpus in (8, 16, 32, 64, 128, 256):
            forecast, _ = planned("grpo", {"model.path": str(model_folder)}, sets, f"h100:{gpus}", lambda note: None)
            if (advice := forecast.asynchrony) is None:
                continue
            best = {option.staleness: option for option in sorted(advice.options, key=lambda option: option.gain)}
            gains = {staleness: {"gain": option.gain, **option.keys} for staleness, option in sorted(best.items())}
            rows.append({"model": name, "gpus": gpus, "step_s": advice.synchronous.step_s, "best": gains})
    return {"simulated": rows}


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    if "learns" in report:
        table = Table(
            "staleness", f"steps to {TARGET}", "seconds", "last accuracy", title="median \\[least, most] of seeds"
        )
        for staleness in STALENESS:
            rows = [row for row in report["learns"] if row["staleness"] == staleness]
            steps, seconds, last = ([row[name] for row in rows] for name in ("steps", "seconds", "last"))
            table.add_row(str(staleness), _spread(steps, "{:.0f}"), _spread(seconds, "{:.1f}"), _spread(last, "{:.3f}"))
    elif "simulated" in report:
        table = Table(
            "model", "H100s", "synchronous step", *(f"S = {value}" for value in STALENESS[1:]), title="simulated"
        )
        for row in report["simulated"]:
            gains = [
                f"{best['gain']:.2f} × ({best.get('cluster.workers', row['gpus'])} + {best.get('rollout.workers', 0)})"
                for best in row["best"].values()
            ]
            table.add_row(row["model"], str(row["gpus"]), f"{row['step_s']:.0f} s", *gains)
    else:
        table = Table(
            "devices", "staleness", "a step", "gain", "predicted, alone", "error", "predicted, beside", "error"
        )
        for row in report["rows"]:
            known = (("predicted_gain_alone", "error_alone"), ("predicted_gain_beside", "error_beside"))
            gains = [text for gain, error in known for text in (f"{row[gain]:.2f} ×", f"{row[error]:+.0%}")]
            times = f"{row['step_s']:.2f} s", f"{row['gain']:.2f} ×"
            table.add_row(row["layout"], str(row["staleness"]), *times, *gains)
        lengths = report["lengths"]
        table.caption = f"lengths: mean {lengths['mean']:.0f}, longest {lengths['longest']} tokens"
    Console(width=110).print(table)


def _spread(values: list[float | None], form: str) -> str:
    present = sorted(value for value in values if value is not None)
    if not present:
        return "never"
    missing = f" ({len(values) - len(present)} never)" if len(present) < len(values) else ""
    return f"{form.format(median(present))} [{form.format(present[0])}, {form.format(present[-1])}]{missing}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny-1m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="longest response")
    parser.add_argument("--median", type=float, default=48, help="of the lengths")
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of their logarithm")
    parser.add_argument("--steps", type=int, default=12, help="of each run that count")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--learns", action="store_true", help="compare what is learnt in the place of the time")
    parser.add_argument("--seeds", type=int, default=5, help="of --learns")
    parser.add_argument("--cache", type=Path, help="where the warm starts of --learns are kept (default: nowhere)")
    parser.add_argument("--simulate", action="store_true", help="larger models on 8 to 256 GPUs")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlcli-async-") as folder:
        if arguments.simulate:
            report = simulations(Path(folder))
        else:
            report = (learns if arguments.learns else pays)(arguments, Path(folder))
    show(report)
    write_json(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
