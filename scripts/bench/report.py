"""How fast `rlcli view` opens a long run, and what `rlcli report` of it takes.

    .venv/bin/python scripts/bench/report.py [--steps 10000] [--samples 256] [--json report.json]

A synthetic run of that many steps and samples a step is written into a temporary folder (the files of a
step are links to those of one of 20). Each figure is of a new reader; on a loaded machine the CPU seconds count:

    overview, samples, search     seconds until the server answers, from its first read of the folder
    in the browser                seconds from opening the address until the page is complete, with a headless Chromium
    report                        seconds, megabytes on disk and the process's peak memory

`--browser` names a Chromium; without one those rows are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import write_json
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
DISTINCT = 20
"""Steps whose samples are written; the others link to them."""
GROUP = 8
QUESTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "overview": ("overview", {}),
    "samples": ("samples", {}),
    "samples, filtered": ("samples", {"outcome": "wrong", "low": "0"}),
    "search, one answer": ("samples", {"text": "no sample has this"}),
    "a group": ("group", {"step": "1", "prompt": "sums/0"}),
    "time": ("time", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=256, help="a step")
    parser.add_argument("--browser", default=shutil.which("chromium") or "")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(CHILDREN[given.child](given.run, given)))
        return
    with tempfile.TemporaryDirectory(prefix="rlcli-bench-") as folder:
        run = Path(folder) / "run"
        started = time.monotonic()
        write(run, given.steps, given.samples)
        figures: dict[str, Any] = {"write_s": time.monotonic() - started}
        for child in [*CHILDREN] if given.browser else [name for name in CHILDREN if name != "browser"]:
            figures[child] = measured(child, run, given)
    show(figures, given)
    if given.json:
        write_json(given.json, {"steps": given.steps, "samples": given.samples, **figures})


def measured(child: str, run: Path, given: argparse.Namespace) -> Any:
    """What a process of its own reports."""
    words = [sys.executable, __file__, "--child", child, "--run", str(run), "--browser", given.browser]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def write(run: Path, steps: int, samples: int) -> None:
    """The run: as many metrics as a real one has, samples of 600 characters, tokens and times."""
    from tests.report_runs import Settings, timeline_line, write_run, write_step

    prompts = samples // GROUP
    text = "The sum of the two numbers is found digit by digit, from the right to the left. " * 7
    texts = {(step, place, 1): f"{text} #### {step}" for step in range(1, DISTINCT + 1) for place in range(prompts)}
    settings = Settings(steps=DISTINCT, prompts=prompts, samples=GROUP, dataset=DISTINCT * prompts, texts=texts)
    write_run(run, Settings(steps=1, prompts=prompts, samples=GROUP))
    for step in range(1, DISTINCT + 1):
        write_step(run, settings, step)
    rooms = [run / "samples" / f"step-{step:06d}" for step in range(1, DISTINCT + 1)]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    more = {f"more/metric_{number}": number / 7 for number in range(60)}
    with (run / "metrics.jsonl").open("w") as metrics, (run / "timeline.jsonl").open("w") as timeline:
        for step in range(1, steps + 1):
            metrics.write(json.dumps(lines[step % DISTINCT] | more | {"step": step}) + "\n")
            timeline.write(json.dumps(timeline_line(step)) + "\n")
            room = run / "samples" / f"step-{step:06d}"
            if step > DISTINCT:
                room.mkdir()
                for path in rooms[step % DISTINCT].iterdir():
                    os.link(path, room / path.name)


def answers(run: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each answer of a new server; the first includes opening the run."""
    from rlcli_inspect.report.page_api import Api, as_json
    from rlcli_inspect.report.page_server import warm_up

    from rlcli.runs.run_data import RunData

    warm_up(Api([]))
    figures = {}
    for name, (what, parameters) in QUESTIONS.items():
        started, cpu = time.perf_counter(), time.process_time()
        api = Api([RunData(run)])
        size = len(as_json(api.answer(what, parameters)))
        figures[name] = {
            "s": time.perf_counter() - started,
            "cpu_s": time.process_time() - cpu,
            "kb": size / 1000,
        }
    return figures


def browser(run: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds until the page is complete in a browser, for a new server and then for one that has read the run."""
    from playwright.sync_api import sync_playwright

    from tests.browser import FLAGS

    words = [sys.executable, "-P", "-m", "rlcli.cli.main", "view", str(run), "--no-browser"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    figures = {}
    try:
        with sync_playwright() as playwright:
            started_browser = playwright.chromium.launch(executable_path=given.browser, args=list(FLAGS))
            for name, where in (("overview", "overview"), ("samples", "samples"), ("overview, again", "overview")):
                page = started_browser.new_page()
                started = time.perf_counter()
                page.goto(f"{url}#/{where}")
                page.wait_for_function("() => document.documentElement.dataset.ready")
                figures[name] = {"s": time.perf_counter() - started}
                page.close()
            started_browser.close()
    finally:
        server.terminate()
        server.wait()
    return figures


def report(run: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds, size and peak memory of a report."""
    from rlcli_inspect.report.static_report import write_report

    from rlcli.runs.run_data import RunData

    started, cpu = time.perf_counter(), time.process_time()
    written = write_report([RunData(run)], run.parent / "report")
    kept = written.kept["run"]["samples"]
    return {
        "s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "mb": written.bytes / 1e6,
        "steps": kept.steps,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }


def show(figures: dict[str, Any], given: argparse.Namespace) -> None:
    table = Table(title=f"{given.steps:,} steps of {given.samples} samples, seconds")
    for column in ("what", "s", "CPU s", ""):
        table.add_column(column, justify="right" if column.endswith("s") else "left")
    for name, found in figures["answers"].items():
        table.add_row(f"server: {name}", f"{found['s']:.2f}", f"{found['cpu_s']:.2f}", f"{found['kb']:,.0f} kB")
    for name, found in figures.get("browser", {}).items():
        table.add_row(f"browser: {name}", f"{found['s']:.2f}", "", "")
    made = figures["report"]
    size = f"{made['mb']:.0f} MB, {made['steps']} steps, {made['peak_mb']:,.0f} MB of memory"
    table.add_row("rlcli report", f"{made['s']:.1f}", f"{made['cpu_s']:.1f}", size)
    Console().print(table)


CHILDREN = {"answers": answers, "browser": browser, "report": report}

if __name__ == "__main__":
    main()
