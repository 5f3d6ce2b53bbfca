from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcli.data.prompts import TokenizedPrompts, read_prompts
from rlcli.data.schema import row, write_rows
from rlcli.errors import DataError, ModelError
from rlcli.model.tiny import tiny_tokenizer
from rlcli.types import Prompt

CHAT = [{"content": "What is 6*7?", "role": "user"}]


def verl_file(path: Path, style: str | None = "rule") -> Path:
    """As verl's examples make them: content before role, pandas' index column, no answer for `style` to name."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": CHAT,
            "ability": "math",
            "reward_model": {"ground_truth": "42", "style": style},
            "extra_info": {"answer": "#### 42", "index": i, "question": "What is 6*7?", "split": "train"},
            "__index_level_0__": i,
        }
        for i in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_file_made_for_verl_is_read_when_a_verifier_is_given(tmp_path: Path) -> None:
    prompts = read_prompts(verl_file(tmp_path / "a.parquet"), "train", verifier="gsm8k")
    assert prompts[1] == Prompt(
        id="openai/gsm8k:train:1",
        messages=({"role": "user", "content": "What is 6*7?"},),
        data_source="openai/gsm8k",
        ability="math",
        verifier="gsm8k",
        ground_truth="42",
        extra_info={"answer": "#### 42", "index": 1, "question": "What is 6*7?", "split": "train"},
    )


@pytest.mark.parametrize("style", ["rule", "rule-lighteval/MATH_v2", "model", "", None])
def test_a_style_that_names_no_verifier_asks_for_one(tmp_path: Path, style: str | None) -> None:
    file = verl_file(tmp_path / "a.parquet", style)
    with pytest.raises(DataError, match=r"row 0 .*--set verifier\.name="):
        read_prompts(file, "train")


def test_the_row_names_its_verifier_and_a_given_one_overrides_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "test.parquet", [toy("1+1=", "math")])
    assert read_prompts(tmp_path, "test")[0].verifier == "math"
    assert read_prompts(tmp_path, "test", verifier="format")[0].verifier == "format"


def toy(content: str, verifier: str = "gsm8k") -> dict:
    return row(data_source="toy", messages=[{"role": "user", "content": content}], verifier=verifier, ground_truth="2")


def test_what_is_missing_is_named_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file or folder: .*nowhere; make it with: rlcli prep"):
        read_prompts(tmp_path / "nowhere", "train")
    write_rows(tmp_path / "train.parquet", [toy("1+1=")])
    with pytest.raises(DataError, match=r"has no test\.parquet \(it has train\.parquet\)"):
        read_prompts(tmp_path, "test")
    (tmp_path / "test.parquet").write_text("question,answer\n")
    with pytest.raises(DataError, match=r"test\.parquet cannot be read as parquet"):
        read_prompts(tmp_path, "test")


def test_a_missing_column_is_named_and_those_that_are_there(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["?"], "prompt": ["?"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column 'data_source' \(it has question, prompt\)"):
        read_prompts(tmp_path / "a.parquet", "train")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    whole = pq.read_table(verl_file(tmp_path / "a.parquet"))
    pq.write_table(whole.slice(0, 0), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no rows"):
        read_prompts(tmp_path / "a.parquet", "train")


@pytest.mark.parametrize(
    ("column", "bad"),
    [
        ("prompt", None),
        ("prompt", []),
        ("prompt", [{"role": "user", "content": None}]),
        ("reward_model", None),
        ("reward_model", {"style": "gsm8k", "ground_truth": None}),
        ("data_source", None),
    ],
)
def test_a_bad_row_is_named_with_its_number_and_column(tmp_path: Path, column: str, bad: object) -> None:
    good = toy("1+1=") | {"extra_info": {"index": 0}}
    pq.write_table(pa.Table.from_pylist([good, good | {column: bad}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet, row 1 \(the first is 0\): '{column}'"):
        read_prompts(tmp_path / "a.parquet", "train")


def test_a_column_of_another_type_is_refused(tmp_path: Path) -> None:
    rows = [toy("1+1=") | {"prompt": "1+1=", "extra_info": {"index": 0}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="'prompt' must be a list of messages"):
        read_prompts(tmp_path / "a.parquet", "train")


def prompts_of(*contents: str, role: str = "user") -> list[Prompt]:
    return [
        Prompt(f"toy:train:{i}", ({"role": role, "content": content},), "toy", "math", "gsm8k", "2")
        for i, content in enumerate(contents)
    ]


def test_tokens_are_those_of_the_chat_template_one_prompt_at_a_time() -> None:
    tokenizer = tiny_tokenizer()
    prompts = prompts_of("1+1=", "", "What, £5?\n" * 9)
    tokenized = TokenizedPrompts.tokenize(prompts, tokenizer, max_prompt_tokens=200)
    assert len(tokenized) == 3
    for i, prompt in enumerate(prompts):
        alone = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True)["input_ids"]
        assert tokenized.tokens(i).tolist() == alone
        assert tokenized.length(i) == len(alone)
    assert tokenized.flat.dtype == np.int32


def test_longer_prompts_than_the_limit_are_left_out_and_counted() -> None:
    # The template adds two tokens to the characters.
    prompts = prompts_of("a" * 9, "b" * 8, "c" * 30, "d")
    tokenized = TokenizedPrompts.tokenize(prompts, tiny_tokenizer(), max_prompt_tokens=10)
    assert [prompt.id for prompt in tokenized.prompts] == ["toy:train:1", "toy:train:3"]
    assert tokenized.too_long == 2
    assert [tokenized.length(i) for i in range(2)] == [10, 3]


def test_no_prompt_within_the_limit_is_an_error_that_says_what_would_do() -> None:
    with pytest.raises(DataError, match=r"all 2 prompts .* = 4 .*has 5 tokens.*max_prompt_tokens=5"):
        TokenizedPrompts.tokenize(prompts_of("abc", "abcd"), tiny_tokenizer(), max_prompt_tokens=4)


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    prompts = prompts_of(*map(str, range(1100)))
    TokenizedPrompts.tokenize(prompts, tiny_tokenizer(), 64, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (1100, 1100)
    assert len(seen) > 1


def test_a_missing_or_refusing_chat_template_is_the_models_fault() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ModelError, match="refuses prompt toy:train:0: unknown role: tool"):
        TokenizedPrompts.tokenize(prompts_of("1+1=", role="tool"), tokenizer, 64)
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"no chat template; use an instruct model"):
        TokenizedPrompts.tokenize(prompts_of("1+1="), tokenizer, 64)
    tokenizer.chat_template = "{% for message in %}"
    with pytest.raises(ModelError, match=r"is broken: .*; mend or copy again its chat_template\.jinja"):
        TokenizedPrompts.tokenize(prompts_of("1+1="), tokenizer, 64)
