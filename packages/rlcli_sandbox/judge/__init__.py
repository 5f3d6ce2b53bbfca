"""Tests a program with hidden tests, in two sandboxed processes that exchange only values.

    verifier ── job, nonce ──> tester ──── name, arguments ───> candidate <── program ── verifier
    verifier <── result, nonce ── tester <── value or exception ── candidate

The candidate's process runs the program and has no tests. The tester's process runs the dataset's tests and compares
the returned values; `wire` lets only values of exact built-in types through. So `sys.exit(0)`, a walk up the frames,
patched builtins, an `__eq__` that is always true or a forged reply change the candidate's own process and no verdict.
Programs that read standard input and write standard output (`judge_scripts`) need no tester: their output is text,
which the verifier compares itself.
"""

from __future__ import annotations

from rlcli_sandbox.judge.calls import Job, judge_calls
from rlcli_sandbox.judge.judgement import Judgement
from rlcli_sandbox.judge.opening import Judge, open_judge
from rlcli_sandbox.judge.scripts import judge_scripts, same_output

__all__ = ["Job", "Judge", "Judgement", "judge_calls", "judge_scripts", "open_judge", "same_output"]
