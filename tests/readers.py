"""Calls commands one after another in a separate process, so that a test can detect one that hangs.

    python -m tests.readers < COMMANDS.json

Standard input has a list of command lines, each a list of words. `pages RUN…` stands for everything that `rlcli view`
answers about these runs. Each result is a line of JSON: the words, the exit code and what was printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 240
"""Generous: the commands of a test take seconds together."""
MEMORY = 8 << 30
ASKED = ("state", "index", "overview", "series", "samples", "group", "sample", "prompt", "time", "signals", "compare")


class Result(NamedTuple):
    """Output of a command, and its exit code."""

    words: list[str]
    code: int
    out: str
    err: str


def results_of(commands: Sequence[Sequence[str | Path]], folder: Path) -> list[Result]:
    """The results of commands that are called in `folder`. Fails if one of them hangs or needs too much memory."""
    lines = [[str(word) for word in words] for words in commands]
    started = [sys.executable, "-m", "tests.readers", str(folder)]
    with subprocess.Popen(started, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            printed, _ = process.communicate(json.dumps(lines), timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
            done = len(printed.splitlines())
            raise AssertionError(f"it hung: {' '.join(lines[done])}") from None
    results = [Result(**json.loads(line)) for line in printed.splitlines()]
    assert len(results) == len(lines), f"it died: {' '.join(lines[len(results)])}"
    return results


def call(words: list[str]) -> Result:
    from rlcli.cli.main import main

    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = pages(words[1:]) if words[0] == "pages" else main(words)
    return Result(words, code, stdout.getvalue(), stderr.getvalue())


def pages(runs: list[str]) -> int:
    """Print the JSON of every answer about the runs, or the error that ends the command or that a page shows."""
    from rlcli_inspect.commands.report import opened
    from rlcli_inspect.report.page_api import Api
    from rlcli_inspect.report.page_server import answered

    from rlcli.errors import RlcliError

    try:
        api = Api(opened([Path(run) for run in runs]))
    except RlcliError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    parameters: dict[str, Any] = {"names": "reward/mean", "step": "1", "prompt": "sums/0", "sample": "0"}
    refused = 0
    for page in ASKED:
        status, text = answered(api, page, parameters)
        print(text)
        if status != 200:
            refused = 2
            print(f"error: {json.loads(text)['error']}", file=sys.stderr)
    return refused


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    commands = json.load(sys.stdin)
    os.chdir(sys.argv[1])
    for each in commands:
        print(json.dumps(call(each)._asdict()), flush=True)
