"""Adapters of TextArena, SkyRL, verl and OpenEnv, on stand-ins of their packages with the interfaces that they use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlcli.environments.environment_host import EnvironmentHost, EnvironmentSpec

PACKAGES = {
    "textarena.py": """
import enum, random

Kind = enum.Enum("Kind", "GAME_MESSAGE PLAYER_ACTION")

class Game:
    def reset(self, num_players, seed):
        self.number, self.events = random.randint(1, 9), [(-1, f"Guess, {num_players}.", Kind.GAME_MESSAGE)]

    def get_observation(self):
        return 0, self.events

    def step(self, text):
        self.events = [(0, text, Kind.PLAYER_ACTION), (-1, "No.", Kind.GAME_MESSAGE)]
        return text == f"[{self.number}]", {}

    def close(self):
        return {0: 1.0}, {0: {"reason": "Won."}}

def make(env_id):
    return {"Guess-v0-raw": Game}[env_id]()
""",
    "skyrl_gym.py": """
class Sum:
    def __init__(self, env_id, env_config, extras):
        assert (env_id, env_config) == ("sum", {"turns": 2})
        self.wanted = extras["reward_spec"]["ground_truth"] + extras["unit"]

    def init(self, messages):
        return messages, {}

    def step(self, text):
        right = text == self.wanted
        observations = [] if right else [{"role": "user", "content": "No."}]
        return {"observations": observations, "reward": float(right), "done": right}

    def get_metrics(self):
        return {}

    def close(self):
        pass

make = Sum
""",
    "verl/tools/tool_registry.py": """
from types import SimpleNamespace

class Add:
    name = "add"

    def get_openai_tool_schema(self):
        schema = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
        return SimpleNamespace(model_dump=lambda **options: schema)

    async def create(self, session, create_kwargs):
        self.total, self.wanted = 0, float(create_kwargs["ground_truth"])

    async def execute(self, session, arguments):
        self.total += arguments["a"] + arguments["b"]
        return SimpleNamespace(text=str(self.total)), 0.25, {}

    async def calc_reward(self, session):
        return float(self.total == self.wanted)

    async def release(self, session):
        pass

def initialize_tools_from_config(config):
    return [Add()]
""",
    "interactions.py": """
class Ask:
    def __init__(self, config):
        self.text = config["text"]

    async def start_interaction(self, session, **given):
        pass

    async def generate_response(self, session, messages, ground_truth):
        right = messages[-1]["content"] == ground_truth
        return right, self.text, float(right), {}

    async def finalize_interaction(self, session):
        pass
""",
    "openenv/core.py": """
from types import SimpleNamespace

TOOL = {"name": "add", "description": "", "input_schema": {"type": "object"}}

def result(observation, reward=None, done=False):
    return SimpleNamespace(observation=observation, reward=reward, done=done)

class GenericEnvClient:
    def __init__(self, base_url):
        pass

    async def connect(self):
        pass

    async def reset(self, seed, number=3):
        self.number = number
        return result({"text": "Guess."})

    async def step(self, action):
        if action.get("type") == "list_tools":
            return result({"tools": [TOOL]})
        if action.get("type") == "call_tool":
            return result({"result": {"data": sum(action["arguments"].values())}})
        right = action["message"] == str(self.number)
        return result({"text": "yes" if right else "no"}, float(right), right)

    async def close(self):
        pass
""",
}
ROW = {"messages": [{"role": "user", "content": "2+3?"}], "ground_truth": "5", "extra_info": {}}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in PACKAGES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def played(name: str, options: dict[str, Any], *turns: str | dict[str, int], seed: int = 7) -> list[Any]:
    """The first messages, and of each turn the environment's messages, reward and whether it is the last. turns: texts,
    and arguments of a call of the tool `add`."""
    with EnvironmentHost(EnvironmentSpec(name, options)) as host:
        session = host.session()
        history: list[Any] = [[message["content"] for message in session.reset(ROW, seed).result(60).messages]]
        for turn in turns:
            call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": turn}}
            message = {"content": turn} if isinstance(turn, str) else {"content": "", "tool_calls": [call]}
            reply = session.step({"role": "assistant", **message}).result(60)
            history.append(([message["content"] for message in reply.messages], reply.reward, reply.done))
        session.close()
    return history


def test_textarena_rewards_the_end(packages: None) -> None:
    guesses = [f"[{number}]" for number in range(1, 10)]
    first, *rest = played("textarena", {"env_id": "Guess-v0"}, *guesses)
    assert first == ["Guess, 1."]
    last = next(number for number, (_, _, done) in enumerate(rest) if done)
    assert rest[: last + 1] == [*[(["No."], 0.0, False)] * last, (["Won."], 1.0, True)]
    assert played("textarena", {"env_id": "Guess-v0"}, *guesses) == [first, *rest]


def test_skyrl_rewards_each_step(packages: None) -> None:
    options = {"env_id": "sum", "config": {"turns": 2}, "extras": {"unit": "!"}}
    assert played("skyrl_gym", options, "4", "5!") == [["2+3?"], (["No."], 0.0, False), ([], 1.0, True)]


def test_verls_tools_reward_each_call_and_the_change_of_the_whole(packages: None) -> None:
    history = played("verl_tools", {"config": "tools.yaml"}, {"a": 2, "b": 3}, {"a": 1, "b": 0}, "6")
    assert history == [["2+3?"], (["5"], 1.25, False), (["6"], -0.75, False), ([], 0.0, True)]


def test_an_interaction_of_verl_scores_each_turn(packages: None) -> None:
    options = {"interaction": "interactions:Ask", "config": {"text": "Sure?"}}
    assert played("verl_interaction", options, "4", "5") == [
        ["2+3?"],
        (["Sure?"], 0.0, False),
        (["Sure?"], 1.0, True),
    ]


def test_a_server_of_openenv_shows_a_field_of_its_observations(packages: None) -> None:
    options = {"base_url": "http://127.0.0.1:1", "observation": "text", "reset": {"number": 4}}
    assert played("openenv", options, "3", "4") == [["Guess."], (["no"], 0.0, False), (["yes"], 1.0, True)]


def test_tools_of_an_openenv_server_are_the_policys(packages: None) -> None:
    options = {"base_url": "http://127.0.0.1:1", "tools": True}
    assert played("openenv", options, {"a": 2, "b": 3}, "5") == [["2+3?"], (["5"], 0.0, False), ([], 0.0, True)]
