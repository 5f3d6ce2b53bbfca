"""Map a pure function over many items in separate processes, for Python code that uses only one core."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

from rlcli.errors import SetupError
from rlcli.support.importing import python
from rlcli.support.redact import without_secrets

T = TypeVar("T")
R = TypeVar("R")

MOST_PROCESSES = 32
"""Each process takes a few hundred megabytes, and seconds to import its modules."""


def spread(work: Callable[[T], R], items: Sequence[T], processes: int = 0) -> Iterator[R]:
    """`work(item)` of each item, in their order. work, items and results are pickled. An exception of `work` is raised
    here, that of the earliest item first. processes: 0: one per core.

    The processes end with this one, however it ends. Raises `SetupError` if one of them dies.
    """
    cores = len(os.sched_getaffinity(0))
    processes = min(processes or min(cores, MOST_PROCESSES), len(items))
    with ExitStack() as stack:
        idle: SimpleQueue[_Child[T, R]] = SimpleQueue()
        # Kill first, so that a caller that leaves early does not wait for unwanted results.
        pool = stack.enter_context(ThreadPoolExecutor(max(processes, 1)))
        for _ in range(processes):
            idle.put(stack.enter_context(_Child(work)))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)

        def ask(item: T) -> R:
            child = idle.get()
            try:
                return child.ask(item)
            finally:
                idle.put(child)

        for future in [pool.submit(ask, item) for item in items]:
            yield future.result()


class _Child(Generic[T, R]):
    """One process, which answers until its standard input is closed."""

    def __init__(self, work: Callable[[T], R]) -> None:
        self._process = subprocess.Popen(
            python("rlcli.data.prompts.parallel_map"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**without_secrets(os.environ), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # this process handles Ctrl-C
        )
        self._work: Callable[[T], R] | None = work

    def ask(self, item: T) -> R:
        """`work(item)` of the process, or the exception that it raised there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if self._work is not None:
                pickle.dump(self._work, self._process.stdin)
                self._work = None
            pickle.dump(item, self._process.stdin)
            self._process.stdin.flush()
            worked, result = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise SetupError(
                f"a process that prepares prompts died (exit status {self._process.wait()})",
                "if it ran out of memory, free some and start again",
            ) from error
        if not worked:
            raise result
        answer: R = result
        return answer

    def __enter__(self) -> _Child[T, R]:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unflushed data has no reader
                pipe.close()
        self._process.wait()


def main() -> None:
    """Main function of a child: answer on the original standard output; anything printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    work: Callable[[object], object] | None = None
    while True:
        try:
            item = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if work is None:
            work = item
            continue
        try:
            answer = True, work(item)
        except Exception as error:
            answer = False, error
        pickle.dump(answer, answers)
        answers.flush()
