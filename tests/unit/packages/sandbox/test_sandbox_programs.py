"""Honest programs run in the sandbox as they would outside of it."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from rlcli_sandbox import Limits, Sandbox
from sandboxes import run, sandbox

__all__ = ["sandbox"]

PROGRAMS = {
    "a temporary file": """
        import tempfile
        with tempfile.NamedTemporaryFile("w+") as file:
            file.write("kept"); file.seek(0)
            print(file.read())""",
    "a temporary directory": """
        import os, tempfile
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(os.path.join(folder, "a", "b"))
            open(os.path.join(folder, "a", "b", "c"), "w").write("kept")
            print(open(os.path.join(folder, "a", "b", "c")).read())
        assert not os.path.exists(folder)""",
    "a spooled file": """
        import tempfile
        file = tempfile.SpooledTemporaryFile(max_size=4)
        file.write(b"kept\\n" * 100); file.seek(0)
        print(file.readline().decode())""",
    "files of the working directory": """
        import os, pathlib, shutil
        pathlib.Path("a").write_text("kept"); pathlib.Path("sub").mkdir()
        pathlib.Path("touched").touch(); pathlib.Path("touched").touch()
        shutil.copyfile("a", "sub/b"); os.rename("sub/b", "sub/c"); os.symlink("sub/c", "d")
        print(pathlib.Path("d").read_text()); shutil.rmtree("sub")
        assert sorted(os.listdir()) == ["a", "d", "touched"]""",
    "re": "import re; print(re.sub(r'(?P<x>l+)ost', 'kept', 'lllost'))",
    "collections": "import collections; c = collections.Counter('kept'); print(''.join(sorted(c, key='kept'.index)))",
    "recursion": """
        import sys
        sys.setrecursionlimit(10**5)
        def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
        assert depth(50_000) == 50_000
        print("kept")""",
    "threads": """
        import threading, queue
        q = queue.Queue()
        threads = [threading.Thread(target=q.put, args=(i,)) for i in range(32)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert sorted(q.get() for _ in threads) == list(range(32))
        print("kept")""",
    "a pool of threads": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(lambda x: x * x, range(100))) == 328350
        print("kept")""",
    "asyncio": """
        import asyncio
        async def one(i):
            await asyncio.sleep(0.01)
            return i
        async def all_of_them():
            await asyncio.to_thread(sum, [1, 2])
            return await asyncio.gather(*map(one, range(10)))
        assert asyncio.run(all_of_them()) == list(range(10))
        print("kept")""",
    "random": (
        "import random; random.seed(1); a = random.random(); random.seed(1); print('kept' if a == "
        "random.random() else a)"
    ),
    "secrets and uuid": "import secrets, uuid; uuid.uuid4(); secrets.token_bytes(9); print('kept')",
    "hashlib": "import hashlib; print('kept' if hashlib.sha256(b'x').hexdigest().startswith('2d711642') else 0)",
    "decimal": (
        "from decimal import *; print('kept' if Decimal(2).sqrt() == Decimal('1.414213562373095048801688724') else 0)"
    ),
    "heapq and itertools": """
        import heapq, itertools
        heap = list(itertools.permutations(range(4))); heapq.heapify(heap)
        assert heapq.heappop(heap) == (0, 1, 2, 3)
        print("kept")""",
    "large integers": "print('kept' if len(str(7 ** 5000)) == 4226 else 0)",
    "standard input": "import sys; print(sys.stdin.readline().strip() + ''.join(sys.stdin))",
    "input()": "print(input())",
    "dates and zones": """
        import datetime, zoneinfo, time, locale
        datetime.datetime.now(zoneinfo.ZoneInfo("UTC")); time.localtime(); locale.getlocale()
        print("kept")""",
    "signals to itself": """
        import os, signal
        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
        os.kill(os.getpid(), signal.SIGUSR1); signal.raise_signal(10)
        signal.signal(signal.SIGALRM, lambda *_: seen.append(2)); signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.pause()
        assert seen == [1, 1, 2]
        print("kept")""",
    "dataclasses and pickle of main": """
        import dataclasses, pickle, copy, typing
        @dataclasses.dataclass
        class Point:
            x: int
        print("kept" if pickle.loads(pickle.dumps(Point(1))) == Point(1) and __name__ == "__main__" else 0)""",
    "memory maps and sqlite": """
        import mmap, sqlite3
        mmap.mmap(-1, 1 << 20)[:4] = b"kept"
        base = sqlite3.connect("base.db")
        base.execute("create table t (x)"); base.execute("insert into t values ('kept')")
        base.commit(); print(base.execute("select x from t").fetchone()[0])""",
    "lowering limits": """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28)); resource.getrusage(resource.RUSAGE_SELF)
        print("kept")""",
    "text that is not ASCII": "print('kept', 'π', file=open('f', 'w')); print(open('f').read().split()[0])",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_honest_program_runs(sandbox: Sandbox, name: str) -> None:
    ended = run(sandbox, textwrap.dedent(PROGRAMS[name]), stdin=b"kept")
    assert (ended.status, ended.stdout.split(), ended.stderr, ended.killed_for) == (0, [b"kept"], b"", "")


def test_installed_packages_import(sandbox: Sandbox) -> None:
    pytest.importorskip("numpy")
    program = "import numpy; a = numpy.arange(9.0).reshape(3, 3); print((a @ a).sum(), numpy.linalg.norm(a) > 1)"
    ended = run(sandbox, program)
    assert (ended.stdout, ended.stderr, ended.status) == (b"486.0 True\n", b"", 0)


def test_the_end_tells_status_and_streams_apart(sandbox: Sandbox) -> None:
    ended = run(sandbox, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert (ended.status, ended.stdout, ended.stderr, ended.killed_for) == (7, b"out\n", b"err\n", "")
    assert ended.seconds > 0


def test_an_exception_is_its_traceback_and_status_one(sandbox: Sandbox) -> None:
    ended = run(sandbox, "1 / 0")
    assert ended.status == 1
    assert ended.stderr.endswith(b"ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("status", [0, 1, 128, 255])
def test_a_status_is_told(sandbox: Sandbox, status: int) -> None:
    assert run(sandbox, f"raise SystemExit({status})").status == status


@pytest.mark.parametrize("number", [6, 9, 11, 15])
def test_a_signal_is_a_negative_status(sandbox: Sandbox, number: int) -> None:
    assert run(sandbox, f"import os; os.kill(os.getpid(), {number})").status == -number


def test_descriptors_that_are_passed_keep_their_numbers(sandbox: Sandbox) -> None:
    for_reading, to_program = os.pipe()
    from_program, for_writing = os.pipe()
    os.write(to_program, b"ping")
    program = f"import os; os.write({for_writing}, os.read({for_reading}, 4) + b'-pong')"
    run(sandbox, program, pass_fds=[for_reading, for_writing])
    assert os.read(from_program, 100) == b"ping-pong"
    for fd in (for_reading, to_program, from_program, for_writing):
        os.close(fd)


def test_a_conversation_while_it_runs(sandbox: Sandbox) -> None:
    with sandbox.start("while True: print(int(input()) ** 2, flush=True)", Limits(wall_s=20.0)) as child:
        for number in range(5):
            child.stdin.write(b"%d\n" % number)
            child.stdin.flush()
            assert child.stdout.read(100) == b"%d\n" % number**2
        assert child.wait().stderr.endswith(b"EOFError: EOF when reading a line\n")


def test_hashes_do_not_change_from_run_to_run(sandbox: Sandbox) -> None:
    program = "print(hash('a'), list({'one', 'two', 'three', 'four'}))"
    assert run(sandbox, program).stdout == run(sandbox, program).stdout


def test_nothing_of_the_owners_environment_is_inside(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    ended = run(sandbox, "import os, sys; print(os.environ, sys.path, sys.argv, sys.flags)")
    assert b"a-secret" not in ended.stdout
    assert b"LD_PRELOAD" not in ended.stdout
    assert str(Path.cwd() / "'").encode() not in ended.stdout


def test_the_project_is_not_inside(sandbox: Sandbox) -> None:
    test_file = str(Path(__file__).resolve())
    ended = run(sandbox, f"print(open({test_file!r}).read())")
    assert ended.status == 1
    assert b"FileNotFoundError" in ended.stderr or b"PermissionError" in ended.stderr


def test_a_run_leaves_nothing_for_the_next(sandbox: Sandbox) -> None:
    program = """
import os
print(os.listdir(), os.path.exists("/tmp/left"))
open("left", "w").close()
try: open("/tmp/left", "w").close()
except OSError: pass
"""
    assert run(sandbox, program).stdout == run(sandbox, program).stdout == b"[] False\n"
