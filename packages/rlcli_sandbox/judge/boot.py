"""The source text that starts a judge's process: our modules, compiled, and the call that starts them.

The sandbox shows its processes no package of ours, so the text includes what they need.
"""

from __future__ import annotations

import marshal
import zlib
from functools import cache
from pathlib import Path

_MAIN = """\
import marshal, sys, types, zlib
for name, code in {modules!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(marshal.loads(zlib.decompress(code)), vars(module))
{call}
"""


@cache
def _code(name: str) -> bytes:
    """A module of this package, compiled for our interpreter version, which the sandbox uses too.

    Compressed, because a remote judge starts its processes with all of it as one argument: 128 KiB at most.
    """
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return zlib.compress(marshal.dumps(compile(source, name, "exec")))


def candidate_calls(requests: int, replies: int, all_names: bool) -> str:
    """A process that reads the program from its standard input and answers calls of its functions."""
    arguments = f"{requests}, {replies}, {all_names}"
    return _main(["wire", "candidate"], f"module.serve_calls(sys.stdin.buffer.read().decode(), {arguments})")


def candidate_scripts(requests: int, replies: int, output: int) -> str:
    """A process that reads the program from its standard input and runs it for one standard input after another."""
    fds = f"{requests}, {replies}, {output}"
    return _main(["wire", "candidate"], f"module.serve_scripts(sys.stdin.buffer.read().decode(), {fds})")


def tester(requests: int, replies: int) -> str:
    """A process that reads a job of tests from its standard input and writes the result to its standard output."""
    return _main(["wire", "program", "tester"], f"module.main({requests}, {replies})")


def _main(names: list[str], call: str) -> str:
    return _MAIN.format(modules=[(f"rlcli_sandbox.judge.{name}", _code(name)) for name in names], call=call)
