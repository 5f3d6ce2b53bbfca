"""Checks that unchanged agents of other frameworks train through the gateway: their samples are recorded to the token.

    python scripts/proofs/gateway.py [--only pydantic-ai …] [--cache FOLDER] [--json FILE]

Makes an environment with uv for each framework under the cache folder, once, and runs its agent as a process on a tiny
model that is taught to call a tool and to use its result. Exit code 1 if a trajectory is not what the engine saw and
drew, or the agent did not earn its reward.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlcli.environments.conversation import Limits
from rlcli.environments.gateway.agent_processes import run_agent
from rlcli.environments.gateway.gateway_server import Gateway
from tests.taught_engine import TaughtEngine, is_recorded

ROW = {"id": "sum", "messages": [{"role": "user", "content": "What is 2+3?"}], "ground_truth": "5"}
CALL = '<tool_call>{{"name": "{name}", "arguments": {{"a": 2, "b": 3}}}}</tool_call>'
OFFERED = re.compile(r"</tool_call>: (\S+) ")
"""The name of the tool in the taught template's system message: verifiers prefixes that of its toolset."""
REWARD_KEY = """
import os
reward_key = open(os.environ["RLCLI_REWARD_KEY"]).read()
"""
REWARD = """
body = json.dumps({"reward": float(reward)}).encode()
url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
headers = {"Authorization": f"Bearer {reward_key}", "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(f"{url}/reward", body, headers))
"""
OPENAI_AGENTS = """
import asyncio, json, os, urllib.request
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)

@function_tool
def add(a: int, b: int) -> int:
    "Adds two numbers."
    return a + b

row = json.load(open(os.environ["RLCLI_ROW"]))
model = OpenAIChatCompletionsModel("policy", AsyncOpenAI())
agent = Agent(name="sums", instructions="Use the tools.", tools=[add], model=model)
result = asyncio.run(Runner.run(agent, row["messages"][0]["content"]))
reward = row["ground_truth"] in result.final_output
"""
PYDANTIC_AI = """
import json, os, urllib.request
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

row = json.load(open(os.environ["RLCLI_ROW"]))
agent = Agent(OpenAIChatModel("policy"), instructions="Use the tools.")

@agent.tool_plain
def add(a: int, b: int) -> int:
    "Adds two numbers."
    return a + b

result = agent.run_sync(row["messages"][0]["content"])
reward = row["ground_truth"] in result.output
"""
VERIFIERS_TASK = """
import verifiers.v1 as vf

class Sum(vf.TaskData):
    answer: str = ""

class SumTask(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

class SumTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        "Adds two numbers."
        return a + b

class SumTaskWithTools(SumTask):
    @classmethod
    def toolsets(cls, config):
        return [SumTools(vf.ToolsetConfig())]

if __name__ == "__main__":  # verifiers serves a toolset by running its module in a process of its own
    SumTools.run()
"""
VERIFIERS = """
import asyncio, json, os, urllib.request
import verifiers.v1 as vf
from sum_task import Sum, TASK
from verifiers.v1.harnesses.null import NullHarnessConfig

async def run():
    row = json.load(open(os.environ["RLCLI_ROW"]))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    harness, runtime = NullHarnessConfig(id="null"), vf.SubprocessConfig()
    agent = vf.Agent(vf.AgentConfig(model="policy", client=client, harness=harness, runtime=runtime))
    task = TASK(Sum(idx=0, prompt=row["messages"][0]["content"], answer=row["ground_truth"]), vf.TaskConfig())
    return await agent.run(task)

trace = asyncio.run(run())
assert not trace.errors, trace.errors
reward = trace.reward
"""


@dataclass(frozen=True)
class Case:
    """An agent of another framework."""

    requirements: Sequence[str]
    """Packages of its environment."""
    program: str
    """Source code of the agent."""
    turns: int
    """Expected number of turns of the policy."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Source code of further modules by name."""


CASES = {
    "openai-agents": Case(["openai-agents==0.24.0"], OPENAI_AGENTS, 2),
    "pydantic-ai": Case(["pydantic-ai-slim[openai]==2.68.0"], PYDANTIC_AI, 2),
    "verifiers": Case(["verifiers==0.4.0"], VERIFIERS.replace("TASK", "SumTask"), 1, {"sum_task": VERIFIERS_TASK}),
    "verifiers-toolset": Case(
        ["verifiers==0.4.0"], VERIFIERS.replace("TASK", "SumTaskWithTools"), 2, {"sum_task": VERIFIERS_TASK}
    ),
}


@dataclass(frozen=True)
class AgentRun:
    """The result of one agent."""

    framework: str
    """Name of the case."""
    package: str
    """Requirement that was installed."""
    turns: list[int]
    """Turns of the policy in each trajectory."""
    response_tokens: int
    """Response tokens of all trajectories."""
    tokens: int
    """All their tokens."""
    reward: float | None
    """Reward of the session; None if none came."""
    exact: bool
    """True if the recorded trajectories are what the engine read and sampled."""
    wrong: bool
    """True if tokens, reward or turns are not the expected ones."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(CASES), help="the frameworks to run")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "rlcli-gateway")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [run_case(name, CASES[name], options.cache) for name in options.only or CASES]
    table = Table("framework", "package", "turns", "response tokens", "tokens", "reward", "exact ids", box=None)
    for result in results:
        numbers = (str(result.turns), str(result.response_tokens), str(result.tokens), str(result.reward))
        table.add_row(result.framework, result.package, *numbers, "yes" if result.exact else "NO")
    Console(width=140).print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return int(any(result.wrong for result in results))


def run_case(name: str, case: Case, cache: Path) -> AgentRun:
    """Run one agent, to its end."""
    program = cache / f"agent-{name}.py"
    python = interpreter(name, case, cache)
    program.write_text(REWARD_KEY + case.program + REWARD)
    limits = Limits(turns=4, turn_tokens=200, response_tokens=800, tokens=3000)
    with (
        tempfile.TemporaryDirectory() as folder,
        TaughtEngine(Path(folder) / "model", wanted) as engine,
        Gateway(engine.tokenizer, engine.stops, limits, engine.submit) as gateway,
    ):
        run = run_agent(gateway, gateway.open(), f"{python} {program}", ROW, deadline_s=300).result()
        trajectories = [branch.trajectory for branch in run.branches]
        exact = is_recorded(engine.seen, trajectories)
    turns = [trajectory.turns for trajectory in trajectories]
    response_tokens, tokens = (
        sum(each) for each in zip(*((t.response_tokens, len(t.tokens)) for t in trajectories), strict=True)
    )
    wrong = not exact or run.reward != 1.0 or turns != [case.turns]
    return AgentRun(name, case.requirements[0], turns, response_tokens, tokens, run.reward, exact, wrong)


def wanted(prompt: str) -> str:
    """The text that the policy should generate."""
    offered = OFFERED.search(prompt)
    return "It is 5." if "gives 5" in prompt or not offered else CALL.format(name=offered[1])


def interpreter(name: str, case: Case, cache: Path) -> Path:
    """Python interpreter of the framework's environment, made if missing. Its harness finds uv next to this one."""
    os.environ["PATH"] = f"{os.environ['PATH']}{os.pathsep}{Path(sys.executable).parent}"
    folder, uv = cache / name, [sys.executable, "-P", "-m", "uv"]
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True)
        subprocess.run([*uv, "pip", "install", "--quiet", "--python", str(python), *case.requirements], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        for module, text in case.modules.items():
            (packages / f"{module}.py").write_text(text)
        ready.touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
