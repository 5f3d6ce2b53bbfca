"""tests/gpu, one after another, each verdict recorded at once; a second run of the part goes on with what is left."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

from _gpu_check import checkout
from _gpu_check.check import Check

FOLDER = "tests/gpu"
APART = "test_gpu_planner"
"""What the part `planner` measures, with a model of a real shape."""
FIRST = ("test_gpu_sampling", "test_gpu_update", "test_the_engine_gives", "test_what_leaves", "test_segments")
"""What is quick, or tells of a fault before a whole run trips over it."""
RESERVE_S = 100.0
"""No test is begun with less left: a run takes about 45 s."""


def run(check: Check) -> None:
    tests = collected(check)
    check.require(bool(tests), f"{FOLDER} is collected", f"{len(tests)} tests")
    verdicts: dict[str, str] = {} if check.rehearse else dict(check.data.get("verdicts", {}))
    waiting = [test for test in tests if verdicts.get(test) not in ("passed", "skipped")]
    groups = [waiting] if check.rehearse else [[test] for test in waiting]
    for number, group in enumerate(groups):
        if check.left_s < RESERVE_S and not check.rehearse:
            break
        verdicts |= ran(check, group, f"{number + 1} of {len(groups)}")
        check.keep("verdicts", verdicts)
        count(check, tests, verdicts)
    count(check, tests, verdicts)
    left = [test for test in tests if test not in verdicts]
    check.require(not left, "every test was run", f"{len(left)} wait: run the part again (--only tests)")
    bad = [test for test in tests if verdicts.get(test) == "failed"]
    check.require(not bad, "no test failed", ", ".join(bad))


def count(check: Check, tests: list[str], verdicts: dict[str, str]) -> None:
    for verdict in ("passed", "failed", "skipped"):
        check.figure(verdict, sum(verdicts.get(test) == verdict for test in tests), f"of {len(tests)} tests")


def collected(check: Check) -> list[str]:
    """The tests' names, those of FIRST first."""
    done = pytest(check, FOLDER, "--collect-only", "-q", capture=True)
    print(done.stdout, flush=True)
    names = [line.strip() for line in done.stdout.splitlines() if "::" in line and not line.startswith(("=", "ERROR"))]
    check.require(done.returncode == 0, "pytest collects without errors", f"exit code {done.returncode}")
    wanted = [name for name in names if APART not in name]
    return sorted(wanted, key=lambda name: next((i for i, part in enumerate(FIRST) if part in name), len(FIRST)))


def ran(check: Check, tests: list[str], place: str) -> dict[str, str]:
    """Each test's verdict. One pytest a test on a GPU: what one leaves there is not the next one's."""
    check.progress(f"{place}: {tests[0] if len(tests) == 1 else f'{len(tests)} tests'}", 45)
    report = check.work / "report.jsonl"
    report.unlink(missing_ok=True)
    pytest(check, *tests, "-q", "-p", "_gpu_check.verdicts", "--verdicts", str(report))
    found = dict.fromkeys(tests, "failed")  # where pytest itself dies
    if report.exists():
        for line in report.read_text().splitlines():
            name, verdict = json.loads(line)
            found[name] = verdict
    for test, verdict in found.items():
        if verdict == "failed":
            check.progress(f"FAILED {test}")
    return found


def pytest(check: Check, *words: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """The project's settings ask for pytest-timeout; where it is not installed they are left out."""
    without = [] if find_spec("pytest_timeout") else ["-o", "addopts="]
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *without, *words]
    return subprocess.run(command, cwd=checkout.ROOT, stdout=subprocess.PIPE if capture else None, text=True)
