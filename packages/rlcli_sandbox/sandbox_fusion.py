"""Run programs on a remote SandboxFusion server: RLCLI_SANDBOX=http://host:port.

Each verification by calls sends one POST to /run_code; verification by standard input sends one for each case.

It guarantees less than a sandbox of this machine:

- Standard input and output: the same. Expected outputs stay here, and the program's output is compared here.
- Calls and asserts: two processes as here, over the same typed JSON, so that frame walks, patched builtins, `sys.exit`
  or an `__eq__` forge nothing. But both run as one user in one remote sandbox: a program that attacks the tests'
  process or files there (by /proc, ptrace, a signal) can read them and forge a pass.
- Files, network, processes and leftovers are limited by that server's configuration, and not by us.
- Memory is limited for calls only; time is, for both, plus the network time: wall-clock seconds, whereas a sandbox of
  this machine counts CPU seconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlcli.errors import SetupError
from rlcli_sandbox.judge.calls import Job, encoded_job, with_nonce
from rlcli_sandbox.judge.judgement import Judgement
from rlcli_sandbox.judge.scripts import same_output
from rlcli_sandbox.limits import Limits

MAX_REPLY_BYTES = 16 << 20

_HINT = "start it, or unset RLCLI_SANDBOX to use this machine's sandbox"
_MODULES = ("boot", "calls", "candidate", "judgement", "process", "program", "remote", "tester", "wire")
_PACKAGES = ("rlcli_sandbox/__init__.py", "rlcli_sandbox/judge/__init__.py")

_DRIVER = """\
import pathlib, sys, tempfile
with tempfile.TemporaryDirectory() as root:
    for name, text in {files!r}.items():
        path = pathlib.Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    sys.path.insert(0, root)
    from rlcli_sandbox.judge.remote import main
    main()
"""


def _on_the_wall(limits: Limits) -> Limits:
    """With one time limit: the CPU time of remote processes is not visible here."""
    return dataclasses.replace(limits, wall_s=min(limits.wall_s, limits.cpu_s), cpu_s=math.inf)


class FusionJudge:
    """Tests programs on a SandboxFusion server; see `judge_calls` and `judge_scripts`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") + "/run_code"

    def calls(self, program: str, job: Job, limits: Limits) -> Judgement:
        nonce, limits = secrets.token_hex(16), _on_the_wall(limits)
        order = {"program": program, "job": encoded_job(job), "limits": dataclasses.asdict(limits), "nonce": nonce}
        ran = self._run(_driver(), json.dumps(order), limits.wall_s + 1.0)
        lines = reversed(str(ran["stdout"] or "").splitlines())
        result = next(filter(None, (with_nonce(line, nonce) for line in lines)), None)
        if result is None:
            if ran["status"] == "TimeLimitExceeded":
                return Judgement.of(0, 0, f"ran past {limits.wall_s:g} s")
            raise RuntimeError(f"{self._url}: no verdict came back: {str(ran['stderr'])[-300:]}")
        if result.get("error") == "tests":
            raise ValueError(result["detail"])
        if "error" in result:
            raise RuntimeError(result["detail"])
        return Judgement(right=result["right"] is True, share=float(result["share"]), detail=str(result["detail"]))

    def scripts(self, program: str, cases: Sequence[Mapping[str, str]], limits: Limits, count_all: bool) -> Judgement:
        limits = _on_the_wall(limits)
        deadline = time.monotonic() + limits.wall_s
        passed, detail = 0, ""
        for number, case in enumerate(cases, 1):
            remaining_s = deadline - time.monotonic()
            problem = f"ran past {limits.wall_s:g} s"
            if remaining_s > 0:
                ran = self._run(program, case["input"], remaining_s)
                if ran["status"] != "TimeLimitExceeded":
                    problem = _problem(ran, case["output"])
            passed += not problem
            detail = detail or (problem and f"case {number} of {len(cases)}: {problem}")
            if detail and (not count_all or remaining_s <= 0):
                break
        return Judgement.of(passed, len(cases), detail)

    def _run(self, code: str, stdin: str, timeout_s: float) -> dict[str, Any]:
        """A program's `run_result`. Raises `SetupError` if no server answers, `RuntimeError` for a failure there."""
        body = {"code": code, "language": "python", "stdin": stdin, "run_timeout": timeout_s, "compile_timeout": 10}
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s + 30) as response:
                reply = json.loads(response.read(MAX_REPLY_BYTES + 1))
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self._url}: HTTP {error.code} {error.reason}") from None
        except (OSError, ValueError) as error:
            raise SetupError(f"RLCLI_SANDBOX: no SandboxFusion server at {self._url}: {error}", _HINT) from None
        ran = reply.get("run_result") if isinstance(reply, dict) else None
        if not isinstance(ran, dict) or reply.get("status") == "SandboxError" or ran.get("status") == "Error":
            message = reply.get("message") if isinstance(reply, dict) else reply
            raise RuntimeError(f"{self._url}: the sandbox failed: {str(message)[:300]}")
        return {"status": "", "stdout": "", "stderr": "", "return_code": 0, **ran}


def _problem(ran: Mapping[str, Any], expected: str) -> str:
    if ran["return_code"] != 0:
        lines = str(ran["stderr"] or "").strip().splitlines()
        return lines[-1][:300] if lines else f"the program ended with status {ran['return_code']}"
    got = str(ran["stdout"] or "")
    return "" if same_output(expected, got) else f"expected {expected[:80]!r}, got {got[:80]!r}"


@cache
def _driver() -> str:
    """The source text of a program that runs the tests: it unpacks our modules and runs `remote.main`."""
    folder = Path(__file__).parent
    names = ["limits.py", *(f"judge/{name}.py" for name in _MODULES)]
    files = {f"rlcli_sandbox/{name}": (folder / name).read_text(encoding="utf-8") for name in names}
    return _DRIVER.format(files=files | dict.fromkeys(_PACKAGES, ""))
