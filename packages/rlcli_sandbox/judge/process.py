"""One sandboxed process of a judge, and the meaning of its exit."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from io import FileIO
from typing import TYPE_CHECKING, Protocol

from rlcli_sandbox.limits import Excess, Exit, Limits

if TYPE_CHECKING:
    from rlcli_sandbox import Child


class ProcessStarter(Protocol):
    """A sandbox: it starts processes."""

    def start(self, main: str, limits: Limits, pass_fds: Sequence[int] = ()) -> Child: ...


class Process:
    """A started child with its standard input written; a thread waits for it, so that its limits hold."""

    def __init__(
        self, sandbox: ProcessStarter, main: str, limits: Limits, stdin: bytes, pass_fds: Sequence[int]
    ) -> None:
        self.limits = limits
        self._child = sandbox.start(main, limits, pass_fds)
        self._exit: Exit | None = None
        with contextlib.suppress(BrokenPipeError):  # it died; its exit status shows why
            self._child.stdin.write(stdin)
            self._child.stdin.close()
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    def _wait(self) -> None:
        self._exit = self._child.wait()

    def ended(self, timeout_s: float | None = None) -> Exit | None:
        """Wait for its end; None if it has not ended within `timeout_s`."""
        self._waiter.join(timeout_s)
        return self._exit

    @property
    def cpu_s(self) -> float:
        """CPU seconds that it has used, as of the last check."""
        return self._child.cpu_s

    def kill(self) -> None:
        """Kill and reap it. Harmless when repeated."""
        self._child.kill()
        self._waiter.join()


def over_limit(broken: Excess, limits: Limits) -> str:
    """The limit that a program was killed for, in words; empty if it was not killed."""
    return {
        "": "",
        "cpu": f"ran past {limits.cpu_s:g} s of CPU time",
        "time": f"ran past {limits.wall_s:g} s",
        "memory": f"used more than {limits.memory_bytes >> 20} MB of memory",
        "output": f"wrote more than {limits.output_bytes} bytes",
        "disk": f"filled {limits.disk_bytes >> 20} MB of disk",
    }[broken]


@contextlib.contextmanager
def pipes(count: int) -> Iterator[list[tuple[FileIO, FileIO]]]:
    """Pipes as (read, write) files without buffers, closed at the end; the other side's ends may be closed earlier."""
    with contextlib.ExitStack() as stack:
        pairs = [(FileIO(read, "rb"), FileIO(write, "wb")) for read, write in (os.pipe() for _ in range(count))]
        for end in (end for pair in pairs for end in pair):
            stack.enter_context(end)
        yield pairs
