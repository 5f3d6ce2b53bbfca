"""Engines in workers of their own: does generating the next step's samples while one is trained on pay?

    .venv/bin/python scripts/bench/async_rollout.py [--model tiny-1m] [--repeats 5] [--json FILE]
    .venv/bin/python scripts/bench/async_rollout.py --learns [--steps 60]

One worker trains and one generates, each on a core. Runs with `async.staleness` 0 and 1 take turns on the same workers;
beside them, in a cluster of its own, runs whose two workers do both (`rollout.workers` = 0), which is what the same two
devices can do otherwise. Told is the median time of a step between the second and the last but one.

--learns trains the quickstart's model from its warm start, once with each staleness: what it costs in reward.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from _common import interleaved, ratio, write_json
from _quickstart import evaluations, percent, rlcli
from _step_work import make_model

from rlcli.tracking.console import View
from rlcli.types import ConvertOptions

APART = ("rollout.workers=1", "async.staleness=0")
AHEAD = ("rollout.workers=1", "async.staleness=1")
TOGETHER = ("cluster.workers=2",)
PHASES = ("generate", "wait_for_rollout", "update", "sync", "step")


class RecordingView(View):
    """Says nothing, and keeps the metrics of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Mapping[str, float]] = []

    def start(self, *_: object) -> None: ...

    def phase(self, name: str) -> None: ...

    def step(self, metrics: Mapping[str, float]) -> None:
        self.steps.append(metrics)


class Contest:
    """Runs of a workload, each of `steps` steps and all in one folder, on workers that stay."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.folder, self.steps, self.number = folder, arguments.steps or 6, 0
        self.sets = [
            f"rollout.prompts_per_step={arguments.prompts}",
            f"rollout.samples_per_prompt={arguments.samples}",
            f"rollout.max_response_tokens={arguments.tokens}",
            *("data.max_prompt_tokens=64", "train.tokens_per_microbatch=4096", "tracking.save_samples=false"),
            # Whatever the reward: every sample is forwarded, and has a gradient.
            *("algorithm.entropy_coef=0.001", "checkpoint.every=0"),
        ]
        few = ConvertOptions(count=max(arguments.prompts * self.steps, 64), test_count=64)
        self.flags: dict[str, object] = {
            "model.path": make_model(arguments.model, folder / "model"),
            "data.path": str(make_data(folder / "data", few)),
            "train.steps": self.steps,
        }
        self.seen: dict[tuple[str, ...], list[Mapping[str, float]]] = {}

    def prepared(self, own: tuple[str, ...]) -> Any:
        from rlcli.config.load import resolve
        from rlcli.launch.preflight import prepare

        return prepare(resolve("grpo", self.flags, [*self.sets, *own]).config)

    @contextmanager
    def workers(self, own: tuple[str, ...]) -> Iterator[Any]:
        from rlcli.launch.launch import running_workers

        logs = self.folder / f"logs-{len(self.seen)}"
        logs.mkdir()
        with running_workers(self.prepared(own), logs, train=True, on_phase=lambda name: None) as groups:
            yield groups

    def run(self, groups: Any, own: tuple[str, ...]) -> float:
        """Train once; the median seconds of its steps but the first two, which warm up, and the last, beside which
        nothing is generated."""
        from rlcli.launch.launch import trainer_of, worker_spec
        from rlcli.runs.folder import RunFolder
        from rlcli.supervisor.signals import StopOnSignal
        from rlcli.tracking import open_trackers

        ready, logs = self.prepared(own), Path(groups.spec.logs)
        spec = worker_spec(ready, logs, train=True, group_id=groups.spec.group_id)
        groups.policy.build(spec)
        self.number += 1
        view = RecordingView()
        with RunFolder.create(self.folder / f"run-{self.number}") as folder, StopOnSignal(lambda: None) as stop:
            folder.write_config("")
            trackers = open_trackers((), folder, "", {}, print)
            trainer_of(ready, dataclasses.replace(groups, spec=spec), folder, trackers, view, stop).run()
            trackers.close()
        counted = view.steps[2:-1]
        self.seen.setdefault(own, []).extend(counted)
        return median(step["time/step_s"] for step in counted)


def make_data(folder: Path, options: ConvertOptions) -> Path:
    from rlcli.data.prompts.schema import write_prompts
    from rlcli.prep.pipeline import converter_named, prepare

    for split, prompts in prepare(converter_named("arithmetic"), options).splits.items():
        write_prompts(folder / f"{split}.parquet", prompts)
    return folder


def pays(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Step times of the three layouts, their phases, and the ratios of paired runs."""
    contest = Contest(arguments, folder)
    with contest.workers(APART) as groups:
        times = interleaved(
            {"0": lambda: contest.run(groups, APART), "1": lambda: contest.run(groups, AHEAD)},
            repeats=arguments.repeats,
        )
    with contest.workers(TOGETHER) as groups:
        together = interleaved({"together": lambda: contest.run(groups, TOGETHER)}, repeats=arguments.repeats)
    times |= together
    layouts = {"0": APART, "1": AHEAD, "together": TOGETHER}
    return {
        "step_s": {name: median(values) for name, values in times.items()},
        "phases_s": {
            name: {phase: median(step[f"time/{phase}_s"] for step in contest.seen[own]) for phase in PHASES}
            for name, own in layouts.items()
        },
        "ratio_0_to_1": ratio(times["0"], times["1"]),
        "ratio_together_to_1": median(times["together"]) / median(times["1"]),
    }


def learns(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Held-out accuracy and reward of the quickstart's task with each staleness."""
    from rlcli.quickstart.sums import Sums
    from rlcli.quickstart.warm_start import warm_start

    data = make_data(folder / "data", ConvertOptions(seed=arguments.seed))
    warm = warm_start(arguments.cache or folder / "cache", Sums(data), arguments.seed)
    found: dict[str, Any] = {}
    for own in (APART, AHEAD):
        out = folder / f"run-{len(found)}"
        sets = [word for text in own for word in ("--set", text)]
        sets += ["--steps", str(arguments.steps)] if arguments.steps else []
        places = ("--model", str(warm.path), "--data", str(data), "--eval-data", str(data), "--out", str(out))
        result, seconds = rlcli("train", "quickstart", *places, "--seed", str(arguments.seed), "--workers", "1", *sets)
        before, *_, after = evaluations(result).values()
        rewards = result["reward_first"], result["reward_last"]
        found[own[1][-1]] = {"before": before, "after": after, "rewards": rewards, "seconds": seconds}
    return found


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    if "step_s" not in found:
        table = Table("staleness", "pass@1 before", "pass@1 after", "sampled reward, first → last step", "seconds")
        for staleness, one in found.items():
            first, last = one["rewards"]
            accuracy = percent(one["before"]), percent(one["after"])
            table.add_row(staleness, *accuracy, f"{first:.2f} → {last:.2f}", f"{one['seconds']:.0f}")
        Console().print(table)
        return
    table = Table("layout", *(f"{phase} s" for phase in PHASES))
    names = {"0": "1 trains, 1 generates", "1": "the same, staleness 1", "together": "2 do both"}
    for name, phases in found["phases_s"].items():
        table.add_row(names[name], *(f"{phases[phase]:.3f}" for phase in PHASES))
    Console().print(table)
    print(f"staleness 0 ÷ 1: {found['ratio_0_to_1']:.2f}; two that do both ÷ 1: {found['ratio_together_to_1']:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny-1m")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="longest response")
    parser.add_argument("--steps", type=int, default=0, help="of each run (default: 6; of --learns: the recipe's)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learns", action="store_true", help="compare what is learnt in the place of the time")
    parser.add_argument("--cache", type=Path, help="where the warm start of --learns is kept (default: nowhere)")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlcli-async-") as folder:
        found = (learns if arguments.learns else pays)(arguments, Path(folder))
    show(found)
    write_json(arguments.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
