"""Checkpoints as Hugging Face folders: which one, written whole or not at all, and proven before it is in place."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli import __version__
from rlcli.config.schema import RunConfig
from rlcli.errors import RlcliError, RunFailed
from rlcli.files import by_umask
from rlcli.hub import offline_unless_reachable
from rlcli.trainer.checkpoint import MANIFEST, Checkpoint, is_checkpoint
from rlcli.trainer.origin import Origin, Say, find_origin, is_run, newest_in

if TYPE_CHECKING:
    from rlcli.model.proof import Change

RECORD = "rlcli_export.json"
"""In every folder that was exported: of which checkpoint, how, and what was proven."""
EXACT, ROUNDED = 1e-4, 0.3
"""How far a log-prob may be from the trainer's: in float32, and where trainer or files are bfloat16."""


@dataclass(frozen=True)
class Options:
    """merge: an adapter goes into its base's weights. dtype: of the files; empty: float32 for an adapter, else what the
    trainer computed in. critic: the value or process reward model, not the policy. check: prove what is written."""

    merge: bool = False
    dtype: str = ""
    critic: bool = False
    check: bool = True


@dataclass(frozen=True)
class LogProbs:
    """Of the trainer's probe: how many log-probs were compared, the largest difference, and how large it may be."""

    tokens: int
    largest: float
    bound: float

    def __str__(self) -> str:
        return f"within {self.largest:.2g} of the trainer's on {self.tokens} tokens (at most {self.bound:g})"


@dataclass(frozen=True)
class Export:
    """What lies in `path`. kind: `model`, `adapter`, `value model` or `process reward model`. base: what it was trained
    from. change, log_probs: what was proven; None where it was not asked for, or where there is nothing to compare.
    manifest: SHA-256 of the checkpoint's."""

    path: str
    kind: str
    step: int
    dtype: str
    base: str
    manifest: str
    change: Change | None = None
    log_probs: LogProbs | None = None


def export(origin: Origin, out: Path, options: Options, *, force: bool, on_phase: Say, on_note: Say) -> Export:
    """Write the checkpoint's model to the folder `out`, which appears whole or not at all, and prove it before.

    force: replace an export that is there. RlcliError where `out` is there already, or holds what this export is made
    of, or where the checkpoint holds no such model; RunFailed where it cannot be written, or where a proof fails.
    """
    check_out(out, force)
    _check_apart(origin, out)
    if not Path(origin.base).is_dir():
        offline_unless_reachable(on_note)
    from transformers.utils import logging

    from rlcli.trainer.card import write_card
    from rlcli.trainer.proving import prove, write

    logging.disable_progress_bar()
    with _appearing(out) as folder:
        on_phase(f"write {origin.name}")
        written = write(origin, options, folder, str(out))
        if options.check:
            on_phase("compare with the base model and with the trainer's log-probs")
            written = prove(origin, written, folder)
        write_card(origin, written, folder)
        (folder / RECORD).write_text(json.dumps(_record(written), indent=2) + "\n", encoding="utf-8")
    return written


def check_out(out: Path, force: bool) -> None:
    """RlcliError where `out` could not be made, or is there and is not to be replaced, or is no export."""
    if not out.exists() and not out.is_symlink():
        above = next(folder for folder in out.absolute().parents if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            why = "cannot be written" if above.is_dir() else "is a file"
            raise RlcliError(f"--out {out}: {above} {why}", "give another folder")
        return
    if not force:
        raise RlcliError(f"{out} exists already", "give another folder with --out, or replace an export with --force")
    if out.is_symlink() or not (out / RECORD).is_file():
        raise RlcliError(
            f"--force: {out} is no export (it holds no {RECORD}), and is left as it is",
            "give another folder with --out",
        )


def _check_apart(origin: Origin, out: Path) -> None:
    """RlcliError where replacing `out` would remove what the export is made of: a base may be an export itself."""
    config, place = origin.resolved.config, out.resolve()
    for what, path in (
        ("the base model", config.model.path),
        ("the critic's base model", config.critic.path),
        ("the checkpoint", str(origin.checkpoint.path)),
    ):
        folder = Path(path).resolve()
        if path and place in (folder, *folder.parents) and out.exists():
            raise RlcliError(f"--out {out} holds {what} that the export is made from", "give another folder")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write to, which takes its place at the end; on an error nothing is left of it."""
    from safetensors import SafetensorError

    out = out.absolute()
    beside, old = (out.with_name(f".{out.name}.{what}-{os.getpid()}") for what in ("partial", "old"))
    try:
        beside.mkdir(parents=True)
        yield beside
        by_umask(beside)
        if out.exists():
            os.replace(out, old)
        os.replace(beside, out)
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"cannot write {out}: {error}", "make room, or give another folder with --out") from error
    finally:
        if old.exists() and not out.exists():  # stopped between the two
            os.replace(old, out)
        for left in (beside, old):
            shutil.rmtree(left, ignore_errors=True)


def model_folder(path: str, on_note: Say, critic: bool = False) -> str:
    """What transformers and vLLM can load for `path`: a hub id or a Hugging Face folder as it is; for a checkpoint, or
    for a run's folder (its newest sound checkpoint), an export in the run's folder, made once and then used again.

    critic: the checkpoint's critic is meant where it holds one. CheckpointError names what is damaged.
    """
    folder = Path(path)
    is_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if is_model or not (is_checkpoint(folder) or is_run(folder)):
        return path
    # What has been exported is not verified again: that takes minutes where a checkpoint is large.
    folder = folder.resolve()
    newest = folder if is_checkpoint(folder) else newest_in(folder)
    if newest is not None and _is_of(made := _place(newest, critic), newest):
        return str(made)
    origin = find_origin(folder, "", on_note)
    checkpoint = origin.checkpoint.path
    options = Options(critic=critic and has_critic(origin.checkpoint), check=False)
    out = _place(checkpoint, options.critic)
    if _is_of(out, checkpoint):
        return str(out)
    if not _writable(out.parent, origin.run):
        temporary = tempfile.mkdtemp(prefix="rlcli-export-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        out = Path(temporary) / out.name
        on_note(f"{checkpoint} lies where nothing can be written: what is made of it lasts as long as this command")
    elif out.exists():
        shutil.rmtree(out)  # of another checkpoint of that step, before the run went back
    on_note(f"exporting {origin.name} to {out}")
    try:
        export(origin, out, options, force=False, on_phase=lambda phase: None, on_note=on_note)
    except RlcliError:
        if not _is_of(out, checkpoint):  # else another process was faster
            raise
    return str(out)


def with_model_folders(config: RunConfig, on_note: Say) -> RunConfig:
    """`config` with what `model_folder` gives for its model.path and critic.path."""
    found = {
        "model": model_folder(config.model.path, on_note) if config.model.path else "",
        "critic": model_folder(config.critic.path, on_note, critic=True) if config.critic.path else "",
    }
    sections = {name: getattr(config, name).model_copy(update={"path": path}) for name, path in found.items()}
    return config.model_copy(update=sections)


def has_critic(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint holds a value model or a process reward model."""
    from rlcli.trainer.proving import critic_of

    return bool(critic_of(checkpoint).shapes)


def manifest_digest(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's manifest, which has those of all its files; empty where it has none."""
    manifest = checkpoint / MANIFEST
    return hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else ""


def _place(checkpoint: Path, critic: bool) -> Path:
    """Where the export of a checkpoint of a run lies."""
    return checkpoint.parent.parent / "exports" / (checkpoint.name + ("-critic" if critic else ""))


def _is_of(exported: Path, checkpoint: Path) -> bool:
    digest = manifest_digest(checkpoint)
    return bool(digest) and _recorded(exported).get("manifest") == digest


def _writable(exports: Path, run: Path | None) -> bool:
    """Whether the checkpoint lies in a run that takes its exports."""
    return run is not None and os.access(exports if exports.exists() else run, os.W_OK)


def _recorded(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _record(written: Export) -> dict[str, Any]:
    facts = asdict(replace(written, base=shown(written.base)))
    return {"rlcli": __version__, **{name: facts[name] for name in facts if name != "path"}}


def shown(base: str) -> str:
    """A hub id as it is; of a folder the name alone, with its run's for an export: the rest says nothing to others."""
    folder = Path(base)
    if not folder.is_dir():
        return base
    return f"{folder.parent.parent.name} {folder.name}" if folder.parent.name == "exports" else folder.name
