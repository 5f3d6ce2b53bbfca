"""Runs the attacks and looks from outside at what they did.

Each owner is a separate process that verifies one program after another. The harness stands above all owners as the
reaper of orphans, so that a grandchild that leaves everything behind is still found below it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import queue
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlcli.types import Outcome
from tests.attacks.catalogue import FENCED, Attack, functional

ROOT = Path(__file__).resolve().parents[2]
MEMORY_BYTES = (512 << 20) * 5 // 4
"""Memory limit of a program at any observation: the verifier's default, plus a quarter for growth in between."""
OWNER_BYTES = 300 << 20
LOOK_S = 0.03
HANGS_S = 60.0
LOADED_S = 40.0
"""Time limit of a correct program and of process exit while other tests occupy both cores."""
INNOCENT_EVERY = 4
"""A right program is verified after so many attacks, and must pass and find nothing that they left."""
POOL_S = 4.0
"""The verifier's own time limit, which holds where the pool calls it."""

LISTENING = "0A"
"""The state of a TCP socket that listens, in the kernel's tables."""

OUTSIDE = (
    *("/", "/tmp", "/var/tmp", "/dev/shm", "/usr", "/usr/lib", "/usr/bin", "/etc", "/var", "/opt", "/srv", "/run"),
    *("/home", "/mnt", "/boot"),
)
"""Folders in which no name of an attack may turn up, besides the user's, the project's and Python's."""

LEFTOVERS = FENCED.format("""
import os, tempfile
def f(n):
    found = []
    for place in (".", tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~")):
        try:
            found += [name for name in os.listdir(place) if "@TOKEN@" in name]
        except OSError:
            pass
    found += [name for name in os.environ if "@TOKEN@" in name + os.environ[name]]
    return [sum(int(digit) for digit in str(n)), sorted(set(found))]
""")
"""A right program that also looks for what an earlier one left."""


@dataclass
class Report:
    """One run: the verdict, and each side condition that does not hold, in words."""

    outcome: Outcome | None
    detail: str
    seconds: float
    problems: list[str] = field(default_factory=list)

    @property
    def forged(self) -> bool:
        return self.outcome is Outcome.OK


def free_port() -> int:
    """A free port outside the kernel's ephemeral range and the range of Ray's workers."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return int(free.getsockname()[1])


LATE = ("the sandbox did not start: timed out", "the program's process did not start: ran past")
"""Errors of a machine on which the sandbox had no turn in time."""


class World:
    """Targets of the attacks: canaries, listeners, a victim. All of them are removed at the end."""

    def __init__(self) -> None:
        self.token = f"rlcliattack{secrets.token_hex(4)}"
        self._stack = contextlib.ExitStack()
        self.tmp = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{self.token}-")))
        self.home = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{self.token}-", dir=Path.home()))
        )
        self.project = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{self.token}-", dir=ROOT)))
        self.visitors: list[str] = []
        self._open = True
        self._tcp = self._listening(socket.socket(), ("127.0.0.1", 0))
        self.port = self._tcp.getsockname()[1]
        self._udp = self._listening(socket.socket(type=socket.SOCK_DGRAM), ("127.0.0.1", self.port))
        self.unix = str(self.tmp / "unix")
        self._unix = self._listening(socket.socket(socket.AF_UNIX), self.unix)
        self._abstract = self._listening(socket.socket(socket.AF_UNIX), f"\0{self.token}")
        self._packets = self._listening(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), f"\0{self.token}-d")
        self.listen = free_port()
        self._doorman = threading.Thread(target=self._receive, daemon=True)
        self._doorman.start()
        self.victim = self._stack.enter_context(subprocess.Popen(["sleep", "1000"], start_new_session=True))
        self._stack.callback(lambda: self.victim.kill())
        self.places = [Path(folder) for folder in (*OUTSIDE, Path.home() / ".cache", sys.prefix, sys.base_prefix)]
        self.places += [Path(path) for path in sys.path if path and Path(path).is_dir()]
        self.places += [ROOT, ROOT / "tests", Path.home(), self.tmp, self.home, self.project, self.tmp.parent]
        self.restore()

    def close(self) -> None:
        self._open = False
        self._doorman.join()
        self.victim.kill()
        for listener in (self._tcp, self._udp, self._unix, self._abstract, self._packets):
            listener.close()
        self._stack.close()

    def fill(self, text: str) -> str:
        values = {"HOME": self.home, "PROJECT": self.project, "TMP": self.tmp, "TOKEN": self.token, "PORT": self.port}
        values |= {"LISTEN": self.listen, "VICTIM": self.victim.pid, "ABSTRACT": self.token, "UNIX": self.unix}
        for name, value in values.items():
            text = text.replace(f"@{name}@", str(value))
        return text

    def restore(self) -> None:
        """Canaries as they were, a live victim, an empty book of visitors, no marked names."""
        for folder in (self.tmp, self.home, self.project):
            folder.chmod(0o755)
            canary = folder / "canary"
            canary.unlink(missing_ok=True)
            canary.write_text("alive")
            canary.chmod(0o600)
        for path in self._marked():
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        if self.victim.poll() is not None:
            self.victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self.visitors.clear()
        self._before = self._state()

    def changes(self) -> list[str]:
        """The changes since the start."""
        now = self._state()
        lines = [
            f"{name}: {self._before.get(name)} became {now.get(name)}"
            for name in now
            if now[name] != self._before.get(name)
        ]
        lines += [f"somebody came by {visitor}" for visitor in self.visitors]
        if self.victim.poll() is not None:
            lines.append(f"the victim died ({self.victim.returncode})")
        return lines

    def listeners(self) -> list[str]:
        """Sockets that listen on the port, or under the name, that the attacks use."""
        lines = []
        for table in ("tcp", "tcp6", "udp"):
            with contextlib.suppress(OSError):
                rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
                # the port as an own address, not as a peer's; connections that ended linger for a minute
                on_port = [row for row in rows if row[1].endswith(f":{self.listen:04X}")]
                lines += [
                    f"{table} listener: {' '.join(row)}" for row in on_port if table == "udp" or row[3] == LISTENING
                ]
        lines += [line for line in Path("/proc/net/unix").read_text().splitlines() if f"@listen-{self.token}" in line]
        return lines

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for folder in (self.tmp, self.home, self.project):
            status = folder.stat()
            state[f"{folder}"] = (oct(status.st_mode), sorted(os.listdir(folder)), status.st_mtime_ns, status.st_uid)
            canary = folder / "canary"
            if canary.exists():
                status = canary.stat()
                digest = hashlib.sha256(canary.read_bytes()).hexdigest()[:12]
                state[f"{canary}"] = (
                    digest,
                    oct(status.st_mode),
                    status.st_mtime_ns,
                    status.st_nlink,
                    os.listxattr(canary),
                )
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, self.victim.pid)
            score = Path(f"/proc/{self.victim.pid}/oom_score_adj").read_text().strip()
            status = Path(f"/proc/{self.victim.pid}/stat").read_text().rpartition(")")[2].split()[0]
            state["victim"] = (nice, score, "stopped" if status in "Tt" else "runs")
        state["names outside"] = [str(path) for path in self._marked()]
        state["segments"] = [
            len(Path(f"/proc/sysvipc/{kind}").read_text().splitlines()) for kind in ("shm", "msg", "sem")
        ]
        return state

    def _marked(self) -> list[Path]:
        own_folders = {self.tmp.name, self.home.name, self.project.name}
        paths = set()
        for folder in self.places:
            with contextlib.suppress(OSError):
                paths.update(
                    folder / name for name in os.listdir(folder) if self.token in name and name not in own_folders
                )
        return sorted(paths)

    def _listening(self, listener: socket.socket, address: Any) -> socket.socket:
        listener.bind(address)
        if listener.type == socket.SOCK_STREAM:
            listener.listen(64)
        listener.setblocking(False)
        return listener

    def _receive(self) -> None:
        names = {self._tcp: "TCP", self._udp: "UDP", self._unix: "a unix socket", self._abstract: "an abstract socket"}
        names[self._packets] = "an abstract datagram"
        while self._open:
            for ready in select.select(list(names), [], [], 0.2)[0]:
                with contextlib.suppress(OSError):
                    if ready.type == socket.SOCK_STREAM:
                        ready.accept()[0].close()
                    else:
                        ready.recv(65536)
                    self.visitors.append(names[ready])


class Owner:
    """One process that verifies, with its own targets, and a thread that monitors its child processes."""

    def __init__(self, backend: str) -> None:
        self.world = World()
        self.scratch = Path(tempfile.mkdtemp(prefix="rlcli-owner-"))
        (self.scratch / "tmp").mkdir()
        self.log = self.scratch / "said"
        self.backend = backend
        self._start()
        self._peaks = [0, 0]
        self._since: list[str] = []
        self._watching = True
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _start(self) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        variables = {"RLCLI_SANDBOX": self.backend, "TMPDIR": str(self.scratch / "tmp"), "PYTHONPATH": str(ROOT)}
        variables |= {"RLCLI_ATTACK_SECRET": "secret-of-the-environment", "OMP_NUM_THREADS": "1"}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.attacks.owner", str(theirs_in), str(theirs_out)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | variables, cwd=self.scratch,
                pass_fds=(theirs_in, theirs_out), start_new_session=True,
            )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._replies, self._requests = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb", buffering=0)
        self._calm: set[int] = set()
        for pool in (False, True):
            first = self._asked(LEFTOVERS, INNOCENT, LOADED_S, pool)
            assert first.get("outcome") == "ok", (first, self.log.read_text())
        self._calm = {process.pid for process in below(self.process.pid)}

    def close(self) -> None:
        self._watching = False
        self._watcher.join()
        self._stop()
        self.world.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _stop(self) -> None:
        for process in [*below(self.process.pid), psutil.Process(self.process.pid)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self._replies.close()
        self._requests.close()

    def run(self, attack: Attack, pool: bool = False) -> Report:
        """Let the attack loose, look around, and clear up."""
        self._peaks = [0, 0]
        completion = self.world.fill(attack.completion)
        limit = POOL_S if pool else attack.timeout_s
        reply = self.ask(completion, attack.ground_truth(), limit, pool)
        outcome = Outcome(reply["outcome"]) if "outcome" in reply else None
        report = Report(outcome, reply.get("detail", reply.get("error", "")), reply.get("seconds", HANGS_S))
        report.problems += self._problems(reply, pool)
        report.problems += self.world.changes()
        self.world.restore()
        self._since.append(attack.id)
        if report.problems or pool or len(self._since) >= INNOCENT_EVERY:
            innocent = self.ask(self.world.fill(LEFTOVERS), INNOCENT, LOADED_S, pool)
            if innocent.get("outcome") != "ok":
                report.problems.append(f"the right program after {', '.join(self._since)}: {innocent}")
            self._since.clear()
        return report

    def _problems(self, reply: dict[str, Any], pool: bool) -> Iterator[str]:
        if not reply:
            yield "the owner hung or died"
            return
        if "error" in reply:
            yield f"the verifier raised {reply['error']}"
        processes = self._left_behind()
        if processes:
            yield f"processes left: {processes}"
        descriptors_before, descriptors_after = reply["descriptors"]
        if descriptors_after > descriptors_before:
            yield f"descriptors: {descriptors_before} before, {descriptors_after} after"
        if self._peaks[0] > MEMORY_BYTES:
            yield f"the program held {self._peaks[0] >> 20} MiB"
        if self._peaks[1] > OWNER_BYTES:
            yield f"the owner grew to {self._peaks[1] >> 20} MiB"
        if self.log.stat().st_size:
            yield f"the owner's output: {self.log.read_bytes()[:200]!r}"
            os.truncate(self.log, 0)
        scraps = os.listdir(self.scratch / "tmp")
        if scraps and not pool:
            yield f"left in the temporary folder: {scraps[:5]}"
            subprocess.run(["rm", "-rf", *(str(self.scratch / "tmp" / name) for name in scraps)], check=False)
        yield from self.world.listeners()

    def _left_behind(self) -> list[str]:
        """Processes below the harness that no owner had before; those found are killed."""
        processes = [process for process in below(self.process.pid) if process.pid not in self._calm]
        deadline = time.monotonic() + LOADED_S
        while processes and time.monotonic() < deadline:
            time.sleep(0.02)
            processes = [process for process in processes if alive(process)]
        names = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                names.append(f"{process.pid} {' '.join(process.cmdline())[:60]}")
                process.kill()
        return names

    def _restart(self) -> None:
        self._stop()
        self._start()

    def ask(self, completion: str, ground_truth: str, timeout_s: float, pool: bool) -> dict[str, Any]:
        """The owner's reply. Empty where it hangs or dies: there is a new one then, which owes no other reply. Asked
        once more where a loaded machine gave the sandbox no turn for longer than it may take to start."""
        reply = self._asked(completion, ground_truth, timeout_s, pool)
        if any(late in reply.get("error", "") for late in LATE):
            reply = self._asked(completion, ground_truth, timeout_s, pool)
        if not reply:
            self._restart()
        return reply

    def _asked(self, completion: str, ground_truth: str, timeout_s: float, pool: bool) -> dict[str, Any]:
        ask = {"completion": completion, "ground_truth": ground_truth, "timeout_s": timeout_s, "pool": pool}
        try:
            rest = memoryview(json.dumps(ask).encode() + b"\n")
            while rest:
                rest = rest[self._requests.write(rest) or 0 :]
            if not select.select([self._replies], [], [], HANGS_S)[0]:
                return {}
            line = self._replies.readline()
        except BrokenPipeError:
            return {}
        return dict(json.loads(line)) if line else {}

    def _watch(self) -> None:
        while self._watching:
            held = sum(map(resident, below(self.process.pid, self._calm)))
            with contextlib.suppress(psutil.Error):
                owner_bytes = psutil.Process(self.process.pid).memory_info().rss
                self._peaks = [max(self._peaks[0], held), max(self._peaks[1], owner_bytes)]
            time.sleep(LOOK_S)


INNOCENT = json.dumps(functional([[1], [203]], [[1, []], [5, []]]))


def below(pid: int, but: set[int] | frozenset[int] = frozenset()) -> list[psutil.Process]:
    """Live processes beneath `pid`, those without which there is calm aside."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [process for process in children if process.pid not in but and alive(process)]


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


AT_ONCE = threading.BoundedSemaphore(2)
"""Verifications at a time, of all campaigns: more would be late for want of processors, not by their own doing."""
OWNERS: list[Owner] = []


class Campaign:
    """All owners of one backend, and the attacks given to whichever is free."""

    def __init__(self, backend: str, owners: int = 2) -> None:
        adopt_orphans(True)
        self._free: queue.SimpleQueue[Owner] = queue.SimpleQueue()
        self._owners = []
        for _ in range(owners):
            owner = Owner(backend)
            self._owners.append(owner)
            OWNERS.append(owner)
            self._free.put(owner)
        self._executor = ThreadPoolExecutor(owners)
        self.submit = self._executor.submit
        self.submit_all = self._executor.map

    def run(self, attack: Attack, pool: bool = False) -> Report:
        owner = self._free.get()
        try:
            with AT_ONCE:
                return owner.run(attack, pool)
        finally:
            self._free.put(owner)

    def bare(self, attack: Attack) -> str:
        """Output of a deed without a sandbox: it is run by a plain interpreter in a temporary folder."""
        owner = self._free.get()
        try:
            source = owner.world.fill(attack.completion.removeprefix("```python\n").removesuffix("\n```"))
            with tempfile.TemporaryDirectory() as folder:
                run = subprocess.run(
                    [sys.executable, "-c", source + "\nprint(f(0))"], cwd=folder, capture_output=True, text=True,
                    env=os.environ | {"RLCLI_ATTACK_SECRET": "x", "TMPDIR": folder}, start_new_session=True, timeout=60,
                )  # fmt: skip
            owner.world.restore()
            return run.stdout + run.stderr[-300:]
        finally:
            self._free.put(owner)

    def verify(self, completion: str, ground_truth: str) -> dict[str, Any]:
        """A plain verification, of a control."""
        owner = self._free.get()
        try:
            return owner.ask(completion, ground_truth, LOADED_S, False)
        finally:
            self._free.put(owner)

    def orphans(self) -> list[str]:
        """Processes that came to the harness because their parents left them."""
        mine = {pid for owner in OWNERS for pid in (owner.process.pid, owner.world.victim.pid)}
        lines = []
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if process.pid not in mine and process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.pid not in mine and "resource_tracker" not in " ".join(process.cmdline()):
                    lines.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        return lines

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
        for owner in self._owners:
            owner.close()
            OWNERS.remove(owner)
        adopt_orphans(bool(OWNERS))


def adopt_orphans(yes: bool) -> None:
    """Become the parent of all orphans below this process, or leave that to the system's first process again."""
    ctypes.CDLL(None).prctl(36, int(yes), 0, 0, 0)
