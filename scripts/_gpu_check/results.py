"""Results of all parts: a JSON file into which each run merges its parts, and a table of them."""

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


class IncompatibleResults(Exception):
    """The file holds results that this run must not be merged into; the message has the reason."""


def load(output_folder: Path, rehearsal: bool) -> Results:
    """The results in the folder, or an empty record. Raises `IncompatibleResults` if only one of the results and
    this run is a rehearsal, and for another kind of file."""
    path = output_folder / JSON
    if not path.exists():
        return {"version": VERSION, "rehearsal": rehearsal, "parts": {}}
    try:
        results: Results = json.loads(path.read_text())
        version, kind = results["version"], results["rehearsal"]
        assert isinstance(results["parts"], dict)
    except (ValueError, KeyError, TypeError, AssertionError, OSError) as error:
        raise IncompatibleResults(
            f"{path} is not a file of this command ({type(error).__name__}); give another --out"
        ) from None
    if version != VERSION or kind != rehearsal:
        held = "a rehearsal" if kind else "a check on a GPU"
        raise IncompatibleResults(f"{path} holds {held} (version {version}); give another --out, or move it away")
    return results


def merge(results: Results, name: str, result: Mapping[str, Any]) -> Results:
    """`results` with the part `name` replaced."""
    return {**results, "parts": {**results["parts"], name: dict(result)}}


def write(results: Results, output_folder: Path) -> None:
    """Write both files atomically."""
    results["written"] = time.strftime("%Y-%m-%d %H:%M:%S")
    output_folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((JSON, json.dumps(results, indent=1) + "\n"), (TABLE, table(results))):
        temporary = output_folder / f".{name}.new"
        temporary.write_text(text)
        os.replace(temporary, output_folder / name)


def table(results: Results) -> str:
    """Markdown: a row for each part, a row for each figure, then failed parts with the end of their output."""
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
        result = parts.get(part.name, {"status": "not run", "seconds": "", "checks": []})
        held = sum(check["ok"] for check in result["checks"])
        checks = f"{held} of {len(result['checks'])} hold" if result["checks"] else ""
        lines.append(_row(part.name, MARKS[result["status"]], result["seconds"], checks))
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


def _failure(name: str, result: Mapping[str, Any]) -> list[str]:
    lines = ["", f"## {name}: {result['status']}", "", result["error"] or "interrupted", ""]
    return [*lines, f"`{result['log']}` ends with", "", "```", *result["tail"], "```"] if result["tail"] else lines


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
