"""`rlcli env try`: a person, or a model, plays an environment in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import completion, console
from rlcli.cli.env.environment_task import EnvironmentName, RowNumber, Task, TaskData, config_and_row, opened
from rlcli.cli.env.print_messages import STYLES, answer, print_end, print_message, print_opening, print_reply
from rlcli.cli.options import Sets
from rlcli.errors import ConfigError

if TYPE_CHECKING:
    from rlcli.environments.chat_messages import Message, ToolCall

BLOCK = '"""'
"""A line of this alone begins and ends a turn of several lines."""


def play(
    name: EnvironmentName,
    data: TaskData = None,
    row: RowNumber = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the task; unset: the row's, as in a run.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id of a model that plays instead of you, on transformers.",
            autocompletion=completion.models,
        ),
    ] = None,
    set: Sets = None,
) -> None:
    """Play an environment: you type the policy's turns, and see what it answers and rewards.

    A turn is one line, or the lines between two lines of \"\"\". A tool is called by its
    name and arguments: calculate {"expression": "6*7"}. Ctrl-D leaves. Turns may come
    from a pipe, too. With --model the model plays, within the limits of environment.*.
    A program that asks the model, such as 'python agent.py', needs --model.

    Examples:

      rlcli env try guess_number --seed 3

      rlcli env try countdown --data data/countdown --row 7

      rlcli env try calculator --data data/arithmetic --model Qwen/Qwen2.5-0.5B-Instruct

      printf '50\\n75\\n' | rlcli env try guess.py:Guess --set environment.options.high=99
    """
    if model:
        from rlcli.cli.env.playing_model import play_agent, play_model

        config, prompt = config_and_row(name, data, row, set or [], model=model)
        if config.environment.is_command:
            play_agent(config, prompt)
            return
        with opened(name, data, row, set or [], seed=seed, model=model) as task:
            play_model(task)
        return
    with opened(name, data, row, set or [], seed=seed) as task:
        play_person(task)


def play_person(task: Task) -> None:
    """Play turns from standard input, until the environment is done or the input ends."""
    from rlcli.environments.calls import function_of

    session, opening = task.reset()
    print_opening(opening)
    tools = {function_of(tool).get("name") for tool in opening.tools}
    total, turns = 0.0, 0
    while (message := read_turn(tools)) is not None:
        if not sys.stdin.isatty():  # else the terminal has shown it
            print_message(message)
        reply = answer(session, message)
        total, turns = total + reply.reward, turns + 1
        print_reply(reply)
        if reply.done:
            print_end("done", turns, total)
            return
    print_end("the input ended", turns, total)


def read_turn(tools: Collection[object]) -> Message | None:
    """The next turn as a message; None at the end of the input. An unreadable call is requested again."""
    while True:
        text = _read_text()
        if text is None:
            return None
        try:
            return as_message(text, tools)
        except ConfigError as error:
            if not sys.stdin.isatty():
                raise
            console.stderr().print(f"{error}", markup=False)


def as_message(text: str, tools: Collection[object]) -> Message:
    """A typed turn: a call if it begins with the name of a tool. Raises `ConfigError` for arguments that are not JSON.

    >>> as_message('add {"a": 1}', ["add"])["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': {'a': 1}}
    >>> as_message("added 1", ["add"])
    {'role': 'assistant', 'content': 'added 1'}
    """
    name, _, rest = text.strip().partition(" ")
    if name not in tools:
        return {"role": "assistant", "content": text}
    try:
        arguments = json.loads(rest or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"the arguments of {name} are not a JSON object: {rest[:80]}", f'write {name} {{"name": value}}'
        )
    call: ToolCall = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _read_text() -> str | None:
    if sys.stdin.isatty():
        console.stdout().print("you> ", style=STYLES["assistant"], end="")
    line = sys.stdin.readline()
    if not line:
        return None
    if line.strip() != BLOCK:
        return line.rstrip("\n")
    lines = []
    while (line := sys.stdin.readline()) and line.strip() != BLOCK:
        lines.append(line)
    return "".join(lines)
