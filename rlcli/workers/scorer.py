"""The scoring service of this machine, as its workers start and find it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcli.rollout.engine import shared_memory_prefix
from rlcli.scoring.client import ScoringService
from rlcli.scoring.service import Settings
from rlcli.workers.spec import WorkerSpec

CORES_OF_A_WORKER = 2
"""On GPUs: what an engine or trainer computes with, and what feeds it."""

MOST_PROCESSES = 256


def note_worker(spec: WorkerSpec, rank: int) -> None:
    """Count this worker among those of its machine, before any of them asks how many there are."""
    folder = _noted(spec)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{spec.name}-{rank}").touch()


def forget_worker(spec: WorkerSpec, rank: int) -> None:
    """It has ended; the last of a machine leaves nothing."""
    with contextlib.suppress(OSError):
        (_noted(spec) / f"{spec.name}-{rank}").unlink(missing_ok=True)
        _noted(spec).rmdir()


def scoring_service(spec: WorkerSpec, tokenizer: Any) -> ScoringService:
    """The service that all engines of this run on this machine share, maybe still loading."""
    section = spec.config.verifier
    settings = Settings(
        tokenizer=spec.config.model.path,
        processes=spec.scoring_processes or processes_of(_cores(), len(list(_noted(spec).iterdir())), spec.device),
        deadline_s=section.deadline_s,
        verifiers=tuple(spec.verifiers),
        sandbox=section.sandbox,
        log=str(Path(spec.logs) / f"verifiers-{socket.gethostname()}.log"),
    )
    # Of two runs on the same workers, one after another, each has its own. How many workers there are is no part of it.
    digest = hashlib.sha256(replace(settings, processes=0).to_json().encode()).hexdigest()[:8]
    # Short: the path of a socket has at most 107 bytes.
    return ScoringService(settings, Path("/tmp", f"rlcli-scoring-{spec.group_id}-{digest}"), tokenizer)


def processes_of(cores: int, workers: int, device: str) -> int:
    """Scoring processes of a machine with so many cores, on which so many workers of the run live.

    On GPUs the workers' cores are theirs. On CPUs workers compute on all of them, and leave them while verdicts are
    awaited.

    >>> processes_of(192, 8, "cuda"), processes_of(8, 8, "cuda"), processes_of(2, 2, "cpu")
    (176, 1, 2)
    """
    left = cores - (CORES_OF_A_WORKER * workers if device == "cuda" else 0)
    return min(max(left, 1), MOST_PROCESSES)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _noted(spec: WorkerSpec) -> Path:
    """One file for each worker of the run on this machine; removed with what else the run has in shared memory."""
    shared = Path("/dev/shm")
    root = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"{shared_memory_prefix(spec.group_id)}workers"
