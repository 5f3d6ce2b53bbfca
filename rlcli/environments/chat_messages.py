"""The messages of a conversation: turns of the policy, and what its environment or a program answers.

The types only: at run time each of them is a plain `dict`, in memory, in JSON and for a chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NotRequired, Required, TypeAlias, TypedDict

from rlcli.support.json_types import JsonValue

if TYPE_CHECKING:
    from rlcli.images.image_descriptions import ImageDescription


class FunctionCall(TypedDict):
    """The function that a tool call names."""

    name: str
    """Name of the tool."""
    arguments: JsonValue
    """Value of each parameter, by name. Only a client of the gateway may send anything else."""


class ToolCall(TypedDict):
    """A tool call of the policy."""

    id: str
    """Identifies it among the calls of its message: "call00001"."""
    type: Literal["function"]
    """A constant of OpenAI's protocol."""
    function: FunctionCall
    """Function that is called."""


class InvalidToolCall(TypedDict):
    """A tool call that cannot be read."""

    id: str
    """As in `ToolCall`."""
    text: str
    """The start of what the policy wrote."""
    error: str
    """The reason, and the form that a call has."""


class Message(TypedDict, total=False):
    """One message, with an IMAGE marker in its content for each of its images. What an environment adds beyond these
    fields is kept for the chat template.

    >>> call: ToolCall = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    >>> turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    >>> answer: Message = {"role": "tool", "content": "3", "name": "add", "tool_call_id": turn["tool_calls"][0]["id"]}
    """

    role: Required[str]
    """"system", "user", "assistant" or "tool"."""
    content: Required[str]
    """Its text."""
    images: list[ImageDescription]
    """Its images, in the order of the markers."""
    reasoning_content: str
    """Reasoning of an assistant's turn."""
    tool_calls: list[ToolCall]
    """Tool calls of an assistant's turn."""
    invalid_tool_calls: list[InvalidToolCall]
    """Calls of an assistant's turn that cannot be read."""
    name: str
    """Name of the tool whose result this is."""
    tool_call_id: str
    """Id of the call whose result this is."""


TemplateMessage: TypeAlias = Mapping[str, object]
"""A `Message` as a chat template takes it: the content of one with images is a list of parts, and the arguments of its
calls may be JSON text."""
ToolSchema: TypeAlias = Mapping[str, JsonValue]
"""A tool as OpenAI's protocol describes it: `{"type": "function", "function": {"name": …, "parameters": …}}`, where
the parameters are a JSON schema. Environments and clients write them: no part of it is certain to be there."""


class EnvironmentRow(TypedDict):
    """A dataset's row, as `reset` and agent programs get it."""

    id: str
    """Identifies the row: data source, split and row number."""
    messages: Sequence[Mapping[str, JsonValue]]
    """Messages of the prompt; the content of one with images is a list of parts."""
    ground_truth: NotRequired[str]
    """Reference answer; missing for an agent that must not know it."""
    data_source: str
    """Name of the dataset."""
    ability: str
    """Kind of the task."""
    extra_info: Mapping[str, JsonValue]
    """Further fields of the row."""
