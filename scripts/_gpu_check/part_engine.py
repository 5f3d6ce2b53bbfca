"""A vLLM engine colocated with the trainer: sleep and wake, then weight syncs. The engine is started once for both."""

from __future__ import annotations

from _gpu_check import single_worker
from _gpu_check.check import Check
from _gpu_check.part_sleeping import measure_sleep
from _gpu_check.part_sync import measure_syncs


def run(check: Check) -> None:
    with single_worker.worker(check, check.shape) as worker:
        measure_sleep(check, worker)
        measure_syncs(check, worker)
