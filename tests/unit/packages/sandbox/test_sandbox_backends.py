"""Selection of the backend, on machines that lack some kernel features."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from rlcli_sandbox import Limits, bubblewrap, landlock_process, open_sandbox
from rlcli_sandbox.kernel import landlock
from sandboxes import alive, needs_root, opened, run, until

from rlcli.errors import SetupError
from rlcli.support.sandbox_name import backend_name

ROOT = Path(__file__).resolve().parents[4]
NO_LANDLOCK = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x50000 | 38), (0x06, 0, 0, 0x7FFF0000)]
"""A filter under which landlock_create_ruleset does not exist."""


def elsewhere(code: str, landlock: bool, arguments: tuple[str, ...] = ()) -> str:
    """The output of `code` on a machine that allows no user namespaces and, optionally, has no Landlock."""
    opened("bwrap")
    with tempfile.TemporaryFile() as rules:
        rules.write(b"".join(struct.pack("<HBBI", *row) for row in ([] if landlock else NO_LANDLOCK)))
        rules.seek(0)
        filtered = [] if landlock else ["--seccomp", str(rules.fileno())]
        command = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", *filtered]
        command += ["--dev-bind", "/", "/", "--proc", "/proc", "--tmpfs", tempfile.gettempdir(), "--chdir", "/"]
        # Both may lie beneath the temporary folder, which is an empty one there.
        command += [word for path in (str(ROOT), sys.prefix) for word in ("--ro-bind", path, path)]
        command += ["--setenv", "PYTHONPATH", str(ROOT), sys.executable, "-c", textwrap.dedent(code), *arguments]
        seen = subprocess.run(command, pass_fds=[rules.fileno()], capture_output=True, text=True, check=False)
    assert seen.returncode == 0, seen.stderr
    return seen.stdout


TELL = """
from rlcli.errors import SetupError
from rlcli_sandbox import Limits, open_sandbox
for name in ["auto", "bwrap", "landlock", "unsafe"]:
    try:
        sandbox = open_sandbox(name)
        print(name, sandbox.name, sandbox.start("print(6 * 7)", Limits()).wait().stdout)
    except SetupError as error:
        print(name, error)
"""


def test_landlock_takes_over_where_namespaces_are_blocked() -> None:
    opened("landlock")
    seen = elsewhere(TELL, landlock=True).splitlines()
    assert seen[0] == "auto landlock b'42\\n'"
    assert seen[1].startswith("bwrap bwrap: the sandbox did not start: ")
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in seen[1]
    assert seen[2] == "landlock landlock b'42\\n'"


def test_nothing_less_takes_over_by_itself() -> None:
    seen = elsewhere(TELL, landlock=False).splitlines()
    assert seen[0].startswith("auto programs cannot be isolated here: bwrap: ")
    for part in ("landlock: ", "user namespaces", "--set verifier.sandbox=unsafe", "RLCLI_SANDBOX=unsafe"):
        assert part in seen[0]
    assert seen[2].startswith("landlock landlock: ")
    assert "lsm=landlock" in seen[2]
    assert seen[3] == "unsafe unsafe b'42\\n'"


def test_the_doctor_warns_where_only_unsafe_is_left() -> None:
    seen = json.loads(elsewhere(DOCTOR, landlock=False))
    assert seen[0] == "warn"
    assert "user namespaces" in seen[2]
    assert "landlock" in seen[2]


def test_the_doctor_passes_on_landlock_alone_and_says_why_not_bwrap() -> None:
    opened("landlock")
    status, detail, _ = json.loads(elsewhere(DOCTOR, landlock=True))
    assert status == "pass"
    assert detail.startswith("landlock (ABI ")
    assert "bwrap: the sandbox did not start" in detail


DOCTOR = """
import json
from rlcli_sandbox.machine_check import check_sandbox
found = check_sandbox()
print(json.dumps([found.status, found.detail, found.hint]))
"""


def test_bubblewrap_comes_first() -> None:
    assert opened("bwrap").name == "bwrap"
    assert open_sandbox("auto").name == "bwrap"
    assert open_sandbox() is open_sandbox("auto")


def test_the_environment_names_a_backend_and_an_argument_overrules_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCLI_SANDBOX", "unsafe")
    assert backend_name() == "unsafe"
    assert open_sandbox().name == "unsafe"
    assert backend_name("bwrap") == "bwrap"
    monkeypatch.delenv("RLCLI_SANDBOX")
    assert backend_name() == "auto"


@pytest.mark.parametrize("name", ["docker", "http://localhost:8080", "https://sandbox.example/run_code"])
def test_what_is_no_backend_here_is_an_error_that_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCLI_SANDBOX", name)
    with pytest.raises(SetupError, match=name) as caught:
        open_sandbox()
    assert "landlock" in caught.value.hint


def test_no_bubblewrap_is_an_error_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SetupError, match="apt install bubblewrap"):
        open_sandbox("bwrap")
    opened("landlock")
    assert open_sandbox("auto").name == "landlock"


def wrapped(folder: Path, lacks: list[str], hides: bool) -> str:
    """A bubblewrap without some of its options: one that is older (hides them), or that the machine denies them."""
    opened("bwrap")
    real, pattern = shlex.quote(str(shutil.which("bwrap"))), "|".join(lacks)
    hide = f'[ "$1" = --help ] && {{ {real} --help | grep -vE -e "({pattern})" ; exit 0; }}' if hides else ""
    path = folder / "bwrap"
    path.write_text(
        f"#!/bin/bash\n{hide}\nfor word; do case $word in --) break;; {pattern}) "
        f'echo "bwrap: no $word" >&2; exit 1;; esac; done\nexec {real} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


PROBE = """
import os
print(open("/etc/hostname").read() if os.path.exists("/etc/hostname") else "no file", os.getcwd(), sorted(os.listdir()))
try: os.fork()
except OSError as error: print(error.errno)
open("x", "w").write("x")
"""


def test_an_older_bubblewrap_keeps_every_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    sandbox = bubblewrap.bubblewrap(wrapped(tmp_path, ["--size", "--disable-userns", "--clearenv"], hides=True))
    assert not sandbox.sized_tmpfs
    assert run(sandbox, PROBE).stdout == f"no file {bubblewrap.working_directory()} []\n1\n".encode()
    fill = "i = 0\nwhile True:\n i += 1\n open(str(i), 'wb').write(b'x' * (1 << 20))"
    assert run(sandbox, fill, Limits(wall_s=20.0, disk_bytes=8 << 20)).killed_for == "disk"
    assert not list(folders.iterdir())


def test_a_container_that_denies_an_option_still_runs_it(tmp_path: Path) -> None:
    sandbox = bubblewrap.bubblewrap(wrapped(tmp_path, ["--disable-userns"], hides=False))
    assert run(sandbox, PROBE).stdout == f"no file {bubblewrap.working_directory()} []\n1\n".encode()
    assert run(sandbox, "while True: pass", Limits(wall_s=0.2)).killed_for == "time"


def test_a_bubblewrap_that_fails_says_why(tmp_path: Path) -> None:
    path = tmp_path / "bwrap"
    path.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n")
    path.chmod(0o755)
    with pytest.raises(SetupError, match="setting up uid map: Permission denied") as caught:
        bubblewrap.bubblewrap(str(path))
    assert "user namespaces" in caught.value.hint


def test_a_sandbox_that_stops_working_is_an_error_and_no_verdict(tmp_path: Path) -> None:
    path = Path(wrapped(tmp_path, ["--no-such"], hides=False))
    sandbox = bubblewrap.bubblewrap(str(path))
    path.write_text("#!/bin/sh\necho 'bwrap: no more namespaces' >&2; exit 1\n")
    with pytest.raises(SetupError, match="bwrap: the sandbox did not start: bwrap: no more namespaces"):
        sandbox.start("print(1)", Limits())
    path.unlink()
    with pytest.raises(SetupError, match="No such file"):
        sandbox.start("print(1)", Limits())


def test_a_main_that_does_not_compile_is_an_error() -> None:
    with pytest.raises(SetupError, match="SyntaxError"):
        opened("landlock").start("def (", Limits())


@pytest.mark.parametrize("backend", ["bwrap", "landlock", "unsafe"])
@needs_root
def test_another_user_than_root(backend: str) -> None:
    opened(backend)
    python = shutil.which("python3", path="/usr/bin")
    if not python or subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode:
        pytest.skip("the system's Python is too old, and root's cannot be read by others")
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'packages')!r}]\n"
        "from rlcli_sandbox import Limits, open_sandbox\n"
        f"sandbox = open_sandbox({backend!r})\n"
        "print(sandbox.start('import os; print(os.getuid(), os.listdir())', Limits()).wait())\n"
        "print(sandbox.start('while True: pass', Limits(wall_s=0.2)).wait().killed_for)\n"
        'deep = \'import os\\nwhile True: os.mkdir("d", 0o300); os.chdir("d")\'\n'
        "print(sandbox.start(deep, Limits()).wait().killed_for)\n"
    )
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    seen = subprocess.run([*user, python, "-c", code], capture_output=True, text=True, cwd="/", env={}, check=False)
    assert seen.stderr == ""
    ended, time, disk = seen.stdout.splitlines()
    assert "status=0" in ended
    assert "b'65534 []\\n'" in ended
    assert (time, disk) == ("time", "disk")


@pytest.mark.parametrize("version", range(1, 8))
def test_older_versions_of_landlock_keep_every_promise(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened("landlock")
    if landlock.version() < version:
        pytest.skip(f"this kernel's Landlock is of version {landlock.version()}")
    monkeypatch.setattr(landlock, "version", lambda: version)
    program = """
        import os, tempfile
        with tempfile.TemporaryDirectory() as folder:
            open(folder + "/a", "w").write("kept"); os.ftruncate(os.open(folder + "/a", os.O_RDWR), 2)
            print(open(folder + "/a").read())
        def tried(what, *args):
            try: print(what(*args))
            except OSError as error: print(error.errno)
        tried(os.open, os.__file__, os.O_RDONLY | os.O_TRUNC)
        tried(os.truncate, os.__file__, 0)
        tried(os.open, os.__file__, os.O_WRONLY)
        tried(os.link, os.__file__, "mine")
        tried(os.listdir, "/")
        tried(os.open, "/etc/passwd", os.O_RDONLY)
    """
    ended = run(landlock_process.Fenced("landlock", "", fence=True), textwrap.dedent(program))
    assert ended.stderr == b""
    seen = ended.stdout.split()
    assert seen[0] == b"ke"
    assert set(seen[1:]) <= {b"1", b"13", b"18"}
    assert len(seen) == 7


def test_unsafe_still_filters_and_limits() -> None:
    sandbox = open_sandbox("unsafe")
    assert run(sandbox, "import os\ntry: os.fork()\nexcept OSError as e: print(e.errno)").stdout == b"1\n"
    assert run(sandbox, "while True: pass", Limits(wall_s=0.2)).killed_for == "time"


def test_every_process_of_it_dies_with_a_killed_owner() -> None:
    opened("bwrap")
    code = (
        "import time; from rlcli_sandbox import *\n"
        "child = open_sandbox('bwrap').start('while True: pass', Limits(wall_s=60.0)); print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    owner.stdout.readline()
    family = _descendants(owner.pid)
    assert len(family) >= 3  # bubblewrap, the first process of its namespace, the program
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    assert until(lambda: not any(map(alive, family)))


def _descendants(pid: int) -> list[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    pids = [pid]
    for ancestor in pids:
        pids += [child for child, parent in parents.items() if parent == ancestor]
    return pids[1:]
