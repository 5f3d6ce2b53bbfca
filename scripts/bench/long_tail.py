"""What a long tail of lengths costs, and what is won back: fixed shares, groups by free slots, `rollout.oversample`.

    .venv/bin/python scripts/bench/long_tail.py [--model tiny-1m] [--slots 16] [--tokens 256] [--json FILE]

Two engines generate steps of prompts × samples, whose lengths are log-normal: about half of the spread lies between
prompts (hard ones take long), half within a group. A response's length is a function of its seed, so all variants are
asked for the same. The variants take turns, each going on from its own last step: what oversampling carries over is
part of the next one. Useful tokens are those of the samples that a step is given to train on; an engine is idle from
when it has nothing left to generate until the other one is done.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from _common import interleaved, ratio, write_json
from _step_work import make_model

ENGINES = 2


def give_lengths(worker: Any, median_tokens: float, spread: float) -> None:
    """Within a worker: have its engine end each response where its prompt and its seed say."""
    import math
    import zlib

    import numpy as np

    engine = worker.engine
    params = engine._params

    def normal(*seed: int) -> float:
        return float(np.random.default_rng(seed).normal())

    def bounded(request: Any) -> Any:
        given = params(request)
        z = (normal(zlib.crc32(request.prompt.tobytes())) + normal(request.seed)) / math.sqrt(2)
        length = round(median_tokens * math.exp(spread * z))
        begun = 0 if request.response_prefix is None else len(request.response_prefix)
        given.max_tokens = max(1, min(given.max_tokens, length - begun))
        given.ignore_eos, given.stop_token_ids = True, []
        return given

    engine._params = bounded


@dataclass
class Variant:
    """source: of its steps. Of each run, useful: tokens trained on, a second; idle: share of the engines' time; stale:
    share of samples with tokens of an older step."""

    source: Any
    same_bits: bool
    step: int = 0
    useful: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    stale: list[float] = field(default_factory=list)

    def run(self, workers: Any, steps: int, busy: list[float]) -> float:
        """Seconds per useful token. busy: what each engine adds its seconds of generation to."""
        import ray

        workers.same_bits = self.same_bits
        tokens = samples = stale = 0
        busy[:] = []
        started = time.perf_counter()
        for _ in range(steps):
            self.step += 1
            version = self.step
            ray.get([actor.__ray_call__.remote(lambda w: _set(w, version)) for actor in workers._actors])  # noqa: B023
            batch = self.source.take(self.step)
            tokens += int(batch.samples.drawn_tokens.sum())
            samples, stale = samples + len(batch.samples), stale + batch.stats.stale
        seconds = time.perf_counter() - started
        self.useful.append(tokens / seconds)
        self.idle.append(1 - sum(busy) / (ENGINES * seconds))
        self.stale.append(stale / samples)
        return seconds / tokens


def _set(worker: Any, version: int) -> None:
    worker.rollout_role.version = version


def make_data(folder: Path, count: int) -> Path:
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    made = prepare(converter_named("arithmetic"), ConvertOptions(count=count, test_count=8))
    folder.mkdir()
    write_prompts(folder / "train.parquet", made.splits["train"])
    return folder


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import ray
    from ray import cloudpickle

    from rlcli.config.load import resolve
    from rlcli.launch.launch import running_workers
    from rlcli.launch.preflight import prepare
    from rlcli.rollout.scheduler import sync_rollouts
    from rlcli.rollout.scheduler.rollout_source import source_of

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    flags: dict[str, object] = {
        "model.path": make_model(arguments.model, folder / "model"),
        "data.path": str(make_data(folder / "data", 4096)),
        "cluster.workers": ENGINES,
    }
    sets = [
        f"rollout.prompts_per_step={arguments.prompts}",
        f"rollout.samples_per_prompt={arguments.samples}",
        f"rollout.max_response_tokens={arguments.tokens}",
        f"rollout.max_concurrent={arguments.slots}",
        *("data.max_prompt_tokens=64", "tracking.save_samples=false", "train.tokens_per_microbatch=65536"),
    ]

    def config(oversample: float) -> Any:
        return resolve("grpo", flags, [*sets, f"rollout.oversample={oversample}"]).config

    busy: list[float] = []
    gather = sync_rollouts.gather

    def timed(*args: Any, **kwargs: Any) -> Any:
        reports = gather(*args, **kwargs)
        busy.extend(report.stats.generate_s for report in reports)
        return reports

    sync_rollouts.gather = timed
    ready = prepare(config(max(arguments.oversample)))
    logs = folder / "logs"
    logs.mkdir()
    ready = replace(ready, roles=frozenset({"engine"}))
    with running_workers(ready, logs, on_phase=lambda name: None) as groups:
        workers = groups.policy
        spread, middle = arguments.spread, arguments.median
        ray.get([a.__ray_call__.remote(lambda w: give_lengths(w, middle, spread)) for a in workers._actors])

        def variant(oversample: float, same_bits: bool) -> Variant:
            source = source_of(
                config(oversample), ready.prompts, workers, folder, greedy=False, on_progress=lambda done, total: None
            )
            return Variant(source, same_bits)

        variants = {"fixed shares": variant(1.0, True), "free slots": variant(1.0, False)}
        variants |= {f"oversample {factor:g}": variant(factor, False) for factor in arguments.oversample}

        def runner(one: Variant) -> Callable[[], float]:
            return lambda: one.run(workers, arguments.steps, busy)

        times = interleaved({name: runner(one) for name, one in variants.items()}, repeats=arguments.repeats)
    base = times["fixed shares"]
    return {
        name: {
            "useful_tokens_per_s": median(one.useful[1:]),
            "against_fixed_shares": ratio(base, times[name]),
            "idle": median(one.idle[1:]),
            "stale": median(one.stale[1:]),
        }
        for name, one in variants.items()
    }


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "useful tokens/s", "× fixed shares", "engines idle", "samples with older tokens")
    for name, one in found.items():
        rate, times = f"{one['useful_tokens_per_s']:.0f}", f"{one['against_fixed_shares']:.2f}"
        table.add_row(name, rate, times, f"{one['idle']:.0%}", f"{one['stale']:.0%}")
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny-1m")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="longest response")
    parser.add_argument("--median", type=float, default=24, help="of the lengths")
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of their logarithm")
    parser.add_argument("--slots", type=int, default=16, help="responses that one engine generates at once")
    parser.add_argument("--oversample", type=float, nargs="*", default=[1.25])
    parser.add_argument("--steps", type=int, default=3, help="of each run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlcli-tail-") as folder:
        found = measure(arguments, Path(folder))
    show(found)
    write_json(arguments.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
