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
    """An undamaged checkpoint, the configuration of its run, and the run's folder if it is in one."""

    checkpoint: Checkpoint
    resolved: Resolved
    run: Path | None

    @property
    def base(self) -> str:
        return self.resolved.config.model.path

    @property
    def name(self) -> str:
        return f"step {self.checkpoint.step} of {self.run.name if self.run else self.checkpoint.path}"

    @property
    def computed_in(self) -> str:
        """What the trainer computed in: `float32` and so on."""
        given = self.resolved.config.model.dtype
        return self.checkpoint.dtype if given == "auto" else given


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
        what = "is neither a run's folder nor a checkpoint" if source.exists() else "does not exist"
        raise RlcliError(f"{source} {what}", "give runs/NAME or runs/NAME/checkpoints/step-NNNNNN")
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
    """With the chat template that the checkpoint keeps, in place of the file that it was read from."""
    kept = checkpoint.path / TEMPLATE
    if not kept.is_file():
        return resolved
    return replace(resolved, config=resolved.config.changed(model={"chat_template": str(kept)}))


def _located(resolved: Resolved, run: Path | None) -> Resolved:
    """With paths relative to the run's start directory made absolute, if they exist."""
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
    root = Checkpoints(run / "checkpoints", keep=1)
    if not step:
        newest = root.newest(on_note)
        if newest is None:
            raise CheckpointError(f"{run} has no undamaged checkpoint", f"make one with: rlcli train --resume {run}")
        return newest
    checkpoints = root.all()
    steps = [checkpoint.step for checkpoint in checkpoints]
    there = f"{run} has {', '.join(map(str, steps)) or 'none'}"
    if step == "best":
        best_by = resolve(str(checkpoints[-1].path / CONFIG)).config.checkpoint.best_by if checkpoints else MEAN
        scored = {number: score_of(means_of(report), best_by) for number, report in evaluations_of(run).items()}
        found = {number: score for number, score in scored.items() if number in steps and score is not None}
        if not found:
            raise RlcliError(
                f"--step best: no checkpoint of {run} was evaluated by {best_by} (checkpoint.best_by)",
                f"give a step: {there}",
            )
        best = max(found, key=lambda number: (found[number], number))
        on_note(f"step {best} is the best of {len(found)} evaluated checkpoints: {best_by} {found[best]:.4g}")
        return read_checkpoint(root.path(best))
    if not step.isdecimal() or int(step) not in steps:
        raise RlcliError(f"--step {step}: no such checkpoint", f"{there}; or give best")
    return read_checkpoint(root.path(int(step)))


def is_run(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir()


def newest_in(run: Path) -> Path | None:
    """The run's newest checkpoint, which may be damaged."""
    found = Checkpoints(run / "checkpoints", keep=1).all()
    return found[-1].path if found else None
