"""What a part writes while it runs: progress for whoever watches, and a JSON file that is whole after every figure."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRESS = "== "
"""How a line of a part's output begins that is shown while the part runs."""


class CheckFailed(Exception):
    """What a part found to be wrong; its message is one line."""


@dataclass
class Check:
    """One run of a part. work: an empty folder, removed afterwards. models: a folder that is kept for other parts.
    result: the JSON file that figures go to. deadline_s: after which the part is killed. rehearse: on the CPU, tiny.
    shape: of the model, for parts that have none of their own."""

    name: str
    rehearse: bool
    work: Path
    models: Path
    result: Path
    deadline_s: float
    shape: str = "0.5b"
    figures: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def left_s(self) -> float:
        return self.deadline_s - (time.monotonic() - self.began)

    def progress(self, text: str, takes_s: float | None = None) -> None:
        """Tell what is done now, and how many seconds it usually takes on a GPU."""
        about = "" if takes_s is None or self.rehearse else f" (about {takes_s:.0f} s)"
        print(f"{PROGRESS}{self.name} {time.monotonic() - self.began:.0f} s: {text}{about}", flush=True)

    def figure(self, name: str, value: float | str, unit: str = "", target: str = "", note: str = "") -> None:
        """Record what was measured; a figure of the same name is replaced. target: `<= 1.1` or `>= 0.4`; a rehearsal's
        figures meet none. A number that is not finite fails the part."""
        met = None if self.rehearse or not target else meets(float(value), target)
        if isinstance(value, float) and not math.isfinite(value):
            self.require(False, f"{name} is finite", str(value))
            value = str(value)
        entry = {"name": name, "value": value, "unit": unit, "target": target, "met": met, "note": note}
        self.figures = [one for one in self.figures if one["name"] != name] + [entry]
        self.write()

    def require(self, holds: bool, what: str, detail: str = "") -> None:
        """Record a check; one that does not hold fails the part, which goes on with what else it measures."""
        self.checks.append({"name": what, "ok": bool(holds), "detail": detail})
        if not holds:
            self.progress(f"FAILED: {what}: {detail}")
        self.write()

    def keep(self, name: str, value: Any) -> None:
        """Put raw data into the JSON, beside the figures."""
        self.data[name] = value
        self.write()

    @property
    def failed(self) -> list[str]:
        return [f"{check['name']}: {check['detail']}" for check in self.checks if not check["ok"]]

    def write(self) -> None:
        found = {"figures": self.figures, "checks": self.checks, "data": self.data}
        temporary = self.result.with_suffix(".new")
        temporary.write_text(json.dumps(found))
        os.replace(temporary, self.result)


def meets(value: float, target: str) -> bool:
    """Whether `value` is within `target`.

    >>> meets(1.05, "<= 1.10"), meets(0.3, ">= 0.4")
    (True, False)
    """
    relation, _, bound = target.partition(" ")
    return value <= float(bound) if relation == "<=" else value >= float(bound)
