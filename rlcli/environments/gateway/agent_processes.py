"""Agent programs: one process for each session, which asks the gateway as it would ask OpenAI."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rlcli.environments.chat_messages import EnvironmentRow
from rlcli.environments.environment import EnvironmentFailed, Failure
from rlcli.environments.gateway.gateway_server import Gateway, GatewaySession
from rlcli.environments.gateway.session_record import Branch
from rlcli.environments.process_variables import for_agent, hint_of
from rlcli.errors import SetupError
from rlcli.support import owned_main
from rlcli.support.redact import redacted
from rlcli.types import Ended

END_S = 5.0
"""Time that the supervisor of an agent may take to kill all of its processes."""


@dataclass(frozen=True)
class AgentRun:
    """Result of one agent."""

    branches: Sequence[Branch]
    """Trajectories of the sample; the last one has the last turn."""
    reward: float | None
    """The reward that it posted; None if it posted none."""
    ended: Ended | None
    """The limit that refused its last request; None if none did."""
    calls: int = 0
    """Tool calls of the policy."""
    failed_calls: int = 0
    """Tool calls that could not be read."""
    copies: Mapping[str, bytes] = field(default_factory=dict)
    """Digest → small copy, of the images that it showed."""
    reward_refused: str = ""
    """Reason why its last reward was refused; empty if it was not."""


def run_agent(
    gateway: Gateway,
    session: GatewaySession,
    command: str,
    row: EnvironmentRow,
    *,
    deadline_s: float,
    memory_bytes: int = 0,
    variables: Sequence[str] = (),
) -> Future[AgentRun]:
    """Start `command`, with the session in OPENAI_BASE_URL, OPENAI_API_KEY and RLCLI_SESSION, `row` as JSON in the file
    RLCLI_ROW, and the key of the reward in the file RLCLI_REWARD_KEY. The latter is removed when it asks for its first
    turn, and the row too if it has the ground truth: what the policy writes cannot read them. Thread-safe, and returns
    at once. At its end the session is closed, and all processes that it has started are killed.
    deadline_s: the longest time in which it asks for no turn. memory_bytes: of one of its processes; 0: no limit.
    variables: names of further environment variables that it inherits.

    The future raises `EnvironmentFailed` if the program passes its deadline or ends with another exit code than 0
    (unless a limit of the session had refused its last request), or if it asked for no turn; and `SetupError` if there
    is no such program. Cancelling it ends the process.
    """
    agent = _Agent(session, command, row, deadline_s, memory_bytes, variables)
    return asyncio.run_coroutine_threadsafe(agent.run(gateway), gateway.loop)


@dataclass(frozen=True)
class _Agent:
    """One agent; fields as the arguments of `run_agent`."""

    session: GatewaySession
    """Its session."""
    command: str
    """Its command line."""
    row: EnvironmentRow
    """Row of the dataset, as JSON values."""
    deadline_s: float
    """Longest time without a request for a turn."""
    memory_bytes: int
    """Limit of one process; 0: none."""
    variables: Sequence[str]
    """Names of further environment variables that it inherits."""

    async def run(self, gateway: Gateway) -> AgentRun:
        session = self.session
        try:
            with (
                tempfile.TemporaryDirectory(prefix="rlcli-agent-", ignore_cleanup_errors=True) as folder,
                tempfile.TemporaryFile() as errors,
            ):
                environment = self._environment(Path(folder))
                status = await self._status(environment, errors)
                failure = self._failure(status, errors, environment)
        finally:
            gateway.close_session(session)
        if failure is not None:
            raise failure
        record = session.record
        return AgentRun(
            session.branches,
            session.reward,
            session.ended,
            record.calls,
            record.failed_calls,
            record.copies,
            session.reward_refused,
        )

    def _environment(self, folder: Path) -> dict[str, str]:
        """Its variables, and the files in `folder`, this user's alone, that they name."""
        session, row, key = self.session, folder / "row.json", folder / "reward-key"
        row.write_text(json.dumps(self.row), encoding="utf-8")
        key.write_text(session.reward_key, encoding="utf-8")
        session.until_turn = (key, row) if "ground_truth" in self.row else (key,)
        session_variables = {
            "OPENAI_BASE_URL": session.url,
            "OPENAI_API_KEY": session.token,
            "RLCLI_SESSION": session.id,
            "RLCLI_ROW": str(row),
            "RLCLI_REWARD_KEY": str(key),
        }
        return for_agent(os.environ, self.variables, session_variables)

    async def _status(self, environment: Mapping[str, str], errors: IO[bytes]) -> int | None:
        """Its exit status; None if it passed its deadline. None of its processes is left."""
        program = [sys.executable, "-I", "-S", owned_main.__file__, str(self.memory_bytes), *words_of(self.command)]
        try:
            process = await asyncio.create_subprocess_exec(
                *program,
                env=environment,
                stdin=asyncio.subprocess.PIPE,  # its end ends the agent, with all that it has started
                stdout=asyncio.subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:  # the machine has no process or file left
            raise EnvironmentFailed(Failure.DIED, f"the agent cannot be started: {error.strerror}") from error
        self.session.quiet_since = time.monotonic()
        try:
            while (remaining := self._left()) > 0:
                with contextlib.suppress(TimeoutError):
                    return await asyncio.wait_for(process.wait(), remaining)
            return None
        finally:
            await _end(process)

    def _left(self) -> float:
        """Seconds until its deadline, if it asks for nothing meanwhile."""
        if self.session.busy:
            return self.deadline_s
        return self.session.quiet_since + self.deadline_s - time.monotonic()

    def _failure(
        self, status: int | None, errors: IO[bytes], environment: Mapping[str, str]
    ) -> EnvironmentFailed | None:
        session = self.session
        if status is None and session.ended is None:
            missing = "another turn" if session.branches else "a turn"
            return EnvironmentFailed(
                Failure.TIMEOUT, f"the agent did not ask for {missing} within {self.deadline_s:g} s"
            )
        if status and session.ended is None:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
            secrets = [session.token, session.reward_key]
            last = redacted(errors.read().decode(errors="replace"), secrets).strip().rpartition("\n")[2][:300]
            hint = hint_of(last, os.environ, environment)
            for name in ("RLCLI_REWARD_KEY", "RLCLI_ROW"):
                if environment[name] in last and not Path(environment[name]).exists():
                    hint = f"the file {name} is removed when the agent asks for its first turn"
            end, kind = (f"exit status {status}", Failure.CRASH) if status > 0 else (f"signal {-status}", Failure.DIED)
            detail = f"{last} ({hint})" if hint else last
            return EnvironmentFailed(kind, f"the agent ended with {end}: {detail}".rstrip(": "))
        if not session.branches:
            detail = f"the agent ended without a turn of the policy: {session.refused}".rstrip(": ")
            return EnvironmentFailed(Failure.PROTOCOL, detail)
        return None


def words_of(command: str) -> list[str]:
    """The program and its arguments, as a shell splits them. Raises `SetupError` if there is no such program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SetupError(f"the agent '{command}' cannot be started: {error}", "close the quotes") from error
    if not words or shutil.which(words[0]) is None:
        raise SetupError(
            f"the agent '{command}' cannot be started: there is no program '{(words or [''])[0]}'",
            "give a command that exists, with the path of the program if it is not in PATH",
        )
    return words


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let the supervisor kill all processes of the agent, and wait for it."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)  # the agent may have stopped it
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:  # the agent stops it again and again
        await asyncio.to_thread(owned_main.kill_from_outside, process.pid)
        await process.wait()
