"""Environment classes as TRL's `environment_factory` takes them, and its tools."""

from __future__ import annotations

import asyncio
import functools
import inspect
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Found by path, since this file runs where no rlcli can be imported: beside this package in an installation, one folder
# above it in a checkout.
ENVIRONMENTS = next(
    folder
    for parent in Path(__file__).resolve().parents
    if (folder := parent / "rlcli" / "environments").joinpath("host_main.py").is_file()
)
FIND = runpy.run_path(str(ENVIRONMENTS / "host_main.py"))["find"]
TOOLS = runpy.run_path(str(ENVIRONMENTS / "tools.py"))["ToolEnvironment"]


class TrlEnvironment:
    """A class as TRL's `environment_factory` takes it.

    factory: `file.py:Class` or `module:Class`. Its public methods are tools; `reset` gets the row's fields, and the
    text, or the list of parts, that it returns is appended to the last message; `get_reward` may be missing. tools:
    `file.py:LIST` of further functions. options: of the constructor.

    `get_reward` is asked after each turn, and the turn's reward is the change, so that the sum is the last one also
    where a limit ends the conversation."""

    def __init__(self, factory: str, tools: str = "", **options: Any) -> None:
        self.environment = FIND(factory)(**options)
        names = [name for name, _ in inspect.getmembers(type(self.environment), predicate=inspect.isfunction)]
        if "reset" not in names:
            raise TypeError(f"{factory} has no method reset")
        self.earned = "get_reward" in names
        public = [name for name in names if name not in ("reset", "get_reward") and not name.startswith("_")]
        functions = [*(FIND(tools) if tools else ()), *(getattr(self.environment, name) for name in public)]
        self.tools, self.reward = TOOLS([_synchronous(function) for function in functions]), 0.0

    def reset(self, row: Any, seed: int) -> Any:
        fields = {**row, **(row.get("extra_info") or {}), "prompt": list(row["messages"])}
        reset, takes = self.environment.reset, inspect.signature(self.environment.reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
            fields = {name: value for name, value in fields.items() if name in takes}
        observation = _synchronous(reset)(**fields)
        messages = list(row["messages"]) or [{"role": "user", "content": ""}]
        if observation is not None:
            messages[-1] = {**messages[-1], "content": _joined(messages[-1]["content"], observation)}
        self.reward = 0.0
        return messages, self.tools.schemas

    def step(self, message: Any) -> Any:
        answers, _, done, info = self.tools.step(message)
        previous_reward = self.reward
        if self.earned:
            self.reward = float(_synchronous(self.environment.get_reward)())
        return answers, self.reward - previous_reward, done, info


def _joined(content: Any, observation: Any) -> Any:
    """Two contents as one: of parts if one of them is."""
    if isinstance(content, str) and isinstance(observation, str):
        return content + observation
    parts = [
        [{"type": "text", "text": text}] if isinstance(text, str) else list(text) for text in (content, observation)
    ]
    return [*parts[0], *parts[1]]


def _synchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    """An async function as one that waits for its result."""
    if not inspect.iscoroutinefunction(function):
        return function
    return functools.wraps(function)(lambda *args, **kwargs: asyncio.run(function(*args, **kwargs)))
