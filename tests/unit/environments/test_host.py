"""Environments in processes of their own: what they return, and all the ways in which they fail."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcli.environments.environment import Cause, EnvironmentFailed, Failure
from rlcli.environments.environment_host import EnvironmentHost, EnvironmentSpec
from rlcli.errors import SetupError, UnknownName

GUESS = """
import asyncio, os, random, sys, time

class Guess:
    def __init__(self, high=10):
        self.high = high

    def reset(self, row, seed):
        print("noise on standard output")
        os.write(1, b"and on its descriptor\\n")
        self.number = random.Random(seed).randint(1, self.high)
        return [{"role": "user", "content": f"1 to {self.high}, {row['hint']}"}]

    def step(self, message):
        said = message["content"]
        if said == "hang":
            time.sleep(600)
        if said == "nap":
            time.sleep(0.4)
            said = str(self.number)
        if said == "leave a child":
            import subprocess
            self.child = subprocess.Popen(["sleep", "600"])
            return [{"role": "user", "content": str(self.child.pid)}], 0.0, False
        if said == "print":
            print("guessing \\x1b[31m in red, for a while")
        if said == "raise":
            raise ValueError("not a guess")
        if said == "exit":
            sys.exit(3)
        if said == "die":
            os._exit(7)
        if said == "wait and die":
            time.sleep(0.4)
            os._exit(7)
        if said == "large":
            return [{"role": "user", "content": "x" * 10_000_000}], 0.0, False
        if said == "large image":
            part = {"type": "image", "image": b"x" * 8_000_000}
            return [{"role": "user", "content": [part]}], 0.0, False
        if said == "eat":
            bytearray(1 << 32)
        if said in WRONG:
            return WRONG[said]
        right = said == str(self.number)
        return [{"role": "user", "content": "yes" if right else "no"}], float(right), right, {"asked": said}

class Slow(Guess):
    running = 0

    async def step(self, message):
        Slow.running += 1
        while Slow.running < int(message["content"]):
            await asyncio.sleep(0.01)
        return [{"role": "user", "content": "later"}], 0, False

NONE: list[object] = []
WRONG = {
    "nothing": None,
    "two": ([], 0.0),
    "text": ("no", 0.0, False),
    "nan": ([], float("nan"), True),
    "word": ([], "good", True),
    "true": ([], True, True),
    "maybe": ([], 0.0, 1),
    "role": ([{"role": "assistant", "content": "x"}], 0.0, False),
    "number": ([{"role": "user", "content": 3}], 0.0, False),
    "silent": ([], 0.0, False),
    "info": ([], 0.0, True, [1]),
    "count": ([], 0.0, True, {"failed_calls": None}),
    "endless": ([], 10**400, True),
    "object": ([], object(), True),
}
"""
ROW = {"hint": "even"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "guess.py"
    path.write_text(GUESS)
    return path


@pytest.fixture(scope="module")
def host(file: Path) -> Any:
    with EnvironmentHost(EnvironmentSpec(f"{file}:Guess", {"high": 3})) as host:
        yield host


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_conversation_runs_to_its_end(host: EnvironmentHost) -> None:
    session = host.session()
    opening = session.reset(ROW, 5).result(20)
    assert (list(opening.messages), list(opening.tools)) == ([{"role": "user", "content": "1 to 3, even"}], [])
    replies = [session.step(said(str(number))).result(20) for number in (1, 2, 3)]
    assert [reply.done for reply in replies].count(True) == 1
    right = next(reply for reply in replies if reply.done)
    assert (right.messages[0]["content"], right.reward) == ("yes", 1.0)
    assert [reply.info["asked"] for reply in replies] == ["1", "2", "3"]
    session.close()
    session.close()


def test_sessions_share_nothing_but_a_seed(host: EnvironmentHost) -> None:
    def answers(seed: int) -> list[str]:
        session = host.session()
        session.reset(ROW, seed).result(20)
        return [session.step(said(str(number))).result(20).messages[0]["content"] for number in (1, 2, 3)]

    assert answers(1) == answers(1)
    assert len({tuple(answers(seed)) for seed in range(8)}) > 1


@pytest.mark.parametrize(
    ("text", "failure", "detail"),
    [
        ("raise", Failure.CRASH, r"step raised ValueError: not a guess \(guess.py:28\)"),
        ("exit", Failure.CRASH, r"step raised SystemExit: 3"),
        ("object", Failure.PROTOCOL, "step returned what cannot be sent: object is no JSON"),
        ("nothing", Failure.PROTOCOL, r"not \(messages, reward, done\)"),
        ("two", Failure.PROTOCOL, r"not \(messages, reward, done\)"),
        ("text", Failure.PROTOCOL, "messages that are not a list: no"),
        ("nan", Failure.PROTOCOL, "a reward that is no finite number: nan"),
        ("word", Failure.PROTOCOL, "a reward that is no finite number: good"),
        ("true", Failure.PROTOCOL, "a reward that is no finite number: True"),
        ("maybe", Failure.PROTOCOL, "a value for done that is neither True nor False: 1"),
        ("role", Failure.PROTOCOL, "a message whose role is none of user, tool, system"),
        ("number", Failure.PROTOCOL, "a message without a role and a text"),
        ("silent", Failure.PROTOCOL, "no messages, and is not done"),
        ("info", Failure.PROTOCOL, "an info that is no mapping"),
        ("count", Failure.PROTOCOL, "an info whose failed_calls is no whole number"),
        ("endless", Failure.PROTOCOL, "a reward that is no finite number: 1000"),
    ],
)
def test_a_failure_has_its_kind_and_the_process_goes_on(
    host: EnvironmentHost, text: str, failure: Failure, detail: str
) -> None:
    session = host.session()
    session.reset(ROW, 0).result(20)
    with pytest.raises(EnvironmentFailed, match=detail) as failed:
        session.step(said(text)).result(20)
    assert failed.value.failure is failure
    assert not session.step(said("0")).result(20).done


def test_one_that_hangs_ends_its_process_and_others_start_anew(file: Path) -> None:
    with EnvironmentHost(EnvironmentSpec(f"{file}:Guess", deadline_s=3)) as host:
        hanging, other = host.session(), host.session()
        for session in (hanging, other):
            session.reset(ROW, 0).result(20)
        with pytest.raises(EnvironmentFailed, match=r"timeout: step did not end within 3 s"):
            hanging.step(said("hang")).result(20)
        with pytest.raises(EnvironmentFailed, match="died: another session's step did not end"):
            other.step(said("1")).result(20)
        assert host.session().reset(ROW, 0).result(20).messages


@pytest.mark.parametrize(("text", "ending"), [("die", "exit status 7"), ("", "signal 9")])
def test_a_process_that_dies_is_replaced(file: Path, text: str, ending: str) -> None:
    with EnvironmentHost(EnvironmentSpec(f"{file}:Guess")) as host:
        session = host.session()
        session.reset(ROW, 0).result(20)
        if not text:
            os.kill(host.pids[0], signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match=f"died: its process ended with {ending}"):
            session.step(said(text or "hang")).result(20)
        assert host.session().reset(ROW, 0).result(20).messages
    with pytest.raises(EnvironmentFailed, match="died"):
        session.step(said("1")).result(20)


def causes(*futures: Any) -> list[Cause]:
    raised = [future.exception(60) for future in futures]
    assert all(isinstance(error, EnvironmentFailed) and error.failure is Failure.DIED for error in raised)
    return [error.cause for error in raised]


def test_the_cause_of_a_process_that_dies_is_the_call_that_it_works_at(file: Path) -> None:
    with EnvironmentHost(EnvironmentSpec(f"{file}:Guess")) as host:
        first, second, idle = (host.session() for _ in range(3))
        for session in (first, second, idle):
            session.reset(ROW, 0).result(20)
        assert causes(first.step(said("die"))) == [Cause.OWN]
        assert causes(idle.step(said("1"))) == [Cause.ANOTHER]
        first, second = host.session(), host.session()
        for session in (first, second):
            session.reset(ROW, 0).result(20)
        assert causes(first.step(said("wait and die")), second.step(said("hang"))) == [Cause.UNKNOWN] * 2


def test_sessions_that_are_alone_are_worked_at_one_by_one(file: Path) -> None:
    with EnvironmentHost(EnvironmentSpec(f"{file}:Guess", deadline_s=20)) as host:
        dies, waits, other = host.session(alone=True), host.session(alone=True), host.session()
        for session in (dies, waits, other):
            session.reset(ROW, 0).result(20)
        assert causes(dies.step(said("wait and die")), waits.step(said("nap"))) == [Cause.OWN, Cause.ANOTHER]
        reopened = [host.session(alone=True) for _ in range(3)]
        for session in reopened:
            session.reset(ROW, 0).result(20)
        assert [session.step(said("nap")).result(20).done for session in reopened] == [True] * 3
        assert other.step(said("0")).result(20).messages[0]["content"] == "no"  # in another process


def test_ten_megabytes_of_text_are_a_failure_of_their_kind(host: EnvironmentHost) -> None:
    session = host.session()
    session.reset(ROW, 0).result(20)
    with pytest.raises(EnvironmentFailed, match=r"^too_large: step returned 10\.0 MB of text, more than 4\.2$"):
        session.step(said("large")).result(20)
    with pytest.raises(EnvironmentFailed, match="protocol: step returned what cannot be shown"):  # not for its size
        session.step(said("large image")).result(20)
    assert not session.step(said("0")).result(20).done


@pytest.mark.long
def test_what_it_prints_is_shown_in_plain_text_and_not_without_end(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcli.environments.environment_host.PRINTED_BYTES", 1000)
    loud = tmp_path / "loud.py"  # what another test's environment prints late has another name
    loud.write_text(file.read_text())
    with EnvironmentHost(EnvironmentSpec(f"{loud}:Guess")) as host:
        session = host.session()
        session.reset(ROW, 0).result(20)
        for _ in range(3000):  # more than a pipe holds: it is not held up by what is left out
            session.step(said("print")).result(20)
    name = f"[{loud}:Guess] "
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith((name, "…"))]
    assert lines[:2] == [f"{name}noise on standard output", f"{name}and on its descriptor"]
    assert set(lines[2:-2]) == {rf"{name}guessing \x1b[31m in red, for a while"}
    assert 20 < len(lines) < 40
    assert lines[-1] == "… what it prints from here on is left out"


def test_its_memory_has_a_limit(file: Path) -> None:
    with EnvironmentHost(EnvironmentSpec(f"{file}:Guess", memory_bytes=1 << 30)) as host:
        session = host.session()
        session.reset(ROW, 0).result(20)
        with pytest.raises(EnvironmentFailed, match="crash: step raised MemoryError"):
            session.step(said("eat")).result(20)


def test_async_sessions_wait_at_once(file: Path) -> None:
    """Each returns once all of them have been called."""
    with EnvironmentHost(EnvironmentSpec(f"{file}:Slow")) as host:
        sessions = [host.session() for _ in range(500)]
        for future in [session.reset(ROW, 0) for session in sessions]:
            future.result(60)
        replies = [session.step(said("500")) for session in sessions]
        assert [reply.result(60).messages[0]["content"] for reply in replies] == ["later"] * 500


def test_functions_are_tools(tmp_path: Path) -> None:
    tools = tmp_path / "tools.py"  # a name that a module of rlcli has, too
    tools.write_text(
        "def double(number: int) -> int:\n    'Doubles a number.'\n    return 2 * number\n\n"
        "def undescribed(): pass\n\nBOTH = [double]\n"
    )
    for name in ("double", "BOTH"):
        with EnvironmentHost(EnvironmentSpec(f"{tools}:{name}")) as host:
            session = host.session()
            opening = session.reset({"messages": [{"role": "user", "content": "2 * 4?"}]}, 0).result(20)
            assert opening.tools[0]["function"]["name"] == "double"
            call = {"id": "call00001", "type": "function", "function": {"name": "double", "arguments": {"number": 4}}}
            reply = session.step({**said(""), "tool_calls": [call]}).result(20)
            assert [message["content"] for message in reply.messages] == ["8"]
    with pytest.raises(SetupError, match="NoSchema: the tool undescribed has no docstring"):
        EnvironmentHost(EnvironmentSpec(f"{tools}:undescribed"))


def test_an_environment_is_described_where_it_runs(file: Path) -> None:
    documented = file.with_name("documented.py")
    documented.write_text(
        "class Guess:\n    'Guess it.'\n    def __init__(self, high: int = 10, *, word: str, **more): pass\n"
        "    def reset(self, row, seed): pass\n    def step(self, message): pass\n\n"
        "def double(number: int) -> int:\n    'Doubles a number.'\n    return 2 * number\n\nBOTH = [double, double]\n"
    )

    def description(name: str) -> Any:
        with EnvironmentHost(EnvironmentSpec(name)) as host:
            return host.describe()

    assert description(f"{documented}:Guess") == {
        "doc": "Guess it.",
        "options": [
            {"name": "high", "type": "int", "required": False, "default": "10"},
            {"name": "word", "type": "str", "required": True, "default": ""},
        ],
    }
    assert description(f"{documented}:double") == {"doc": "Doubles a number.", "options": []}
    assert description(f"{documented}:BOTH")["doc"] == "double: Doubles a number.\n\ndouble: Doubles a number."


def test_a_process_that_writes_no_json_object_is_ended(tmp_path: Path) -> None:
    writer = tmp_path / "writer.py"
    writer.write_text(
        "import contextlib, os, time\n"
        "for descriptor in range(3, 20):\n"
        "    with contextlib.suppress(OSError):\n"
        "        os.write(descriptor, b'[]\\n')\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(SetupError, match="does not load: its process ended with signal 9"):
        EnvironmentHost(EnvironmentSpec(f"{writer}:Any"))


def test_what_does_not_load_is_one_line(file: Path) -> None:
    broken = file.with_name("broken.py")
    broken.write_text("import nothing_of_this_name\n")
    for name, python, message in (
        (f"{broken}:Guess", "", r"does not load: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        (f"{file}:Gues", "", r"does not load: AttributeError: .*guess.py has no Gues"),
        (f"{file}:NONE", "", "TypeError: .*NONE is an empty list, and needs a function to be a tool"),
        (f"{file}:WRONG", "", "TypeError: .*WRONG is no environment: it has no reset and step"),
        (f"{file}:Guess", "/no/such/python", r"cannot be started with /no/such/python: No such file"),
        (f"{file}:Guess", sys.executable, ""),
    ):
        spec = EnvironmentSpec(name, python=python)
        if message:
            with pytest.raises(SetupError, match=message):
                EnvironmentHost(spec)
        else:
            EnvironmentHost(spec).close()
    with pytest.raises(UnknownName, match="no environment is called 'gues'"):
        EnvironmentHost(EnvironmentSpec("gues"))


def test_calls_that_wait_for_a_thread_are_not_late(file: Path) -> None:
    """One process runs 64 calls of plain methods at once."""
    with EnvironmentHost(EnvironmentSpec(f"{file}:Guess", deadline_s=1.0)) as host:
        sessions = [host.session() for _ in range(200)]
        for session in sessions:
            session.reset(ROW, 1).result(60)
        naps = [session.step({"content": "nap"}) for session in sessions]
        assert {nap.result(60).done for nap in naps} == {True}


def test_what_an_environment_has_started_ends_with_it(file: Path) -> None:
    with EnvironmentHost(EnvironmentSpec(f"{file}:Guess")) as host:
        session = host.session()
        session.reset(ROW, 1).result(60)
        child = int(session.step({"content": "leave a child"}).result(60).messages[0]["content"])
        assert psutil.pid_exists(child)
    _, alive = psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=20)
    assert [process.status() for process in alive] in ([], [psutil.STATUS_ZOMBIE])


SHOWS = """
import os

class Shows:
    def reset(self, row, seed):
        return [{"role": "user", "content": "\\n".join(sorted(os.environ))}]

    def step(self, message):
        return [], 0.0, True
"""


def test_an_environment_inherits_all_but_secrets_that_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    secrets = {"AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "MY_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "SSH_AUTH_SOCK"}
    for name in (*secrets, "MY_DATA"):
        monkeypatch.setenv(name, "a value")

    def variables(*names: str) -> set[str]:
        with EnvironmentHost(EnvironmentSpec(f"{tmp_path}/shows.py:Shows", variables=names)) as host:
            (message,) = host.session().reset({}, 0).result(20).messages
        return set(str(message["content"]).splitlines())

    assert variables() & {*secrets, "MY_DATA"} == {"MY_DATA"}
    assert variables("MY_API_KEY") & secrets == {"MY_API_KEY"}
    monkeypatch.delenv("MY_DATA")
    with pytest.raises(SetupError, match=r"environment\.variables names MY_DATA, which is not set"):
        variables("MY_DATA")


def test_an_environment_that_lacks_a_variable_says_how_to_pass_it_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs.py").write_text('import os\nos.environ["MY_API_KEY"]\n')
    monkeypatch.setenv("MY_API_KEY", "mine")
    with pytest.raises(SetupError) as refused:
        EnvironmentHost(EnvironmentSpec(f"{tmp_path}/needs.py:Needs"))
    assert "MY_API_KEY is not passed on: name it in environment.variables" in str(refused.value)
