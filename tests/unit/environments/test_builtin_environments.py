"""The built-in environments: what each answers, and when it rewards."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlcli_data_prep.arithmetic import working
from rlcli_environments.bm25 import Bm25
from rlcli_environments.calculator import calculate
from rlcli_environments.code_repair import CodeRepair, shown_tests
from rlcli_environments.countdown import Countdown
from rlcli_environments.guess_number import GuessNumber
from rlcli_environments.python import Python
from rlcli_environments.search import Search

from rlcli.config.load import resolve
from rlcli.environments.environment import ENVIRONMENTS, EnvironmentFailed, Reply, opening_of, reply_of
from rlcli.environments.environment_host import EnvironmentHost, EnvironmentSpec
from rlcli.environments.environment_pool import spec_of
from rlcli.errors import DataError

ASK = [{"role": "user", "content": "Go."}]
ROW = {"id": "toy:0", "messages": ASK, "ground_truth": "42", "data_source": "toy", "ability": "", "extra_info": {}}
CALL = {"id": "call00001", "type": "function"}


def begun(environment: Any, row: Any = ROW, seed: int = 1) -> Any:
    opening_of(json.loads(json.dumps(environment.reset(row, seed))))
    return environment


def said(environment: Any, text: str, *calls: tuple[str, dict[str, Any]]) -> Reply:
    """The reply to a turn, as it comes through JSON."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [{**CALL, "function": {"name": n, "arguments": a}} for n, a in calls]
    return reply_of(json.loads(json.dumps(environment.step(message))))


def run(environment: Python, code: str) -> str:
    (message,) = said(environment, "", ("python", {"code": code})).messages
    return str(message["content"])


@pytest.mark.long
def test_each_name_starts_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "text": "a"}\n')
    truths = {
        "countdown": '{"numbers": [1, 2], "target": 3}',
        "code_repair": '{"kind": "asserts", "asserts": ["assert f(1) == 2"]}',
    }
    names = [name for name in ENVIRONMENTS.names() if ENVIRONMENTS.target(name).startswith("rlcli_environments.")]
    assert names == ["calculator", "code_repair", "countdown", "guess_number", "python", "search"]
    for name in names:
        options = {"corpus": str(tmp_path / "corpus.jsonl")} if name == "search" else {}
        with EnvironmentHost(EnvironmentSpec(name, options)) as host:
            opening = host.session().reset(ROW | {"ground_truth": truths.get(name, "42")}, 1).result(60)
        assert [tool["function"]["name"] for tool in opening.tools] == {
            "calculator": ["calculate"],
            "python": ["python"],
            "search": ["search"],
        }.get(name, [])


@pytest.mark.parametrize(("high", "questions"), [(1, 1), (2, 2), (100, 7), (127, 7), (128, 8)])
def test_halving_always_guesses_the_number_in_time(high: int, questions: int) -> None:
    for seed in range(high):
        game, low, top = begun(GuessNumber(high=high), seed=seed), 1, high
        assert game.left == questions
        for _ in range(questions):
            guess = (low + top) // 2
            reply = said(game, f"Between {low} and {top}.\n{guess}")
            if reply.done:
                break
            higher = reply.messages[0]["content"].startswith("Higher")
            low, top = (guess + 1, top) if higher else (low, guess - 1)
        assert (reply.reward, reply.done) == (1.0, True)


def test_the_questions_end_and_numbers_differ_between_rows() -> None:
    game = begun(GuessNumber(questions=2))
    assert said(game, "0").messages[0]["content"] == "Higher. Guesses left: 1."
    assert said(game, "101") == Reply([], 0.0, True, {"questions": 2})
    assert len({begun(GuessNumber(), seed=seed).number for seed in range(300)}) > 90


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> tuple[str, Fraction]:
    """An expression in brackets, and its value, worked out beside it."""
    if depth == 0 or draw(st.booleans()):
        integer, decimals = draw(st.integers(0, 9999)), draw(st.integers(0, 3))
        text = f"{integer}.{draw(st.integers(0, 10**decimals - 1)):0{decimals}d}" if decimals else str(integer)
        return text, Fraction(text)
    (left, a), (right, b) = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    sign = draw(st.sampled_from("+-*/") if b else st.sampled_from("+-*"))
    return f"({left} {sign} {right})", {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[sign]


@given(expressions())
def test_the_calculator_is_exact(expression: tuple[str, Fraction]) -> None:
    text, expected = expression
    if len(text) <= 300:
        shown = calculate(text).partition(" (about")[0]
        assert Fraction(shown) == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("58 + 67", "125"),
        ("2 ^ 10 − 7 × 3 ÷ 2", "1013.5"),
        ("-7 // 2 + 7 % 4", "-1"),
        ("2 ** -2", "0.25"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 3", "10/3 (about 3.33333333333)"),
        ("10**1000 / 3 > 1", ValueError),
        ("1 / 0", ValueError),
        ("2 ** 0.5", ValueError),
        ("", ValueError),
    ],
)
def test_what_the_calculator_shows(text: str, shown: Any) -> None:
    if shown is ValueError:
        with pytest.raises(ValueError, match=r"an expression|divides by zero|whole number"):
            calculate(text)
    else:
        assert calculate(text) == shown
    assert calculate("10**1000 / 3").endswith("(about 3.33333333333E+999)")


def test_a_call_of_the_calculator_is_answered() -> None:
    with EnvironmentHost(EnvironmentSpec("calculator")) as host:
        session = host.session()
        assert session.reset(ROW, 1).result(60).messages == ASK
        call = {**CALL, "function": {"name": "calculate", "arguments": {"expression": "6*7"}}}
        reply = session.step({"role": "assistant", "content": "", "tool_calls": [call]}).result(60)
        assert (reply.messages[0]["content"], reply.reward, reply.done) == ("42", 0.0, False)
        assert session.step({"role": "assistant", "content": working(40, 2, 2)}).result(60) == Reply(
            [], 0.0, True, {"tool_calls": 0, "failed_calls": 0}
        )


COUNTDOWN = ROW | {"ground_truth": '{"numbers": [3, 5, 7], "target": 36}'}


def test_a_wrong_expression_is_answered_with_what_it_makes() -> None:
    game = begun(Countdown(attempts=3), COUNTDOWN)
    first = said(game, "<answer>(3 + 5) * 7</answer>")
    assert first.messages[0]["content"] == ("That is not right: it makes 56, the target is 36. Attempts left: 2.")
    assert "no expression" in said(game, "").messages[0]["content"]
    assert said(game, "<answer>(5 + 7) * 3</answer>") == Reply([], 1.0, True, {"attempts": 3})
    with pytest.raises(ValueError, match="give no numbers and target"):
        Countdown().reset(ROW, 1)


MBPP = ROW | {
    "messages": [{"role": "user", "content": "Double it. Tests such as:\n\n```python\nassert twice(2) == 4\n```"}],
    "ground_truth": json.dumps({"kind": "asserts", "asserts": ["assert twice(2) == 4", "assert twice(-77) == -154"]}),
}
HUMANEVAL = ROW | {
    "messages": [
        {
            "role": "user",
            "content": "Complete it.\n\n```python\ndef twice(x):\n    '''Doubles.\n    >>> twice(2)\n    4\n"
            "    >>> twice(unknown)\n    1\n    >>> print(twice(1))\n    2\n    >>> twice(3)\n    a text\n    '''\n```",
        }
    ],
    "ground_truth": json.dumps(
        {"kind": "check", "entry_point": "twice", "test": "def check(candidate):\n    assert candidate(-77) == -154"}
    ),
}
RIGHT, WRONG = "```python\ndef twice(x):\n    return 2 * x\n```", "```python\ndef twice(x):\n    return x + 3\n```"


@pytest.mark.parametrize("row", [MBPP, HUMANEVAL], ids=["mbpp", "humaneval"])
def test_the_shown_tests_come_back_and_the_next_attempt_counts(row: Any) -> None:
    code = begun(CodeRepair(), row)
    assert said(code, "I cannot.").messages[0]["content"].startswith("The tests fail: no program")
    reply = said(code, WRONG)
    assert (reply.done, reply.reward) == (False, 0.0)
    assert "assert twice(2) == 4" in reply.messages[0]["content"]
    assert said(code, RIGHT) == Reply([], 1.0, True, {"attempts": 3})


def test_only_tests_that_the_prompt_shows_are_public() -> None:
    def of(row: Any) -> Any:
        shown = shown_tests(row["ground_truth"], {}, row["messages"][0]["content"])
        return json.loads(shown) if shown else None

    assert of(MBPP)["asserts"] == of(HUMANEVAL)["asserts"] == ["assert twice(2) == 4"]
    assert of(HUMANEVAL | {"messages": ASK}) is None
    cases = [{"input": "1 2\n", "output": "3\n"}, {"input": "1", "output": "2"}]
    scripts = {"messages": [{"content": "Input:\n  1 2\nOutput:\n  3\nlike 1 and 2"}]}
    assert of(scripts | {"ground_truth": json.dumps({"kind": "stdio", "cases": cases})})["cases"] == cases[:1]


@pytest.mark.long
def test_cells_have_the_state_of_a_notebook() -> None:
    environment = begun(Python())
    assert run(environment, "import numpy as np\nx = [1]\ndef add(n): x.append(n); return x") == "(no output)"
    assert run(environment, "print('a'); add(2)") == "a\n[1, 2]\n"
    assert run(environment, "add(3); 1 / 0").endswith("ZeroDivisionError: division by zero\n")
    assert "/" not in run(environment, "def broken(:").splitlines()[0], "no path of this machine"
    assert run(environment, "import os; x = 0; os._exit(3)") == (
        "error: this call ended the process with status 3; it was left out, variables are as before it"
    )
    assert run(environment, "open('kept', 'w').write('text'); x") == "[1, 2, 3]\n"
    state = run(environment, "import random, uuid; d = random.random(), np.random.rand(), uuid.uuid4().hex; d")
    assert run(environment, "d") == state, "a cell that runs again draws the same"
    assert run(environment, "open('kept').read()") == "'text'\n"
    assert run(begun(Python()), "x").endswith("NameError: name 'x' is not defined\n")


def test_programs_run_in_the_sandbox_that_the_configuration_names() -> None:
    config = resolve("tools-python", {}, ["verifier.sandbox=http://127.0.0.1:9"]).config
    with (
        EnvironmentHost(spec_of(config, "python")) as host,
        pytest.raises(
            EnvironmentFailed, match=r"127\.0\.0\.1:9' is a remote server, which cannot start a local program"
        ),
    ):
        host.session().reset(ROW, 1).result(60)
    assert spec_of(resolve("tools-python").config, "python").sandbox == ""


@pytest.mark.long
def test_a_call_beyond_a_limit_is_left_out_and_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rlcli_environments.python.PATIENCE", 120.0
    )  # on a busy machine a second of CPU time takes long
    environment = begun(Python(timeout_s=1.0, memory_mb=200, output_chars=20))
    assert run(environment, "x = 1") == "(no output)"
    assert run(environment, "x = 2\nwhile True: pass").startswith("error: this call ran past 1 s of CPU time; it was")
    assert "used more than 200 MB" in run(environment, "x = bytearray(250 << 20)\nwhile True: pass")
    assert run(environment, "x = 3\nprint('a' * 3000000)").endswith(
        "aaaaaaaaaa\nerror: this call wrote more than 1048576 bytes; it was left out, variables are as before it"
    )
    assert run(environment, "'0123456789' * 10") == ("'012345678\n… 83 characters left out …\n23456789'\n")
    environment.step({"role": "assistant", "content": ""})
    environment.turn_ends = 0.0
    assert environment.python("1") == "error: the time of this turn is used up; this call was left out"
    assert run(environment, "x") == "1\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = ["Paris is the capital of France.", "Lima is the capital of Peru.", "Peru has the Andes. " * 99, "Bread."]
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(
        gzip.compress("\n".join(json.dumps({"id": f"p{n}", "text": t}) for n, t in enumerate(texts)).encode())
    )
    return path


def test_search_returns_the_passages_that_match_best(corpus: Path, tmp_path: Path) -> None:
    environment = begun(Search(str(corpus), passage_chars=26))

    def found(**arguments: Any) -> str:
        return str(said(environment, "", ("search", arguments)).messages[0]["content"])

    assert found(query="capital of PERU?", count=1) == "[p1] Lima is the capital of Per"
    assert [line[:4] for line in found(query="capital Peru").split("\n\n")] == ["[p1]", "[p2]", "[p0]"]
    assert found(query="quux") == "No passage has any of these words."
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({"id": [7], "text": ["Lima"]}), tmp_path / "c.parquet")
    environment = begun(Search(str(tmp_path / "c.parquet")))
    assert found(query="lima") == "[7] Lima"


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "has no passages"), ("{}", "passage 1 has no id and text: {}"), ("{", "cannot be read: Expecting")],
)
def test_a_corpus_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.jsonl").write_text(text)
    with pytest.raises(DataError, match=message) as failed:
        Search(str(tmp_path / "c.jsonl"))
    assert "\n" not in str(failed.value)
    with pytest.raises(DataError, match=r"no\.parquet cannot be read"):
        Search(str(tmp_path / "no.parquet"))


def test_bm25_is_its_formula() -> None:
    chance = random.Random(3)
    texts = [" ".join(chance.choices("abcdefg", k=chance.randint(0, 9))) for _ in range(50)]
    words = [Counter(text.split()) for text in texts]
    mean = sum(map(Counter.total, words)) / len(words)

    def score(document: int, query: str) -> float:
        total = 0.0
        for word in set(query.split()):
            holding, count = sum(word in counts for counts in words), words[document][word]
            rarity = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
            total += rarity * count * 2.5 / (count + 1.5 * (0.25 + 0.75 * words[document].total() / mean))
        return total

    for query in ("a b", "g", "c c d"):
        best = sorted(range(50), key=lambda passage: (-round(score(passage, query), 4), passage))
        assert Bm25(texts).best(query, 10) == best[:10]
