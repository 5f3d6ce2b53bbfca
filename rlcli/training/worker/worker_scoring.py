"""The scoring service of this machine: how its workers start and find it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.rewards.service.scoring_client import ScoringClient
from rlcli.rewards.service.scoring_service import Settings
from rlcli.rollout.engine import shared_memory_prefix
from rlcli.support.files import private_folder
from rlcli.training.worker.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CORES_OF_A_WORKER = 2
"""On GPUs: cores for the computation of an engine or trainer, and for the data that it needs."""

MOST_PROCESSES = 256


def note_worker(spec: WorkerSpec, rank: int) -> None:
    """Register this worker on its machine, before any of them asks how many there are."""
    (private_folder(_noted(spec)) / f"{spec.name}-{rank}").touch()


def forget_worker(spec: WorkerSpec, rank: int) -> None:
    """Unregister an ended worker; the last of a machine leaves nothing behind."""
    with contextlib.suppress(OSError):
        (_noted(spec) / f"{spec.name}-{rank}").unlink(missing_ok=True)
        _noted(spec).rmdir()


def scoring_service(spec: WorkerSpec, tokenizer: PreTrainedTokenizerBase) -> ScoringClient:
    """The scoring service shared by all engines of this run on this machine, possibly still loading."""
    section, cores = spec.config.verifier, len(os.sched_getaffinity(0))
    settings = Settings(
        tokenizer=spec.config.model.path,
        processes=section.processes or processes_of(cores, len(list(_noted(spec).iterdir())), spec.facts.device),
        deadline_s=section.deadline_s,
        verifiers=spec.facts.verifiers,
        sandbox=section.sandbox,
        log=str(Path(spec.logs) / f"verifiers-{socket.gethostname()}.log"),
        steps=spec.config.train.steps,
    )
    # Two runs on the same workers, one after another, have separate ones. The number of workers is not part of the key.
    digest = hashlib.sha256(replace(settings, processes=0).to_json().encode()).hexdigest()[:8]
    # Short: the path of a socket has at most 107 bytes.
    return ScoringClient(settings, Path("/tmp", f"rlcli-scoring-{spec.group_id}-{digest}"), tokenizer)


def processes_of(cores: int, workers: int, device: str) -> int:
    """Number of scoring processes of a machine, from the numbers of its cores and of the run's workers on it.

    On GPUs the workers' cores are reserved. On CPUs workers compute on all cores, and are idle while they wait for
    verdicts.

    >>> processes_of(192, 8, "cuda"), processes_of(8, 8, "cuda"), processes_of(2, 2, "cpu")
    (176, 1, 2)
    """
    free_cores = cores - (CORES_OF_A_WORKER * workers if device == "cuda" else 0)
    return min(max(free_cores, 1), MOST_PROCESSES)


def _noted(spec: WorkerSpec) -> Path:
    """Folder with one file per worker of the run on this machine; removed with the run's other shared memory."""
    shared = Path("/dev/shm")
    root = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"{shared_memory_prefix(spec.group_id)}workers"
