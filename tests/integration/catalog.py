"""Train recipes for two steps each on one group of workers, and print their results as JSON, a line per recipe.

    python tests/integration/catalog.py MODEL DATA OUT WORKERS RECIPE…

A recipe may name a harm, as in `grpo:swapped`, which is done to the last rank (see `harms.py`); `failed` is the message
with which the run stops. CATALOG_SETS has further `--set` arguments for all recipes, separated by blanks.

Starting Ray and importing vLLM takes half a minute, once; the roles are built again for each recipe, as in any run.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from harms import SETTINGS, harmed

from rlcli.algorithms.build import build_algorithm
from rlcli.cluster.supervisor.stop_signals import StopOnSignal
from rlcli.config.load import Resolved, dump_toml, resolve
from rlcli.errors import RunFailed
from rlcli.launch.launch import make_trainer, running_workers, worker_spec
from rlcli.launch.preflight import prepare
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.runs.folder import RunFolder
from rlcli.runs.record_files import metrics_of
from rlcli.runs.tracking import open_trackers
from rlcli.runs.tracking.run_console import View
from rlcli.training.worker.calls import WorkerCalls

STEPS = 2
SMALL = [
    *("train.minibatches=2", "train.tokens_per_microbatch=256", "train.lr=1e-3", "train.warmup_steps=0"),
    *("rollout.prompts_per_step=4", "rollout.max_response_tokens=24", "data.max_prompt_tokens=32"),
    *("rollout.tensor_parallel=1", "rollout.kv_cache_mb=64", "dynamic_sampling.max_batches=4"),
    *("critic.warmup_steps=0", "evaluation.data=", "model.gradient_checkpointing=false", "checkpoint.every=0"),
    # Random text never earns the reward of a right answer, but it can earn this one: so there is a gradient.
    *("verifier.name=test-even", "tracking.trackers="),
]
"""Sizes that fit a laptop; the settings that define a recipe are unchanged."""
CONVERSING = [
    *("train.tokens_per_microbatch=4096", "data.max_prompt_tokens=1500", "environment.context_tokens=300"),
    *("environment.turn_tokens=12", "rollout.samples_per_prompt=4", "rollout.kv_cache_mb=256"),
]
"""For recipes with an environment: one token is one character, of its messages and of the schemas of its tools too."""


@cache
def teacher() -> Path:
    """A tiny model with other random weights than the one that is trained."""
    folder = Path(tempfile.mkdtemp(prefix="rlcli-teacher-"))
    atexit.register(shutil.rmtree, folder)
    return make_tiny_model(folder / "tiny", seed=1)


def sets_for(recipe: str) -> list[str]:
    """`--set` arguments that make a recipe small."""
    config = resolve(recipe).config
    if config.environment.name:
        return [*SMALL, *CONVERSING, f"environment.turns={min(config.environment.turns, 2)}"]
    samples = min(config.rollout.samples_per_prompt, 4)
    buffer = min(config.shaping.overlong_buffer, 8)
    distils = build_algorithm(**config.algorithm.model_dump(), trial_calls=False).needs_teacher
    small = [*SMALL, f"teacher.path={teacher()}"] if distils else SMALL
    return [*small, f"rollout.samples_per_prompt={samples}", f"shaping.overlong_buffer={buffer}"]


def resolved(name: str, model: str, data: str, workers: int) -> Resolved:
    """data: `{recipe}` in it stands for the recipe's name; a recipe without data gets none."""
    recipe, _, harm = name.partition(":")
    needs_data = resolve(recipe).config.data.path or not resolve(recipe).config.environment.name
    path = data.replace("{recipe}", recipe) if needs_data else None
    flags = {"model.path": model, "data.path": path, "train.steps": STEPS, "cluster.workers": workers}
    return resolve(
        recipe, flags, sets_for(recipe) + SETTINGS.get(harm, []) + os.environ.get("CATALOG_SETS", "").split()
    )


def main(model: str, data: str, output_folder: Path, workers: int, recipes: list[str]) -> None:
    first = prepare(resolved(recipes[0], model, data, workers).config)
    (output_folder / "logs").mkdir(parents=True)
    with (
        View() as view,
        StopOnSignal(lambda: None) as stop,
        running_workers(first, output_folder / "logs", on_phase=view.phase) as groups,
    ):
        for recipe in recipes:
            started, failed = time.perf_counter(), ""
            config = resolved(recipe, model, data, workers)
            ready = prepare(config.config)
            spec = worker_spec(ready.context, output_folder / "logs", groups.spec.group_id)
            groups.policy.call(WorkerCalls.build, spec)
            _, _, harm = recipe.partition(":")
            with (
                RunFolder.create(output_folder / recipe, force=False) as folder,
                harmed(groups.engines or groups.policy, harm),
            ):
                folder.write_config(dump_toml(config))
                trackers = open_trackers((), folder, "", {}, view.note)
                try:
                    make_trainer(ready, dataclasses.replace(groups, spec=spec), folder, trackers, view, stop).run()
                except RunFailed as error:
                    if not harm:
                        raise
                    failed = str(error)
                trackers.close()
            row = {"recipe": recipe, "seconds": time.perf_counter() - started, "failed": failed}
            # While Ray runs, sys.stdout leads to stderr.
            print(json.dumps(row | {"steps": metrics_of(output_folder / recipe)}), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    model, data, output_folder, workers, *recipes = sys.argv[1:]
    main(model, data, Path(output_folder), int(workers), recipes)
