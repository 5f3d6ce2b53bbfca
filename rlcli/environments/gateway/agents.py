"""Agent programs: one process for each session, which asks the gateway as it would ask OpenAI."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO, Any

from rlcli.environments.environment import EnvironmentFailed, Failure
from rlcli.environments.gateway.record import Branch
from rlcli.environments.gateway.server import Gateway, GatewaySession
from rlcli.errors import SetupError
from rlcli.redact import redacted, without_service_secrets
from rlcli.types import Ended

LOOPBACK = "127.0.0.1,localhost"


@dataclass(frozen=True)
class AgentRun:
    """What one process did. branches: trajectories of the same sample. reward: what it posted; None if it posted none,
    so that the row's verifier decides. ended: the limit that refused its last request; None if none did."""

    branches: Sequence[Branch]
    reward: float | None
    ended: Ended | None


def run_agent(
    gateway: Gateway, command: str, row: Mapping[str, Any], *, deadline_s: float, version: int = 0
) -> Future[AgentRun]:
    """Start `command`, with the session in OPENAI_BASE_URL, OPENAI_API_KEY and RLCLI_SESSION, and `row` as JSON in the
    file RLCLI_ROW. version: of the weights. Thread-safe, and returns at once.

    The future raises `EnvironmentFailed` if the program does not end in time, ends with another exit code than 0
    (unless a limit of the session had refused its last request), or asked nothing; and `SetupError` if there is no such
    program. Cancelling it ends the process.
    """
    return asyncio.run_coroutine_threadsafe(_run(gateway, command, row, deadline_s, version), gateway.loop)


async def _run(gateway: Gateway, command: str, row: Mapping[str, Any], deadline_s: float, version: int) -> AgentRun:
    session = gateway.open(version)
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as given, tempfile.TemporaryFile() as errors:
            json.dump(row, given)
            given.flush()
            status = await _status(command, _environment(session, given.name), errors, deadline_s)
            failure = _failure(status, session, errors)
    finally:
        gateway.close_session(session)
    if failure is not None:
        raise failure
    return AgentRun(session.branches, session.reward, session.ended)


async def _status(command: str, environment: Mapping[str, str], errors: IO[bytes], deadline_s: float) -> int | None:
    """Its exit status; None if it did not end in time. Nothing of it is left."""
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SetupError(f"the agent '{command}' cannot be started: {reason}", "give a command that exists") from error
    try:
        return await asyncio.wait_for(process.wait(), deadline_s)
    except TimeoutError:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _environment(session: GatewaySession, row: str) -> dict[str, str]:
    inherited = without_service_secrets(dict(os.environ))
    direct = ",".join(filter(None, [inherited.get("NO_PROXY", ""), LOOPBACK]))
    given = {"OPENAI_BASE_URL": session.url, "OPENAI_API_KEY": session.token}
    return {
        **inherited,
        **given,
        "RLCLI_SESSION": session.id,
        "RLCLI_ROW": row,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _failure(status: int | None, session: GatewaySession, errors: IO[bytes]) -> EnvironmentFailed | None:
    if status is None:
        return EnvironmentFailed(Failure.TIMEOUT, "the agent did not end in time")
    if status and session.ended is None:
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
        last = redacted(errors.read().decode(errors="replace"), [session.token]).strip().rpartition("\n")[2]
        how, kind = (f"exit status {status}", Failure.CRASH) if status > 0 else (f"signal {-status}", Failure.DIED)
        return EnvironmentFailed(kind, f"the agent ended with {how}: {last[:300]}".rstrip(": "))
    if not session.branches:
        return EnvironmentFailed(Failure.PROTOCOL, "the agent ended without a turn of the policy")
    return None
