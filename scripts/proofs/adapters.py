"""Checks that the adapters of other projects' environments play conversations of the real packages.

    python scripts/proofs/adapters.py [--only gem …] [--cache FOLDER] [--json FILE]

Makes an environment with uv for each package under the cache folder, once, and plays three conversations of each case
through `EnvironmentHost` with that interpreter: two with the same seed, which must be equal, and one with another. TRL
and verl see the packages of this interpreter (torch, transformers), and are installed without their dependencies. Exit
code 1 if a case does not end as it should.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlcli.environments.environment_host import EnvironmentHost, EnvironmentSpec

ADD = {"a": 2, "b": 3}
SUM = [{"role": "user", "content": "What is 2+3?"}]

FILES = {
    "trl_add.py": '''
from trl.trainer.grpo_trainer import EnvironmentFactory

class Add:
    def __init__(self, start: int = 0):
        self.start = start

    def reset(self, **row):
        self.total = self.start
        return " Use the tools."

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        self.total += a + b
        return self.total

    def get_reward(self) -> float:
        return float(self.total == 5)

FACTORY: EnvironmentFactory = Add
''',
    "verl_add.py": """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class Add(BaseTool):
    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        self.totals = {instance_id: 0} | getattr(self, "totals", {})
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.totals[instance_id] += parameters["a"] + parameters["b"]
        return ToolResponse(text=str(self.totals[instance_id])), 0.0, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.totals[instance_id] == 5)
""",
    "openenv_server.py": """
import random, sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    message: str

class Hint(Observation):
    text: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **options):
        self.number = random.Random(seed).randint(1, 9)
        return Hint(text="Guess my number, from 1 to 9.")

    def step(self, action, **options):
        right = action.message == str(self.number)
        return Hint(text="yes" if right else "no", done=right, reward=float(right))

class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            "Adds two numbers."
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **options):
        return Observation()

    def _step_impl(self, action, **options):
        raise ValueError("only tools")

app = create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=8) if sys.argv[2] == "tools" \\
    else create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
""",
}
SCHEMA = """
    tool_schema:
      type: function
      function:
        name: {name}
        description: {description}
        parameters: {{type: object, properties: {properties}, required: {required}}}
"""
FILES["verl_add.yaml"] = "tools:\n  - class_name: verl_add.Add\n    config: {type: native}" + SCHEMA.format(
    name="add",
    description="Adds two numbers.",
    properties="{a: {type: integer, description: first}, b: {type: integer, description: second}}",
    required="[a, b]",
)
FILES["verl_gsm8k.yaml"] = (
    "tools:\n  - class_name: verl.tools.gsm8k_tool.Gsm8kTool\n    config: {type: native}"
    + SCHEMA.format(
        name="calc_gsm8k_reward",
        description="Checks an answer.",
        properties="{answer: {type: string, description: the answer}}",
        required="[answer]",
    )
)


def said(text: str, *calls: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A turn of the policy."""
    tool_calls = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        for number, (name, arguments) in enumerate(calls, 1)
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if calls else {})


@dataclass(frozen=True)
class Case:
    """A conversation with an environment of another project."""

    adapter: str
    """Name of the adapter."""
    environment: str
    """Key of ENVIRONMENTS; empty: this interpreter."""
    options: Mapping[str, Any]
    """Options of the adapter."""
    turns: Sequence[Mapping[str, Any]]
    """Assistant messages of the policy, in order."""
    reward: float = 1.0
    """Expected sum of rewards of a full conversation, with any seed."""
    seeded: bool = True
    """The task depends on the seed."""
    row: Mapping[str, Any] = field(default_factory=lambda: {"messages": SUM, "ground_truth": "5", "extra_info": {}})
    """Data row that starts the conversation."""
    server: str = ""
    """Kind of OpenEnv server to start; empty: none."""


ENVIRONMENTS: dict[str, Sequence[str]] = {
    "gem": ["gem-llm==0.1.0"],
    "textarena": ["textarena==0.7.4"],
    "skyrl-gym": ["skyrl-gym==0.4.0"],
    "openenv": ["openenv==0.10.0"],
    "trl": ["--no-deps", "trl==1.16.0"],
    "verl-0.9": [
        *("--no-deps", "verl==0.9.1", "tensordict", "codetiming", "hydra-core", "omegaconf", "pyvers", "orjson"),
        "antlr4-python3-runtime==4.9.3",
    ],
    "verl-0.7": [
        *("--no-deps", "verl==0.7.1", "tensordict", "codetiming", "hydra-core", "omegaconf", "pyvers", "orjson"),
        "antlr4-python3-runtime==4.9.3",
    ],
}
CASES: dict[str, Case] = {
    "GEM, GuessTheNumber": Case(
        "gem",
        "gem",
        {"env_id": "game:GuessTheNumber-v0-hard", "max_turns": 99},
        [said(f"\\boxed{{{number}}}") for number in range(1, 51)],
    ),
    "GEM, reasoning-gym": Case("gem", "gem", {"env_id": "rg:chain_sum"}, [said("\\boxed{no}")], 0.0),
    "TextArena, GuessTheNumber": Case(
        "textarena",
        "textarena",
        {"env_id": "GuessTheNumber-v0", "max_turns": 99},
        [said(f"[{n}]") for n in range(1, 21)],
    ),
    "TextArena, 2048": Case("textarena", "textarena", {"env_id": "2048-v0"}, [said("[up]"), said("x"), said("y")], 0.0),
    "SkyRL, gsm8k_multi_turn": Case(
        "skyrl_gym", "skyrl-gym", {"env_id": "gsm8k_multi_turn"}, [said("#### 4"), said("#### 5")], 1.04, False
    ),
    "TRL, environment_factory": Case(
        "trl", "trl", {"factory": "trl_add.py:Add"}, [said("", ("add", ADD)), said("5")], 1.0, False
    ),
    "verl 0.9, BaseTool": Case(
        "verl_tools", "verl-0.9", {"config": "verl_add.yaml"}, [said("", ("add", ADD)), said("5")], 1.0, False
    ),
    "verl 0.7, Gsm8kTool": Case(
        "verl_tools",
        "verl-0.7",
        {"config": "verl_gsm8k.yaml"},
        [said("", ("calc_gsm8k_reward", {"answer": number})) for number in ("4", "5")] + [said("5")],
        0.95,
        False,
    ),
    "verl 0.7, Gsm8kInteraction": Case(
        "verl_interaction",
        "verl-0.7",
        {"interaction": "verl.interactions.gsm8k_interaction:Gsm8kInteraction", "config": {"name": "gsm8k"}},
        [said("#### 4"), said("#### 5")],
        1.0,
        False,
    ),
    "OpenEnv, text": Case(
        "openenv", "openenv", {"observation": "text"}, [said(str(n)) for n in range(1, 10)], server="game", seeded=False
    ),
    "OpenEnv, MCP tools": Case(
        "openenv", "openenv", {"tools": True}, [said("", ("add", ADD)), said("5")], 0.0, False, server="tools"
    ),
    "reasoning_gym": Case("reasoning_gym", "", {"task": "chain_sum"}, [said("<answer>no</answer>")] * 3, 0.0),
}


@dataclass(frozen=True)
class Played:
    """Result of a case."""

    case: str
    """Name of the case."""
    package: str
    """Requirement of the package that was tested."""
    turns: int
    """Number of turns."""
    reward: float
    """Sum of rewards."""
    seconds: float
    """Duration of a conversation, with a third of the import time."""
    example: str
    """End of the environment's last message."""
    wrong: str
    """Deviations from the expected result; empty: none."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="beginnings of the cases' names")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "rlcli-adapters")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    selected = [name for name in CASES if not options.only or name.startswith(tuple(options.only))]
    games = [played(name, CASES[name], options.cache) for name in selected]
    table = Table("case", "package", "turns", "reward", "s with import", "the environment's last message", "", box=None)
    for game in games:
        numbers = (str(game.turns), f"{game.reward:.2f}", f"{game.seconds:.2f}")
        table.add_row(game.case, game.package, *numbers, game.example, game.wrong or "as it should")
    Console(width=180).print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(game) for game in games], indent=1) + "\n")
    return int(any(game.wrong for game in games))


def played(name: str, case: Case, cache: Path) -> Played:
    folder = cache / "files"
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in FILES.items():
        (folder / file).write_text(text)
    options = {
        key: str(folder / value) if str(value).startswith(tuple(FILES)) else value
        for key, value in case.options.items()
    }
    python = interpreter(case.environment, cache) if case.environment else ""
    package = next(
        (requirement for requirement in ENVIRONMENTS.get(case.environment, ()) if "==" in requirement),
        "reasoning-gym, here",
    )
    with server(python, folder, case.server) as url:
        options |= {"base_url": url} if url else {}
        with EnvironmentHost(EnvironmentSpec(case.adapter, options, python)) as host:
            start = time.perf_counter()
            conversations = [conversation(host, case, seed) for seed in (7, 7, 8)]
            seconds = (time.perf_counter() - start) / len(conversations)
    texts, reward, turns = conversations[0]
    wrong = [] if abs(reward - case.reward) < 0.01 else [f"the reward should be {case.reward}"]
    wrong += [] if conversations[1] == conversations[0] else ["the same seed gives another conversation"]
    wrong += ["another seed gives the same"] if case.seeded and conversations[2][0] == texts else []
    return Played(name, package, turns, reward, seconds, texts[-1].replace("\n", " ")[-60:], ", ".join(wrong))


def conversation(host: EnvironmentHost, case: Case, seed: int) -> tuple[list[str], float, int]:
    """Messages of the environment, the sum of its rewards, and the number of turns."""
    session = host.session()
    texts = [str(message["content"]) for message in session.reset(case.row, seed).result(60).messages]
    reward, turns, done = 0.0, 0, False
    for turn in case.turns:
        reply = session.step(turn).result(60)
        texts += [str(message["content"]) for message in reply.messages]
        reward, turns, done = reward + reply.reward, turns + 1, reply.done
        if done:
            break
    session.close()
    return texts, reward, turns if done else -turns


def interpreter(name: str, cache: Path) -> str:
    """The interpreter of an environment, which is made if need be."""
    folder, uv = cache / name, [sys.executable, "-P", "-m", "uv"]
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True)
        subprocess.run([*uv, "pip", "install", "--quiet", "--python", str(python), *ENVIRONMENTS[name]], check=True)
        paths = [str(cache / "files")] + [sysconfig.get_path("purelib")] * ("--no-deps" in ENVIRONMENTS[name])
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text("\n".join(paths) + "\n")
        ready.touch()
    return str(python)


@contextlib.contextmanager
def server(python: str, folder: Path, kind: str) -> Iterator[str]:
    """The address of an OpenEnv server on loopback, while it runs."""
    if not kind:
        yield ""
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(folder / "openenv_server.py"), str(port), kind])
    try:
        _wait(lambda: socket.create_connection(("127.0.0.1", port), 1).close(), process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait(connect: Callable[[], None], process: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            return connect()
        except OSError:
            if process.poll() is not None:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
