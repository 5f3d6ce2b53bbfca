"""A small row of each public form of data, of its published shape and with content of our own."""

from __future__ import annotations

import base64
import datetime
import json
import pickle
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcli_data_prep import hf, jsonl
from rlcli_data_prep.code_tests import code_tests
from rlcli_data_prep.sources import read_splits
from rlcli_verifiers import code, countdown, exact, gsm8k, math, multiple_choice

from rlcli.cli.main import main
from rlcli.errors import DataError
from rlcli.types import ConvertOptions, Outcome, Prompt

USER = {"role": "user", "content": "What is 6 times 7?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "It is 42."}
DOUBLE = "```python\nimport sys\nprint(2 * int(sys.stdin.read()))\n```"
ADD = "```python\ndef add(a, b):\n    if not isinstance(a, int):\n        raise ValueError(a)\n    return a + b\n```"
ADD_METHOD = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"


def prompt(row: dict[str, Any], verifier: str | None = "math", **columns: str) -> Prompt:
    return jsonl.prompt(row, ConvertOptions(source="rows.jsonl", verifier=verifier, columns=columns))


def messages(value: Any) -> list[tuple[str, str]]:
    converted = prompt({"prompt": value, "answer": "42"})
    return [(message["role"], message["content"]) for message in converted.messages]


# Chats


@pytest.mark.parametrize(
    "value",
    [
        [SYSTEM, USER],
        [SYSTEM, USER, ANSWER],
        json.dumps([SYSTEM, USER]),
        json.dumps({"messages": [SYSTEM, USER], "id": 3}),
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": USER["content"]}]},
        [
            {"from": "system", "value": "Be brief.", "weight": None},
            {"from": "human", "value": USER["content"], "weight": None},
            {"from": "gpt", "value": "It is 42.", "weight": 1},
        ],
        json.dumps([{"from": "System", "value": "Be brief."}, {"from": "user", "value": USER["content"]}]),
        [SYSTEM, {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}],
        {"role": ["system", "user"], "content": ["Be brief.", USER["content"]]},
        {"conversations": {"from": ["system", "human"], "value": ["Be brief.", USER["content"]]}},
        [{"role": "System", "content": "Be brief."}, USER, {"role": "assistant", "content": ""}],
    ],
)
def test_a_chat_in_any_form_is_its_messages(value: Any) -> None:
    assert messages(value) == [("system", "Be brief."), ("user", "What is 6 times 7?")]


@pytest.mark.parametrize(
    "text", ["Sort [3, 1, 2].", '{"a": 1} is JSON?', "[1, 2]", '[{"a": 1}]', "[{role: ...}] is odd"]
)
def test_text_that_is_no_chat_stays_text(text: str) -> None:
    assert messages(text) == [("user", text)]


def test_turns_after_the_question_become_the_response() -> None:
    converted = prompt({"messages": [USER, {"role": "assistant", "content": "41?"}, USER, ANSWER], "answer": 42})
    assert [message["role"] for message in converted.messages] == ["user", "assistant", "user"]
    assert (converted.extra_info["response"], converted.ground_truth) == ("It is 42.", "42")
    with_response = prompt({"messages": [USER, ANSWER], "answer": 42, "worked": "6 * 7 = 42"}, response="worked")
    assert with_response.extra_info["response"] == "6 * 7 = 42"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("[{'role': 'user', 'content': '2+2?'}]", "not as Python prints them"),
        ([ANSWER], "turns of the assistant alone"),
        ([{"from": "narrator", "value": "Once"}], "no known speaker"),
        ([{"from": "human", "value": None}], "no text in column 'content'"),
        ([{"role": "system", "content": ""}], "no message but an empty system prompt"),
        (["one", "two"], "holds no chat message"),
    ],
)
def test_what_is_no_chat_is_refused_by_name(value: Any, says: str) -> None:
    with pytest.raises(DataError) as error:
        prompt({"prompt": value, "answer": "42"})
    assert says in str(error.value)


def test_the_command_reports_conversations_that_were_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"conversations": [USER, ANSWER], "answer": 42}, {"conversations": [USER], "answer": 42}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["prep", "jsonl", "--source", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]) == 0
    assert "convert: 1 rows ended with the assistant's answer" in capsys.readouterr().out
    assert {row["prompt"][-1]["role"] for row in pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()} == {
        "user"
    }


# Columns


def test_columns_may_be_fields_within_structs_lists_and_json() -> None:
    row = {
        "a": {"b": {"c": "2+2?"}},
        "turns": [{"value": "4"}],
        "meta": '{"source": {"name": "mine"}}',
        "x.y": "dotted",
    }
    converted = prompt(row, prompt="a.b.c", answer="turns.0.value", origin="meta.source.name", dots="x.y")
    assert (converted.messages[0]["content"], converted.ground_truth) == ("2+2?", "4")
    assert (converted.extra_info["origin"], converted.extra_info["dots"]) == ("mine", "dotted")
    for columns, says in (
        ({"prompt": "a.b.d"}, "no column 'a.b.d' ('a.b' has c); name the column with --columns prompt=THEIRS"),
        ({"prompt": "turns.7"}, "no column 'turns.7' ('turns' is a list of 1)"),
        ({"prompt": "x.y.z"}, "no column 'x.y.z' (the row has a, turns, meta, x.y)"),
    ):
        with pytest.raises(DataError) as error:
            prompt(row, **columns)
        assert says in str(error.value)


# Answers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["42"], "42"),
        ('["42"]', "42"),
        (["2", "-2"], "2, -2"),
        ([2, -2.0], "2, -2"),
        ([["42"]], "42"),
        ({"value": 42}, "42"),
        ({"ground_truth": {"value": "42"}}, "42"),
        ('{"answer": "42"}', "42"),
        (42, "42"),
        (42.0, "42"),
        (0.1, "0.1"),
        (1e-7, "0.0000001"),
        (1e22, "10000000000000000000000"),
        (10**30, "1" + "0" * 30),
        (Decimal("0.50"), "0.5"),
        (Decimal("300.00"), "300"),
        ([3, 3, 5], "3, 3, 5"),
        (["42", 42, 42.0], "42"),
        ([[2, -2]], "2, -2"),
        (["(1,2)", "(3,4)"], "(1,2), (3,4)"),
        ("12:30", "12:30"),
        ("2024-5", "2024-5"),
        ("[2, 3)", "[2, 3)"),
        ("[2, 3]", "[2, 3]"),
        ("  x+1 ", "x+1"),
    ],
)
def test_an_answer_is_the_text_that_a_person_would_write(value: Any, text: str) -> None:
    converted = prompt({"prompt": "?", "answer": value})
    assert converted.ground_truth == text
    assert math.verify(converted.request(math.gold(converted.request()), "stop")).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (datetime.date(2024, 5, 1), "2024-05-01"),
        (datetime.datetime(2024, 5, 1), "2024-05-01"),
        (datetime.datetime(2024, 5, 1, 12, 30), "2024-05-01 12:30:00"),
        (datetime.time(12, 30), "12:30:00"),
        ("5/1/2024", "5/1/2024"),
        ("2024/05/01", "2024/05/01"),
        ("31-12-2024", "31-12-2024"),
    ],
)
def test_a_date_is_an_answer_for_texts_and_none_for_formulas(value: Any, text: str) -> None:
    assert prompt({"prompt": "?", "answer": value}, "exact").ground_truth == text
    for verifier in ("math", "gsm8k"):
        for answer in (value, [value], {"value": value}):
            with pytest.raises(DataError, match=r"a date or time.*; compare it as text \(--verifier exact\)"):
                prompt({"prompt": "?", "answer": answer}, verifier)


def test_answers_of_a_list_count_as_often_as_they_are_there() -> None:
    converted = prompt({"prompt": "?", "answer": [3, 3, 5]})
    scores = [
        math.verify(converted.request(rf"\boxed{{{answer}}}", "stop")).score
        for answer in ("5, 3, 3", "3, 5", "3, 5, 5")
    ]
    assert scores == [1.0, 0.0, 0.0]


@pytest.mark.long
def test_the_command_reports_rows_with_several_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [["1/2", "0.5"], ["42", "42"], 42, [[2, -2]]]
    rows = [{"prompt": f"{number}?", "answer": answer} for number, answer in enumerate(answers)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["prep", "jsonl", "--source", str(tmp_path / "rows.jsonl"), "--verifier", "math"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "convert: 2 rows hold several answers, of which a response must give all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "verifier", "says"),
    [
        ([[1, 2], [3, 4]], "math", "several answers, of which one has a comma of its own ('1, 2')"),
        (["2, 3", "5"], "math", "of which one has a comma of its own ('2, 3')"),
        ({"a": 1}, "math", "name the field that holds it: --columns answer=answer.FIELD"),
        ([], "math", "an empty list"),
        ("nan", "math", "the text of a missing value"),
        (float("nan"), "gsm8k", "holds no answer"),
        (None, "math", "no text in column 'answer'"),
        ("['42']", "math", "a list as Python prints it"),
        (["Paris", "Lutetia"], "exact", "holds 2 answers"),
        (b"42", "math", "holds no answer"),
        ({"at": b"x"}, None, "holds no answer"),
    ],
)
def test_an_answer_that_nothing_can_match_is_refused(value: Any, verifier: str | None, says: str) -> None:
    with pytest.raises(DataError) as error:
        prompt({"prompt": "?", "answer": value}, verifier)
    assert says in str(error.value)


def test_types_of_columns_leave_no_trace_in_an_answer(tmp_path: Path) -> None:
    table = pa.table(
        {
            "prompt": ["a?", "b?"],
            "answer": pa.array([0.1, 2.5], pa.float32()),
            "half": pa.array([np.float16(0.1), None], pa.float16()),
            "parts": pa.array([[{"x": 0.1}], []], pa.list_(pa.struct([("x", pa.float32())]))),
        }
    )
    encoded = pa.table({"prompt": ["a?"], "answer": pa.array([0.1], pa.float32()).dictionary_encode()})
    pyarrow.feather.write_feather(encoded, tmp_path / "encoded.arrow")
    (row,) = read_splits(ConvertOptions(source=str(tmp_path / "encoded.arrow")), "")["train"]
    assert row.values["answer"] == 0.1
    pq.write_table(table, tmp_path / "rows.parquet")
    options = ConvertOptions(source=str(tmp_path / "rows.parquet"), verifier="math")
    first, second = (jsonl.prompt(row.values, options) for row in jsonl.read(options)["train"])
    assert (first.ground_truth, second.ground_truth) == ("0.1", "2.5")
    assert (first.extra_info["half"], first.extra_info["parts"]) == (0.1, [{"x": 0.1}])


def test_values_nested_without_end_are_refused_with_their_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = "[" * 900 + "]" * 900
    chats = '{"messages": ' * 900 + "1" + "}" * 900
    for row in (f'{{"prompt": "?", "answer": {deep}}}', f'{{"prompt": {chats}, "answer": 1}}'):
        (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "?", "answer": "1"}}\n{row}\n')
        arguments = ["prep", "jsonl", "--source", str(tmp_path / "rows.jsonl"), "--verifier", "math"]
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
        assert "rows.jsonl, line 2: " in capsys.readouterr().err


def test_structs_of_search_r1_and_tinyzero() -> None:
    row = {
        "data_source": "countdown",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"numbers": [4, 6], "target": 24}},
        "extra_info": {"split": "train", "index": 7, "hint": "times"},
    }
    converted = prompt(row, "countdown")
    assert (converted.data_source, converted.ability, converted.extra_info["hint"]) == ("countdown", "math", "times")
    assert countdown.verify(converted.request("<answer>4 * 6</answer>", "stop")).score == 1.0
    search = {
        **row,
        "data_source": "searchR1_nq",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Oslo"]}},
    }
    assert exact.verify(prompt(search, "exact").request("Oslo", "stop")).score == 1.0
    assert prompt(search, None).ground_truth == '{"target": ["Oslo"]}'
    number = {**row, "reward_model": {"style": "rule", "ground_truth": "4"}}
    assert gsm8k.verify(prompt(number, "gsm8k").request("#### 4", "stop")).score == 1.0


# Choices


@pytest.mark.parametrize(
    ("choices", "answer", "verifier"),
    [
        (["Rome", "Paris"], 1, "multiple_choice(truth=index0)"),
        (["Rome", "Paris"], 2, "multiple_choice(truth=index1)"),
        (["Rome", "Paris"], "Paris", "multiple_choice"),
        (["A) Rome", "B) Paris"], "B", "multiple_choice"),
        ({"text": ["Rome", "Paris"], "label": ["A", "B"]}, "B", "multiple_choice"),
        ({"text": ["Rome", "Paris"], "label": ["1", "2"]}, "2", "multiple_choice"),
        ([{"label": "A", "text": "Rome"}, {"label": "B", "text": "Paris"}], "B", "multiple_choice"),
        ({"A": "Rome", "B": "Paris", "C": None}, "B", "multiple_choice"),
        ('["Rome", "Paris"]', "B", "multiple_choice"),
    ],
)
def test_choices_in_any_form_are_shown_and_scored(choices: Any, answer: Any, verifier: str) -> None:
    row = {"question": "Capital of France?", "options": choices, "target": answer}
    for columns in ({"choices": "options"}, {}):
        converted = prompt(row, verifier, prompt="question", answer="target", **columns)
        assert converted.messages[-1]["content"] == "Capital of France?\n\nA. Rome\nB. Paris"
        assert converted.extra_info["choices"] == ["Rome", "Paris"]
        truth: Any = "index0" if "index0" in verifier else "index1" if "index1" in verifier else "letter"
        for response, score in (("The answer is (B)", 1.0), ("The answer is (A)", 0.0)):
            assert multiple_choice.verify(converted.request(response, "stop"), truth=truth).score == score


@pytest.mark.parametrize("answer", [2, 2.0, [2], {"value": 2}, '{"answer": 2}'])
def test_a_number_beside_choices_is_refused_unless_it_is_a_label(answer: Any) -> None:
    row = {"prompt": "1 + 2?", "choices": ["1", "2", "3", "4"], "answer": answer}
    with pytest.raises(DataError) as error:
        prompt(row, "multiple_choice")
    assert "may be an index of the choices" in str(error.value)
    assert "multiple_choice(truth=index0)" in error.value.hint
    indexed = prompt(row, "multiple_choice(truth=index0)").request("The answer is (C)", "stop")
    assert multiple_choice.verify(indexed, truth="index0").score == 1.0
    labelled = {**row, "choices": {"text": ["3", "1"], "label": ["1", "2"]}}
    assert prompt(labelled, "multiple_choice").ground_truth == "B"
    assert prompt({**row, "answer": "2"}, "multiple_choice").ground_truth == "2"
    assert prompt({**row, "choices": [1.5, 2.5], "answer": 2.5}, "multiple_choice").ground_truth == "2.5"


def test_choices_that_the_question_shows_are_not_repeated() -> None:
    question = "Capital of France?\n(A) Rome\n(B) Paris"
    converted = prompt({"prompt": question, "choices": ["Rome", "Paris"], "answer": "B"}, "multiple_choice")
    assert converted.messages[-1]["content"] == question
    with pytest.raises(DataError, match="no list of 2 to 10 choices"):
        prompt({"prompt": "?", "choices": ["one"], "answer": "A"}, "multiple_choice")


# Tests of code


def packed(tests: list[dict[str, Any]]) -> str:
    """As LiveCodeBench stores its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


STDIN = [{"input": "3\n", "output": "6\n", "testtype": "stdin"}, {"input": "4\n", "output": "8\n", "testtype": "stdin"}]
CALLS = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
KODCODE = "from solution import add\nimport pytest\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
KODCODE_RAISES = KODCODE + "\ndef test_text():\n    with pytest.raises(ValueError):\n        add('a', 'b')\n"
KODCODE_MATCH = KODCODE + (
    "\ndef test_text():\n    with pytest.raises(ValueError, match='^a') as caught:  # pytest.approx\n"
    "        add('a', 'b')\n    assert str(caught.value) == 'a'\n    assert caught.type is ValueError\n"
)
REVERSE = "```python\nimport json\nprint(json.dumps(json.loads(input())[::-1]))  # 2 * 2\n```"
METADATA = '{"func_name": "add"}'
STARTER = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        "
FORMS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "apps": (json.dumps({"inputs": ["3\n"], "outputs": ["6\n"]}), {}, DOUBLE),
    "taco-lines": ({"inputs": [["3"]], "outputs": [["6"]], "fn_name": None}, {}, DOUBLE),
    "taco-numbers": ({"inputs": ["3"], "outputs": [6]}, {}, DOUBLE),
    "taco-calls": (json.dumps({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}), {}, ADD),
    "apps-column": ({"input_output": json.dumps({"inputs": ["3"], "outputs": ["6"]})}, {}, DOUBLE),
    "codecontests": ({"input": ["3\n"], "output": ["6\n"]}, {}, DOUBLE),
    "eurus": ({"style": "rule", "ground_truth": json.dumps({"inputs": ["3"], "outputs": ["6"]})}, {}, DOUBLE),
    "livecodebench": (json.dumps(STDIN), {}, DOUBLE),
    "livecodebench-calls": (json.dumps(CALLS), {"metadata": METADATA}, ADD_METHOD),
    "livecodebench-starter": (json.dumps(CALLS), {"metadata": "{}", "starter_code": STARTER}, ADD_METHOD),
    "livecodebench-private": (packed(CALLS), {"metadata": METADATA}, ADD_METHOD),
    "deepcoder": ([{**CALLS[0], "metadata": {"func_name": "add"}}], {}, ADD_METHOD),
    "deepcoder-stdin": ([{"type": "stdin_stdout", "input": "3\n", "output": "6\n", "fn_name": None}], {}, DOUBLE),
    "deepcoder-calls": ([{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}], {}, ADD),
    "synthetic-1": (
        {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "3\n", "output": "6\n"}]},
        {},
        DOUBLE,
    ),
    "sandbox-fusion": ([{"input": {"stdin": "3\n"}, "output": {"stdout": "6\n"}}], {}, DOUBLE),
    "open-r1": ([{"input": "3\n", "output": "6\n"}], {}, DOUBLE),
    "acecode": (["assert add(1, 2) == 3", "assert add(2, 2) == 4"], {}, ADD),
    "mbpp": (["assert add(1, one) == 2"], {"test_setup_code": "one = 1", "test_imports": ["import math"]}, ADD),
    "mbpp-text": ("assert add(1, 2) == 3\nassert add(2, 2) == 4", {}, ADD),
    "kodcode": (KODCODE, {}, ADD),
    "kodcode-raises": (KODCODE_RAISES, {}, ADD),
    "kodcode-match": (KODCODE_MATCH, {}, ADD),
    "json-lists": ({"inputs": '["3", "4"]', "outputs": '["6", "8"]'}, {}, DOUBLE),
    "json-lists-of-lines": ({"inputs": '[["3"], ["4"]]', "outputs": '[["6"], ["8"]]'}, {}, DOUBLE),
    "json-calls": ({"inputs": "[[1, 2]]", "outputs": "[[3]]", "fn_name": "add"}, {}, ADD),
    "kodcode-info": (KODCODE.partition("\n")[2], {"test_info": [{"function_name": "add"}]}, ADD),
    "code-r1": ({"functional": "def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)"}, {}, ADD),
    "humaneval": ("def check(candidate):\n    assert candidate(1, 2) == 3\n", {"entry_point": "add"}, ADD),
    "verl-assert": (json.dumps({"inputs": [""], "outputs": [""], "assert_case": ["assert add(1, 2) == 3"]}), {}, ADD),
    "verl-assert-alone": ({"assert_case": ["assert add(1, 2) == 3"]}, {}, ADD),
    "verl-no-assert": ({"inputs": ["3"], "outputs": ["6"], "assert_case": [""]}, {}, DOUBLE),
    "ours": ({"kind": "functional", "entry_point": "add", "cases": [{"input": [1, 2], "output": 3}]}, {}, ADD),
}


@pytest.mark.parametrize(("tests", "others", "solution"), FORMS.values(), ids=FORMS)
def test_code_in_each_public_form_scores_right_and_wrong(tests: Any, others: dict[str, Any], solution: str) -> None:
    converted = prompt({"prompt": "Write it.", "tests": tests, **others}, "code", answer="tests")
    code.check_row(converted.request())
    assert code.verify(converted.request(solution, "stop")).score == 1.0
    for wrong in (solution.replace("2 *", "3 *").replace("a + b", "a - b"), "```python\npass\n```"):
        verdict = code.verify(converted.request(wrong, "stop"))
        assert (verdict.score, verdict.outcome) == (0.0, Outcome.WRONG), verdict


@pytest.mark.parametrize(("input_name", "output_name"), [("input", "output"), ("inputs", "outputs")])
def test_a_standard_input_that_looks_like_json_is_one_case(input_name: str, output_name: str) -> None:
    for text, wanted in (("[1, 2, 3]", "[3, 2, 1]"), ("[]", "0"), ('{"a": 1}', "[1]"), ("[[1], 2]", "[2, [1]]")):
        converted = json.loads(code_tests({input_name: text, output_name: wanted}, "tests", {}))
        assert converted == {"kind": "stdio", "cases": [{"input": text, "output": wanted}]}
    converted = prompt(
        {"prompt": "?", "tests": {input_name: "[1, 2, 3]", output_name: "[3, 2, 1]"}}, "code", answer="tests"
    )
    assert code.verify(converted.request(REVERSE, "stop")).score == 1.0


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ('["a", "b"]', "2"),
        ("[[1, 2], [3, 4]]", "[[1, 3], [2, 4]]"),
        ("[[1, 2]]", "3"),
        ("[]", "[]"),
        ('["a"]', "[]"),
        (["a"], '["b"]'),
    ],
)
def test_a_text_that_may_be_one_case_or_several_is_refused(inputs: Any, outputs: Any) -> None:
    with pytest.raises(DataError, match="may be one case or a list of several; give inputs and outputs as lists"):
        code_tests({"inputs": inputs, "outputs": outputs}, "tests", {})


def test_pytest_raises_gives_a_key_error_with_its_message() -> None:
    body = "    with pytest.raises(KeyError) as e:\n        add({}, 'a')\n    assert str(e.value) == \"'a'\"\n"
    converted = prompt({"prompt": "?", "tests": f"{KODCODE}\ndef test_key():\n{body}"}, "code", answer="tests")
    solution = "```python\ndef add(a, b):\n    return a[b] if isinstance(a, dict) else a + b\n```"
    assert code.verify(converted.request(solution, "stop")).score == 1.0


def test_pytest_raises_compares_the_message() -> None:
    converted = prompt({"prompt": "?", "tests": KODCODE_MATCH}, "code", answer="tests")
    for wrong in (ADD.replace("ValueError(a)", "ValueError('b')"), ADD.replace("ValueError(a)", "TypeError(a)")):
        assert code.verify(converted.request(wrong, "stop")).outcome is Outcome.WRONG


def test_long_sources_of_tests_that_do_not_parse_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("def test_a(\n", "from solution import (\n", "# assert\ndef test_a() "):
        with pytest.raises(DataError, match="not Python source"):
            code_tests("assert f()\n" + line * 8000, "tests", {})
    monkeypatch.setattr("rlcli_data_prep.code_tests.MAX_SOURCE_CHARS", 100)
    with pytest.raises(DataError, match="of source"):
        code_tests("assert f(1) == 2\n" * 10, "tests", {})


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        (KODCODE + "class TestB:\n    def test_b(self):\n        assert add(1, 1) == 3\n", "TestB, which only pytest"),
        (KODCODE + "class B(Base):\n    def test_b(self):\n        assert add(1, 1) == 3\n", "B, which only pytest"),
        (KODCODE + "async def test_b():\n    assert add(1, 1) == 3\n", "test_b, which only pytest would run"),
        (KODCODE + "if True:\n    def test_b():\n        assert add(1, 1) == 3\n", "test_b, which only pytest"),
        (KODCODE + "def setup_module():\n    pass\n", "setup_module, which only pytest would run"),
        ('from solution import add\ndef test_a():\n    print("assert", add(1, 2))\n', "assert nothing"),
        ("from solution import add\ndef test_a():\n    assert True, add(1, 2)\n", "assert nothing"),
        (["print('assert', add(1, 2))"], "asserts nothing"),
        (["assert add(1, 2 == 3"], "not Python source"),
        ("def check(candidate):\n    assert candidate(1 == 2\n", "not Python source"),
        (KODCODE.replace("import pytest", "import pytest, math"), "in another form than 'import pytest'"),
        (KODCODE.replace("import pytest", "import pytest as pt"), "in another form than 'import pytest'"),
        (KODCODE.replace("import pytest", "from pytest import raises"), "in another form than 'import pytest'"),
        (KODCODE.replace("import add", "import add; import math"), "import the module solution"),
        (KODCODE + "from solution import sub as minus\n", "import each name as it is"),
        (KODCODE + "def test_b():\n    pytest.raises(ValueError, add, 'a', 'b')\n", "a call of pytest.raises"),
        (
            KODCODE + "def test_b():\n    with pytest.raises(ValueError, add, 'a'):\n        pass\n",
            "a call of pytest.raises",
        ),
        (KODCODE_RAISES.replace("):\n        add", ") as e:\n        e.exconly()\n        add"), "reads exconly"),
        ([], "holds no tests"),
        ("", "no text in column 'tests'"),
        ("print(1)", "holds no tests"),
        ("{'inputs': ['3'], 'outputs': ['6']}", "not JSON"),
        ({"inputs": ["3"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"a": 1}, "no form of tests that is known (it has a)"),
        (["add(1, 2)"], "asserts nothing"),
        ([{"input": "1"}], "neither an assert nor an input and output"),
        ([STDIN[0], CALLS[0]], "tests of the kinds functional, stdin"),
        ([{**STDIN[0], "testtype": "interactive"}], "tests of the kinds interactive"),
        (CALLS, "a function whose name is nowhere"),
        ({"language": "cpp", "test_cases": STDIN}, "tests of cpp, not of Python"),
        ({"inputs": ["1"], "outputs": ["1"], "assert_case": ["assert f(1) == 2"]}, "that are not empty"),
        ({"inputs": [b"1"], "outputs": ["1"]}, "no text"),
        (KODCODE.replace("()", "(capsys)"), "takes arguments"),
        ("class TestAdd:\n    def test_sum(self):\n        assert add(1, 2) == 3\n", "no assert that would run"),
        (KODCODE + "@pytest.mark.slow\ndef test_b():\n    assert add(1, 1) == 2\n", "pytest.mark"),
        (KODCODE.replace("from solution import add", "import solution"), "import the module solution"),
        (KODCODE.replace("import add", "import add as f"), "import each name as it is"),
        (base64.b64encode(zlib.compress(pickle.dumps(["a"]))).decode(), "more than one text"),
        (base64.b64encode(zlib.compress(b"nothing")).decode(), "cannot be read"),
        ("eJxx", "cannot be read"),
        (7, "holds no tests"),
    ],
)
def test_tests_in_no_known_form_are_refused(tests: Any, says: str) -> None:
    with pytest.raises(DataError) as error:
        code_tests(tests, "tests", {})
    assert says in str(error.value)
    assert error.value.hint


def test_a_pickle_is_read_and_never_loaded(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "touched",))

    content = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
    with pytest.raises(DataError, match="cannot be read: a pickle of more than one text"):
        code_tests(content, "tests", {})
    assert list(tmp_path.iterdir()) == []


def test_packed_tests_that_unpack_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcli_data_prep.code_tests.DATA_LINE_BYTES", 1 << 20)
    content = base64.b64encode(zlib.compress(b"[" + b"0," * (1 << 20) + b"0]")).decode()
    with pytest.raises(DataError, match="packed tests of more than 1 MiB"):
        code_tests(content, "tests", {})


# Any value

WORDS = (
    *("", "4", "nan", "[", '["4"]', "\ud800", "eJwDAAAAAAE=", '{"inputs": [1], "outputs": [2]}'),
    *("stdin", "functional", "user", "assistant"),
    *("assert f(1) == 2", "def check(candidate):", "from solution import f", "def test_a(): assert f()"),
)
FIELDS = (
    *("inputs", "outputs", "input", "output", "fn_name", "assert_case", "testtype", "metadata", "language"),
    *("test_cases", "functional", "pytest", "test", "kind"),
    *("role", "content", "from", "value", "messages", "text", "label", "A", "B"),
)
NUMBERS = st.integers() | st.floats() | st.decimals()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.sampled_from(WORDS) | st.binary(max_size=2) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=8,
)
NAMED = (None, "math", "gsm8k", "exact", "multiple_choice", "code", "countdown")


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(VALUES, VALUES, VALUES, st.sampled_from(NAMED))
def test_any_value_gives_a_prompt_or_an_error_with_a_fix(
    question: Any, answer: Any, options: Any, verifier: str | None
) -> None:
    row = {"prompt": question, "answer": answer, "choices": options, "metadata": answer}
    refusals: list[DataError] = []
    try:
        converted = prompt(row, verifier)
        jsonl.note(row, ConvertOptions(source="rows.jsonl", verifier=verifier))
    except DataError as error:
        refusals.append(error)
    if refusals:
        assert all(error.hint and "\n" not in str(error) for error in refusals)
        return
    assert converted.ground_truth.strip()
    assert all(message["content"].strip() for message in converted.messages)
    json.dumps(dict(converted.extra_info), allow_nan=False)
    for text in (converted.ground_truth, *(part for message in converted.messages for part in message.values())):
        text.encode()


# Files


ROWS = [{"prompt": f"What is {number}+{number}?", "answer": str(2 * number)} for number in range(600)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select(range(8))}).save_to_disk(tmp_path / "both")
    rows.save_to_disk(tmp_path / "one", num_shards=3)
    (tmp_path / "one" / "cache-0123.arrow").write_bytes(b"a cache of map")
    return tmp_path


def test_folders_of_save_to_disk_are_read(saved: Path) -> None:
    splits = {
        split: [row.values for row in rows]
        for split, rows in read_splits(ConvertOptions(source=str(saved / "both")), "").items()
    }
    assert splits == {"train": ROWS, "test": ROWS[:8]}
    single = hf.read(ConvertOptions(source=str(saved / "one")))
    assert [row.values for row in single["train"]] == ROWS
    assert list(single) == ["train"]


def test_arrow_and_tsv_files_are_read(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pyarrow.feather.write_feather(table, tmp_path / "random.arrow")
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as stream:
        stream.write_table(table)
    lines = "prompt\tanswer\n" + "".join(f"{row['prompt']}\t{row['answer']}\n" for row in ROWS)
    (tmp_path / "rows.tsv").write_text(lines)
    for name in ("random.arrow", "stream.arrow", "rows.tsv"):
        rows = list(read_splits(ConvertOptions(source=str(tmp_path / name)), "")["train"])
        assert [row.values for row in rows] == ROWS, name
    assert rows[-1].where == "rows.tsv, line 601"


def test_a_damaged_arrow_file_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as stream:
        stream.write_table(table)
    original = (tmp_path / "rows.arrow").read_bytes()
    offsets = np.frombuffer(table["prompt"].chunk(0).buffers()[1], np.int32)[:601].tobytes()
    assert offsets in original
    beyond = np.array([2**31 - 1] * 601, np.int32).tobytes()
    for content in (original[:500], b"no arrow", original.replace(offsets, beyond)):
        (tmp_path / "rows.arrow").write_bytes(content)
        with pytest.raises(DataError, match=r"rows\.arrow cannot be read"):
            list(read_splits(ConvertOptions(source=str(tmp_path / "rows.arrow")), "")["train"])


def test_a_row_that_cannot_be_right_stops_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "1?", "answer": ["1"]}, {"prompt": "2?", "answer": {"unit": "m"}}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["prep", "jsonl", "--source", str(tmp_path / "rows.jsonl"), "--verifier", "math"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert "rows.jsonl, line 2: 'answer' holds a struct (unit)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
