"""Tests by standard input and output: one sandboxed process runs the program for one case after another."""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from io import FileIO
from typing import Any

from rlcli_sandbox.judge import boot
from rlcli_sandbox.judge.judgement import Judgement
from rlcli_sandbox.judge.process import Process, ProcessStarter, over_limit, pipes
from rlcli_sandbox.judge.wire import OutOfProtocol, TooBig, encode, receive, send
from rlcli_sandbox.limits import Limits

# No leading zeros: "0110" is a text of digits, which no other number may match.
_NUMBER = re.compile(r"[+-]?(?:0|[1-9]\d{0,400})(?:\.\d{0,400})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_START_S = 0.1
"""Minimum time left to begin another case."""
_EXIT_S = 2.0
"""Maximum time for a process that has closed its pipes to end, on a busy machine too; then it counts as hung up."""

_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


def judge_scripts(
    sandbox: ProcessStarter, program: str, cases: Sequence[Mapping[str, str]], limits: Limits, count_all: bool = False
) -> Judgement:
    """Run `program` as `__main__` for each case (`input`, `output`) and compare what it writes.

    Every case has a fresh namespace, an empty folder and its own standard input; the process is started once, and again
    only if the program ends it (`os._exit`) or leaves files that cannot be removed. `limits` hold for all the cases
    together, output for each. The program's process never sees an expected output. Raises `RuntimeError` if the
    sandbox failed and not the program.
    """
    ends, spent_s = time.monotonic() + limits.wall_s, 0.0
    passed, detail, runner = 0, "", None
    try:
        for number, case in enumerate(cases, 1):
            if runner is None or runner.over:
                if runner:
                    runner.close()
                    spent_s += runner.cpu_s
                remaining = replace(limits, wall_s=ends - time.monotonic(), cpu_s=limits.cpu_s - spent_s)
                runner = _Runner(sandbox, program, limits, remaining)
            output, problem = runner.run(case["input"])
            if not problem and not same_output(case["output"], output):
                problem = f"expected {_short(case['output'])}, got {_short(output)}"
            passed += not problem
            detail = detail or (problem and f"case {number} of {len(cases)}: {problem}")
            if excess := _over_time(limits, ends, spent_s + runner.cpu_s):
                detail = detail or (excess if number < len(cases) else "")
                break
            if detail and not count_all:
                break
    finally:
        if runner:
            runner.close()
    return Judgement.of(passed, len(cases), detail)


def _over_time(limits: Limits, ends: float, spent_s: float) -> str:
    """The exceeded limit, in words, if too little wall-clock or CPU time is left for another case; else empty."""
    if spent_s >= limits.cpu_s - _START_S:
        return over_limit("cpu", limits)
    return over_limit("time", limits) if time.monotonic() >= ends - _START_S else ""


class _Runner:
    """One process that runs the program for one standard input after another, until it is `over`."""

    def __init__(self, sandbox: ProcessStarter, program: str, limits: Limits, remaining: Limits) -> None:
        self.limits = limits
        self.over = False
        self._stack = contextlib.ExitStack()
        [(requests, self._requests), (self._replies, replies), (self._output, output)] = self._stack.enter_context(
            pipes(3)
        )
        fds = (requests.fileno(), replies.fileno(), output.fileno())
        try:
            main = boot.candidate_scripts(requests=fds[0], replies=fds[1], output=fds[2])
            self._process = Process(sandbox, main, remaining, program.encode("utf-8", "replace"), fds)
        except BaseException:
            self._stack.close()
            raise
        self._stack.callback(self._process.kill)
        for end in (requests, replies, output):
            end.close()
        os.set_blocking(self._output.fileno(), False)
        self._started = False

    @property
    def cpu_s(self) -> float:
        return self._process.cpu_s

    def close(self) -> None:
        self._stack.close()

    def run(self, stdin: str) -> tuple[str, str]:
        """The program's output for `stdin`, and the error, in words, or an empty text."""
        written = bytearray()
        try:
            if not self._started and receive(self._replies.fileno()) is None:
                raise RuntimeError(f"the program's process did not start: {self._end()}")
            self._started = True
            try:
                send(self._requests.fileno(), {"stdin": encode(stdin)})
            except BrokenPipeError:
                pass  # it has ended, and its replies will too
            except TooBig as error:
                raise ValueError(f"a case's input is too long: {error}") from None
            reply = self._read(written)
        except OutOfProtocol as error:
            self.over = True
            return "", f"the program sent {error}"
        if reply is not None and reply.get("clean") is not True:
            self.over = True  # the next case starts in a new folder and process
        problem = self._end() if reply is None else str(reply.get("text", "")) if reply.get("error") else ""
        if len(written) > self.limits.output_bytes:
            self.over, problem = True, f"wrote more than {self.limits.output_bytes} bytes"
        return written.decode("utf-8", "replace"), problem[:300]

    def _end(self) -> str:
        """The reason why the process ended; empty if it ended by itself with status 0."""
        self.over = True
        end = self._process.ended(_EXIT_S)
        if end is None:
            return "the program hung up"
        if not end.killed_for and end.status == 0:
            return ""
        return over_limit(end.killed_for, self.limits) or f"the program ended with status {end.status}"

    def _read(self, written: bytearray) -> dict[str, Any] | None:
        """Collect output until the reply comes; None if the process ended instead."""
        with selectors.DefaultSelector() as ready:
            for end in (self._replies, self._output):
                ready.register(end, selectors.EVENT_READ)
            while len(written) <= self.limits.output_bytes:
                readable = [key.fileobj for key, _ in ready.select()]
                if self._output in readable and not _drain(self._output, written, self.limits.output_bytes):
                    ready.unregister(self._output)
                if self._replies in readable:
                    reply = receive(self._replies.fileno())
                    _drain(self._output, written, self.limits.output_bytes)
                    if reply is not None and not isinstance(reply, dict):
                        raise OutOfProtocol("a message that is not an object")
                    return reply
        return {}


def _drain(source: FileIO, written: bytearray, max_bytes: int) -> bool:
    """Read what a pipe holds, up to `max_bytes` bytes in all and one chunk; False at its end."""
    while len(written) <= max_bytes:
        chunk = source.read(1 << 16)
        if chunk is None:
            return True
        if not chunk:
            return False
        written += chunk
    return True


def same_output(expected: str, got: str) -> bool:
    """True if an output equals the expected one: line by line, ignoring white space around lines and at both ends.

    Lines that differ are compared by their words: the same text, or the same number; if the expected number has a
    fraction or an exponent, within 1e-6 of it, relative or absolute.

    >>> same_output("1 2.5\\n", "1  2.5000001 \\n\\n")
    True
    >>> same_output("0110", "110")
    False
    """
    expected_lines, got_lines = expected.strip().split("\n"), got.strip().split("\n")
    return len(expected_lines) == len(got_lines) and all(map(_same_line, expected_lines, got_lines))


def _same_line(expected: str, got: str) -> bool:
    if expected.strip() == got.strip():
        return True
    expected_words, got_words = expected.split(), got.split()
    return len(expected_words) == len(got_words) and all(map(_same_word, expected_words, got_words))


def _same_word(expected: str, got: str) -> bool:
    if expected == got:
        return True
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(got)):
        return False
    if _WHOLE.fullmatch(expected):
        return Decimal(expected) == Decimal(got)
    wanted = float(expected)
    return math.isfinite(wanted) and math.isclose(wanted, float(got), rel_tol=1e-6, abs_tol=1e-6)


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}…"
