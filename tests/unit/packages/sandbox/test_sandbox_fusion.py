"""The remote judge, against a server on this machine that speaks SandboxFusion's protocol and really runs programs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rlcli_sandbox import Limits, open_sandbox
from rlcli_sandbox.judge import Job
from rlcli_sandbox.sandbox_fusion import FusionJudge
from rlcli_verifiers import code

from rlcli.errors import SetupError
from rlcli.types import Outcome, VerifyRequest

LIMITS = Limits(wall_s=4.0, memory_bytes=512 << 20)
CHECK = Job(
    kind="check",
    setup="",
    test="def check(candidate):\n    assert candidate(1) == 2\n",
    entry_point="f",
    count_all=False,
)


class Fusion(BaseHTTPRequestHandler):
    """POST /run_code. What starts processes runs as one itself, as on a real server; all else in our sandbox."""

    bodies: list[dict[str, Any]]
    broken = ""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        assert self.path == "/run_code"
        reply = {"status": "SandboxError", "message": self.broken} if self.broken else self.answer(body)
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["language"] == "python"
        status, stdout, stderr, code = (plain if "rlcli_sandbox/" in body["code"] else sandboxed)(
            body["code"], body["stdin"], body["run_timeout"]
        )
        ran = {"status": status, "stdout": stdout, "stderr": stderr, "return_code": code, "execution_time": 0.1}
        success = status == "Finished" and code == 0
        return {"status": "Success" if success else "Failed", "message": "", "run_result": ran, "files": {}}

    def log_message(self, *args: Any) -> None:
        pass


def plain(program: str, stdin: str, timeout_s: float) -> tuple[str, str, str, int | None]:
    try:
        ran = subprocess.run(
            [sys.executable, "-c", program], input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "TimeLimitExceeded", "", "", None
    return "Finished", ran.stdout, ran.stderr, ran.returncode


def sandboxed(program: str, stdin: str, timeout_s: float) -> tuple[str, str, str, int | None]:
    child = open_sandbox("auto").start(program, Limits(wall_s=timeout_s))
    child.stdin.write(stdin.encode())
    ended = child.wait()
    if ended.killed_for == "time":
        return "TimeLimitExceeded", "", "", None
    return "Finished", ended.stdout.decode(), ended.stderr.decode(), ended.status


@pytest.fixture
def handler() -> type[Fusion]:
    return type("Handler", (Fusion,), {"bodies": []})


@pytest.fixture
def url(handler: type[Fusion], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    try:
        open_sandbox()
    except SetupError as error:
        pytest.skip(f"no sandbox here: {error}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_calls_are_judged_there(url: str) -> None:
    judge = FusionJudge(url)
    assert judge.calls("def f(x): return x + 1", CHECK, LIMITS).right
    wrong = judge.calls("def f(x): return x", CHECK, LIMITS)
    assert (wrong.right, wrong.detail) == (False, "assert candidate(1) == 2")


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "print('{\"right\": true}')\ndef f(x): return 0",
        "import sys\ndef f(x): sys.exit(0)",
        "class E:\n    def __eq__(s, o): return True\ndef f(x): return E()",
        "while True: pass",
    ],
)
def test_no_simple_forgery_passes(url: str, program: str) -> None:
    judgement = FusionJudge(url).calls(program, CHECK, Limits(wall_s=1.0))
    assert not judgement.right
    assert judgement.detail


def test_outputs_are_compared_here(url: str, handler: type[Fusion]) -> None:
    judge = FusionJudge(url)
    cases = [{"input": "2\n", "output": "4-secret"}, {"input": "3\n", "output": "6-secret"}]
    assert judge.scripts("print(f'{int(input()) * 2}-' + 'sec' + 'ret')", cases, LIMITS, False).right
    assert "4-secret" not in json.dumps(handler.bodies)
    judgement = judge.scripts("print(4, 'secret', sep='-')", cases, LIMITS, True)
    assert (judgement.right, judgement.share) == (False, 0.5)
    assert judgement.detail.startswith("case 2 of 2: expected '6-secret'")


@pytest.mark.parametrize(
    ("program", "says"),
    [("1 / 0", "ZeroDivisionError"), ("while True: pass", "ran past 1 s"), ("raise SystemExit(3)", "status 3")],
)
def test_the_detail_says_what_went_wrong_there(url: str, program: str, says: str) -> None:
    judgement = FusionJudge(url).scripts(program, [{"input": "", "output": ""}], Limits(wall_s=1.0), False)
    assert not judgement.right
    assert says in judgement.detail


def test_tests_that_can_judge_no_program_are_an_error_there_too(url: str) -> None:
    with pytest.raises(ValueError, match="never call the program"):
        FusionJudge(url).calls("def f(x): return 2", Job(CHECK, test="def check(candidate): pass"), LIMITS)


def test_a_failure_of_the_server_is_no_wrong_answer(url: str, handler: type[Fusion]) -> None:
    handler.broken = "no workers left"
    with pytest.raises(RuntimeError, match="no workers left"):
        FusionJudge(url).calls("def f(x): return 2", CHECK, LIMITS)


def test_nobody_there_is_a_setup_error() -> None:
    with pytest.raises(SetupError, match="RLCLI_SANDBOX"):
        FusionJudge("http://127.0.0.1:9").scripts("", [{"input": "", "output": ""}], LIMITS, False)


def test_the_verifier_uses_it_when_the_environment_says_so(
    url: str, handler: type[Fusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCLI_SANDBOX", url)
    truth = json.dumps({"kind": "stdio", "cases": [{"input": "1", "output": "1"}]})
    verdict = code.verify(VerifyRequest("```python\nprint(input())\n```", truth))
    assert verdict.outcome is Outcome.OK
    assert len(handler.bodies) == 1
