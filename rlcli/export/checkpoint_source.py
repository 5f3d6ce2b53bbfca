"""Find the checkpoint to export, with its run and configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlcli.config.load import Resolved, resolve
from rlcli.errors import CheckpointError, ConfigError, RlcliError
from rlcli.runs.checkpoint import CONFIG, TEMPLATE, Checkpoint, Checkpoints, is_checkpoint, read_checkpoint
from rlcli.runs.folder import check_records
from rlcli.runs.record_files import evaluations_of
from rlcli.runs.run_measure import MEAN, means_of, score_of
from rlcli.runs.software_record import directory_of, environment_of

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Origin:
    """A checkpoint to export."""

    checkpoint: Checkpoint
    """Undamaged."""
    resolved: Resolved
    """The configuration of its run."""
    run: Path | None
    """The run's folder if the checkpoint is in one."""

    @property
    def base(self) -> str:
        """Path of the base model."""
        return self.resolved.config.model.path

    @property
    def name(self) -> str:
        """The checkpoint in a message."""
        return f"step {self.checkpoint.step} of {self.run.name if self.run else self.checkpoint.path}"

    @property
    def computed_in(self) -> str:
        """The dtype in which the trainer computed: `float32` and so on."""
        dtype = self.resolved.config.model.dtype
        return self.checkpoint.dtype if dtype == "auto" else dtype


def find_origin(source: Path, step: str, on_note: Notify) -> Origin:
    """The checkpoint that `source` (a run folder or a checkpoint) refers to. step: a number, `best` (of those that were
    evaluated, by `checkpoint.best_by`) or empty for the newest undamaged one. RlcliError if there is none,
    CheckpointError if it is damaged."""
    if is_checkpoint(source):
        if step:
            raise RlcliError(f"--step {step}: {source} is one checkpoint", "give its run's folder, or leave --step out")
        checkpoint = read_checkpoint(source)
    elif is_run(source):
        check_records(source)
        checkpoint = _of_run(source, step, on_note)
    else:
        problem = "is neither a run's folder nor a checkpoint" if source.exists() else "does not exist"
        raise RlcliError(f"{source} {problem}", "give runs/NAME or runs/NAME/checkpoints/step-NNNNNN")
    folder = checkpoint.path.parent
    run = folder.parent if folder.name == "checkpoints" else None
    if run:
        check_records(run)
    try:
        resolved = resolve(str(checkpoint.path / CONFIG))
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.path / CONFIG}: {error.message}", error.hint) from error
    return Origin(checkpoint, _with_template(_located(resolved, run), checkpoint), run)


def _with_template(resolved: Resolved, checkpoint: Checkpoint) -> Resolved:
    """The configuration with the checkpoint's copy of the chat template instead of the file that it was read from."""
    template = checkpoint.path / TEMPLATE
    if not template.is_file():
        return resolved
    return replace(resolved, config=resolved.config.changed(model={"chat_template": str(template)}))


def _located(resolved: Resolved, run: Path | None) -> Resolved:
    """The configuration with absolute paths where paths relative to the run's start directory exist."""
    start = directory_of(environment_of(run)) if run else None
    if start is None:
        return resolved
    config = resolved.config
    for section, name in (("model", "path"), ("critic", "path"), ("data", "path"), ("evaluation", "data")):
        path = getattr(getattr(config, section), name)
        if path and (start / path).exists():
            config = config.changed(**{section: {name: str(start / path)}})
    return replace(resolved, config=config)


def _of_run(run: Path, step: str, on_note: Notify) -> Checkpoint:
    """The checkpoint of `run` that `step` selects (see `find_origin`)."""
    root = Checkpoints(run / "checkpoints", keep=1)
    if not step:
        newest = root.newest(on_note)
        if newest is None:
            raise CheckpointError(f"{run} has no undamaged checkpoint", f"make one with: rlcli train --resume {run}")
        return newest
    checkpoints = root.all()
    steps = [checkpoint.step for checkpoint in checkpoints]
    available = f"{run} has {', '.join(map(str, steps)) or 'none'}"
    if step == "best":
        best_by = resolve(str(checkpoints[-1].path / CONFIG)).config.checkpoint.best_by if checkpoints else MEAN
        scored = {number: score_of(means_of(report), best_by) for number, report in evaluations_of(run).items()}
        candidates = {number: score for number, score in scored.items() if number in steps and score is not None}
        if not candidates:
            raise RlcliError(
                f"--step best: no checkpoint of {run} was evaluated by {best_by} (checkpoint.best_by)",
                f"give a step: {available}",
            )
        best = max(candidates, key=lambda number: (candidates[number], number))
        on_note(f"step {best} is the best of {len(candidates)} evaluated checkpoints: {best_by} {candidates[best]:.4g}")
        return read_checkpoint(root.path(best))
    if not step.isdecimal() or int(step) not in steps:
        raise RlcliError(f"--step {step}: no such checkpoint", f"{available}; or give best")
    return read_checkpoint(root.path(int(step)))


def is_run(folder: Path) -> bool:
    """True for a run's folder."""
    return (folder / "checkpoints").is_dir()


def newest_in(run: Path) -> Path | None:
    """The run's newest checkpoint, which may be damaged."""
    checkpoints = Checkpoints(run / "checkpoints", keep=1).all()
    return checkpoints[-1].path if checkpoints else None
