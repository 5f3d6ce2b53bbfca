"""Judging programs by calls and by standard input: what passes, what does not, and who is to blame."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from rlcli_sandbox import Limits, Sandbox, open_sandbox
from rlcli_sandbox.judge import Job, Judgement, judge_calls, judge_scripts
from rlcli_sandbox.judge.wire import (
    MAX_FRAME_BYTES,
)
from sandboxes import open_fds, until

from rlcli.errors import SetupError

LIMITS = Limits(wall_s=4.0, memory_bytes=512 << 20)


@pytest.fixture(scope="module", params=["bwrap", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    try:
        return open_sandbox(request.param)
    except SetupError as error:
        pytest.skip(f"no {request.param} here: {error}")


# ---- calls


def check(body: str, entry_point: str = "f", **fields: Any) -> Job:
    return Job(
        kind="check",
        setup="",
        test=f"def check(candidate):\n    {body}\n",
        entry_point=entry_point,
        count_all=False,
        **fields,
    )


def asserts(*lines: str, setup: str = "", count_all: bool = False) -> Job:
    return Job(kind="asserts", setup=setup, asserts=list(lines), count_all=count_all)


def cases(*pairs: tuple[list[Any], Any], name: str = "f", wrapped: bool = False) -> Job:
    return Job(
        kind="cases",
        entry_point=name,
        cases=[{"input": a, "output": b} for a, b in pairs],
        wrapped=wrapped,
        count_all=False,
    )


def judge(sandbox: Sandbox, program: str, job: Job, limits: Limits = LIMITS) -> Judgement:
    return judge_calls(sandbox, program, job, limits)


RIGHT: list[tuple[str, Job]] = [
    ("def f(x): return x + 1", check("assert candidate(1) == 2")),
    ("def f(x): return x + 1", check("assert f(1) == 2 and candidate(x=2) == 3")),
    (
        "def f(x): raise ValueError('no')",
        check("try:\n        f(1)\n        assert False\n    except ValueError: pass"),
    ),
    (
        "def f(x): raise ValueError('no')",
        check("try:\n        f(1)\n        assert False\n    except ValueError as e: assert str(e) == 'no'"),
    ),
    (
        "def f(x): raise KeyError(x)",
        check("try:\n        f('a')\n        assert False\n    except KeyError as e: assert e.args == ('a',)"),
    ),
    (
        "class Low(ValueError): pass\ndef f(x): raise Low(f'{x} is low')",
        check("try:\n        f(1)\n        assert False\n    except ValueError as e: assert str(e) == '1 is low'"),
    ),
    ("def f(x): return x\ndef g(x): return -x", asserts("assert f(1) == -g(1)")),
    ("def sum(a, b): return a * b", asserts("assert sum(3, 5) == 15")),
    ("import re\ndef f(s): return re.search('a', s)", asserts("assert f('cab')", "assert not f('xyz')")),
    ("def f(): return {1: (2, {3})}", asserts("assert f() == {1: (2, {3})}")),
    ("def f(): yield from 'ab'", asserts("assert list(f()) == ['a', 'b']")),
    ("def f(): return (1, 2)", asserts("assert isclose(f()[0], 1)", setup="from math import isclose")),
    ("def f(x): return x", asserts("assert f(1) == math.floor(1.5)")),
    ("class Solution:\n    def f(self, a: List[int]) -> int:\n        return sum(a)", cases(([[1, 2]], 3))),
    ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", cases(([20000], 20000))),
    ("def f(x): return defaultdict(int, {x: 1})", cases(([5], {"5": 1}))),
    ("def f(x): return x", cases(([7], [7]), wrapped=True)),
    (
        "import collections, re, tempfile\nwith tempfile.TemporaryFile() as t: t.write(b'x')\ndef f(): return 1",
        cases(([], 1)),
    ),
]


@pytest.mark.parametrize(("program", "job"), RIGHT)
def test_right_programs_pass(sandbox: Sandbox, program: str, job: Job) -> None:
    assert judge(sandbox, program, job) == Judgement(right=True, share=1.0, detail="")


EQUAL = "\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    __hash__ = int.__hash__\n"
PATCH = "import builtins\nbuiltins.AssertionError = builtins.Exception = type('A', (BaseException,), {})\n"
WALK = """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if isinstance(value, dict):
                value.update(passed=9, total=9, verdict='done', detail='')
        frame = frame.f_back
    return 0
"""
EARLY = """
import json, os
body = json.dumps({'id': 0, 'value': 2}).encode()
for fd in range(3, 64):
    try: os.write(fd, len(body).to_bytes(4, 'big') + body)
    except OSError: pass
def f(x): return 0
"""
VERDICT = """
import json, os
line = json.dumps({'nonce': '', 'verdict': 'done', 'passed': 1, 'total': 1, 'detail': ''}) + chr(10)
for fd in range(1, 64):
    try: os.write(fd, line.encode())
    except OSError: pass
def f(x): return 0
"""


def test_what_a_program_need_not_import_is_what_the_prompt_imported_for_it(sandbox: Sandbox) -> None:
    program = "def f(x: List[int]):\n    return math.floor(sqrt(sum(deque(x))))"
    assert judge(sandbox, program, cases(([[9]], 3))).right
    assert "NameError" in judge(sandbox, program, asserts("assert f([9]) == 3")).detail
    assert "NameError" in scripts(sandbox, "print(sqrt(4))", ("", "2.0")).detail


FORGERIES = {
    "exits at once": "import sys; sys.exit(0)",
    "ends its process": "import os; os._exit(0)",
    "exits when called": "import sys\ndef f(x): sys.exit(0)",
    "is equal to everything": f"class E:{EQUAL}def f(x): return E()",
    "subclasses int": f"class E(int):{EQUAL}def f(x): return E(0)",
    "patches builtins": f"{PATCH}def f(x): return 0",
    "raises StopIteration": "def f(x): raise StopIteration",
    "walks the frames": WALK,
    "replies early": EARLY,
    "closes its pipes": "import os\nos.closerange(3, 4096)\ndef f(x): return 2",
    "writes a verdict": VERDICT,
    "replies too much": "def f(x): return 'x' * (20 << 20)",
    "never stops replying": "def f(x):\n    while True: yield x",
    "returns itself nested": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "says that it is right": "def f(x): return 'PASSED'",
    "defines the tests' helper": "def abs(x): return 0\ndef f(x): return 0",
    "raises AssertionError": "def f(x): raise AssertionError",
    "crashes": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "does not parse": "def f(x) return 2",
    "defines nothing": "x = 1",
}
TESTS = check("assert all(map(lambda n: abs(candidate(n) - (n + 1)) == 0, [1, 2]))\n    assert candidate(1) == 2")


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES.keys())
def test_no_forgery_passes(sandbox: Sandbox, program: str) -> None:
    judgement = judge(sandbox, program, TESTS)
    assert not judgement.right
    assert judgement.detail


def test_a_builtin_of_the_tests_is_not_the_programs(sandbox: Sandbox) -> None:
    job = asserts("assert abs(f(1) - 2) < 1e-6")
    assert not judge(sandbox, "def abs(x): return 0\ndef f(x): return 77", job).right


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("while True: pass", "ran past 1 s"),
        ("def f(x):\n    while True: pass", "ran past 1 s"),
        ("def f(x):\n    a = []\n    while True: a.append('x' * 999999)", "memory|Memory"),
        ("def f(x):\n    while True: print('x' * 9999)", "wrote more than"),
        ("import os\ndef f(x): os._exit(3)", "ended with status 3"),
        ("def f(x): return 1 / 0", "ZeroDivisionError"),
        ("raise KeyError('k')", "KeyError"),
        ("def f(x) return 2", "SyntaxError"),
        ("def g(x): return 2", "defines no f"),
    ],
)
def test_the_detail_says_what_went_wrong(sandbox: Sandbox, program: str, says: str) -> None:
    limits = Limits(wall_s=1.0 if says.startswith("ran") else 8.0, memory_bytes=200 << 20)
    judgement = judge(sandbox, program, check("assert candidate(1) == 2"), limits)
    assert not judgement.right
    assert any(part in judgement.detail for part in says.split("|")), judgement.detail


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (asserts("assert f(1) =="), "do not compile"),
        (check("pass"), "never call the program"),
        (asserts("assert 1 == 1"), "never call the program"),
        (asserts("assert f(1)", setup="import no_such_module"), "No module named"),
        (asserts("assert f(lambda: 1)"), "cannot be sent"),
        (Job(kind="check", setup="", test="x = 1", entry_point="f", count_all=False), "define no check"),
    ],
)
def test_tests_that_can_judge_no_program_are_an_error(sandbox: Sandbox, job: Job, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        judge(sandbox, "def f(x): return 1", job)


def test_tests_too_big_to_send_are_an_error_and_no_programs_fault(sandbox: Sandbox) -> None:
    text = "x" * (MAX_FRAME_BYTES + 1)
    with pytest.raises(ValueError, match="too long"):
        scripts(sandbox, "", (text, ""))
    with pytest.raises(ValueError, match="too much"):
        judge(sandbox, "def f(x): return 1", cases(([text], 1)))


def test_an_argument_that_the_program_blew_up_is_its_own_fault(sandbox: Sandbox) -> None:
    job = asserts("assert f(f('x') * 9) == 1")
    assert not judge(sandbox, "def f(x): return x * 1_000_000", job).right
    job = asserts("assert f(f(1)) == 1")
    assert not judge(sandbox, "def f(x): return object()", job).right


def test_the_share_counts_asserts(sandbox: Sandbox) -> None:
    job = asserts("assert f(1) == 1", "assert f(2) == 4", "assert f(0) == 0", "assert f(3) == 1/0", count_all=True)
    judgement = judge(sandbox, "def f(x): return x", job)
    assert judgement.share == 0.5
    assert judgement.detail == "assert f(2) == 4"


def test_the_tests_see_neither_each_others_changes_nor_the_programs(sandbox: Sandbox) -> None:
    job = check("x = [3, 1]\n    assert candidate(x) == [1, 3]\n    assert x == [3, 1]")
    assert judge(sandbox, "def f(x):\n    x.sort()\n    return x", job).right


def test_the_program_finds_no_test_anywhere(sandbox: Sandbox) -> None:
    """Neither in its own process nor in any file that it can read."""
    spy = """
import gc, os, sys
def f(x):
    seen = [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
    for folder, _, names in os.walk('.'):
        seen += [open(os.path.join(folder, n), errors='replace').read() for n in names]
    for pid in map(str, range(1, 99)):
        for part in ('cmdline', 'environ'):
            try: seen.append(open(f'/proc/{pid}/{part}', errors='replace').read())
            except OSError: pass
    return any('-'.join(['needle', 'in', 'the', 'tests']) in text for text in seen)
"""
    assert judge(
        sandbox, spy, asserts("assert f('') is False  # needle-in-the-tests", "assert 'needle-in-the-tests'")
    ).right


# ---- standard input and output


def scripts(
    sandbox: Sandbox, program: str, *pairs: tuple[str, str], count_all: bool = False, **limits: Any
) -> Judgement:
    cases = [{"input": stdin, "output": wanted} for stdin, wanted in pairs]
    return judge_scripts(sandbox, program, cases, Limits(**{"memory_bytes": 512 << 20, **limits}), count_all)


READERS = {
    "input": "print(int(input()) * 2)",
    "sys.stdin": "import sys\nprint(int(sys.stdin.readline()) * 2)",
    "stdin.buffer": "import sys\nsys.stdout.buffer.write(b'%d' % (2 * int(sys.stdin.buffer.read())))",
    "open(0)": "print(int(open(0).read()) * 2)",
    "os.read": "import os\nos.write(1, str(2 * int(os.read(0, 99))).encode())",
    "main guard": "def main():\n    print(int(input()) * 2)\nif __name__ == '__main__':\n    main()",
    "sys.exit": "import sys\nprint(int(input()) * 2)\nsys.exit()",
    "os._exit": "import os, sys\nprint(int(input()) * 2)\nsys.stdout.flush()\nos._exit(0)",
    "atexit": "import atexit\nn = int(input())\natexit.register(lambda: print(n * 2))",
    "thread": "import threading\nthreading.Thread(target=lambda: print(int(input()) * 2)).start()",
    "leftovers": "import builtins\nif hasattr(builtins, 'x'): print(0)\nelse: n = int(input()); print(n * 2); x = 1",
    "closes": "import sys\nprint(int(input()) * 2)\nsys.stdout.close()\nsys.stdin.close()",
}


@pytest.mark.parametrize("program", READERS.values(), ids=READERS.keys())
def test_programs_that_read_and_write_pass_case_after_case(sandbox: Sandbox, program: str) -> None:
    pairs = [("2\n", "4\n"), ("5", "10\n"), ("-3\n", "-6")]
    assert scripts(sandbox, program, *pairs) == Judgement(right=True, share=1.0, detail="")
    wrong = scripts(sandbox, program, *pairs, ("3\n", "7\n"))
    assert not wrong.right
    assert wrong.detail.startswith("case 4 of 4: expected")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("print(3)", "expected '4"),
        ("print(4); 1 / 0", "ZeroDivisionError"),
        ("print(4); raise SystemExit(3)", "SystemExit"),
        ("print(4)\nimport os, sys; sys.stdout.flush(); os._exit(3)", "status 3"),
        ("while True: pass", "ran past 1 s"),
        ("while True: print('x' * 999)", "wrote more than"),
        ("print(4", "SyntaxError"),
        ("", "expected '4"),
        ("import os; os.closerange(2, 4096); print(4)", "hung up|status"),
        ("import os, signal; print(4); os.kill(os.getpid(), 9)", "status|expected"),
        ("input(); input()", "EOFError"),
    ],
)
def test_programs_that_write_the_wrong_thing_fail(sandbox: Sandbox, program: str, says: str) -> None:
    judgement = scripts(sandbox, program, ("2\n", "4\n"), wall_s=1.0)
    assert not judgement.right
    assert any(part in judgement.detail for part in says.split("|")), judgement.detail


def test_cpu_time_is_for_all_cases_together_and_sleeping_uses_none(sandbox: Sandbox) -> None:
    burn = "import time\nwhile time.process_time() % 0.5 < 0.3: pass\nprint(1, flush=True)\nimport os; os._exit(0)"
    limits = replace(LIMITS, wall_s=60.0, cpu_s=0.7)
    judgement = judge_scripts(sandbox, burn, [{"input": "", "output": "1"}] * 9, limits, True)
    assert 0 < judgement.share < 0.5
    assert "ran past 0.7 s of CPU time" in judgement.detail
    sleep = "import time; time.sleep(0.3); print(1)"
    assert judge_scripts(sandbox, sleep, [{"input": "", "output": "1"}] * 3, limits).right


def test_the_time_is_for_all_cases_together(sandbox: Sandbox) -> None:
    judgement = scripts(sandbox, "import time; time.sleep(1.2); print(1)", *[("", "1")] * 9, wall_s=4.0, count_all=True)
    assert not judgement.right
    assert 0 < judgement.share < 0.5
    assert "ran past 4 s" in judgement.detail


def test_the_share_counts_cases(sandbox: Sandbox) -> None:
    assert scripts(sandbox, "print(input())", ("1", "1"), ("2", "3"), ("3", "3"), count_all=True).share == 2 / 3


def test_large_inputs_and_outputs_pass_through(sandbox: Sandbox) -> None:
    text = "\n".join(map(str, range(100_000)))
    assert scripts(sandbox, "import sys\nsys.stdout.write(sys.stdin.read())", (text, text)).right


@pytest.mark.long
def test_no_descriptor_and_no_thread_is_left(sandbox: Sandbox) -> None:
    judge(sandbox, "def f(x): return 2", check("assert candidate(1) == 2"))
    files, threads = open_fds(), threading.active_count()
    for program in ("def f(x): return 2", "while True: pass", "import os; os._exit(1)"):
        judge(sandbox, program, check("assert candidate(1) == 2"), Limits(wall_s=0.5))
        scripts(sandbox, program, ("", ""), ("", ""), wall_s=0.5)
    assert threading.active_count() <= threads
    assert until(lambda: open_fds() <= files, within_s=0.5)  # A thread of another test's may read a file for a moment.
