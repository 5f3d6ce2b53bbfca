"""Tests by calls: the dataset's tests in one sandboxed process, the program in another."""

from __future__ import annotations

import json
import secrets
from typing import Any, Literal, TypedDict, cast

from rlcli_sandbox.judge import boot
from rlcli_sandbox.judge.judgement import Judgement
from rlcli_sandbox.judge.process import Process, ProcessStarter, over_limit, pipes
from rlcli_sandbox.judge.wire import decode, encode
from rlcli_sandbox.limits import Exit, Limits

_GRACE_S = 0.2
"""Maximum time for a program that closed its pipe to end, so that its exit status can show the reason."""


class Job(TypedDict, total=False):
    """Tests, as `tester` reads them: the fields of one kind, and count_all (continue after a failure, for a share)."""

    kind: Literal["check", "asserts", "cases"]
    """Form of the tests."""
    setup: str
    """Code that runs before the tests (check, asserts)."""
    test: str
    """Code that defines `check(candidate)` (check)."""
    entry_point: str
    """Name of the function or method under test (check, cases)."""
    asserts: list[str]
    """One assert statement each (asserts)."""
    cases: list[dict[str, object]]
    """`input`, the list of arguments, and `output`, the expected result (cases)."""
    wrapped: bool
    """Each expected result may be in a list of one (cases)."""
    count_all: bool
    """Continue after a failure, for a share of passed tests."""


def judge_calls(sandbox: ProcessStarter, program: str, job: Job, limits: Limits) -> Judgement:
    """Run the tests of `job` against `program`, both within `limits`.

    Raises `ValueError` for tests that cannot test any program (they do not compile, need a missing module, call
    nothing, pass functions), and `RuntimeError` if the sandbox failed and not the program.
    """
    nonce = secrets.token_hex(16)
    with pipes(2) as [(request_reader, request_writer), (reply_reader, reply_writer)]:
        fds = (request_reader.fileno(), reply_writer.fileno())
        main = boot.candidate_calls(fds[0], fds[1], job["kind"] == "cases")
        candidate = Process(sandbox, main, limits, program.encode("utf-8", "replace"), fds)
        try:
            tester_fds = (request_writer.fileno(), reply_reader.fileno())
            order = json.dumps({"nonce": nonce, **encoded_job(job)}).encode()
            tester = Process(sandbox, boot.tester(tester_fds[0], tester_fds[1]), limits, order, tester_fds)
            try:
                for end in (request_reader, request_writer, reply_reader, reply_writer):
                    end.close()  # each process can now detect the end of the other
                end_of_tests = tester.ended()
            finally:
                tester.kill()
            assert end_of_tests is not None
            result = with_nonce(end_of_tests.stdout, nonce)
            exited = result is None or result["verdict"] in ("exited", "not_started")
            end_of_program = candidate.ended(_GRACE_S if exited else 0)
        finally:
            candidate.kill()
    return _judgement(result, end_of_tests, end_of_program, limits)


def encoded_job(job: Job) -> dict[str, Any]:
    """Encode the values of a job as typed JSON, which holds integers of any length."""
    return {**job, "cases": encode(job["cases"])} if "cases" in job else {**job}


def decoded_job(job: dict[str, Any]) -> Job:
    """Decode a job from `encoded_job`."""
    return cast(Job, {**job, "cases": decode(job["cases"])} if "cases" in job else job)


def with_nonce(text: str | bytes, nonce: str) -> dict[str, Any] | None:
    """The JSON object in `text`, if it repeats the nonce."""
    try:
        result = json.loads(text)
    except ValueError:
        return None
    return result if isinstance(result, dict) and result.get("nonce") == nonce else None


def _judgement(result: dict[str, Any] | None, tests: Exit, program: Exit | None, limits: Limits) -> Judgement:
    excess = over_limit(program.killed_for, limits) if program else ""
    if result is None:
        # Tests that loop or grow without end do so because of the program's values.
        excess = excess or over_limit(tests.killed_for, limits)
        if not excess:
            raise RuntimeError(f"the tests' process ended with status {tests.status}: {_last_line(tests.stderr)}")
        return Judgement.of(0, 0, excess)
    verdict, passed, total, detail = (result[key] for key in ("verdict", "passed", "total", "detail"))
    if verdict == "invalid_tests":
        raise ValueError(detail)
    if verdict == "not_started":
        raise RuntimeError(f"the program's process did not start: {excess or (program and _last_line(program.stderr))}")
    if verdict == "exited":
        detail = excess or (f"the program ended with status {program.status}" if program else "the program hung up")
    elif verdict == "done" and passed == total:
        detail = ""
    return Judgement.of(passed, total, detail)


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"
