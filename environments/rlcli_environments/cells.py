"""Runs the cells of a conversation, one after the other; what the last one writes is the output.

This file is the program of a sandboxed process: it may import only the standard library. Its order, JSON on standard
input, has `cells`, the sources, and `seed`: a conversation's cells run again for each new one, so that all sources of
chance begin the same each time. It exits with `FINISHED`; any other status is that of a cell that ended the process.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import random
import sys
import traceback
import types
from typing import Any

FINISHED = 77


def run(source: str, number: int, names: dict[str, Any]) -> None:
    """Run a cell and print the value of its last expression, as a notebook does, or what it raised."""
    filename = f"<cell {number}>"
    linecache.cache[filename] = len(source), None, source.splitlines(True), filename
    try:
        tree = ast.parse(source, filename)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, filename, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), filename, "eval"), names)
            if value is not None:
                print(repr(value))
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # without the one of this function
        traceback.print_exception(type(error), error, frames)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def main() -> None:
    order = json.load(sys.stdin)
    chance = random.Random(order["seed"])
    os.urandom = random._urandom = chance.randbytes  # type: ignore[attr-defined]
    random.seed(order["seed"])
    output, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    for number, source in enumerate(order["cells"], 1):
        target = output if number == len(order["cells"]) else nowhere
        os.dup2(target, 1)
        os.dup2(target, 2)
        run(source, number, vars(module))
    os._exit(FINISHED)


if __name__ == "__main__":
    main()
