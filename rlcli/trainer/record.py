"""What a run folder records of its steps: read back, and cut back to where a run goes on. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from rlcli.files import replacing

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
    kept = [line for line in metrics_of(run) if line["step"] <= step]
    with replacing(run / "metrics.jsonl") as beside:
        beside.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept), encoding="utf-8")
    for room in ("samples", "evaluations"):
        for path in (run / room).glob("step-*"):
            if _step_of(path) > step:
                path.unlink()


def take_back(run: Path, step: int) -> dict[str, Any]:
    """Take the line of `step`, which has to be the last, out of metrics.jsonl and return its metrics, to be logged
    again with more; nothing where it has none."""
    lines = metrics_of(run)
    if not lines or lines[-1]["step"] != step:
        return {}
    line = lines[-1]
    with replacing(run / "metrics.jsonl") as beside:
        beside.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in lines[:-1]), encoding="utf-8")
    odd = line.pop("nonfinite", {})
    del line["step"]
    return line | {name: float(text) for name, text in odd.items()}


def _step_of(path: Path) -> int:
    """
    >>> _step_of(Path("samples/step-000012.rank-0.round-2.parquet"))
    12
    """
    found = OF_STEP.match(path.name)
    return int(found[1]) if found else 0
