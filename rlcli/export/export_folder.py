"""Export a checkpoint as a Hugging Face folder: written completely or not at all, and verified before it appears."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlcli import __version__
from rlcli.config.schema import RunConfig
from rlcli.errors import RlcliError, RunFailed
from rlcli.export.checkpoint_source import Notify, Origin, find_origin, is_run, newest_in
from rlcli.export.export_types import Export, Options, manifest_digest, shown
from rlcli.runs.checkpoint import Checkpoint, is_checkpoint
from rlcli.support.attempt import at_exit
from rlcli.support.files import by_umask, read_object
from rlcli.support.hub import offline_unless_reachable

RECORD = "rlcli_export.json"
"""The record file in every exported folder: which checkpoint, how it was exported, and what was verified."""


def export(
    origin: Origin,
    target: Path,
    options: Options,
    *,
    force: bool,
    on_phase: Notify,
    on_note: Notify,
    report: Callable[[Path, Path], None] | None = None,
) -> Export:
    """Write the checkpoint's model to the folder `target`, which appears complete and verified, or not at all.

    force: replace an existing export. report: writes a report of a run's folder to another folder; it is given one
    without what names this machine. RlcliError if `target` exists, or holds a source of this export, or if the
    checkpoint holds no such model; RunFailed if it cannot be written, or if a check fails.
    """
    check_out(target, force)
    _check_apart(origin, target)
    if not Path(origin.base).is_dir():
        offline_unless_reachable(on_note)
    from transformers.utils import logging

    from rlcli.export.model_card import REPORT, write_card
    from rlcli.export.public_run import public_run
    from rlcli.export.verified_export import prove, write

    logging.disable_progress_bar()
    with _appearing(target) as folder:
        on_phase(f"write {origin.name}")
        written = write(origin, options, folder, str(target))
        if options.check:
            on_phase("compare with the base model and with the trainer's log-probs")
            written = prove(origin, written, folder)
        if report is not None and origin.run is not None:
            on_phase("write the report")
            with public_run(origin.run) as run:
                report(run, folder / REPORT)
        write_card(origin, written, folder)
        (folder / RECORD).write_text(json.dumps(_record(written), indent=2) + "\n", encoding="utf-8")
    return written


def check_out(target: Path, force: bool) -> None:
    """RlcliError if `target` cannot be created, exists and must not be replaced, or is not an export."""
    if not target.exists() and not target.is_symlink():
        above = next(folder for folder in target.absolute().parents if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            why = "cannot be written" if above.is_dir() else "is a file"
            raise RlcliError(f"--out {target}: {above} {why}", "give another folder")
        return
    if not force:
        raise RlcliError(f"{target} exists", "give another folder with --out, or replace an export with --force")
    if target.is_symlink() or not (target / RECORD).is_file():
        raise RlcliError(
            f"--force: {target} is not an export (it holds no {RECORD}) and was not changed",
            "give another folder with --out",
        )


def _check_apart(origin: Origin, target: Path) -> None:
    """RlcliError if replacing `target` would remove a source of the export: a base may itself be an export."""
    config, resolved = origin.resolved.config, target.resolve()
    for source, path in (
        ("the base model", config.model.path),
        ("the critic's base model", config.critic.path),
        ("the checkpoint", str(origin.checkpoint.path)),
    ):
        folder = Path(path).resolve()
        if path and resolved in (folder, *folder.parents) and target.exists():
            raise RlcliError(f"--out {target} holds {source} that the export reads", "give another folder")


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Context with a temporary folder next to `target`, which it replaces at the end; after an error it is removed."""
    from safetensors import SafetensorError

    target = target.absolute()
    partial_folder, old = (target.with_name(f".{target.name}.{suffix}-{os.getpid()}") for suffix in ("partial", "old"))
    try:
        partial_folder.mkdir(parents=True)
        yield partial_folder
        by_umask(partial_folder)
        if target.exists():
            os.replace(target, old)
        os.replace(partial_folder, target)
    except (OSError, SafetensorError) as error:
        raise RunFailed(
            f"cannot write {target}: {error}", "free disk space, or give another folder with --out"
        ) from error
    finally:
        if old.exists() and not target.exists():  # interrupted between the two renames
            os.replace(old, target)
        for folder in (partial_folder, old):
            shutil.rmtree(folder, ignore_errors=True)


def model_folder(path: str, on_note: Notify, critic: bool = False) -> str:
    """A path that transformers and vLLM can load for `path`: a hub id or a Hugging Face folder unchanged; for a
    checkpoint, or a run's folder (its newest undamaged checkpoint), an export in the run's folder, which is reused.

    critic: export the checkpoint's critic if it has one. CheckpointError names what is damaged.
    """
    folder = Path(path)
    is_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if is_model or not (is_checkpoint(folder) or is_run(folder)):
        return path
    # An existing export is not verified again: that takes minutes for a large checkpoint.
    folder = folder.resolve()
    newest = folder if is_checkpoint(folder) else newest_in(folder)
    if newest is not None and _is_of(existing := _place(newest, critic), newest):
        return str(existing)
    origin = find_origin(folder, "", on_note)
    checkpoint = origin.checkpoint.path
    options = Options(critic=critic and has_critic(origin.checkpoint), check=False)
    target = _place(checkpoint, options.critic)
    if _is_of(target, checkpoint):
        return str(target)
    if not _writable(target.parent, origin.run):
        temporary = tempfile.mkdtemp(prefix="rlcli-export-")
        at_exit(partial(shutil.rmtree, temporary, ignore_errors=True))
        target = Path(temporary) / target.name
        on_note(f"the folder of {checkpoint} is not writable: its export is temporary and lasts for this command")
    elif target.exists():
        shutil.rmtree(target)  # an export of another checkpoint of that step, from before a rollback
    on_note(f"exporting {origin.name} to {target}")
    try:
        export(origin, target, options, force=False, on_phase=lambda phase: None, on_note=on_note)
    except RlcliError:
        if not _is_of(target, checkpoint):  # else another process made it first
            raise
    return str(target)


def with_model_folders(config: RunConfig, on_note: Notify) -> RunConfig:
    """`config` with the results of `model_folder` as model.path, critic.path and teacher.path."""
    model = model_folder(config.model.path, on_note) if config.model.path else ""
    critic = model_folder(config.critic.path, on_note, critic=True) if config.critic.path else ""
    teacher = config.teacher.placed(lambda path: model_folder(path, on_note))
    return config.changed(model={"path": model}, critic={"path": critic}, teacher=teacher)


def has_critic(checkpoint: Checkpoint) -> bool:
    """True if the checkpoint holds a value model or a process reward model."""
    from rlcli.export.verified_export import critic_of

    return bool(critic_of(checkpoint).shapes)


def _place(checkpoint: Path, critic: bool) -> Path:
    """The folder for the export of a run's checkpoint."""
    return checkpoint.parent.parent / "exports" / (checkpoint.name + ("-critic" if critic else ""))


def _is_of(exported: Path, checkpoint: Path) -> bool:
    digest = manifest_digest(checkpoint)
    return bool(digest) and read_object(exported / RECORD).get("manifest") == digest


def _writable(exports: Path, run: Path | None) -> bool:
    """True if the checkpoint is in a run whose folder for exports is writable."""
    return run is not None and os.access(exports if exports.exists() else run, os.W_OK)


def _record(written: Export) -> dict[str, Any]:
    facts = asdict(replace(written, base=shown(written.base)))
    return {"rlcli": __version__, **{name: facts[name] for name in facts if name != "path"}}
