"""A vLLM server that the run starts itself, on a Unix socket that only this user can open."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlcli.cluster.placement import Pool, worker_environment
from rlcli.rollout.engine import EngineSpec
from rlcli.rollout.model_servers.server_processes import end_group, inherited, start_group, tail_of
from rlcli.rollout.vllm.vllm_arguments import environment_variables, server_arguments


class ServerProcess:
    """A server, which ends with this process, however that ends. socket: where it listens. log: its output."""

    def __init__(self, spec: EngineSpec, socket: Path, log: Path) -> None:
        self.log = log
        socket.unlink(missing_ok=True)
        environment = {**inherited(), **worker_environment(Pool(1, spec.device, threads=1), os.environ)}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # a server has its engine in another process
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)  # of this worker's process group
        environment |= environment_variables(spec)
        environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_RPC_BASE_PATH": str(socket.parent)}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = start_group(command_of(spec, socket), environment, log)

    @property
    def pid(self) -> int:
        """Id of the process group of the server."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End the server. Idempotent."""
        end_group(self._process)

    def tail(self) -> str:
        """The last lines of its log, as one."""
        return tail_of(self.log)


def command_of(spec: EngineSpec, socket: Path) -> Sequence[str]:
    """The command of vLLM's server for this engine."""
    words = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--uds", str(socket)]
    words += ["--uvicorn-log-level", "warning", "--enable-scale-out", "--enable-prompt-tokens-details"]
    words += ["--worker-extension-cls", "rlcli.rollout.servers.vllm_extension.Extension"]
    return words + server_arguments(spec)
