"""Code: the program in a response, run against tests in the sandbox."""

from __future__ import annotations

import contextlib
from typing import Literal

from rlcli_sandbox.judge import open_judge
from rlcli_sandbox.limits import Limits

from rlcli.errors import SetupError
from rlcli.types import Outcome, Verdict, VerifyRequest
from rlcli_verifiers import fences
from rlcli_verifiers.answers import OPEN_THINK, no_answer
from rlcli_verifiers.code_truth import Scripts, called_names, read_truth

ANSWER_KIND = "code"
ROW_OPTIONS = ("score",)
NEEDS_SANDBOX = True

MAX_OUTPUT_BYTES = 8 << 20
"""Maximum output of one program, and of one case of standard input: tests with outputs of megabytes do exist."""

PATIENCE = 5.0
"""Wall-clock seconds per CPU second that a program may use, so that a loaded machine does not end programs."""


def verify(
    request: VerifyRequest,
    *,
    timeout_s: float = 4.0,
    wall_s: float = 0.0,
    memory_mb: int = 512,
    score: Literal["all", "share"] = "all",
) -> Verdict:
    """The program in the response passes the tests in the ground truth (`code_truth` lists their forms).

    The program is the last fenced block of Python after </think> that defines what the tests call, else the last one
    without a language; if nothing is fenced, all text after </think>.
    It imports what it uses, except the names of `typing` and, in tests of calls (functional), those of LeetCode.
    timeout_s: CPU seconds of the program for all tests together; keep it below the pool's deadline. wall_s: wall-clock
    seconds, which end a program that sleeps; 0: PATIENCE times timeout_s. memory_mb: resident memory of the program.
    score: "all" (1 if every test passes, else 0) or "share" (the share of the tests that pass, which
    is also the part `passed`); OK means that every test passes. A program that exceeds a limit, ends early or violates
    the protocol is WRONG, and the detail states the reason.

    Raises `SetupError` if no sandbox works, `ValueError` for a ground truth that cannot be read or whose tests cannot
    test any program, `RuntimeError` if the sandbox fails.
    """
    truth = read_truth(request.ground_truth, request.extra_info)
    text = request.answer_text()
    if text is None:
        return no_answer(OPEN_THINK)
    program = fences.program(text, called_names(truth), reads_input=isinstance(truth, Scripts))
    if program is None:
        return no_answer("no program in the response")
    limits = Limits(
        wall_s or PATIENCE * timeout_s, cpu_s=timeout_s, memory_bytes=memory_mb << 20, output_bytes=MAX_OUTPUT_BYTES
    )
    judge, count_all = open_judge(), score == "share"
    if isinstance(truth, Scripts):
        judgement = judge.scripts(program, truth.cases, limits, count_all)
    else:
        judgement = judge.calls(program, {**truth, "count_all": count_all}, limits)
    return Verdict(
        score=judgement.share if count_all else float(judgement.right),
        outcome=Outcome.OK if judgement.right else Outcome.WRONG,
        answer=program,
        parts={"passed": judgement.share} if count_all else {},
        detail=judgement.detail,
    )


def check_row(request: VerifyRequest) -> None:
    """Raise `ValueError` for tests that cannot be read. Nothing is run."""
    read_truth(request.ground_truth, request.extra_info)


def preload() -> None:
    """Try the sandbox once, before scoring processes are forked; if it does not work, each row reports that."""
    with contextlib.suppress(SetupError):
        open_judge()


def gold(request: VerifyRequest) -> str:
    """The row's reference response. Raises `ValueError` if it has none: a program cannot be made from tests."""
    response = request.extra_info.get("response")
    if not response:
        raise ValueError('the row has no extra_info "response" with a program')
    return str(response)
