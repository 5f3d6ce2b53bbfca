"""One vLLM engine beside the trainer: sleep and wake, then weight syncs. The engine is started once for both."""

from __future__ import annotations

from _gpu_check import alone
from _gpu_check.check import Check
from _gpu_check.part_sleeping import slept
from _gpu_check.part_sync import loaded


def run(check: Check) -> None:
    with alone.worker(check, check.shape) as worker:
        slept(check, worker)
        loaded(check, worker)
