"""Select the judge: our own sandbox, or a remote one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from rlcli_sandbox import Sandbox, open_sandbox
from rlcli_sandbox.judge.calls import Job, judge_calls
from rlcli_sandbox.judge.judgement import Judgement
from rlcli_sandbox.judge.scripts import judge_scripts
from rlcli_sandbox.limits import Limits


class Judge(Protocol):
    """Runs programs against tests; see `judge_calls` and `judge_scripts` for arguments, results and errors."""

    def calls(self, program: str, job: Job, limits: Limits) -> Judgement: ...

    def scripts(
        self, program: str, cases: Sequence[Mapping[str, str]], limits: Limits, count_all: bool
    ) -> Judgement: ...


class LocalJudge:
    """Judges in a sandbox of this machine."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def calls(self, program: str, job: Job, limits: Limits) -> Judgement:
        return judge_calls(self._sandbox, program, job, limits)

    def scripts(self, program: str, cases: Sequence[Mapping[str, str]], limits: Limits, count_all: bool) -> Judgement:
        return judge_scripts(self._sandbox, program, cases, limits, count_all)


def open_judge() -> Judge:
    """The judge named by the variable RLCLI_SANDBOX: a local backend, or the http address of a SandboxFusion server.

    Raises `SetupError` if it is not available.
    """
    return _open(os.environ.get("RLCLI_SANDBOX", ""))


@lru_cache
def _open(name: str) -> Judge:
    if name.startswith(("http://", "https://")):
        from rlcli_sandbox.sandbox_fusion import FusionJudge

        return FusionJudge(name)
    return LocalJudge(open_sandbox())
