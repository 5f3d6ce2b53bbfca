"""The messages of a conversation on the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlcli.cli import console
from rlcli.errors import RlcliError

if TYPE_CHECKING:
    from rlcli.environments.chat_messages import Message
    from rlcli.environments.environment import Opening, Reply
    from rlcli.environments.environment_host import Session

STYLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}


def answer(session: Session, message: Message) -> Reply:
    """The environment's reply to a turn. Raises `RlcliError` if it fails."""
    from rlcli.environments.environment import EnvironmentFailed

    try:
        return session.step(message).result()
    except EnvironmentFailed as error:
        raise RlcliError(
            f"the environment failed: {error}", "a run would try this sample again, then leave it out"
        ) from None


def print_opening(opening: Opening) -> None:
    from rlcli.environments.calls import function_of, properties_of

    for message in opening.messages:
        print_message(message)
    for tool in opening.tools:
        function = function_of(tool)
        parameters = ", ".join(properties_of(function)) or "nothing"
        print_message({"role": f"tool {function.get('name')}", "content": f"takes {parameters}"})


def print_reply(reply: Reply) -> None:
    for message in reply.messages:
        print_message(message)
    if reply.reward:
        console.plain(f"reward {reply.reward:g}")


def print_end(why: str, turns: int, total: float) -> None:
    console.plain(f"ended: {why}; {turns} turn{'s' * (turns != 1)}, reward {total:g}")


def print_message(message: Mapping[str, Any]) -> None:
    """Print the role in its colour, then the text, and tool calls as they are typed."""
    from rich.text import Text

    from rlcli.images.image_descriptions import worded_messages
    from rlcli.support.redact import printable

    (message,) = worded_messages([message], ())
    lines = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        lines.append(f"{function['name']} {json.dumps(function['arguments'], ensure_ascii=False)}")
    text = Text(f"{message['role']}: ", style=STYLES.get(str(message["role"]).partition(" ")[0], ""))
    text.append(printable("\n".join(lines)), style="default")
    console.stdout().print(text, soft_wrap=True)
