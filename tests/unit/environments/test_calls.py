"""Calls of tools as models write them."""

from __future__ import annotations

from typing import Any

import pytest

from rlcli.environments.calls import format_of, parse
from rlcli.errors import ConfigError

XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=note>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("form", "text", "content", "calls", "failed"),
    [
        (
            "hermes",
            'So: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            "So:",
            [("add", {"a": 1})],
            0,
        ),
        ("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}', "", [("f", {}), ("g", {})], 0),
        ("hermes", "<tool_call>add(1)</tool_call>", "", [], 1),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "", [], 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "", [], 1),
        ("hermes", "no call", "no call", [], 0),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})], 0),
        ("hermes", '<tool_call>{"name": "f", "arguments": "a"}</tool_call>', "", [], 1),
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', "", [("f", {}), ("g", {})], 0),
        ("hermes", '<tool_call>[{"name": "f"}, 3]</tool_call>', "", [("f", {})], 1),
        ("hermes", "<tool_call>[]</tool_call>", "", [], 1),
        ("xml", XML, "", [("add", {"a": "1", "note": "two\nlines"})], 0),
        ("xml", "<tool_call>add</tool_call>", "", [], 1),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})], 0),
        ("llama", '[{"name": "f"}, {"name": "g", "parameters": "{}"}]', "", [("f", {}), ("g", {})], 0),
        ("llama", "[1, 2]", "[1, 2]", [], 0),
        ("llama", '{"name": "add", ', '{"name": "add", ', [], 1),
        ("llama", "It is 2.", "It is 2.", [], 0),
        ("", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', [], 0),
    ],
)
def test_calls_are_read_as_the_model_writes_them(
    form: str, text: str, content: str, calls: list[Any], failed: int
) -> None:
    message, wrong = parse(text, form)
    parsed_calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert (message["content"], parsed_calls, wrong) == (content, calls, failed)
    assert "reasoning_content" not in message


def test_what_is_thought_is_no_call() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(f"<think>{call}</think>\n\n4", "hermes").message == {
        **{"role": "assistant", "content": "4", "reasoning_content": call}
    }
    assert parse(f"{call}</think>{call}", "hermes", thinking=True).message["tool_calls"][0]["function"]["name"] == "f"
    assert "tool_calls" not in parse(f"{call} and on", "hermes", thinking=True).message


def test_the_format_is_read_off_the_template() -> None:
    assert [format_of(text) for text in ("<tool_call>", "<tool_call><function=", '"parameters" ipython', "hello")] == [
        *("hermes", "xml", "llama", ""),
    ]
    with pytest.raises(ConfigError, match="'json' is no format of tool calls; give one of hermes, xml, llama"):
        parse("", "json")


@pytest.mark.parametrize("form", ["hermes", "xml", "llama"])
def test_no_text_of_the_policy_is_more_than_a_failed_call(form: str) -> None:
    deep = "[" * 100_000
    texts = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {{"x": {deep}</tool_call>',
        "xml": f"<tool_call><function=f><parameter=x>{deep}</parameter></function></tool_call>",
        "llama": f'{{"name": "f", "parameters": {deep}',
    }
    message, failed = parse(texts[form], form)
    calls = message.get("tool_calls", [])
    assert failed == 1 or calls[0]["function"]["arguments"] == {"x": deep}


def test_halves_of_surrogate_pairs_are_replaced() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "\\ud83d", "\\ude00": ["\\ud83d\\ude00"]}}</tool_call>'
    message, failed = parse(text, "hermes")
    assert failed == 0
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": "\ufffd", "\ufffd": ["\U0001f600"]}


def tool(**properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


def test_values_without_a_type_are_read_by_the_schema() -> None:
    schema = tool(
        code={"type": "string"},
        zip={"type": "string", "nullable": True},
        count={"type": "integer"},
        on={"type": "boolean"},
        places={"type": "array", "items": {"type": "number"}},
        either={"anyOf": [{"type": "integer"}, {"type": "string"}]},
    )
    written = {
        **{"code": "12345", "zip": "007", "count": "7", "on": "True", "places": "[1, 2.5]", "either": "7", "new": "7"},
    }
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in written.items())
    text = f"<tool_call><function=f>{values}</function></tool_call>"
    (call,) = parse(text, "xml", tools=[schema]).message["tool_calls"]
    assert call["function"]["arguments"] == {
        **{"code": "12345", "zip": "007", "count": 7, "on": True, "places": [1, 2.5], "either": "7", "new": "7"}
    }
    (call,) = parse(text.replace("<parameter=count>\n7", "<parameter=count>\nmany"), "xml", tools=[schema]).message[
        "tool_calls"
    ]
    assert call["function"]["arguments"]["count"] == "many"  # the tool answers it with the error


def test_a_malformed_call_is_kept_with_its_place_and_the_reason() -> None:
    text = '<tool_call>{"name": "f", }</tool_call><tool_call>{"name": "g"}</tool_call><tool_call>h()</tool_call>'
    message, failed = parse(text, "hermes")
    assert failed == 2
    assert [call["id"] for call in message["tool_calls"]] == ["call00002"]
    assert [(call["id"], call["text"]) for call in message["invalid_tool_calls"]] == [
        ("call00001", '{"name": "f", }'),
        ("call00003", "h()"),
    ]
    errors = [call["error"] for call in message["invalid_tool_calls"]]
    assert "Expecting property name enclosed in double quotes (character 15)" in errors[0]
    assert "is not JSON: Expecting value (character 1)" in errors[1]


@pytest.mark.parametrize("tag", ["<function=a>", "<function=", "<function=a b>", "<function=a><parameter=a>"])
def test_xml_without_ends_is_read_in_linear_time(tag: str) -> None:
    parsed = parse("<tool_call>" + tag * 200_000, "xml")
    assert (parsed.failed, len(parsed.message["invalid_tool_calls"])) == (1, 1)
