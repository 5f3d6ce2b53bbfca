"""Adapters of other projects' environments, without their packages."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcli.environments.environment import ENVIRONMENTS, EnvironmentFailed, Opening, Reply
from rlcli.environments.environment_host import EnvironmentHost, EnvironmentSpec
from tests.vision_fixtures import encoded

FOREIGN = '''
import random

class Dice:
    """Rolls with the global generator, as games do."""

    def __init__(self, sides=10**9):
        self.sides = sides

    def reset(self, seed=None):
        return f"Guess one of {random.randint(1, self.sides)}.", {}

    def step(self, text):
        return f"{text}, {random.randint(1, self.sides)}", 0.5, False, text == "stop", {"suffix": "Again."}

class Add:
    """TRL's form."""

    def __init__(self, start=0):
        self.start = start

    def reset(self, question, ground_truth):
        self.total, self.wanted = self.start, float(ground_truth)
        return f" {question}"

    async def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        self.total += a + b
        return self.total

    def _hidden(self):
        pass

    def get_reward(self):
        return 1.0 if self.total == self.wanted else 0.25

def nothing() -> None:
    """Does nothing."""

MORE = [nothing]
'''
IMAGE_ENVIRONMENT = '''
class Look:
    def reset(self):
        return [{"type": "image", "image": IMAGE}, {"type": "text", "text": "Where?"}]

    def look(self, at: int) -> list:
        """Looks.

        Args:
            at: where
        """
        return [{"type": "image", "image": IMAGE}, {"type": "text", "text": f"at {at}"}]
'''
ROW = {
    "messages": [{"role": "user", "content": "Please."}],
    "ground_truth": "5",
    "extra_info": {"question": "2+3?"},
}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "foreign_games.py"
    path.write_text(FOREIGN)
    return path


def said(text: str, *calls: tuple[str, Any]) -> dict[str, Any]:
    tool_calls = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls, 1)
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if tool_calls else {})


def play(host: EnvironmentHost, row: Any, seed: int, *turns: Any) -> tuple[Opening, list[Reply]]:
    session = host.session()
    opening = session.reset(row, seed).result(60)
    replies = [session.step(turn).result(60) for turn in turns]
    session.close()
    return opening, replies


def test_a_gymnasium_game_has_a_random_state_of_its_own(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(foreign.parent))
    system = {"role": "system", "content": "Play."}
    with EnvironmentHost(EnvironmentSpec("gymnasium", {"make": "foreign_games:Dice"})) as host:
        first, second, other = host.session(), host.session(), host.session()
        openings = [
            s.reset({"messages": [system]}, seed).result(60) for s, seed in ((first, 1), (second, 1), (other, 2))
        ]
        assert openings[0].messages[0] == system
        assert openings[0] == openings[1] != openings[2]
        replies = {s: [] for s in (first, second)}  # type: ignore[var-annotated]
        for session in (first, first, other, second, second):
            reply = session.step(said("stop" if len(replies.get(session, ())) else "go")).result(60)
            replies.get(session, []).append(reply)
    assert replies[first] == replies[second]
    assert [reply.done for reply in replies[first]] == [False, True]
    assert replies[first][0].messages[0]["content"].startswith("go, ")
    assert replies[first][0].messages[0]["content"].endswith("\nAgain.")
    assert replies[first][0].reward == 0.5


def test_an_environment_of_trl_has_its_methods_as_tools(foreign: Path) -> None:
    options = {"factory": f"{foreign}:Add", "tools": f"{foreign}:MORE", "start": 1}
    with EnvironmentHost(EnvironmentSpec("trl", options)) as host:
        opening, replies = play(
            host, ROW, 0, said("", ("add", {"a": 2, "b": 2}), ("nothing", {})), said("", ("_hidden", {})), said("5")
        )
    assert opening.messages == [{"role": "user", "content": "Please. 2+3?"}]
    assert [tool["function"]["name"] for tool in opening.tools] == ["nothing", "add"]
    assert opening.tools[1]["function"]["parameters"]["required"] == ["a", "b"]
    assert [[message["content"] for message in reply.messages] for reply in replies] == [
        ["5", "null"],
        ["error: there is no tool _hidden, only nothing, add"],
        [],
    ]
    assert [(reply.reward, reply.done) for reply in replies] == [(1.0, False), (0.0, False), (0.0, True)]


def test_an_environment_of_trl_shows_images(foreign: Path, tmp_path: Path) -> None:
    """Its `reset` and its tools return parts of a content, as TRL takes them."""
    module = tmp_path / "module.py"
    module.write_text(IMAGE_ENVIRONMENT.replace("IMAGE", repr(encoded(1))))
    with EnvironmentHost(EnvironmentSpec("trl", {"factory": f"{module}:Look"})) as host:
        opening, replies = play(host, ROW, 0, said("", ("look", {"at": 2})))
    assert opening.messages[0]["content"] == "Please.<image>Where?"
    assert [image["width"] for image in opening.messages[0]["images"]] == [84]
    assert opening.images == replies[0].images == (encoded(1),)
    assert replies[0].messages[0]["content"] == "<image>at 2"


def test_the_images_of_verls_tools_are_parts() -> None:
    content = runpy.run_path(EnvironmentSpec("verl_tools", python=sys.executable).target.rpartition(":")[0])["_content"]
    response = SimpleNamespace(text="two", image=["a", "b"], video=None)  # as its `ToolResponse`
    assert [part.get("image") or part["text"] for part in content(response)] == ["a", "b", "two"]
    assert content(SimpleNamespace(text="two", image=None)) == content("two") == "two"


def test_the_rewards_of_trl_add_up_to_the_last_one(foreign: Path) -> None:
    with EnvironmentHost(EnvironmentSpec("trl", {"factory": f"{foreign}:Add"})) as host:
        turns = [said("", ("add", {"a": a, "b": 0})) for a in (1, 4, 1)]
        _, replies = play(host, ROW, 0, *turns)
    assert [reply.reward for reply in replies] == [0.25, 0.75, -0.75]


def test_reasoning_gym_gives_feedback_until_it_is_right() -> None:
    entry = '{"question": "2+3?", "answer": "5", "metadata": {}}'
    row = {"messages": [{"role": "user", "content": "2+3?"}], "extra_info": {"task": "chain_sum", "entry": entry}}
    with EnvironmentHost(EnvironmentSpec("reasoning_gym", {"attempts": 4})) as host:
        opening, replies = play(host, row, 0, said("5"), said("<answer>4</answer>"), said("<answer>5</answer>"))
        assert opening.messages == row["messages"]
        assert [reply.messages[0]["content"] for reply in replies] == [
            "There is no answer inside <answer> and </answer>. Attempts left: 3.",
            "That is not right. Attempts left: 2.",
            "That is right.",
        ]
        assert [(reply.reward, reply.done) for reply in replies] == [(0.0, False), (0.0, False), (1.0, True)]
        with pytest.raises(EnvironmentFailed, match=r"reasoning_gym's countdown runs parse_expr\(\) .*: refused"):
            play(host, {"extra_info": {"task": "countdown"}}, 0)


@pytest.mark.long
def test_reasoning_gym_evaluates_neither_the_rows_entry_nor_a_turn(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = f"[open({str(marker)!r}, 'w')]"
    sorting = {"answer": code, "metadata": {"direction": "ascending"}}
    bits = {"answer": "0x3", "metadata": {"problem": f"{code} and 3"}}
    shifts = {"answer": "0x8", "metadata": {"problem": "(0x1 + 0x1) << 0x2"}}
    rows = [
        {"messages": [{"role": "user", "content": "?"}], "extra_info": {"task": task, "entry": entry}}
        for task, entry in (("number_sorting", sorting), ("bitwise_arithmetic", bits), ("bitwise_arithmetic", shifts))
    ]
    with EnvironmentHost(EnvironmentSpec("reasoning_gym", {"attempts": 2})) as host:
        for row, answer, score in zip(rows, ("[1]", "0x3", "0x8"), (0.0, 0.0, 1.0), strict=True):
            _, replies = play(host, row, 0, said(f"<answer>{answer}</answer>"))
            assert [reply.reward for reply in replies] == [score]
        _, replies = play(host, {"extra_info": {"task": "n_queens"}}, 0, said(f"<answer>{code}</answer>"))
        assert [reply.reward for reply in replies] == [0.0]
    assert not marker.exists()


@pytest.mark.long
def test_a_turn_of_gems_tasks_of_reasoning_gym_is_not_evaluated(tmp_path: Path) -> None:
    package, marker = tmp_path / "gem", tmp_path / "ran"
    package.mkdir()
    (package / "envs.py").write_text("")
    (package / "__init__.py").write_text(
        """
class Game:
    def reset(self, seed=None):
        return "6 * 7?", {}
    def step(self, text):
        try:
            return "", float(eval(text) == 42), True, False, {}
        except BaseException:
            return "", 0.0, True, False, {}
def make(env_id):
    return Game()
"""
    )
    code = f"open({str(marker)!r}, 'w')"
    module_file = tmp_path / "mine.py"
    module_file.write_text("from rlcli_port.environments.text_games import Gem\n")
    refused = pytest.raises(EnvironmentFailed, match="the scorer of rg:sums evaluates a text as Python: refused")
    with EnvironmentHost(EnvironmentSpec(f"{module_file}:Gem", {"env_id": "rg:sums"})) as host, refused:
        play(host, ROW, 0, said(code))
    assert not marker.exists()


@pytest.mark.long
@pytest.mark.parametrize("name", ["gem", "openenv", "reasoning_gym", "skyrl_gym", "trl", "verl_tools"])
def test_an_adapter_is_a_file_for_an_interpreter_without_rlcli(name: str) -> None:
    target_file, _, attribute = EnvironmentSpec(name, python=sys.executable).target.rpartition(":")
    program = (
        f"import runpy, sys; assert {attribute!r} in runpy.run_path({target_file!r}) and 'rlcli' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True).stderr == ""
    assert EnvironmentSpec(name).target == ENVIRONMENTS.target(name)


def test_a_package_that_is_missing_is_one_line() -> None:
    missing = "crash: reset raised ModuleNotFoundError: No module named 'textarena'"
    spec = EnvironmentSpec("textarena", {"env_id": "GuessTheNumber-v0"})
    with EnvironmentHost(spec) as host, pytest.raises(EnvironmentFailed, match=missing):
        play(host, ROW, 0)
