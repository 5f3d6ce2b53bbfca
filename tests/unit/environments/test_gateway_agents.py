"""Agent programs as processes: what they get, what they leave, and how they fail."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest

from rlcli.environments.conversation import Limits
from rlcli.environments.environment import EnvironmentFailed, Failure
from rlcli.environments.gateway import agent_processes
from rlcli.environments.gateway.agent_processes import AgentRun, run_agent
from rlcli.environments.gateway.gateway_server import Gateway, GenerationAsk
from rlcli.errors import SetupError
from rlcli.rollout.engine import Generation
from tests.pages import blocks
from tests.taught_engine import TaughtEngine, is_recorded

LIMITS = Limits(turns=3, turn_tokens=4, response_tokens=80, tokens=300)
AGENT = """
import json, os, signal, subprocess, sys, threading, time, urllib.request

def post(path, body, key=os.environ["OPENAI_API_KEY"]):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + path
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

def parent_of(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

row = json.load(open(os.environ["RLCLI_ROW"]))
do = row["extra_info"]["do"]
reward_key = open(os.environ["RLCLI_REWARD_KEY"]).read()
assert os.environ["RLCLI_SESSION"] in os.environ["OPENAI_BASE_URL"]
if do == "variables":
    json.dump(dict(os.environ), open(row["extra_info"]["file"], "w"))
if do == "needs":
    os.environ["MY_API_KEY"]
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
    if do in ("hang", "stop", "stops"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        with open(row["extra_info"].get("file", os.devnull), "w") as file:
            file.write(f"{child.pid}\\n")
    outer, ends = parent_of(os.getppid()), time.monotonic() + 60
    while do == "stops" and time.monotonic() < ends:  # again and again
        os.kill(outer, signal.SIGSTOP)
    if do == "stop":
        for pid in (outer, os.getppid()):
            os.kill(pid, signal.SIGSTOP)
    if do in ("hang", "stop"):
        time.sleep(60)
    if do == "late row":
        open(os.environ["RLCLI_ROW"])
    if do == "late key":
        open(os.environ["RLCLI_REWARD_KEY"])
    if do == "child posts":
        code = "import os; print(os.path.exists(os.environ['RLCLI_REWARD_KEY']), *os.environ.values())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, close_fds=False)
        assert done.stdout.startswith("False") and reward_key not in done.stdout
        try:
            post("/reward", {"reward": 1.0})
        except urllib.error.HTTPError as error:
            sys.exit(str(error.code) + " " + json.load(error)["error"]["message"])
    if do in ("reward", "variables") and len(messages) > 4:
        post("/reward", {"reward": 0.75}, reward_key)
        break
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


def run(
    engine: TaughtEngine,
    command: str,
    do: str,
    deadline_s: float = 60,
    variables: Sequence[str] = (),
    **extra: Any,
) -> AgentRun:
    engine.seen.clear()
    row = {"id": "a", "messages": [{"role": "user", "content": "hi"}], "extra_info": {"do": do, **extra}}
    with Gateway(engine.tokenizer, engine.stops, LIMITS, engine.submit) as gateway:
        options: dict[str, Any] = {"deadline_s": deadline_s, "variables": variables}
        return run_agent(gateway, gateway.open(version=2), command, row, **options).result(90)


def timed_out(engine: TaughtEngine, agent: str, do: str, file: Path) -> None:
    """Run an agent that hangs after its first turn, when it has written `file`, until its deadline ends it. A machine
    may be too slow for that turn within the deadline: then again, with a longer one."""
    for deadline_s in (1, 4, 16, 64):
        with pytest.raises(EnvironmentFailed, match=f"timeout: the agent did not .* within {deadline_s} s") as failed:
            run(engine, agent, do, deadline_s=deadline_s, file=str(file))
        if "another turn" in str(failed.value) and file.exists() and file.read_text():
            return
    pytest.fail(f"the agent never came to its second turn: {failed.value}")


def has_ended(pid: str) -> bool:
    """Or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_agents_turns_and_its_reward_are_a_sample(
    engine: TaughtEngine, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    outcome = run(engine, agent, "reward")
    (branch,) = outcome.branches
    assert (outcome.reward, outcome.ended) == (0.75, None)
    assert is_recorded(engine.seen, [branch.trajectory])
    assert (branch.trajectory.turns, branch.trajectory.versions) == (2, [2, 2])


@pytest.mark.skipif(shutil.which("curl") is None, reason="the program asks with curl")
def test_the_shell_program_of_the_page_posts_its_reward(engine: TaughtEngine, tmp_path: Path) -> None:
    (tmp_path / "agent").write_text(blocks("gateway.md", "text")[0])
    outcome = run(engine, f"sh {tmp_path}/agent", "")
    assert (outcome.reward, outcome.reward_refused, outcome.branches[0].trajectory.turns) == (0.0, "", 1)


def test_an_agent_that_a_limit_stops_has_not_failed(engine: TaughtEngine, agent: str) -> None:
    outcome = run(engine, agent, "more")
    assert (outcome.ended, outcome.reward, outcome.branches[0].trajectory.turns) == ("turns", None, 3)


@pytest.mark.parametrize(
    ("do", "failure", "detail"),
    [
        ("raise", Failure.CRASH, r"the agent ended with exit status 1: ValueError: no, \*\*\*$"),
        ("late key", Failure.CRASH, r"RLCLI_REWARD_KEY is removed when the agent asks for its first turn\)$"),
        ("child posts", Failure.CRASH, r"status 1: 401 a reward needs the key in the file RLCLI_REWARD_KEY, not "),
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


@pytest.mark.parametrize("has_answer", [False, True])
def test_a_row_with_the_answer_is_removed_before_the_policy_writes(
    engine: TaughtEngine, agent: str, has_answer: bool
) -> None:
    answer = {"ground_truth": "42"} if has_answer else {}
    row = {"messages": [{"role": "user", "content": "hi"}], "extra_info": {"do": "late row"}, **answer}
    with Gateway(engine.tokenizer, engine.stops, LIMITS, engine.submit) as gateway:
        running = run_agent(gateway, gateway.open(), agent, row, deadline_s=60)
        if not has_answer:
            assert running.result(90).ended == "turns", "it goes on to its limit"
            return
        with pytest.raises(EnvironmentFailed, match=r"the file RLCLI_ROW is removed when the agent asks for its first"):
            running.result(90)


def test_the_time_that_the_policy_takes_is_not_the_agents(
    engine: TaughtEngine, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, timers, failures = engine.submit, list[threading.Timer](), list[str]()
    for deadline_s in (2, 8, 32):  # the agent's own time has to be less, also on a slow machine

        def held(ask: GenerationAsk, hold_s: float = 1.3 * deadline_s) -> Future[Generation]:
            timers.append(threading.Timer(hold_s, engine.hold.set))
            timers[-1].start()
            return submit(ask)

        monkeypatch.setattr(engine, "submit", held)
        engine.hold.clear()
        try:
            assert run(engine, agent, "reward", deadline_s=deadline_s).reward == 0.75
            return
        except EnvironmentFailed as failed:
            failures.append(str(failed))
        finally:
            for timer in timers:
                timer.cancel()
            engine.hold.set()
    pytest.fail("; ".join(failures))


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
def test_an_agent_is_ended_with_what_it_has_started(engine: TaughtEngine, agent: str, tmp_path: Path, by: str) -> None:
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
    while not has_ended(file.read_text().strip()):
        time.sleep(0.01)


@pytest.mark.parametrize("do", ["hang", "stop", "stops"])
def test_nothing_of_an_agent_is_left_when_its_session_ends(
    engine: TaughtEngine, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    """Even of one that stops the processes which supervise it."""
    monkeypatch.setattr(agent_processes, "END_S", 0.3)
    file = tmp_path / "child"
    timed_out(engine, agent, do, file)
    assert has_ended(file.read_text().strip())


SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "aws",
    "GITHUB_TOKEN": "github",
    "ANTHROPIC_API_KEY": "anthropic",
    "HF_TOKEN": "hf",
    "WANDB_API_KEY": "wandb",
    "RLCLI_SERVED_KEY": "served",
    "SSH_AUTH_SOCK": "/run/agent",
    "SOMETHING_ELSE": "else",
    "OPENAI_ORG_ID": "org",
    "UV_PUBLISH_TOKEN": "pypi",
    "HTTPS_PROXY": "http://me:hunter2@proxy",
}


@pytest.mark.parametrize("allowed", [(), ("ANTHROPIC_API_KEY", "SOMETHING_ELSE")])
def test_an_agent_inherits_what_it_needs_and_what_is_named(
    engine: TaughtEngine, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: tuple[str, ...]
) -> None:
    for name, value in (SECRETS | {"LC_TIME": "C", "SSL_CERT_FILE": "/ca.pem", "NO_PROXY": "intranet"}).items():
        monkeypatch.setenv(name, value)
    run(engine, agent, "variables", variables=allowed, file=str(tmp_path / "variables"))
    variables = json.loads((tmp_path / "variables").read_text())
    assert {name: variables.get(name) for name in SECRETS if name in variables} == {
        name: SECRETS[name] for name in allowed
    }
    assert (variables["LC_TIME"], variables["SSL_CERT_FILE"]) == ("C", "/ca.pem")
    assert variables["PATH"] == os.environ["PATH"]
    assert variables["NO_PROXY"] == variables["no_proxy"] == "intranet,127.0.0.1,localhost"


def test_an_agent_that_lacks_a_variable_says_how_to_pass_it_on(
    engine: TaughtEngine, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "mine")
    with pytest.raises(EnvironmentFailed, match=r"\(MY_API_KEY is not passed on: name it in environment.variables\)$"):
        run(engine, agent, "needs")
    monkeypatch.delenv("MY_API_KEY")
    with pytest.raises(SetupError, match=r"environment\.variables names MY_API_KEY, which is not set"):
        run(engine, agent, "needs", variables=["MY_API_KEY"])


def test_an_agent_that_does_not_exist_is_one_line(engine: TaughtEngine) -> None:
    with pytest.raises(SetupError, match="the agent '/no/agent x' cannot be started: there is no program '/no/agent'"):
        run(engine, "/no/agent x", "nothing")
