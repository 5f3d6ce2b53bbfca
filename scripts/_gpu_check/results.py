"""The JSON of all parts, into which each run merges its own, and the table made from it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _gpu_check.parts import ALL

VERSION = 1
JSON, TABLE = "gpu-check.json", "gpu-check.md"
MARKS = {"ok": "ok", "failed": "**failed**", "timeout": "**timeout**", "running": "interrupted", "not run": "not run"}

Results = dict[str, Any]


class OtherKind(Exception):
    """The file holds what this run must not be merged into; the message says what."""


def load(out: Path, rehearsal: bool) -> Results:
    """What the folder holds, or an empty record. OtherKind where it is of the other kind or is not such a file."""
    path = out / JSON
    if not path.exists():
        return {"version": VERSION, "rehearsal": rehearsal, "parts": {}}
    try:
        found: Results = json.loads(path.read_text())
        version, kind = found["version"], found["rehearsal"]
        assert isinstance(found["parts"], dict)
    except (ValueError, KeyError, TypeError, AssertionError, OSError) as error:
        raise OtherKind(f"{path} is not a file of this command ({type(error).__name__}); give another --out") from None
    if version != VERSION or kind != rehearsal:
        held = "a rehearsal" if kind else "a check on a GPU"
        raise OtherKind(f"{path} holds {held} (version {version}); give another --out, or move it away")
    return found


def merge(results: Results, name: str, result: Mapping[str, Any]) -> Results:
    """`results` with the part `name` replaced; what the tests have found is kept beside what they now found."""
    return {**results, "parts": {**results["parts"], name: dict(result)}}


def write(results: Results, out: Path) -> None:
    """Write both files whole or not at all."""
    results["written"] = time.strftime("%Y-%m-%d %H:%M:%S")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in ((JSON, json.dumps(results, indent=1) + "\n"), (TABLE, table(results))):
        temporary = out / f".{name}.new"
        temporary.write_text(text)
        os.replace(temporary, out / name)


def table(results: Results) -> str:
    """Markdown: a row for each part, then one for each figure, then what failed with the end of its output."""
    parts = results["parts"]
    lines = ["# GPU check" if not results["rehearsal"] else "# GPU check: rehearsal on the CPU", ""]
    if results["rehearsal"]:
        lines += [
            "Tiny shapes on the CPU, several parts at once: these figures say that the check works, nothing of a GPU.",
            "",
        ]
    lines += _machine(parts)
    lines += ["| part | result | seconds | checks |", "|---|---|---|---|"]
    for part in ALL:
        found = parts.get(part.name, {"status": "not run", "seconds": "", "checks": []})
        held = sum(check["ok"] for check in found["checks"])
        checks = f"{held} of {len(found['checks'])} hold" if found["checks"] else ""
        lines.append(_row(part.name, MARKS[found["status"]], found["seconds"], checks))
    lines += ["", "| part | figure | value | target | met | note |", "|---|---|---|---|---|---|"]
    for name in _ordered(parts):
        for figure in parts[name]["figures"]:
            met = {True: "yes", False: "**no**", None: ""}[figure["met"]]
            value = f"{_number(figure['value'])} {figure['unit']}".strip()
            lines.append(_row(name, figure["name"], value, figure["target"], met, figure["note"]))
    for name in _ordered(parts):
        if parts[name]["status"] not in ("ok", "not run"):
            lines += _failure(name, parts[name])
    return "\n".join(lines) + "\n"


def _machine(parts: Mapping[str, Any]) -> list[str]:
    figures = parts.get("environment", {}).get("figures", [])
    texts = [f"{figure['name']} {figure['value']}" for figure in figures if isinstance(figure["value"], str)]
    return ["; ".join(texts[:8]), ""] if texts else []


def _ordered(parts: Mapping[str, Any]) -> list[str]:
    return [part.name for part in ALL if part.name in parts]


def _failure(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = ["", f"## {name}: {found['status']}", "", found["error"] or "interrupted", ""]
    return [*lines, f"`{found['log']}` ends with", "", "```", *found["tail"], "```"] if found["tail"] else lines


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _number(value: object) -> str:
    """Four significant digits, and no exponent below 10¹⁵.

    >>> [_number(value) for value in (1.23456, 12345.6, 0.00012, 7, "text")]
    ['1.235', '12,346', '0.00012', '7', 'text']
    """
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
