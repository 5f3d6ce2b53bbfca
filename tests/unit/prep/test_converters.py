from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcli_data_prep import (
    aime,
    chartqa,
    clevr_count,
    countdown,
    dapo_math,
    deepscaler,
    geometry3k,
    gsm8k,
    hf,
    humaneval,
    jsonl,
    math,
    math500,
    mbpp,
    orz,
    reasoning_gym,
    words,
)
from rlcli_verifiers import countdown as countdown_verifier
from rlcli_verifiers import gsm8k as gsm8k_verifier
from rlcli_verifiers import math as math_verifier

from rlcli.data.prompts.parquet_schema import prompt_row
from rlcli.errors import ConfigError, DataError, SetupError
from rlcli.images.row_images import BadImage
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow, VerifyRequest
from tests.shared_data import shared_data

MATH_ROW = {
    "problem": "Half of 1?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": r"$\boxed{2}$ no, $\boxed{\frac{1}{2}}$.",
}
DAPO_ROW = {
    "prompt": [{"role": "user", "content": "Solve. Answer: $Answer\n\n2+2?"}],
    "reward_model": {"ground_truth": "4", "style": "rule"},
    "extra_info": {"index": "a-b"},
}
ORZ_ROW = {"0": {"from": "human", "value": "2+2?"}, "1": {"from": "assistant", "ground_truth": {"value": "4"}}}
HUMANEVAL_ROW = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}
MBPP_ROW = {
    "task_id": 602,
    "prompt": "Write a function to double a number.",
    "code": "def double(x):\n  return 2 * x",
    "test_imports": ["import math"],
    "test_list": ["assert double(2) == 4", "assert double(math.inf) == math.inf"],
}
GSM8K_ROW = {"question": "2+2?", "answer": "So\n#### 4"}
MATH500_ROW = {
    **MATH_ROW,
    "answer": r"\frac{1}{2}",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "test/algebra/1.json",
}
JSONL = ConvertOptions(
    source="rows.jsonl", verifier="exact", columns={"prompt": "question", "answer": "target", "topic": "about"}
)
ROW_OF: list[tuple[Converter, dict[str, Any], ConvertOptions]] = [
    (gsm8k.CONVERTER, GSM8K_ROW, ConvertOptions()),
    (math.CONVERTER, MATH_ROW, ConvertOptions()),
    (math500.CONVERTER, MATH500_ROW, ConvertOptions()),
    (aime.CONVERTER, {"ID": "2024-I-1", "Problem": "2+2?", "Answer": 4}, ConvertOptions()),
    (humaneval.CONVERTER, HUMANEVAL_ROW, ConvertOptions()),
    (mbpp.CONVERTER, MBPP_ROW, ConvertOptions()),
    (dapo_math.CONVERTER, DAPO_ROW, ConvertOptions()),
    (deepscaler.CONVERTER, {"problem": "2+2?", "answer": "4", "solution": r"\boxed{4}"}, ConvertOptions()),
    (orz.CONVERTER, ORZ_ROW, ConvertOptions()),
    (geometry3k.CONVERTER, {"images": [b"a"], "problem": "<image>Find x.", "answer": "4"}, ConvertOptions()),
    (clevr_count.CONVERTER, {"image": b"a", "problem": "?", "solution": "<answer> 3 </answer>"}, ConvertOptions()),
    (chartqa.CONVERTER, {"image": b"a", "query": "?", "label": ["4"]}, ConvertOptions()),
    (jsonl.CONVERTER, {"question": "2+2?", "target": "4", "about": "sums"}, JSONL),
    (hf.CONVERTER, {"question": "2+2?", "target": "4", "about": "sums"}, JSONL),
]


def write(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    return file


def read(converter: Converter, source: Path | str | None, **options: Any) -> dict[str, list[RawRow]]:
    convert_options = ConvertOptions(source=None if source is None else str(source), **options)
    return {split: list(rows) for split, rows in converter.read(convert_options).items()}


def prompts(converter: Converter, source: Path | str | None, **options: Any) -> dict[str, list[Prompt]]:
    convert_options = ConvertOptions(source=None if source is None else str(source), **options)
    splits = {split: list(rows) for split, rows in converter.read(convert_options).items()}
    return {split: [converter.prompt(row.values, convert_options) for row in rows] for split, rows in splits.items()}


def score(verify: Callable[[VerifyRequest], Any], prompt: Prompt, response: str) -> float:
    request = VerifyRequest(response, prompt.ground_truth, prompt.messages, prompt.data_source, prompt.extra_info)
    return float(verify(request).score)


# Rows


def test_math_takes_the_last_box_and_keeps_the_solution() -> None:
    prompt = math.prompt(MATH_ROW, ConvertOptions())
    assert (prompt.verifier, prompt.ability, prompt.ground_truth) == ("math", "math", r"\frac{1}{2}")
    assert prompt.messages[0]["content"] == f"Half of 1?\n\n{math.INSTRUCTION}"
    # One box only: to the verifier, several are a list of answers.
    assert prompt.extra_info["response"] == r"${2}$ no, $\boxed{\frac{1}{2}}$."
    assert (prompt.extra_info["level"], prompt.extra_info["type"]) == ("Level 1", "Algebra")
    only_answer = math.prompt({"problem": "2+2?", "answer": " 4 ", "difficulty": 5.0}, ConvertOptions())
    assert (only_answer.ground_truth, "response" in only_answer.extra_info) == ("4", False)
    with pytest.raises(DataError, match=r"'solution' has no \\boxed\{\} answer: …'it is 4'"):
        math.prompt({"problem": "2+2?", "solution": "it is 4"}, ConvertOptions())


def test_of_several_answers_that_math_asks_for_each_box_is_one() -> None:
    row = {"problem": "Solve. Enter all, separated by commas.", "solution": r"So $\boxed{3}$ or $\boxed{-\frac12}$."}
    prompt = math.prompt(row, ConvertOptions())
    assert prompt.ground_truth == r"3, -\frac12"
    assert prompt.extra_info["response"] == "So ${3}$ or ${-\\frac12}$.\n\nThe answers are $\\boxed{3, -\\frac12}$."
    assert score(math_verifier.verify, prompt, r"They are \boxed{-1/2, 3}.") == 1.0
    assert score(math_verifier.verify, prompt, r"It is \boxed{-1/2}.") == 0.0
    variant = {**row, "solution": r"First $\boxed{3, 4}$."}
    assert math.prompt(variant, ConvertOptions()).ground_truth == "3, 4"


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{a} or \fbox{\{1, 2\}}.", r"\{1, 2\}"),
        (r"so $\boxed 2$.", "2"),
        (r"so $\boxed{\text{a } \} b}$", r"\text{a } \} b"),
        (r"\boxed{1} and \boxed{2", None),
        ("none", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box_of_a_solution(solution: str, answer: str | None) -> None:
    assert math.last_boxed(solution) == answer


def test_math500_refuses_rows_of_another_part_of_math() -> None:
    prompt = math500.prompt(MATH500_ROW, ConvertOptions())
    assert prompt.ground_truth == r"\frac{1}{2}"
    assert prompt.extra_info["response"].endswith(r"$\boxed{\frac{1}{2}}$.")
    with pytest.raises(DataError, match="no text in column 'answer'"):
        math500.prompt(MATH_ROW, ConvertOptions())


@pytest.mark.parametrize(
    ("answer", "truth"), [(73, "73"), ("073", "73"), (0, "0"), (204.0, "204"), (r"336^\circ", "336"), ("$25$", "25")]
)
def test_an_aime_answer_is_an_integer_to_999(answer: Any, truth: str) -> None:
    assert aime.prompt({"Problem": "?", "Answer": answer}, ConvertOptions()).ground_truth == truth


@pytest.mark.parametrize("answer", [1000, -1, 2.5, "1/2", None, True, "", float("nan"), float("inf"), [7]])
def test_any_other_aime_answer_is_refused(answer: Any) -> None:
    with pytest.raises(DataError, match="'answer' is not an integer from 0 to 999"):
        aime.prompt({"problem": "?", "answer": answer}, ConvertOptions())


def test_aime_tells_the_years_apart(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", [{"problem": "2+2?", "answer": "4"}])
    assert prompts(aime.CONVERTER, file)["test"][0].data_source == "aime"
    assert prompts(aime.CONVERTER, file, subset="2025")["test"][0].data_source == "aime2025"
    numbered = {"problem": 1, "question": "2+2?", "answer": 4, "year": 2024}
    prompt = aime.prompt(numbered, ConvertOptions())
    assert (prompt.data_source, prompt.messages[0]["content"].partition("\n")[0]) == ("aime2024", "2+2?")
    with pytest.raises(ConfigError, match="--subset = 1900: no such year"):
        aime.read(ConvertOptions(subset="1900"))


def test_humaneval_holds_stub_test_and_the_canonical_function() -> None:
    prompt = humaneval.prompt(HUMANEVAL_ROW, ConvertOptions())
    assert json.loads(prompt.ground_truth) == {
        "kind": "check",
        "test": HUMANEVAL_ROW["test"],
        "entry_point": "double",
    }
    assert "```python\ndef double(x):" in prompt.messages[0]["content"]
    assert prompt.extra_info["response"] == '```python\ndef double(x):\n    """Twice x."""\n    return 2 * x\n```'
    for column, text, pattern in [
        ("test", "assert double(2) == 4", "'test' defines no function check"),
        ("test", "def check(:", "is not Python"),
        ("canonical_solution", "    return (", "is not Python"),
        ("entry_point", "", "no text in column 'entry_point'"),
    ]:
        with pytest.raises(DataError, match=pattern):
            humaneval.prompt({**HUMANEVAL_ROW, column: text}, ConvertOptions())


def test_a_humaneval_test_that_calls_a_helper_has_it() -> None:
    stub = "def twice(x):\n    return 2 * x\n\n\ndef half(x):\n    'The x of which twice is given.'\n"
    test = "def check(candidate):\n    assert twice(candidate(6)) == 6\n    assert candidate(4) == 2\n"
    row = {**HUMANEVAL_ROW, "prompt": stub, "canonical_solution": "    return x / 2\n", "test": test}
    truth = json.loads(humaneval.prompt({**row, "entry_point": "half"}, ConvertOptions()).ground_truth)
    namespace: dict[str, Any] = {}
    exec(truth["test"], namespace)
    namespace["check"](lambda x: x / 2)
    with pytest.raises(AssertionError):
        namespace["check"](lambda x: x)


def test_mbpp_shows_one_test_and_holds_the_others_back() -> None:
    prompt = mbpp.prompt(MBPP_ROW, ConvertOptions())
    assert json.loads(prompt.ground_truth) == {
        "kind": "asserts",
        "asserts": MBPP_ROW["test_list"],
        "setup": "import math",
    }
    content = prompt.messages[0]["content"]
    assert "assert double(2) == 4" in content
    assert "math.inf" not in content
    assert prompt.extra_info["response"] == "```python\ndef double(x):\n  return 2 * x\n```"


def test_in_a_folder_of_several_datasets_the_file_of_that_name_is_read(tmp_path: Path) -> None:
    write(tmp_path / "HumanEval.jsonl", [HUMANEVAL_ROW])
    write(tmp_path / "sanitized-mbpp.jsonl", [MBPP_ROW])
    assert [p.data_source for p in prompts(humaneval.CONVERTER, tmp_path)["test"]] == [humaneval.HUB_ID]
    assert [p.data_source for p in prompts(mbpp.CONVERTER, tmp_path)["train"]] == [mbpp.HUB_ID]


def test_mbpp_is_parted_by_the_numbers_of_its_tasks(tmp_path: Path) -> None:
    tasks = [2, 11, 510, 511, 600, 601, 974]
    file = write(tmp_path / "sanitized-mbpp.json", [])
    file.write_text(json.dumps([{**MBPP_ROW, "task_id": task} for task in tasks]))
    splits = prompts(mbpp.CONVERTER, file)
    assert {split: [p.extra_info["task_id"] for p in them] for split, them in splits.items()} == {
        "train": [2, 511, 600, 601, 974],
        "test": [11, 510],
    }


def test_dapo_rows_come_once_with_the_paper_s_prompt(tmp_path: Path) -> None:
    other = {**DAPO_ROW, "extra_info": {"index": "c-d"}, "reward_model": {"ground_truth": "-5"}}
    file = tmp_path / "dapo-math-17k.parquet"
    pq.write_table(pa.Table.from_pylist([DAPO_ROW, other] * 100), file)
    train = prompts(dapo_math.CONVERTER, file)["train"]
    assert [prompt.ground_truth for prompt in train] == ["4", "-5"]
    assert train[0].messages == tuple(DAPO_ROW["prompt"])
    assert (train[0].verifier, train[0].data_source) == ("math", "math_dapo")
    assert score(math_verifier.verify, train[0], "Thus it is four.\nAnswer: $4$") == 1.0
    assert score(math_verifier.verify, train[0], "Thus it is four.\nAnswer: 5") == 0.0


def test_deepscaler_keeps_a_solution_only_if_it_gives_the_answer() -> None:
    row = {"problem": "2+2?", "answer": "4"}
    prompt = deepscaler.prompt({**row, "solution": r"Thus \boxed{4}."}, ConvertOptions())
    assert (prompt.ground_truth, prompt.extra_info["response"]) == ("4", r"Thus \boxed{4}.")
    for solution in (r"\boxed{5}", "four", "", None):
        assert "response" not in deepscaler.prompt({**row, "solution": solution}, ConvertOptions()).extra_info


def test_orz_reads_pairs_of_turns(tmp_path: Path) -> None:
    file = tmp_path / "orz_math_57k_collected.json"
    file.write_text(json.dumps([[ORZ_ROW["0"], ORZ_ROW["1"]]]))
    (prompt,) = prompts(orz.CONVERTER, file)["train"]
    assert (prompt.messages[0]["content"], prompt.ground_truth) == (f"2+2?\n\n{math.INSTRUCTION}", "4")
    with pytest.raises(DataError, match="not a pair of a human's turn"):
        orz.prompt({"0": ORZ_ROW["0"]}, ConvertOptions())


def test_jsonl_maps_columns_as_it_is_told(tmp_path: Path) -> None:
    rows = [
        {"q": " 2+2? ", "target": 4.0, "about": ["sums"]},
        {"q": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}], "target": {"value": "ü"}},
    ]
    file = write(tmp_path / "my.rows.jsonl", [rows[0], {**rows[1], "about": []}])
    columns = {"prompt": "q", "answer": "target", "topic": "about"}
    train = prompts(jsonl.CONVERTER, file, columns=columns, verifier="math", instruction="Box it.")["train"]
    assert train[0].messages == ({"role": "user", "content": "2+2?\n\nBox it."},)
    assert [message["content"] for message in train[1].messages] == ["Be brief.", "?\n\nBox it."]
    assert [prompt.ground_truth for prompt in train] == ["4", "ü"]
    assert [dict(prompt.extra_info) for prompt in train] == [
        {"target": 4.0, "about": ["sums"], "topic": ["sums"]},
        {"target": {"value": "ü"}, "about": [], "topic": []},
    ]
    assert (train[0].verifier, train[0].data_source, train[0].ability) == ("math", "my", "general")
    mapping = {"prompt": "q", "ground_truth": "target", "answer": "about"}
    first, _ = prompts(jsonl.CONVERTER, file, columns=mapping, verifier="math")["train"]
    assert first.ground_truth == "4"
    assert dict(first.extra_info) == {"target": 4.0, "about": ["sums"], "answer": ["sums"]}
    converted = prompts(
        jsonl.CONVERTER, file, columns=columns, verifier="a * 1.0 + b", data_source="mine", ability="code"
    )["train"][0]
    assert (converted.verifier, converted.data_source, converted.ability) == ("a * 1.0 + b", "mine", "code")


def test_jsonl_and_hf_say_what_they_lack(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"q": "?"}])
    for converter in (jsonl.CONVERTER, hf.CONVERTER):
        with pytest.raises(ConfigError, match="--source is not given"):
            converter.read(ConvertOptions(verifier="math"))
    with pytest.raises(DataError, match="no such file or folder: openai/gsm8k; for a hub dataset, use: rlcli prep hf"):
        jsonl.read(ConvertOptions(source="openai/gsm8k", verifier="math"))
    with pytest.raises(
        DataError, match=r"no column 'prompt' \(the row has q\); name the column with --columns prompt="
    ):
        prompts(jsonl.CONVERTER, file, verifier="math")
    with pytest.raises(DataError, match=r"no column 'answer' .*--columns answer=THEIRS"):
        prompts(jsonl.CONVERTER, file, verifier="math", columns={"prompt": "q"})
    columns = {"prompt": "q", "answer": "q", "topic": "about"}
    with pytest.raises(DataError, match=r"no column 'about' \(the row has q\)"):
        prompts(jsonl.CONVERTER, file, verifier="math", columns=columns)


def test_jsonl_needs_neither_a_verifier_nor_then_an_answer(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": "2+2?", "ground_truth": 4}, {"prompt": "Write.", "words": 9}])
    first, second = prompts(jsonl.CONVERTER, file)["train"]
    assert (first.verifier, first.ground_truth, dict(first.extra_info)) == ("", "4", {"ground_truth": 4})
    assert (second.verifier, second.ground_truth, dict(second.extra_info)) == ("", "", {"words": 9})
    row = {"prompt": "2+2?", "answer": "4", "at": datetime.date(2026, 1, 1), "raw": b"x"}
    assert dict(jsonl.prompt(row, ConvertOptions(source="x")).extra_info) == {"answer": "4"}


def test_hf_names_its_rows_after_the_dataset(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [{"prompt": "2+2?", "answer": 4}])
    (prompt,) = prompts(hf.CONVERTER, tmp_path, verifier="math")["test"]
    assert (prompt.data_source, prompt.ground_truth) == (str(tmp_path), "4")


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", " \u2028", "\ud800", "a\u2028b", "4", "#### 4", r"\boxed{", "\x00", "x" * 5000]),
    st.binary(max_size=3),
    st.recursive(st.none() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    st.dictionaries(st.sampled_from(["value", "index", "ground_truth", "role", "content"]), st.text(max_size=3)),
)


@pytest.mark.parametrize(("converter", "row", "options"), ROW_OF, ids=[entry[0].name for entry in ROW_OF])
def test_an_odd_value_gives_a_row_that_can_be_written_or_a_data_error(
    converter: Converter, row: dict[str, Any], options: ConvertOptions
) -> None:
    refusals: list[DataError] = []
    valid_prompt = converter.prompt(row, options)
    assert (valid_prompt.id, bool(valid_prompt.ground_truth), bool(valid_prompt.verifier)) == ("", True, True)

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(sorted(row)), ODD, st.booleans())
    def check(column: str, value: Any, leave_out: bool) -> None:
        odd = {name: row[name] for name in row if name != column}
        if not leave_out:
            odd[column] = value
        try:
            prompt = converter.prompt(odd, options)
        except DataError as error:
            refusals.append(error)
            return
        except BadImage:
            return
        stored = prompt_row(prompt)
        stored.pop("images", None)
        json.dumps(stored, allow_nan=False)
        for text in (prompt.ground_truth, *(part for message in prompt.messages for part in message.values())):
            text.encode()
            assert text.strip()

    check()
    assert refusals
    assert all(error.hint and "\n" not in str(error) for error in refusals)


# Generated


@pytest.mark.parametrize("size", [3, 4, 6])
def test_countdown_problems_are_solvable_distinct_and_apart(size: int) -> None:
    splits = prompts(countdown.CONVERTER, None, difficulty=size, count=300, test_count=50)
    truths = {split: [json.loads(prompt.ground_truth) for prompt in them] for split, them in splits.items()}
    assert {split: len(them) for split, them in truths.items()} == {"train": 300, "test": 50}
    for truth in truths["train"] + truths["test"]:
        assert (len(truth["numbers"]), truth["target"] in truth["numbers"]) == (size, False)
    problems = {(*sorted(truth["numbers"]), truth["target"]) for them in truths.values() for truth in them}
    assert len(problems) == 350
    numbers = {split: {tuple(sorted(truth["numbers"])) for truth in them} for split, them in truths.items()}
    assert not numbers["train"] & numbers["test"]
    for prompt in splits["train"] + splits["test"]:
        assert score(countdown_verifier.verify, prompt, prompt.extra_info["response"]) == 1.0


def test_countdown_depends_on_the_seed_alone() -> None:
    few = {"count": 20, "test_count": 5}
    assert prompts(countdown.CONVERTER, None, seed=1, **few) == prompts(countdown.CONVERTER, None, seed=1, **few)
    assert prompts(countdown.CONVERTER, None, seed=1, **few) != prompts(countdown.CONVERTER, None, seed=2, **few)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"difficulty": 2}, "--difficulty = 2"),
        ({"difficulty": 7}, "--difficulty = 7"),
        ({"count": 0}, "--count = 0"),
        ({"test_count": -1}, "--test-count = -1"),
    ],
)
def test_countdown_refuses_what_is_out_of_bounds(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        countdown.read(ConvertOptions(**options))


def test_countdown_ends_where_there_are_no_more_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(countdown, "LARGEST_NUMBER", 3)
    with pytest.raises(ConfigError, match="9999 rows of 3 numbers are more than can be found"):
        countdown.read(ConvertOptions(difficulty=3, count=9999, test_count=1))


def test_reasoning_gym_names_its_extra_where_it_is_missing() -> None:
    if "reasoning_gym" in sys.modules or _installed():
        pytest.skip("reasoning_gym is installed")
    with pytest.raises(SetupError, match=r"not installed: reasoning_gym; .*'rlcli\[reasoning-gym\]'"):
        reasoning_gym.read(ConvertOptions(task="leg_counting"))


def _installed() -> bool:
    from importlib.util import find_spec

    return find_spec("reasoning_gym") is not None


def test_reasoning_gym_s_own_answers_score_one() -> None:
    pytest.importorskip("reasoning_gym")
    from rlcli_verifiers import reasoning_gym as verifier

    splits = prompts(reasoning_gym.CONVERTER, None, task="leg_counting", count=30, test_count=10, seed=3)
    assert splits == prompts(reasoning_gym.CONVERTER, None, task="leg_counting", count=30, test_count=10, seed=3)
    questions = [prompt.messages[0]["content"] for them in splits.values() for prompt in them]
    assert len(set(questions)) == len(questions) == 40
    for prompt in splits["test"]:
        assert score(verifier.verify, prompt, f"<answer>{prompt.ground_truth}</answer>") == 1.0
        assert score(verifier.verify, prompt, "<answer>-1</answer>") < 1.0
    with pytest.raises(ConfigError, match="--task = leg_count: not a task of reasoning_gym; did you mean leg_counting"):
        reasoning_gym.read(ConvertOptions(task="leg_count"))
    with pytest.raises(ConfigError, match="--task = rearc: its verifier cannot read entries restored from JSON"):
        reasoning_gym.read(ConvertOptions(task="rearc"))


# The published files


@pytest.mark.parametrize(
    ("converter", "file", "rows"),
    [
        (gsm8k.CONVERTER, "gsm8k", {"train": 7473, "test": 1319}),
        (math.CONVERTER, "math/math_test_5000.jsonl.gz", {"test": 5000}),
        (math500.CONVERTER, "math/math500.jsonl.gz", {"test": 500}),
        (humaneval.CONVERTER, "code/HumanEval.jsonl.gz", {"test": 164}),
        (humaneval.CONVERTER, "code", {"test": 164}),
        (mbpp.CONVERTER, "code/sanitized-mbpp.json.gz", {"train": 170, "test": 257}),
    ],
)
def test_the_published_files_give_their_rows(converter: Converter, file: str, rows: dict[str, int]) -> None:
    splits = prompts(converter, shared_data(file))
    assert {split: len(them) for split, them in splits.items()} == rows
    verify = {"math": math_verifier.verify, "gsm8k": gsm8k_verifier.verify}.get(converter.verifier)
    for prompt in [prompt for them in splits.values() for prompt in them]:
        assert prompt.extra_info["response"]
        assert verify is None or score(verify, prompt, prompt.extra_info["response"]) == 1.0


def test_four_rows_of_a_published_train_file_of_math_have_no_answer() -> None:
    rows = read(math.CONVERTER, shared_data("math/math_train_rllm_7474.json.gz"))["train"]
    bad = []
    for row in rows:
        try:
            math.prompt(row.values, ConvertOptions())
        except DataError as error:
            bad.append((row.where.split(", ")[1], error.message))
    assert len(rows) == 7474
    assert [where for where, _ in bad] == [f"row {n} (the first is 0)" for n in (886, 1009, 5328, 5330)]
    assert all(message.startswith("no text in column 'answer'") for _, message in bad)


def test_word_problems_are_distinct_right_and_in_one_split() -> None:
    splits = {split: [row.values for row in rows] for split, rows in words.read(ConvertOptions(seed=3)).items()}
    assert [len(rows) for rows in splits.values()] == [2048, 256]
    questions = [row["question"] for rows in splits.values() for row in rows]
    assert len(set(questions)) == len(questions)
    assert {row["form"] for row in splits["test"]} == set(words.FORMS)
    for row in splits["train"]:
        first, second = map(int, re.findall(r"\d+", row["question"]))
        assert row["answer"] == str(first + second)
    prompt = words.prompt(splits["test"][0], ConvertOptions())
    verdict = gsm8k_verifier.verify(
        VerifyRequest(f"3 and more: {prompt.ground_truth} in all.", prompt.ground_truth), mode="flexible"
    )
    assert verdict.score == 1
    assert [row.values for row in words.read(ConvertOptions(seed=3))["test"]] == splits["test"]
    assert [row.values for row in words.read(ConvertOptions(seed=4))["test"]] != splits["test"]


@pytest.mark.parametrize(("count", "test_count"), [(0, 8), (8, 0), (8000, 256)])
def test_counts_of_word_problems_have_bounds(count: int, test_count: int) -> None:
    with pytest.raises(ConfigError, match="--count = "):
        words.read(ConvertOptions(count=count, test_count=test_count))
