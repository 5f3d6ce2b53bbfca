"""The source text that starts a judge's process: our modules, by their source, and the call that sets them going.

The sandbox shows its processes no package of ours, so they bring along what they need.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_MAIN = """\
import sys, types
for name, source in {modules!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), vars(module))
{call}
"""


@cache
def _source(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")


def candidate_calls(requests: int, replies: int) -> str:
    """A process that reads the program from its standard input and answers calls of its functions."""
    return _main(["wire", "candidate"], f"module.serve_calls(sys.stdin.buffer.read().decode(), {requests}, {replies})")


def candidate_scripts(requests: int, replies: int, output: int) -> str:
    """A process that reads the program from its standard input and runs it for one standard input after another."""
    fds = f"{requests}, {replies}, {output}"
    return _main(["wire", "candidate"], f"module.serve_scripts(sys.stdin.buffer.read().decode(), {fds})")


def tester(requests: int, replies: int) -> str:
    """A process that reads a job of tests from its standard input and writes the result to its standard output."""
    return _main(["wire", "program", "tester"], f"module.main({requests}, {replies})")


def _main(names: list[str], call: str) -> str:
    return _MAIN.format(modules=[(f"rlcli.sandbox.judge.{name}", _source(name)) for name in names], call=call)
