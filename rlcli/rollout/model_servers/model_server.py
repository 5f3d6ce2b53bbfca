"""One server of a model: vLLM's own, which is restarted if it dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from rlcli.cluster.placement import Pool, worker_environment
from rlcli.errors import RunFailed
from rlcli.rollout.model_servers.server_processes import end_group, inherited, start_group, tail_of
from rlcli.support.machine.gpus import visible_variable
from rlcli.support.served_models import ServedModel

LOOK_S, HEALTH_S = 0.25, 5.0
DEATHS = 3
"""Deaths in a row, without an answer between them, after which a server is not started again."""

CPU_CACHE_BYTES = 1 << 30
"""Size of the KV cache on CPUs. On GPUs vLLM takes 90% of the memory: a server shares its devices with nothing."""


@dataclass(frozen=True)
class ServerPlace:
    """Location and settings of a server."""

    device: str
    """`cuda` or `cpu`."""
    host: str
    """Address that it listens on."""
    key: str
    """Key that each path but /health requires."""
    log: Path
    """File for its output."""
    classifies: bool = False
    """True if it returns the logits of a sequence classifier instead of text."""
    devices: tuple[int, ...] = ()
    """Its GPUs; empty: those that this process sees."""
    group: str = ""
    """Id in the name of its folder of sockets, by which the folder of a killed run is found and removed."""


class ModelServer:
    """A server of `served.model` on `served.tensor_parallel` devices.

    It starts at once and loads in the background; `wait` returns when it answers. If it dies later it is started again
    at the same address. It ends with this process, however that ends.
    """

    def __init__(self, served: ServedModel, location: ServerPlace) -> None:
        self._served, self._place = served, location
        with socket.socket() as probe:
            probe.bind((location.host, 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://{location.host}:{self._port}"
        self.deaths = 0
        self._ready, self._closed = threading.Event(), threading.Event()
        self._failure: RunFailed | None = None
        # vLLM would put the sockets between its processes into the temporary folder, and leave them there. In /tmp: the
        # path of a socket has at most 107 bytes.
        self._sockets = tempfile.mkdtemp(prefix=f"rlcli-{location.group}-served-", dir="/tmp")
        self._process = self._started()
        self._watcher = threading.Thread(target=self._watch, name="rlcli-model-server", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Id of the process group of the server."""
        return self._process.pid

    def wait(self) -> None:
        """Wait until it answers. Raises `RunFailed` with the end of its log if it does not start."""
        while not self._ready.wait(LOOK_S):
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """End its processes. Idempotent."""
        self._closed.set()
        self._watcher.join()
        end_group(self._process)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _started(self) -> subprocess.Popen[bytes]:
        served, location = self._served, self._place
        pool = Pool(served.tensor_parallel, location.device, threads=1)
        server_variables = {
            "VLLM_API_KEY": location.key,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "VLLM_RPC_BASE_PATH": self._sockets,
        }
        environment = {**inherited(), **worker_environment(pool, os.environ), **server_variables}
        if location.devices and location.device == "cuda":
            environment[visible_variable()] = ",".join(map(str, location.devices))
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # a server has its engine in another process
        return start_group(command_of(served, location, self._port), environment, location.log)

    def _watch(self) -> None:
        unanswered = 0
        while not self._closed.wait(LOOK_S):
            if self._process.poll() is None:
                if not self._ready.is_set() and self._answers():
                    unanswered = 0
                    self._ready.set()
                continue
            started_once = self._ready.is_set() or self.deaths > 0
            self.deaths, unanswered = self.deaths + 1, unanswered + 1
            self._ready.clear()
            end_group(self._process)
            end = f"the server of {self._served.model} ended (exit status {self._process.returncode})"
            if not started_once or unanswered > DEATHS:
                self._failure = RunFailed(f"{end}: {tail_of(self._place.log)}", f"its log is {self._place.log}")
                return
            with self._place.log.open("a") as log:
                log.write(f"{end}; it is started again\n")
            self._process = self._started()

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=HEALTH_S, trust_env=False).status_code == 200
        return False


def command_of(served: ServedModel, location: ServerPlace, port: int) -> Sequence[str]:
    """The command of vLLM's server. The longest sequence is what fits into its memory, at most the model's longest."""
    words = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", served.model]
    words += ["--host", location.host, "--port", str(port), "--uvicorn-log-level", "warning"]
    words += ["--middleware", "rlcli.support.server_key.RequireKey"]
    words += ["--tensor-parallel-size", str(served.tensor_parallel), "--max-model-len", "auto"]
    if location.classifies:
        words += ["--runner", "pooling"]
    if location.device == "cpu":
        words += ["--dtype", "float32", "--enforce-eager"]  # by itself it would round float32 weights
        words += ["--kv-cache-memory-bytes", str(CPU_CACHE_BYTES), "--gpu-memory-utilization", "0.1"]
    return words
