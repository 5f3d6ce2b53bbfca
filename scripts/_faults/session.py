"""One layout of workers, and one short run after another on it, each with a fault or none. Prints a JSON line a run.

    python scripts/_faults/session.py WORK LAYOUT STEPS NAME…

NAME is that of a fault, or `unharmed:RECIPE`. Starting Ray and vLLM takes half a minute, once; the roles are built anew
for each run, as in any run.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import catalog
import in_controller
import in_workers
import patches
from catalog import FAULTS, LAYOUTS, MODELS, REAL_FAULTS, REAL_LAYOUTS, SOUND, Fault

from rlcli.cluster.supervisor.stop_signals import StopOnSignal
from rlcli.config.load import Resolved, dump_toml, resolve
from rlcli.errors import RlcliError, RunFailed
from rlcli.launch import launch
from rlcli.launch.preflight import prepare
from rlcli.runs.folder import RunFolder, events_of
from rlcli.runs.record_files import metrics_of
from rlcli.runs.tracking import open_trackers
from rlcli.runs.tracking.run_console import View
from rlcli.training.loop.trainer import Trainer
from rlcli.training.worker.calls import WorkerCalls

SMALL = (
    *("train.minibatches=2", "train.tokens_per_microbatch=256", "train.lr=1e-4", "train.warmup_steps=0"),
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "rollout.max_response_tokens=24"),
    *("data.max_prompt_tokens=32", "rollout.kv_cache_mb=64", "critic.warmup_steps=0", "checkpoint.every=0"),
    *("rollout.tensor_parallel=1", "model.gradient_checkpointing=false", "tracking.trackers=", "evaluation.data="),
    *("shaping.overlong_buffer=0", "verifier.processes=1"),
    # Random text earns it half the time, however long it is, so that there is something to learn.
    'verifier.name=regex(pattern="^.{0,2}[a-z]", match=search)',
    # So does any of these end a response: an untrained model hardly draws its end token.
    f"rollout.stop_token_ids={list(range(5, 90, 2))}",
)
TASK = (
    *("train.lr=2e-4", "train.betas=[0.9,0.99]", "train.tokens_per_microbatch=4096"),
    *("critic.lr=2e-3", "critic.warmup_steps=0", "checkpoint.every=0", "tracking.trackers=", "evaluation.data="),
    *("data.max_prompt_tokens=32", "rollout.max_response_tokens=40", "rollout.kv_cache_mb=64"),
    "verifier.processes=1",
)
"""The quickstart's settings, and 64 samples a step: small batches are the harder test."""
SIZES = {"ppo": ("rollout.prompts_per_step=64",), "dapo": ("shaping.overlong_buffer=10",)}
REAL = (
    *("train.tokens_per_microbatch=2048", "train.lr=1e-5", "train.warmup_steps=0", "checkpoint.every=0"),
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=8", "rollout.max_response_tokens=32"),
    *("rollout.kv_cache_mb=256", "tracking.trackers=", "evaluation.data=", "verifier.processes=1"),
    # Most responses have such a letter: most groups differ, and are trained on.
    'verifier.name=regex(pattern="[jkvw]", match=search)',
)
"""64 samples a step of the model that `--model` gives."""
FOUND = {
    "log_prob_check": r"different log-probs at equal weights",
    "weights": r"after the weight sync",
    "signature": r"other tokens, log-probs or reward|different prompts",
    "coverage": r"signatures of the samples|response tokens forwarded",
    "denominator": r"loss's denominator",
    "advantages": r"advantages of the samples",
    "reduction": r"gradients are not summed",
    "optimizer step": r"changed no weight",
    "seeds": r"share seeds",
    "cursor": r"cursor does not move",
    "verdict": r"verdict",
    "template": r"chat template|would begin with",
    "verifier_failures": r"verifications (were killed|crashed)",
}
"""Check → what the message of a run that it stops matches; the first that does names it."""


def resolved(work: Path, fault: Fault, recipe: str, steps: int) -> Resolved:
    if fault.layout == SOUND:
        flags: dict[str, object] = {"model.path": str(work / "warm"), "data.path": str(work / "sums")}
        rollout_sizes = ("rollout.prompts_per_step=8", "rollout.samples_per_prompt=8") if recipe != "ppo" else ()
        flags |= {"train.steps": steps, "train.warmup_steps": min(10, steps), "cluster.workers": 2}
        return resolve(recipe, flags, [*TASK, *rollout_sizes, *SIZES.get(recipe, ())])
    model, data = work / MODELS.get(fault.layout, "model"), work / "data"
    if fault.layout in REAL_LAYOUTS:
        flags = {"model.path": str(model), "data.path": str(data), "train.steps": steps, "cluster.workers": 1}
        return resolve(recipe, flags, [*REAL, *REAL_LAYOUTS[fault.layout], *fault.settings])
    if fault.model:
        model, data = work / f"model-{fault.name}", work / "data-with-system"
        shutil.copytree(work / "model", model, dirs_exist_ok=True)
        fault.model(model)
    flags = {"model.path": str(model), "data.path": str(data), "train.steps": steps}
    flags["cluster.workers"] = 2
    return resolve(recipe, flags, [*SMALL, *LAYOUTS[fault.layout], *fault.settings])


@contextmanager
def planted(fault: Fault, groups: launch.WorkerPools) -> Iterator[None]:
    """Plant the fault, in all workers or in the last one, and in each trainer that is built meanwhile."""
    import ray
    from ray import cloudpickle

    for module in (patches, in_workers, in_controller, catalog):
        cloudpickle.register_pickle_by_value(module)
    actors = (groups.engines or groups.policy)._actors
    targets = actors[-1:] if fault.last_rank else actors
    build = Trainer.__init__

    def built(trainer: Any, *args: Any, **kwargs: Any) -> None:
        build(trainer, *args, **kwargs)
        if fault.controller:
            fault.controller(trainer)

    if fault.worker:
        ray.get([actor.__ray_call__.remote(fault.worker) for actor in targets])
    patches.patch(Trainer, "__init__", built)
    try:
        yield
    finally:
        patches.heal()
        ray.get([actor.__ray_call__.remote(_heal) for actor in actors])


def _heal(worker: Any) -> None:
    """Take the fault out, and what a run that was stopped has left in the engine."""
    patches.heal()
    engine = worker.engine
    if engine is not None:
        states = engine._engine.output_processor.request_states.values()
        engine._engine.abort_request([state.external_req_id for state in states])
        while engine._engine.has_unfinished_requests():
            engine._engine.step()
        engine._keys.clear()
        engine._llm.reset_prefix_cache()


def caught(folder: Path, failed: str) -> tuple[str, int, str]:
    """The first check that reported something, its step and its message; empty if none did."""
    warnings = [event for event in events_of(folder) if event["event"] == "warning"]
    done = [line["step"] for line in metrics_of(folder)]
    step = max(done, default=0) + 1
    if warnings and (not failed or warnings[0]["step"] < step):
        return warnings[0]["name"], warnings[0]["step"], warnings[0]["text"]
    return _named(failed, step) if failed else ("", 0, "")


def _named(failed: str, step: int) -> tuple[str, int, str]:
    return next((name for name, pattern in FOUND.items() if re.search(pattern, failed)), "another"), step, failed


def went(folder: Path) -> dict[str, Any]:
    """The last step of a run, and every warning that it raised."""
    rewards = [line["reward/mean"] for line in metrics_of(folder) if "reward/mean" in line]
    warnings = [f"{event['name']} at {event['step']}" for event in events_of(folder) if event["event"] == "warning"]
    last = sum(rewards[-10:]) / max(1, len(rewards[-10:]))
    return {"steps": len(rewards), "reward": [rewards[0] if rewards else None, last], "warnings": warnings}


def main(work: Path, layout: str, steps: int, names: list[str]) -> None:
    faults = {fault.name: fault for fault in (*FAULTS, *REAL_FAULTS)}
    sound = Fault("", "", "", layout=layout)
    first = prepare(resolved(work, sound, "grpo", steps).config)
    layout_folder = work / "runs" / layout
    (layout_folder / "logs").mkdir(parents=True, exist_ok=True)
    with (
        View() as view,
        StopOnSignal(lambda: None) as stop,
        launch.running_workers(first, layout_folder / "logs", on_phase=view.phase) as groups,
    ):
        for name in names:
            began, failed = time.perf_counter(), ""
            recipe = name.partition(":")[2] or "grpo"
            fault = faults.get(name, sound)
            run = resolved(work, fault, recipe, steps)
            try:
                ready = prepare(run.config)
            except RlcliError as error:  # refused before anything starts
                _print(name, layout, *_named(str(error), 0), stopped=True, began=began)
                continue
            spec = launch.worker_spec(ready.context, layout_folder / "logs", groups.spec.group_id)
            groups.policy.call(WorkerCalls.build, spec)
            if groups.engines:
                groups.engines.call(WorkerCalls.build, launch.engine_spec(spec))
            path = layout_folder / name.replace(":", "-")
            with RunFolder.create(path, force=True) as folder, planted(fault, groups):
                folder.write_config(dump_toml(run))
                with closing(open_trackers((), folder, "", {}, view.note)) as trackers:
                    try:
                        layout_groups = dataclasses.replace(groups, spec=spec)
                        launch.make_trainer(ready, layout_groups, folder, trackers, view, stop).run()
                    except RunFailed as error:
                        failed = str(error)
            _print(name, layout, *caught(path, failed), stopped=bool(failed), began=began, **went(path))


def _print(
    name: str, layout: str, check: str, step: int, text: str, *, stopped: bool, began: float, **extra: Any
) -> None:
    row = {"name": name, "layout": layout, "check": check, "step": step, "stopped": stopped, "text": text}
    # While Ray runs, sys.stdout leads to stderr.
    print(json.dumps(row | extra | {"seconds": time.perf_counter() - began}), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
