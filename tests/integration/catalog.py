"""Train recipes for two steps each on one group of workers, and print what came of them as JSON, a line a recipe.

    python tests/integration/catalog.py MODEL DATA OUT WORKERS RECIPE…

Starting Ray and importing vLLM takes half a minute, once; the roles are built anew for each recipe, as in any run.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

from rlcli.config.load import resolve
from rlcli.trainer.launch import running_workers, train, worker_spec
from rlcli.trainer.preflight import Prepared, prepare
from rlcli.trainer.run_folder import RunFolder
from rlcli.trainer.stop import StopOnSignal
from rlcli.trainer.tracking import open_trackers
from rlcli.trainer.view import View

STEPS = 2
SMALL = [
    *("train.minibatches=2", "train.tokens_per_microbatch=256", "train.lr=1e-3", "train.warmup_steps=0"),
    *("rollout.prompts_per_step=4", "rollout.max_response_tokens=24", "data.max_prompt_tokens=32"),
    *("rollout.tensor_parallel=1", "rollout.kv_cache_mb=64", "dynamic_sampling.max_batches=4"),
    *("critic.warmup_steps=0", "evaluation.data=", "model.gradient_checkpointing=false", "checkpoint.every=0"),
    # Random text earns no answer's reward; this one it can earn, so that there is a gradient.
    *("verifier.name=test-even", "tracking.trackers="),
]
"""What a laptop needs: everything that makes a recipe what it is stays."""


def sets_for(recipe: str) -> list[str]:
    """`--set` arguments that make a recipe small."""
    own = resolve(recipe).config
    samples = min(own.rollout.samples_per_prompt, 4)
    buffer = min(own.shaping.overlong_buffer, 8)
    return [*SMALL, f"rollout.samples_per_prompt={samples}", f"shaping.overlong_buffer={buffer}"]


def prepared(recipe: str, model: str, data: str, workers: int) -> Prepared:
    flags = {"model.path": model, "data.path": data, "train.steps": STEPS, "cluster.workers": workers}
    return prepare(resolve(recipe, flags, sets_for(recipe)).config)


def main(model: str, data: str, out: Path, workers: int, recipes: list[str]) -> None:
    first = prepared(recipes[0], model, data, workers)
    (out / "logs").mkdir(parents=True)
    with (
        View() as view,
        StopOnSignal(lambda: None) as stop,
        running_workers(first, out / "logs", train=True, on_phase=view.phase) as groups,
    ):
        for recipe in recipes:
            started = time.perf_counter()
            ready = prepared(recipe, model, data, workers)
            spec = worker_spec(ready, out / "logs", train=True, group_id=groups.spec.group_id)
            groups.policy.build(spec)
            with RunFolder.create(out / recipe, force=False) as folder:
                trackers = open_trackers((), folder, "", {}, view.note)
                train(ready, dataclasses.replace(groups, spec=spec), folder, trackers, view, stop)
                trackers.close()
            steps = [json.loads(line) for line in (out / recipe / "metrics.jsonl").read_text().splitlines()]
            row = {"recipe": recipe, "seconds": time.perf_counter() - started, "steps": steps}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    model, data, out, workers, *recipes = sys.argv[1:]
    main(model, data, Path(out), int(workers), recipes)
