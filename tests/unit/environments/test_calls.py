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
        ("xml", XML, "", [("add", {"a": 1, "note": "two\nlines"})], 0),
        ("xml", "<tool_call>add</tool_call>", "", [], 1),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})], 0),
        ("llama", '{"name": "add", ', '{"name": "add", ', [], 1),
        ("llama", "It is 2.", "It is 2.", [], 0),
        ("", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', [], 0),
    ],
)
def test_calls_are_read_as_the_model_writes_them(
    form: str, text: str, content: str, calls: list[Any], failed: int
) -> None:
    message, wrong = parse(text, form)
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert (message["content"], found, wrong) == (content, calls, failed)
    assert "reasoning_content" not in message


def test_what_is_thought_is_no_call() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(f"<think>{call}</think>\n\n4", "hermes").message == {
        **{"role": "assistant", "content": "4", "reasoning_content": call}
    }
    assert parse(f"{call}</think>{call}", "hermes", opened=True).message["tool_calls"][0]["function"]["name"] == "f"
    assert "tool_calls" not in parse(f"{call} and on", "hermes", opened=True).message


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
