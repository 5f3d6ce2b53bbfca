"""`rlcli env` on the command line, and the examples of the page on environments."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcli.cli.env import play
from rlcli.cli.main import main
from rlcli.data.prompts.parquet_schema import row, write_rows
from tests.pages import blocks, commands

PAGE = "environments.md"


@pytest.fixture
def rlcli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*words: str, typed: str = "", expect: int = 0) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        code = main(["env", *words])
        captured = capsys.readouterr()
        assert code == expect, captured.err
        if expect:
            assert (captured.out.count("Traceback"), len(captured.err.splitlines())) == (0, 1)
        return captured.err if expect else captured.out

    return run


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files."""
    for name, text in zip(("guess.py", "shop.py", "dots.py"), blocks(PAGE, "python"), strict=True):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    messages = [{"role": "user", "content": "6*7="}]
    rows = [row(data_source="sums", messages=messages, verifier="gsm8k", ground_truth=str(n)) for n in (42, 43)]
    write_rows(tmp_path / "train.parquet", rows)
    return tmp_path


@pytest.mark.long
def test_the_pages_example_is_played_as_written(rlcli: Any, page_folder: Path) -> None:
    guesses = "".join(f"{n}\n" for n in range(1, 10))
    shown = rlcli("try", "guess.py:Guess", typed=guesses)
    assert shown.startswith("user: Guess my number, from 1 to 9.\nassistant: 1\n")
    assert "reward 1\nended: done; " in shown
    assert shown == rlcli("try", "guess.py:Guess", typed=guesses), "a row is always the same task"
    other_rows = [rlcli("try", "guess.py:Guess", "--row", str(number), typed=guesses) for number in range(1, 6)]
    assert len({shown, *other_rows}) > 2
    assert all(transcript.count("user: Higher.") == transcript.count("assistant: ") - 1 for transcript in other_rows)
    descending = [rlcli("try", "guess.py:Guess", "--row", str(number), typed="9\n8\n") for number in range(6)]
    assert any(
        transcript.endswith("user: Lower.\nended: the input ended; 2 turns, reward 0\n") for transcript in descending
    )


def test_the_pages_tools_are_shown_and_called(rlcli: Any, page_folder: Path) -> None:
    shown = json.loads(rlcli("show", "shop.py:TOOLS", "--json"))
    assert [tool["function"]["name"] for tool in shown["tools"]] == ["price", "opening_hours"]
    typed = 'price {"item": "bread", "count": 4}\nprice {"item": "tea"}\nopening_hours {"day": "Sunday"}\nIt is 10.0.\n'
    lines = rlcli("try", "shop.py:TOOLS", typed=typed).splitlines()
    assert [line for line in lines if line.startswith("tool:")] == [
        "tool: 10.0",
        "tool: error: KeyError: 'tea'",
        "tool: closed",
    ]
    assert lines[-1] == "ended: done; 4 turns, reward 0"


@pytest.mark.long
def test_the_agents_pages_program_is_answered_by_a_model(
    rlcli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcli.model.io.tiny_model import make_tiny_model

    (tmp_path / "agent.py").write_text(blocks("gateway.md", "python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (words,) = [words for words in commands("gateway.md") if words[:3] == ["rlcli", "env", "try"]]
    words = [str(make_tiny_model(tmp_path / "tiny")) if word.startswith("Qwen/") else word for word in words]
    shown = rlcli(*words[2:], "--set", "environment.turn_tokens=6")
    assert re.match(r"user: What is \d\+\d\?\nassistant: .*user: No. Try again.\nassistant: ", shown, re.DOTALL)
    assert shown.endswith("; 2 turns, reward 0\n")
    assert "a program, which only a model can answer" in rlcli("show", "python agent.py", expect=2)


def test_the_page_names_the_built_ins_and_their_keys(rlcli: Any) -> None:
    from rlcli.config.keys import keys

    page = (Path(__file__).parents[3] / "docs" / PAGE).read_text()
    environments = {entry["name"]: entry for entry in json.loads(rlcli("list", "--json"))}
    for name in ("guess_number", "countdown", "code_repair", "calculator", "python", "search"):
        assert environments[name]["loads"]
        assert environments[name]["summary"].endswith(".")
        assert f"| `{name}` |" in page
    missing = [key for key in keys() if key.startswith("environment.") and key.partition(".")[2] not in page]
    assert not missing


def test_show_has_options_and_the_first_messages_of_a_row(rlcli: Any, sums: Path) -> None:
    shown = json.loads(rlcli("show", "guess_number", "--set", "environment.options.high=9", "--json"))
    assert shown["options"][1] == {"name": "high", "type": "int", "required": False, "default": "100"}
    assert "from 1 to 9" in shown["messages"][0]["content"]
    text = rlcli("show", "calculator", "--data", str(sums), "--row", "1")
    assert "user: 6*7=" in text
    assert '"name": "calculate"' in text
    assert "corpus" in (text := rlcli("show", "search"))
    assert "must be given" in text
    assert "no conversation without --data or options" in text


def test_a_person_plays_from_a_pipe(sums: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "rlcli.cli.main", "env", "try", "calculator", "--data", str(sums)],
        input='calculate {"expression": "6*7"}\n"""\nSo it is\n\n#### 42\n"""\nnot read\n',
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.splitlines() == [
        "user: 6*7=",
        "tool calculate: takes expression",
        'assistant: calculate {"expression": "6*7"}',
        "tool: 42",
        "assistant: So it is",
        "",
        "#### 42",
        "",
        "ended: done; 2 turns, reward 0",
    ]


@pytest.mark.long
def test_the_input_may_end_early_and_a_seed_chooses_the_task(rlcli: Any) -> None:
    assert rlcli("try", "guess_number").endswith("ended: the input ended; 0 turns, reward 0\n")
    tasks = {rlcli("try", "guess_number", "--seed", str(seed), typed="50\n25\n75\n") for seed in range(8)}
    assert len(tasks) > 2


def test_text_of_an_environment_cannot_control_the_terminal(rlcli: Any, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "class Loud:\n    def reset(self, row, seed):\n"
        "        return [{'role': 'user', 'content': '\\x1b[2Jhello [bold]\\r'}]\n    def step(self, message): ...\n"
    )
    assert "user: \\x1b[2Jhello [bold]\\r\n" in rlcli("try", f"{tmp_path / 'loud.py'}:Loud")


def test_a_call_that_cannot_be_read_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = io.StringIO('add 1\nadd {"a": 1}\n')
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    message = play.read_turn({"add"})
    assert message is not None
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


@pytest.mark.long
def test_a_model_plays_within_the_limits(rlcli: Any, tmp_path: Path) -> None:
    from rlcli.model.io.tiny_model import make_tiny_model

    model = str(make_tiny_model(tmp_path / "tiny"))
    sets = ["--set", "rollout.max_response_tokens=40", "--set", "rollout.temperature=1.0"]
    shown = rlcli("try", "guess_number", "--model", model, *sets)
    assert shown.startswith("user: I have chosen")
    assert "\nassistant: " in shown
    assert shown.splitlines()[-1].startswith(("ended: turn_tokens; ", "ended: response_tokens; "))
    assert shown == rlcli("try", "guess_number", "--model", model, *sets), "the same seed draws the same"
    assert "describes no calls of tools" in rlcli("try", "calculator", "--model", model, expect=2)


@pytest.mark.parametrize(
    ("words", "typed", "message"),
    [
        (["show", "gues_number"], "", "did you mean guess_number?"),
        (["try", "guess.py"], "", "write guess.py:CLASS"),
        (["try", "no/such.py:Guess"], "", "does not load: FileNotFoundError"),
        (["try", "guess_number", "--row", "1024"], "", "there are 1024 rows; give 0 to 1023"),
        (["try", "guess_number", "--data", "no/such"], "", "no such file or folder: no/such"),
        (["try", "guess_number", "--set", "options.high=3"], "", "no key is called 'options.high'"),
        (["try", "guess_number", "--set", "environment.options.hi=3"], "", "unexpected keyword argument 'hi'"),
        (["try", "guess_number", "--set", "environment.python=/no/python"], "", "cannot be started with /no/python"),
        (["show", "search", "--set", "environment.options.corpus=/no/file"], "", "/no/file cannot be read"),
        (["try", "countdown"], "", "give no numbers and target"),
        (["try", "calculator"], "calculate 7\n", "the arguments of calculate are not a JSON object: 7"),
        (["try", "guess_number", "--model", "/no/model"], "", "/no/model"),
    ],
)
def test_a_mistake_is_one_line(rlcli: Any, words: list[str], typed: str, message: str) -> None:
    assert message in rlcli(*words, typed=typed, expect=2)


def test_a_step_that_fails_is_one_line(rlcli: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    def reset(self, row, seed):\n        return [{'role': 'user', 'content': 'go'}]\n"
        "    def step(self, message):\n        raise ValueError('no')\n"
    )
    error = rlcli("try", f"{tmp_path / 'broken.py'}:Broken", typed="x\n", expect=2)
    assert "the environment failed: crash: step raised ValueError: no (broken.py:5)" in error
