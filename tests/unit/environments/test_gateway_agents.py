"""Agent programs as processes: what they get, what they leave, and how they fail."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from rlcli.environments.conversation import Limits
from rlcli.environments.environment import EnvironmentFailed, Failure
from rlcli.environments.gateway.agents import AgentRun, run_agent
from rlcli.environments.gateway.server import Gateway
from rlcli.errors import SetupError
from rlcli.sandbox import owned_main
from tests.taught_engine import TaughtEngine, is_recorded

LIMITS = Limits(turns=3, turn_tokens=4, drawn_tokens=80, tokens=300)
AGENT = """
import json, os, subprocess, sys, time, urllib.request

def post(path, body):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + path
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

row = json.load(open(os.environ["RLCLI_ROW"]))
do = row["extra_info"]["do"]
assert os.environ["RLCLI_SESSION"] in os.environ["OPENAI_BASE_URL"] and "HF_TOKEN" not in os.environ
if do == "nothing":
    sys.exit()
if do == "refused":
    try:
        post("/v1/chat/completions", {"messages": [{"role": "robot", "content": ""}]})
    except urllib.error.HTTPError:
        sys.exit()
messages = list(row["messages"])
while True:
    message = post("/v1/chat/completions", {"messages": messages})["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "more"}]
    if do == "raise":
        raise ValueError("no, " + os.environ["OPENAI_API_KEY"])
    if do == "abort":
        os.abort()
    if do == "memory":
        bytearray(1 << 30)
    if do == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(row["extra_info"].get("file", os.devnull), "w").write(str(child.pid))
        time.sleep(600)
    if do == "reward" and len(messages) > 4:
        post("/reward", {"reward": 0.75})
        break
"""


OWNS = """
import subprocess, sys
subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True).wait()
"""
SPAWNS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaughtEngine]:
    with TaughtEngine(tmp_path_factory.mktemp("agents") / "model", lambda prompt: None) as engine:
        yield engine


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("agent") / "an agent.py"
    file.write_text(AGENT)
    return shlex.join([sys.executable, str(file)])


def run(engine: TaughtEngine, command: str, do: str, deadline_s: float = 60, **more: Any) -> AgentRun:
    engine.seen.clear()
    row = {"id": "a", "messages": [{"role": "user", "content": "hi"}], "extra_info": {"do": do, **more}}
    with Gateway(engine.tokenizer, engine.stops, LIMITS, engine.submit) as gateway:
        return run_agent(gateway, gateway.open(version=2), command, row, deadline_s=deadline_s).result(90)


def test_an_agents_turns_and_its_reward_are_a_sample(
    engine: TaughtEngine, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    found = run(engine, agent, "reward")
    (branch,) = found.branches
    assert (found.reward, found.ended) == (0.75, None)
    assert is_recorded(engine.seen, [branch.trajectory])
    assert (branch.trajectory.turns, branch.trajectory.versions) == (2, [2, 2])


def test_an_agent_that_a_limit_stops_has_not_failed(engine: TaughtEngine, agent: str) -> None:
    found = run(engine, agent, "more")
    assert (found.ended, found.reward, found.branches[0].trajectory.turns) == ("turns", None, 3)


@pytest.mark.parametrize(
    ("do", "failure", "detail"),
    [
        ("raise", Failure.CRASH, r"the agent ended with exit status 1: ValueError: no, \*\*\*$"),
        ("abort", Failure.DIED, "the agent ended with signal 6"),
        ("nothing", Failure.PROTOCOL, "the agent ended without a turn of the policy"),
    ],
)
def test_an_agent_that_fails_gives_no_sample(
    engine: TaughtEngine, agent: str, do: str, failure: Failure, detail: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=detail) as failed:
        run(engine, agent, do)
    assert failed.value.failure is failure


def test_an_agent_that_hangs_has_failed(engine: TaughtEngine, agent: str) -> None:
    with pytest.raises(EnvironmentFailed, match="timeout: the agent did not ask for another turn within 1 s"):
        run(engine, agent, "hang", deadline_s=1)


def test_the_time_that_the_policy_takes_is_not_the_agents(engine: TaughtEngine, agent: str) -> None:
    engine.hold.clear()
    threading.Timer(2.5, engine.hold.set).start()
    assert run(engine, agent, "reward", deadline_s=1).reward == 0.75


def test_an_agent_that_is_refused_says_why(engine: TaughtEngine, agent: str) -> None:
    with pytest.raises(EnvironmentFailed, match=r"without a turn of the policy: a message has the role 'robot'"):
        run(engine, agent, "refused")


def test_an_agent_has_a_limit_of_memory(engine: TaughtEngine, agent: str) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}], "extra_info": {"do": "memory"}}
    with (
        Gateway(engine.tokenizer, engine.stops, LIMITS, engine.submit) as gateway,
        pytest.raises(EnvironmentFailed, match="crash: the agent ended with exit status 1: MemoryError"),
    ):
        run_agent(gateway, gateway.open(), agent, row, deadline_s=60, memory_bytes=1 << 30).result(90)


@pytest.mark.parametrize("by", ["cancel", "close"])
def test_an_agent_is_ended_with_its_children(engine: TaughtEngine, agent: str, tmp_path: Path, by: str) -> None:
    file = tmp_path / "child"
    row = {"messages": [{"role": "user", "content": "hi"}], "extra_info": {"do": "hang", "file": str(file)}}
    with Gateway(engine.tokenizer, engine.stops, LIMITS, engine.submit) as gateway:
        running = run_agent(gateway, gateway.open(), agent, row, deadline_s=600)
        while not file.exists() or not file.read_text():
            time.sleep(0.01)
        if by == "cancel":
            running.cancel()
    with pytest.raises(CancelledError):
        running.result()
    status = Path(f"/proc/{file.read_text()}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_an_agent_that_does_not_exist_is_one_line(engine: TaughtEngine) -> None:
    with pytest.raises(SetupError, match="the agent '/no/agent x' cannot be started: there is no program '/no/agent'"):
        run(engine, "/no/agent x", "nothing")


def test_an_agent_ends_with_the_process_that_owns_it(agent: str, tmp_path: Path) -> None:
    """Killed, it can end nothing itself."""
    file = tmp_path / "child"
    program = Path(owned_main.__file__)
    words = [sys.executable, str(program), "0", sys.executable, "-c", SPAWNS, str(file)]
    owner = subprocess.Popen([sys.executable, "-c", OWNS, *words])
    while not file.exists() or len(file.read_text().split()) < 2:
        time.sleep(0.01)
    owner.kill()
    owner.wait()
    for pid in file.read_text().split():
        status = Path(f"/proc/{pid}/stat")
        with contextlib.suppress(FileNotFoundError):
            while status.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
