"""The judge by calls inside a remote sandbox: its two processes are plain children of this one.

It reads one JSON object from the standard input, {"program", "job", "limits", "nonce"}, and writes one, with the nonce,
to the standard output. Only the remote sandbox confines the two processes: they see each other's files and, as
processes of one user, each other. `rlcli_sandbox.sandbox_fusion` lists the consequences.
"""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from rlcli_sandbox.judge.calls import decoded_job, judge_calls
from rlcli_sandbox.limits import Excess, Exit, Limits

if TYPE_CHECKING:
    from rlcli_sandbox import Child

# Bytes of data rather than of address space: the remote machine's libraries should not count.
_PRELUDE = "import resource; resource.setrlimit(resource.RLIMIT_DATA, ({0}, {0}))\n"


class PlainProcesses:
    """Starts processes with limits of time and memory, and no other isolation."""

    def start(self, main: str, limits: Limits, pass_fds: Sequence[int] = ()) -> Child:
        return cast("Child", _PlainChild(_PRELUDE.format(limits.memory_bytes) + main, limits, pass_fds))


class _PlainChild:
    def __init__(self, main: str, limits: Limits, pass_fds: Sequence[int]) -> None:
        self._ends = time.monotonic() + limits.wall_s
        self._limits = limits
        self.cpu_s = 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", main],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
        )
        assert self._process.stdin is not None
        self.stdin = cast(io.BufferedWriter, self._process.stdin)

    def wait(self) -> Exit:
        self._process.stdin = None  # already written and closed
        killed_for: Excess = ""
        try:
            stdout, stderr = self._process.communicate(timeout=max(0.0, self._ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            stdout, stderr = self._process.communicate()
            killed_for = "time"
        return Exit(self._process.returncode, killed_for, stdout, stderr, 0.0)

    def kill(self) -> None:
        self._process.kill()


def main() -> None:
    """Run the job on the standard input; `error` is "tests" or "sandbox" if the judge raised."""
    order = json.load(sys.stdin)
    answer: dict[str, Any] = {"nonce": order["nonce"]}
    try:
        judgement = judge_calls(
            PlainProcesses(), order["program"], decoded_job(order["job"]), Limits(**order["limits"])
        )
        answer |= dataclasses.asdict(judgement)
    except ValueError as error:
        answer |= {"error": "tests", "detail": str(error)}
    except (RuntimeError, OSError) as error:
        answer |= {"error": "sandbox", "detail": str(error)}
    print(json.dumps(answer))
