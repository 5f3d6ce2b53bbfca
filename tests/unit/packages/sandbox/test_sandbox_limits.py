"""Each limit ends a program that breaks it, and nothing is left of any program, however it or its owner ended."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
from rlcli_sandbox import Exit, Limits, Sandbox
from rlcli_sandbox.private_folder import PREFIX, PrivateFolder, sweep
from sandboxes import alive, open_fds, opened, processes_with, run, sandbox, until

__all__ = ["sandbox"]

MIB = 1 << 20


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the private folders of this test's programs are made, its own and its processes'."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def ended_by(sandbox: Sandbox, main: str, limits: Limits) -> Exit:
    """The end of a program that would not end by itself."""
    return run(sandbox, textwrap.dedent(main), limits)


@pytest.mark.parametrize(
    "main",
    [
        "while True: pass",
        "import time; time.sleep(600)",
        "import signal\nfor n in {*range(1, 65)} - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import os; os.kill(os.getpid(), 19)",
        "import os; os.closerange(0, 200)\nwhile True: pass",
        "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
        "10 ** 10 ** 9",
        "import threading\nfor _ in range(50): threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
        "import os\nwhile True: os.kill(os.getpid(), 0)",
        "import threading; l = threading.Lock(); l.acquire(); l.acquire()",
        "import atexit\n@atexit.register\ndef f():\n while True: pass",
        "class A:\n def __del__(self):\n  while True: pass\na = A()",
        "import sys; sys.stdin.read(); import time; time.sleep(600)",
    ],
)
def test_time(sandbox: Sandbox, main: str) -> None:
    ended = ended_by(sandbox, main, Limits(wall_s=0.3))
    assert (ended.killed_for, ended.status) == ("time", -signal.SIGKILL)


SPIN = "import threading\nfor _ in range(2): threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()"


def test_cpu_time_is_bounded_apart_from_the_clock(sandbox: Sandbox) -> None:
    for main in ("while True: pass", SPIN):
        ended = ended_by(sandbox, main, Limits(wall_s=60.0, cpu_s=0.3))
        assert (ended.killed_for, ended.status) == ("cpu", -signal.SIGKILL)
        assert ended.cpu_s >= 0.3
    ended = ended_by(sandbox, "import time; time.sleep(0.4)", Limits(wall_s=60.0, cpu_s=0.3))
    assert (ended.killed_for, ended.status) == ("", 0)


def test_time_ends_a_program_that_nobody_waits_for(sandbox: Sandbox) -> None:
    with sandbox.start("while True: pass", Limits(wall_s=0.2)) as child:
        assert child.stdout.read(1) == b""  # blocks until the end
        assert child.wait().killed_for == "time"


@pytest.mark.parametrize(
    "main",
    [
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import mmap\nx = []\nwhile True:\n m = mmap.mmap(-1, 1 << 24); m.write(b'x' * (1 << 24)); x.append(m)",
        "x = 'x'\nwhile True: x += x",
        "x = [0]\nwhile True: x *= 2",
        "bytearray(1 << 36)",
        "import threading\ndef eat():\n x = []\n while True: x.append(bytearray(1 << 16))\n"
        "for _ in range(8): threading.Thread(target=eat).start()",
        "import ctypes; l = ctypes.CDLL(None)\nwhile True: l.memset(l.malloc(1 << 20), 1, 1 << 20)",
    ],
)
def test_memory(sandbox: Sandbox, main: str) -> None:
    limit = 96 * MIB
    child = sandbox.start(main, Limits(wall_s=20.0, memory_bytes=limit))
    highest = 0
    while alive(child.pid):
        for line in _status(child.pid):
            if line.startswith("VmHWM"):
                highest = max(highest, int(line.split()[1]) << 10)
        time.sleep(0.002)
    ended = child.wait()
    assert ended.killed_for in ("memory", "")
    assert ended.killed_for or b"MemoryError" in ended.stderr or ended.status < 0
    assert highest < limit + 300 * MIB


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []


def test_what_is_resident_counts_as_memory(sandbox: Sandbox) -> None:
    main = "x = bytearray(200 << 20); x[::4096] = b'x' * len(x[::4096])\nwhile True: pass"
    assert ended_by(sandbox, main, Limits(wall_s=20.0, memory_bytes=128 * MIB)).killed_for == "memory"


def test_threads_count_as_memory(sandbox: Sandbox) -> None:
    main = """
        import threading, time
        threading.stack_size(65536)
        for _ in range(20000): threading.Thread(target=time.sleep, args=(600,)).start()
    """
    assert ended_by(sandbox, main, Limits(wall_s=20.0)).killed_for == "memory"


@pytest.mark.parametrize("stream", ["1", "2", "1 + i % 2"])
def test_output(sandbox: Sandbox, stream: str) -> None:
    main = f"import os\ni = 0\nwhile True: i += 1; os.write({stream}, b'x' * 5000)"
    ended = ended_by(sandbox, main, Limits(wall_s=20.0, output_bytes=100_000))
    assert (ended.killed_for, ended.status) == ("output", -signal.SIGKILL)
    assert len(ended.stdout) + len(ended.stderr) == 100_000


def test_output_up_to_the_limit_is_whole(sandbox: Sandbox) -> None:
    ended = run(sandbox, "print('x' * 99_999)", Limits(wall_s=20.0, output_bytes=100_000))
    assert (len(ended.stdout), ended.killed_for) == (100_000, "")


@pytest.mark.parametrize(
    "main",
    [
        "i = 0\nwhile True:\n i += 1\n with open(str(i), 'wb') as f: f.write(b'x' * (1 << 20))",
        "import tempfile\nx = []\nwhile True:\n f = tempfile.TemporaryFile(); x.append(f)\n"
        " f.write(b'x' * (1 << 20)); f.flush()",
        "i = 0\nwhile True:\n i += 1\n open(str(i), 'w').close()",
        "import os\ni = 0\nwhile True:\n i += 1\n os.mkdir(str(i))",
        "import os\nwhile True:\n os.mkdir('d' * 200); os.chdir('d' * 200)",
    ],
)
def test_disk(sandbox: Sandbox, folders: Path, main: str) -> None:
    ended = ended_by(sandbox, main, Limits(wall_s=20.0, disk_bytes=16 * MIB))
    full = b"No space left" in ended.stderr or b"Too many open files" in ended.stderr
    assert ended.killed_for == "disk" or full
    assert not list(folders.iterdir())


def test_one_large_file_is_refused(sandbox: Sandbox) -> None:
    ended = run(sandbox, "open('x', 'wb').write(bytes(20 << 20))", Limits(wall_s=20.0, disk_bytes=16 * MIB))
    assert b"No space left" in ended.stderr or b"File too large" in ended.stderr or ended.killed_for == "disk"


def test_too_much_output_is_so_although_the_program_has_ended(sandbox: Sandbox) -> None:
    with sandbox.start("print('x' * 9000)", Limits(wall_s=20.0, output_bytes=100)) as child:
        assert until(lambda: not alive(child.pid))
        ended = child.wait()
    assert (ended.killed_for, ended.stdout) == ("output", b"x" * 100)


def test_two_may_wait_and_get_the_same(sandbox: Sandbox) -> None:
    child = sandbox.start("import time; time.sleep(0.2); print('x' * 200_000)", Limits(wall_s=20.0))
    seen: list[Exit] = []
    threads = [threading.Thread(target=lambda: seen.append(child.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert len(seen[0].stdout) == 200_001


def test_many_open_files_are_refused(sandbox: Sandbox) -> None:
    ended = run(sandbox, "x = [open('/dev/null') for _ in range(10_000)]")
    assert b"Too many open files" in ended.stderr


def test_kill_ends_it_at_once_and_may_be_repeated(sandbox: Sandbox) -> None:
    child = sandbox.start("while True: pass", Limits(wall_s=60.0))
    child.kill()
    assert not alive(child.pid)
    child.kill()
    ended = child.wait()
    assert (ended.status, ended.killed_for) == (-signal.SIGKILL, "")
    child.kill()
    assert child.wait() == ended


@pytest.mark.long
def test_nothing_is_left_of_many_programs(sandbox: Sandbox, folders: Path) -> None:
    run(sandbox, "")
    gc.collect()
    files, threads = open_fds(), threading.active_count()
    for main in ["print(1)", "1/0", "while True: pass", "import os; os.close(1); os.close(2)"] * 3:
        run(sandbox, main, Limits(wall_s=0.2))
    sandbox.start("while True: pass", Limits(wall_s=60.0)).kill()
    with sandbox.start("while True: pass", Limits(wall_s=60.0)):
        pass
    gc.collect()
    assert threading.active_count() <= threads
    assert until(lambda: open_fds() <= files, within_s=0.5)  # A thread of another test's may read a file for a moment.
    assert not list(folders.iterdir())


OWNER = """
import sys, threading, time
from rlcli_sandbox import Limits, open_sandbox
def start():
    child = open_sandbox({backend!r}).start({main!r}, Limits(wall_s=60.0))
    print(child.pid, flush=True)
    keep.append(child)
keep = []
{how}
"""


def owner_of(sandbox: Sandbox, main: str, startup: str) -> tuple[subprocess.Popen[str], int]:
    """A process that runs `main` in a sandbox, and the id of the program."""
    code = OWNER.format(backend=sandbox.name, main=main, how=textwrap.dedent(startup))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    return owner, int(owner.stdout.readline())


@pytest.mark.parametrize(
    "main",
    ["while True: pass", "import os, time; os.closerange(0, 200); time.sleep(600)", "import time; time.sleep(99)"],
)
def test_a_program_dies_with_an_owner_that_is_killed(sandbox: Sandbox, folders: Path, main: str) -> None:
    owner, pid = owner_of(sandbox, main, "start(); time.sleep(600)")
    assert alive(pid)
    owner.kill()
    owner.communicate()
    assert until(lambda: not alive(pid))
    assert until(lambda: not processes_with(str(folders)))


def test_a_program_outlives_the_thread_that_started_it(sandbox: Sandbox) -> None:
    startup = """
        thread = threading.Thread(target=start); thread.start(); thread.join()
        time.sleep(0.3)
        keep[0].stdin.write(b"still there\\n")
        print(keep[0].wait().stdout, flush=True)
    """
    owner, _ = owner_of(sandbox, "print(input())", startup)
    assert owner.communicate()[0] == "b'still there\\n'\n"


def test_an_owner_that_leaves_takes_its_programs_and_their_folders_along(sandbox: Sandbox, folders: Path) -> None:
    owner, pid = owner_of(sandbox, "while True: pass", "start()")
    owner.communicate()
    assert owner.returncode == 0
    assert not alive(pid)
    assert not list(folders.iterdir())


def test_an_owner_with_little_memory_of_its_own(sandbox: Sandbox) -> None:
    startup = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))"
    startup += "; start(); print(keep[0].wait().status)"
    owner, _ = owner_of(sandbox, "bytearray(300 << 20)", startup)
    assert owner.communicate()[0] == "0\n"


def test_several_at_once(sandbox: Sandbox) -> None:
    children = [sandbox.start(f"print({number}, input())", Limits(wall_s=60.0)) for number in range(8)]
    for child in children:
        child.stdin.write(b"x\n")
    assert [child.wait().stdout for child in children] == [b"%d x\n" % number for number in range(8)]


HIDE = """
import os
os.mkdir("closed"); open("closed/file", "w").close(); os.mkdir("none", 0); os.mkdir("write-only", 0o300)
os.umask(0o777); os.mkdir("masked"); open("masked-file", "w").close(); os.umask(0)
os.symlink("/etc", "link"); os.symlink("/nowhere", "dangling"); os.symlink(".", "self"); os.mkfifo("pipe")
for name in ["\\n", "-rf", " ", "\\udcff".encode("utf8", "surrogateescape"), "x" * 255]: open(name, "w").close()
for _ in range(200):
    os.mkdir("d"); os.chdir("d")
print("made")
"""


def test_a_folder_is_removed_whatever_is_in_it(folders: Path) -> None:
    sandbox = opened("landlock")
    ended = run(sandbox, HIDE)
    assert ended.stderr == b""
    assert not list(folders.iterdir())
    assert Path("/etc").is_dir()


def test_a_deep_folder_is_removed() -> None:
    folder = PrivateFolder()
    parent = os.open(folder.path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d" * 9, dir_fd=parent)
        deeper = os.open("d" * 9, os.O_RDONLY, dir_fd=parent)
        os.close(parent)
        parent = deeper
    os.close(parent)
    assert folder.exceeds(1 << 40, os.getpid())
    folder.remove()
    assert not Path(folder.path).exists()


def test_removal_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "kept").write_text("kept")
    mode = tmp_path.stat().st_mode
    folder = PrivateFolder()
    Path(folder.path, "inner").mkdir()
    for directory in (folder.path, folder.path + "/inner"):
        Path(directory, "link").symlink_to(tmp_path)
        Path(directory, "file").symlink_to(tmp_path / "sub" / "kept")
    folder.remove()
    folder.remove()
    assert not Path(folder.path).exists()
    assert (tmp_path / "sub" / "kept").read_text() == "kept"
    assert tmp_path.stat().st_mode == mode


def test_folders_of_dead_owners_are_swept_and_those_of_the_living_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living, fresh, dead = PrivateFolder(), tmp_path / f"{PREFIX}fresh", tmp_path / f"{PREFIX}dead"
    stranger = tmp_path / "something-else"
    for folder in (fresh, dead, stranger):
        folder.mkdir()
    (dead / "left").write_text("over")
    (tmp_path / f"{PREFIX}file").write_text("")
    for folder in (living.path, dead, stranger, tmp_path / f"{PREFIX}file"):
        os.utime(folder, (1, 1))
    sweep()
    assert Path(living.path).exists()
    assert fresh.exists()
    assert stranger.exists()
    assert not dead.exists()
    living.remove()


def test_an_owner_with_many_open_files(sandbox: Sandbox) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"the hard limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    descriptors = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert run(sandbox, "print(input())", stdin=b"x").stdout == b"x\n"
    finally:
        for fd in descriptors:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_limit_of_the_owner_changes(sandbox: Sandbox) -> None:
    kinds = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = [resource.getrlimit(kind) for kind in kinds]
    run(sandbox, "")
    assert [resource.getrlimit(kind) for kind in kinds] == limits
