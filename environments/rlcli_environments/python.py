"""Python as a tool: cells in the sandbox, with the state of a notebook."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlcli_sandbox import Exit, Limits, open_sandbox
from rlcli_sandbox.judge.process import over_limit

from rlcli.environments.tools import ToolEnvironment
from rlcli_environments.cells import FINISHED

PATIENCE = 5.0
"""Wall-clock seconds of a turn per CPU second of a call, so that a loaded machine does not end programs."""
MAX_OUTPUT_BYTES = 1 << 20
"""A cell that writes more is ended."""


class Python(ToolEnvironment):
    """Run Python in the sandbox: a tool that keeps its variables and files within a conversation.

    The messages are the row's own; its verifier scores the policy's last turn. All cells of a conversation are one
    program that grows: it runs again for each call, with the same seed of all chance, and the output is that of the new
    cell. A cell that breaks a limit is left out; one that raises is not.
    timeout_s: CPU seconds of all cells of a conversation together; all calls of a turn have five times as many seconds
    of wall-clock time, which has to be less than the deadline of the environment. memory_mb: resident memory.
    output_chars: of a cell; what is beyond is cut in the middle.
    """

    def __init__(self, timeout_s: float = 4.0, memory_mb: int = 512, output_chars: int = 4000) -> None:
        super().__init__([self.python])
        self.sandbox = open_sandbox()
        self.timeout_s, self.memory_bytes, self.output_chars = timeout_s, memory_mb << 20, output_chars
        self.cells: list[str] = []
        self.seed = 0
        self.turn_ends = math.inf

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self.seed = seed
        return super().reset(row, seed)

    def step(self, message: Mapping[str, Any]) -> Any:
        self.turn_ends = time.monotonic() + PATIENCE * self.timeout_s
        return super().step(message)

    def python(self, code: str) -> str:
        """Runs Python code. Variables, functions, imports and files of earlier calls exist. The result is what it
        prints, and the value of its last line.

        Args:
            code: one or more lines of Python
        """
        left_s = self.turn_ends - time.monotonic()
        if left_s <= 0:
            return "error: the time of this turn is used up; this call was left out"
        ended = self._run([*self.cells, code], left_s)
        output = self._cut(ended.stdout.decode("utf-8", "replace"))
        if ended.status == FINISHED:
            self.cells.append(code)
            return output or "(no output)"
        limits = self._limits(PATIENCE * self.timeout_s)
        why = over_limit(ended.killed_for, limits) or f"ended the process with status {ended.status}"
        return f"{output}\nerror: this call {why}; it was left out, variables are as before it".lstrip("\n")

    def _run(self, cells: list[str], wall_s: float) -> Exit:
        order = json.dumps({"cells": cells, "seed": self.seed}).encode()
        with self.sandbox.start(_program(), self._limits(wall_s)) as child:
            with contextlib.suppress(BrokenPipeError):  # it has ended; its status shows why
                child.stdin.write(order)
            return child.wait()

    def _limits(self, wall_s: float) -> Limits:
        return Limits(wall_s, self.memory_bytes, output_bytes=MAX_OUTPUT_BYTES, cpu_s=self.timeout_s)

    def _cut(self, text: str) -> str:
        over = len(text) - self.output_chars
        if over <= 0:
            return text
        half = self.output_chars // 2
        return f"{text[: self.output_chars - half]}\n… {over} characters left out …\n{text[len(text) - half :]}"


@cache
def _program() -> str:
    return Path(__file__).with_name("cells.py").read_text(encoding="utf-8")
