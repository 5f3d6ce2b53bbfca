"""A Ray cluster on this machine that stands for three: a head without workers, and two that have room for one each."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
from processes import MARK, kill, line_of, marked, wait_gone

HEAD = "127.0.0.10"
"""Not 127.0.0.1, which Ray would replace by an address of the network. Ray listens on all addresses nevertheless: its
token keeps others out."""
START_S = 60.0
STORE_BYTES = 128 << 20


class Cluster:
    """Started by `with`, ended with it. Machines differ in their loopback address, and their processes in the mark."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._count = 0
        self._marks: list[str] = []
        with socket.socket() as probe:
            probe.bind((HEAD, 0))
            self.address = f"{HEAD}:{probe.getsockname()[1]}"
        self._token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(work / "token")}

    @property
    def environment(self) -> dict[str, str]:
        """With which a run joins it."""
        return {"RAY_ADDRESS": self.address, **self._token}

    def __enter__(self) -> Cluster:
        port = self.address.rpartition(":")[2]
        self._work.mkdir(parents=True, exist_ok=True)
        file = os.open(self._token["RAY_AUTH_TOKEN_PATH"], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "w") as token:
            token.write(secrets.token_hex(32))
        try:
            self._start("--head", "--node-ip-address", HEAD, "--port", port, "--num-cpus", "0")
            for _ in range(2):
                self.replace()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def machine_of(self) -> list[psutil.Process]:
        """All processes of the machine on which a worker lives; nothing where there is none."""
        for mark in self._marks[1:]:
            processes = marked(mark)
            if any(line_of(process).startswith("ray::Worker") for process in processes):
                return processes
        return []

    def replace(self) -> None:
        """Another machine joins in the place of a lost one, as an autoscaler would have it."""
        address = f"{HEAD}{self._count}"
        self._start("--address", self.address, "--node-ip-address", address, "--num-cpus", "1")

    def _start(self, *words: str) -> None:
        mark = f"{os.getpid()}-{self._work.name}-{self._count}"
        scratch = self._work / f"{self._count}"
        scratch.mkdir(parents=True)
        words = (*words, "--object-store-memory", str(STORE_BYTES), "--disable-usage-stats", "--block")
        if self._count == 0:
            words = (*words, "--include-dashboard", "false", "--temp-dir", str(self._work))
        log_file = self._work / f"machine-{self._count}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *words],
                env=os.environ | self._token | {MARK: mark, "TMPDIR": str(scratch)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._marks.append(mark)
        self._count += 1
        deadline = time.monotonic() + START_S
        while "runtime started" not in log_file.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise OSError(f"ray start {' '.join(words)}: {log_file.read_text()[-1000:]}")
            time.sleep(0.2)

    def _end(self) -> None:
        kill([process for mark in self._marks for process in marked(mark)])
        wait_gone(lambda: [process for mark in self._marks for process in marked(mark)], 10.0)
