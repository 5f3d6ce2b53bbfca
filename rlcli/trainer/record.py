"""What a run folder records of its steps: read back, and cut back to where a run goes on. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.files import replacing
from rlcli.trainer.run_folder import finite

OF_STEP = re.compile(r"step-(\d+)\.")


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, oldest first; one that a kill cut off is left out."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def evaluations_of(run: Path) -> dict[int, dict[str, Any]]:
    """Step → report of each periodic evaluation, as evaluations/step-000050.json holds it."""
    found = {}
    for path in sorted((run / "evaluations").glob("step-*.json")):
        with contextlib.suppress(OSError, ValueError):
            found[_step_of(path)] = json.loads(path.read_text(encoding="utf-8"))
    return found


def rewind(run: Path, step: int) -> None:
    """Cut the record back to the end of `step`: metrics atomically, samples and evaluations of later steps. With -1
    nothing is left. Logs and events stay: they tell of what happened, and it did."""
    _write_metrics(run, [line for line in metrics_of(run) if line["step"] <= step])
    for room in ("samples", "evaluations"):
        for path in (run / room).glob("step-*"):
            if _step_of(path) > step:
                path.unlink()
        for path in (run / room).glob(".step-*.tmp"):  # what was being written when a kill came
            path.unlink()


def evaluated_steps(run: Path) -> set[int]:
    """Steps whose line in metrics.jsonl tells of an evaluation: one that was cut short may have left a report."""
    return {line["step"] for line in metrics_of(run) if any(name.startswith("eval/") for name in line)}


def amend(run: Path, step: int, more: Mapping[str, float]) -> None:
    """Add metrics to the line of `step` in metrics.jsonl, atomically."""
    lines = [line | finite(more) if line["step"] == step else line for line in metrics_of(run)]
    _write_metrics(run, lines)


def _write_metrics(run: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with replacing(run / "metrics.jsonl") as beside:
        beside.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def _step_of(path: Path) -> int:
    """
    >>> _step_of(Path("samples/step-000012.rank-0.round-2.parquet"))
    12
    """
    found = OF_STEP.match(path.name)
    return int(found[1]) if found else 0
