"""A whole step of GRPO against its floor: raw vLLM generation, and one forward and backward pass over those tokens.

    python scripts/bench/step.py --model tiny-1m --max-tokens 64 [--ragged] [--workers 1,2] [--json step.json]
    python scripts/bench/step.py --model 0.5b --prompts 64 --max-tokens 1024                  # on a GPU
    python scripts/bench/step.py --model FOLDER --dtype bfloat16 --prompt-tokens 48           # a real model
    python scripts/bench/step.py --compare trl --trl-python /path/to/python                   # where TRL is installed

In one run, in turn, round by round: (a) vLLM generates the workload, in a plain process; (b) torch trains on as many
tokens, in a plain process; (c) a step of a real run (Ray, workers, verifiers, samples saved, weights synced, checks).
All contestants get the same prompts and give responses of the same lengths; the weights are random. Reported: the
median of (c) ÷ ((a) + (b)), pair by pair, where every group's rewards differ, so that no sample is left out; and, step
about, of steps in which some groups' rewards are all equal, whose samples have no gradient and so need no forward pass
(--equal-groups 0: of none, in half the time).

`--no-floor` leaves (a) and (b) out, where memory or time does not suffice for all contestants at once.

With W workers the floor is W processes of as many threads as a worker has. The floor of a row is that of the fastest
layout.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _common import ratio, write_json
from _step_ours import Step, run_ours
from _step_prompts import make_prompts
from _step_raw import RawGroup, raw_group
from _step_trl import TrlError, TrlGroup, trl_group
from _step_work import Workload, draw_lengths, make_model
from rich.console import Console
from rich.table import Table

from rlcli.cluster import ray_session
from rlcli.cluster.process import malloc

HEAPS: dict[str, dict[str, str]] = {"jemalloc": malloc.environment(), "glibc": malloc.GLIBC, "fresh": {}}
"""Heaps of our workers: the default, glibc's configured to keep freed memory, and glibc's default."""


def main() -> None:
    options = parse()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder, ExitStack() as stack:
        device = resolve_device(options)
        model = make_model(options.model, Path(folder) / "model")
        work = Workload(
            model=model,
            dtype=options.dtype or ("float32" if device == "cpu" else "bfloat16"),
            prompt_tokens=options.prompt_tokens,
            prompts=make_prompts(model, options.prompts, options.prompt_tokens),
            max_tokens=options.max_tokens,
            micro=options.micro,
            lengths=draw_lengths(options.prompts, options.samples, options.max_tokens, options.ragged),
        )
        console.print(f"{options.model}, {work.dtype}: {work.response_tokens} response tokens of {work.tokens}")
        cache = options.kv_cache_mb
        raw = {
            world: stack.enter_context(raw_group(work, world, threads(world), device, cache << 20))
            for world in (options.workers if options.floor else ())
        }
        if raw:
            console.print("… the floor's processes are ready")
        tuned = {world: options.micro if options.fixed_micro else group.tune() for world, group in raw.items()}
        trl: dict[str, TrlGroup] = {}
        failed: dict[str, str] = {}
        for mode in options.trl_modes if options.compare == "trl" else ():
            try:
                trl[mode] = stack.enter_context(trl_group(work, mode, options, Path(folder), device))
            except TrlError as error:
                failed[mode] = str(error)
                console.print(f"TRL does not run here with {mode}: {error}", markup=False)
        contest = Contest(raw, trl)
        console.print("… and tuned")
        ours = {world: measure(work, world, options, device, contest) for world in options.workers}
    record = {
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "workload": {"response_tokens": work.response_tokens, "tokens": work.tokens},
        "raw_microbatch": tuned,
        "trl_failed": failed,
        **results(ours, contest, kinds_of(options)),
    }
    show(record)
    write_json(options.json, record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="tiny-1m", help="tiny-1m, tiny-10m, 0.5b, 1.5b (random weights), or a folder"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="what all contestants compute in; master weights are float32. Default: float32 on CPUs, bfloat16 on GPUs",
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64, help="length of the responses")
    parser.add_argument("--ragged", action="store_true", help="lengths up to that, log-normal")
    parser.add_argument("--workers", type=_numbers, default=[1], help="layouts to try, as in 1,2")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of either kind")
    parser.add_argument("--warm-up", type=int, default=1, help="steps of either kind before them that do not count")
    parser.add_argument("--micro", type=int, default=8192, help="our train.tokens_per_microbatch")
    parser.add_argument("--fixed-micro", action="store_true", help="the floor trains with --micro, and tries no other")
    parser.add_argument("--rounds", action="store_true", help="print each round's seconds, too, as a line of JSON")
    parser.add_argument("--equal-groups", type=float, default=0.5, help="share of them in every second step")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--kv-cache-mb", type=int, default=1024, help="of each engine, ours and the raw one")
    parser.add_argument("--heap", choices=HEAPS, default="jemalloc", help="of our workers on CPUs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of our run")
    parser.add_argument("--no-floor", dest="floor", action="store_false", help="measure our steps and TRL's alone")
    parser.add_argument("--compare", choices=["trl"])
    parser.add_argument("--trl-python", default="python", help="an interpreter that imports trl")
    parser.add_argument(
        "--trl-modes",
        type=lambda text: text.split(","),
        default=["generate"],
        help="of generate, batching, vllm; with :N of N samples a micro-batch (per_device_train_batch_size), else 64",
    )
    parser.add_argument("--trl-limit-s", type=float, default=120, help="for TRL to start, and for its first step")
    parser.add_argument("--json", default="", help="write the figures here too")
    options = parser.parse_args()
    if not options.floor and not options.compare:
        parser.error("--no-floor without --compare leaves nothing to compare with")
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def resolve_device(options: argparse.Namespace) -> str:
    return ray_session.resolve_device(options.device, "")


def threads(workers: int) -> int:
    return ray_session.worker_threads(workers)


class Contest:
    """The contestants that run between our steps. times: name → seconds, one entry for each round: after each of our
    steps, or after each two if they are of two kinds."""

    def __init__(self, raw: dict[int, RawGroup], trl: dict[str, TrlGroup]) -> None:
        self._runs: dict[str, Callable[[], float]] = {}
        for world, group in raw.items():
            self._runs[f"generate {world}"], self._runs[f"train {world}"] = group.generate, group.train
        for mode, other in trl.items():
            self._runs[f"trl {mode}"] = other.step
        self.times: dict[str, list[float]] = {name: [] for name in self._runs}

    def round(self) -> dict[str, float]:
        """Run each contestant once. Returns their seconds by name."""
        seconds_by_name = {name: run() for name, run in self._runs.items()}
        for name, seconds in seconds_by_name.items():
            self.times[name].append(seconds)
        return seconds_by_name


def measure(work: Workload, world: int, options: argparse.Namespace, device: str, contest: Contest) -> list[Step]:
    """Our steps in this layout, interleaved with the other contestants; warm-up steps are left out of both."""
    counts_before = {name: len(times) for name, times in contest.times.items()}
    kinds = len(kinds_of(options))
    warm_up = kinds * options.warm_up
    steps = warm_up + kinds * options.steps
    done = 0

    def between() -> None:
        nonlocal done
        done += 1
        if done % kinds == 0:
            others = contest.round()
            if options.rounds:
                print(f"ROUND {json.dumps(others)}", file=sys.__stdout__, flush=True)  # stdout itself is the run's

    setattr(malloc, "environment", lambda: HEAPS[options.heap])  # noqa: B010
    with run_ours(
        work,
        steps=steps,
        workers=world,
        device=device,
        kv_cache_mb=options.kv_cache_mb,
        equal=options.equal_groups,
        sets=options.set,
    ) as run:
        measured_steps = run(between)
    for name, times in contest.times.items():
        start = counts_before[name]
        contest.times[name] = times[:start] + times[start + options.warm_up :]
    return list(measured_steps[warm_up:])


def kinds_of(options: argparse.Namespace) -> list[str]:
    """The kinds of our steps, in turn: all samples have a gradient, or some groups have none."""
    return ["all", "some_equal"] if options.equal_groups else ["all"]


def results(ours: dict[int, list[Step]], contest: Contest, names: Sequence[str]) -> dict[str, Any]:
    """Medians in seconds, and paired ratios to the fastest floor, if there is one."""
    medians = {name: statistics.median(times) for name, times in contest.times.items()}
    measured = [world for world in ours if f"train {world}" in medians]
    floors = {world: medians[f"generate {world}"] + medians[f"train {world}"] for world in measured}
    best = min(floors, key=floors.__getitem__, default=None)
    parts = [contest.times[f"{part} {best}"] for part in ("generate", "train")] if floors else []
    floor = [sum(pair) for pair in zip(*parts, strict=True)]
    layouts = {}
    for layout_index, (world, steps) in enumerate(ours.items()):
        rounds = len(steps) // len(names)
        own_rounds = slice(layout_index * rounds, (layout_index + 1) * rounds)
        kinds = {name: steps[offset :: len(names)] for offset, name in enumerate(names)}
        layouts[world] = {
            kind: {
                "seconds": statistics.median(step.seconds for step in kind_steps),
                "to_floor": ratio([step.seconds for step in kind_steps], floor[own_rounds]) if floor else None,
                "trl_to_ours": {
                    name: ratio(times[own_rounds], [step.seconds for step in kind_steps])
                    for name, times in contest.times.items()
                    if name.startswith("trl")
                },
                "phases": phases(kind_steps),
                "skipped_samples": kind_steps[-1].metrics["plan/skipped_samples"],
            }
            for kind, kind_steps in kinds.items()
        }
    return {"medians": medians, "floors": floors, "floor": best, "ours": layouts}


def phases(steps: Sequence[Step]) -> dict[str, float]:
    names = {name: None for step in steps for name in step.phases()}
    return {name: statistics.median(step.phases().get(name, 0.0) for step in steps) for name in names}


def show(record: dict[str, Any]) -> None:
    console = Console()
    medians, best = record["medians"], record["floor"]
    table = Table("floor", "generate", "train", "together", title="raw vLLM and raw torch, seconds")
    for world, floor in record["floors"].items():
        mark = " (best)" if world == best else ""
        parts = (medians[f"generate {world}"], medians[f"train {world}"], floor)
        table.add_row(f"{world} × {threads(world)} threads{mark}", *(f"{value:.3f}" for value in parts))
    if record["floors"]:
        console.print(table)
    trl = [name for name in medians if name.startswith("trl")]
    table = Table("ours", "step", "÷ floor", *(f"{name} ÷ ours" for name in trl), title="whole steps")
    fastest = min(record["ours"], key=lambda world: float(record["ours"][world]["all"]["seconds"]))
    for world, kinds in record["ours"].items():
        for kind, layout in kinds.items():
            others = (f"{layout['trl_to_ours'][name]:.2f}" for name in trl)
            mark = " (best)" if world == fastest else ""
            name = f"{world} × {threads(world)} threads{mark}, {kind.replace('_', ' ')}"
            to_floor = f"{layout['to_floor']:.3f}" if record["floors"] else "–"
            table.add_row(name, f"{layout['seconds']:.3f}", to_floor, *others)
    console.print(table)
    names = {name: None for kinds in record["ours"].values() for layout in kinds.values() for name in layout["phases"]}
    columns = [f"{world} {kind.replace('_', ' ')}" for world, kinds in record["ours"].items() for kind in kinds]
    table = Table("phase", *columns, title="seconds by phase (medians)")
    for name in names:
        cells = [layout["phases"].get(name, 0.0) for kinds in record["ours"].values() for layout in kinds.values()]
        if max(cells) > 5e-4:
            table.add_row(name.replace("_", " "), *(f"{cell:.3f}" for cell in cells))
    console.print(table)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
