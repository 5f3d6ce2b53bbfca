"""Records of a running part: progress lines on standard output, and a JSON file that each figure updates."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRESS = "== "
"""Prefix of the lines of a part's output that are shown while it runs."""


class CheckFailed(Exception):
    """A part found an error; the message is one line."""


@dataclass
class Check:
    """One run of a part."""

    name: str
    """Name of the part."""
    rehearse: bool
    """Run on the CPU, with tiny shapes."""
    work: Path
    """An empty folder, removed afterwards."""
    models: Path
    """Folder of the models, which all parts share."""
    result: Path
    """The JSON file that figures are written to."""
    deadline_s: float
    """Seconds after which the part is killed."""
    shape: str = "0.5b"
    """Shape of the model, for parts without a fixed one."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """Measured values."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    """Results of `require`."""
    data: dict[str, Any] = field(default_factory=dict)
    """Raw data by name."""
    start_time: float = field(default_factory=time.monotonic)
    """Start, by the monotonic clock."""

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def remaining_s(self) -> float:
        return self.deadline_s - (time.monotonic() - self.start_time)

    def progress(self, text: str, takes_s: float | None = None) -> None:
        """Print the current activity. takes_s: its expected seconds on a GPU."""
        about = "" if takes_s is None or self.rehearse else f" (about {takes_s:.0f} s)"
        print(f"{PROGRESS}{self.name} {time.monotonic() - self.start_time:.0f} s: {text}{about}", flush=True)

    def figure(self, name: str, value: float | str, unit: str = "", target: str = "", note: str = "") -> None:
        """Record a measured value; it replaces a figure of the same name. target: `<= 1.1` or `>= 0.4`, not checked in
        a rehearsal. A number that is not finite fails the part."""
        met = None if self.rehearse or not target else meets(float(value), target)
        if isinstance(value, float) and not math.isfinite(value):
            self.require(False, f"{name} is finite", str(value))
            value = str(value)
        entry = {"name": name, "value": value, "unit": unit, "target": target, "met": met, "note": note}
        self.figures = [figure for figure in self.figures if figure["name"] != name] + [entry]
        self.write()

    def require(self, holds: bool, name: str, detail: str = "") -> None:
        """Record a check. One that does not hold fails the part, which continues with its other measurements."""
        self.checks.append({"name": name, "ok": bool(holds), "detail": detail})
        if not holds:
            self.progress(f"FAILED: {name}: {detail}")
        self.write()

    def keep(self, name: str, value: Any) -> None:
        """Put raw data into the JSON, next to the figures."""
        self.data[name] = value
        self.write()

    @property
    def failed(self) -> list[str]:
        return [f"{check['name']}: {check['detail']}" for check in self.checks if not check["ok"]]

    def write(self) -> None:
        record = {"figures": self.figures, "checks": self.checks, "data": self.data}
        temporary = self.result.with_suffix(".new")
        temporary.write_text(json.dumps(record))
        os.replace(temporary, self.result)


def meets(value: float, target: str) -> bool:
    """True if `value` is within `target`.

    >>> meets(1.05, "<= 1.10"), meets(0.3, ">= 0.4")
    (True, False)
    """
    relation, _, bound = target.partition(" ")
    return value <= float(bound) if relation == "<=" else value >= float(bound)
