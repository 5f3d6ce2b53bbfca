"""Runs tests/gpu one by one and records each verdict at once; a second run of the part runs the missing tests."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

from _gpu_check import checkout
from _gpu_check.check import Check

FOLDER = "tests/gpu"
EXCLUDED = "test_gpu_planner"
"""Tests whose subject the part `planner` measures with a model of a real shape."""
FIRST = ("test_gpu_sampling", "test_gpu_update", "test_the_engine_gives", "test_what_leaves", "test_segments")
"""Tests that run first: quick ones, and those that explain a failure of a whole run."""
RESERVE_S = 100.0
"""No test starts with less time left: a run takes about 45 s."""


def run(check: Check) -> None:
    tests = collected(check)
    check.require(bool(tests), f"{FOLDER} is collected", f"{len(tests)} tests")
    verdicts: dict[str, str] = {} if check.rehearse else dict(check.data.get("verdicts", {}))
    waiting = [test for test in tests if verdicts.get(test) not in ("passed", "skipped")]
    groups = [waiting] if check.rehearse else [[test] for test in waiting]
    for number, group in enumerate(groups):
        if check.remaining_s < RESERVE_S and not check.rehearse:
            break
        verdicts |= run_tests(check, group, f"{number + 1} of {len(groups)}")
        check.keep("verdicts", verdicts)
        count(check, tests, verdicts)
    count(check, tests, verdicts)
    missing = [test for test in tests if test not in verdicts]
    check.require(not missing, "every test was run", f"{len(missing)} are missing: run the part again (--only tests)")
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
    wanted = [name for name in names if EXCLUDED not in name]
    return sorted(wanted, key=lambda name: next((i for i, part in enumerate(FIRST) if part in name), len(FIRST)))


def run_tests(check: Check, tests: list[str], position: str) -> dict[str, str]:
    """Verdict of each test. On a GPU each test has its own pytest process, which frees the device's memory."""
    check.progress(f"{position}: {tests[0] if len(tests) == 1 else f'{len(tests)} tests'}", 45)
    report = check.work / "report.jsonl"
    report.unlink(missing_ok=True)
    pytest(check, *tests, "-q", "-p", "_gpu_check.verdicts", "--verdicts", str(report))
    verdicts = dict.fromkeys(tests, "failed")  # if pytest itself dies
    if report.exists():
        for line in report.read_text().splitlines():
            name, verdict = json.loads(line)
            verdicts[name] = verdict
    for test, verdict in verdicts.items():
        if verdict == "failed":
            check.progress(f"FAILED {test}")
    return verdicts


def pytest(check: Check, *words: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pytest, without the project's options if pytest-timeout, which they need, is not installed."""
    without = [] if find_spec("pytest_timeout") else ["-o", "addopts="]
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *without, *words]
    return subprocess.run(command, cwd=checkout.ROOT, stdout=subprocess.PIPE if capture else None, text=True)
