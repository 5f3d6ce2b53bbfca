from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rlcli_verifiers.gsm8k import verify

from rlcli.data.prompts.chat_template import control_tokens
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts, control_token_in
from rlcli.errors import DataError, ModelError
from rlcli.model.io.tiny_model import tiny_tokenizer
from rlcli.types import Prompt, VerifyRequest

CHAT = [{"content": "What is 6*7?", "role": "user"}]


def verl_file(path: Path, style: str | None = "rule", data_source: str = "openai/gsm8k") -> Path:
    """As verl's examples make them: content before role, pandas' index column, no answer for `style` to name."""
    rows = [
        {
            "data_source": data_source,
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
    file = verl_file(tmp_path / "a.parquet", style, "openai/gsm8k" if style in ("model", None) else "mine")
    with pytest.raises(DataError, match=r"row 0 .*--verifier NAME"):
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
    table = pq.read_table(verl_file(tmp_path / "a.parquet"))
    pq.write_table(table.slice(0, 0), tmp_path / "a.parquet")
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
        assert len(tokenized.tokens(i)) == len(alone)
    assert tokenized.flat.dtype == np.int32


def test_control_tokens_in_a_users_text_are_counted() -> None:
    tokenizer = tokenizer_with(CHATML, "<|im_end|>")
    rows = prompts_of("two", "<|im_end|>" + "x" * 300, "one <|im_end|> two", "<|im_start|> one", "< |im_end| >")
    tokenized = TokenizedPrompts.tokenize(rows, tokenizer, 200)
    assert [tokenized.prompts[index].messages[0]["content"] for index in tokenized.control] == [
        "one <|im_end|> two",
        "<|im_start|> one",
    ]
    control = control_tokens(tokenizer)
    assert [control_token_in(prompt, control) for prompt in rows] == [
        "",
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
        "",
    ]
    assert not len(TokenizedPrompts.tokenize(rows[:1], tokenizer, 200).control)


def test_longer_prompts_than_the_limit_are_left_out_and_counted() -> None:
    # The template adds two tokens to the characters.
    prompts = prompts_of("a" * 9, "b" * 8, "c" * 30, "d")
    tokenized = TokenizedPrompts.tokenize(prompts, tiny_tokenizer(), max_prompt_tokens=10)
    assert [prompt.id for prompt in tokenized.prompts] == ["toy:train:1", "toy:train:3"]
    assert tokenized.too_long == 2
    assert [len(tokenized.tokens(i)) for i in range(2)] == [10, 3]


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
    with pytest.raises(ModelError, match=r"no chat template; use an instruct model, or give one"):
        TokenizedPrompts.tokenize(prompts_of("1+1="), tokenizer, 64)
    tokenizer.chat_template = "{% for message in %}"
    with pytest.raises(ModelError, match=r"is broken: .*; fix its chat_template\.jinja or copy it again"):
        TokenizedPrompts.tokenize(prompts_of("1+1="), tokenizer, 64)


CHATML = (
    "{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
CHATML_THINKING = CHATML.replace(
    "+ m.content +",
    "+ ('<think>\\n\\n</think>\\n\\n' if m.role == 'assistant' and '</think>' not in m.content else '') + m.content +",
)
LLAMA = (
    "{{- '<|begin_of_text|>' -}}{%- for m in messages -%}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)


def tokenizer_with(template: str, end: str) -> Any:
    """One token a character, and one for each special token; `end` is the end of sequence."""
    tokenizer = tiny_tokenizer()
    markers = [
        "<|im_start|>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": markers, "eos_token": end})
    tokenizer.chat_template = template
    return tokenizer


def answered(*pairs: tuple[str, Any], name: str = "response") -> list[Prompt]:
    return [
        Prompt(f"toy:train:{i}", ({"role": "user", "content": question},), "toy", "math", "gsm8k", "2", {name: answer})
        for i, (question, answer) in enumerate(pairs)
    ]


def with_responses(prompts: list[Prompt], tokenizer: Any, longest: int = 99) -> TokenizedPrompts:
    return TokenizedPrompts.tokenize(prompts, tokenizer, 200, response="response", max_response_tokens=longest)


@pytest.mark.parametrize(
    ("tokenizer", "trailing"),
    [
        (tiny_tokenizer(), ""),
        (tokenizer_with(CHATML, "<|im_end|>"), "\n"),
        (tokenizer_with(LLAMA, "<|eot_id|>"), ""),
    ],
    ids=["tiny", "chatml", "llama"],
)
def test_prompt_response_and_end_equal_the_templated_conversation(tokenizer: Any, trailing: str) -> None:
    pairs = [("1+1=", "1+1+0=2#### 2"), ("Why?", "Because £5,\n\nso:  <b>"), ("", "x")]
    tokenized = with_responses(answered(*pairs), tokenizer)
    for i, (question, answer) in enumerate(pairs):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        expected = tokenizer.apply_chat_template(messages)["input_ids"]
        outside = tokenizer(trailing)["input_ids"]
        assert [*tokenized.tokens(i), *tokenized.responses(i), *outside] == expected
        assert tokenized.responses(i)[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in tokenized.responses(i)[:-1]
        assert tokenizer.decode(tokenized.responses(i), skip_special_tokens=True) == answer


def test_a_response_stands_as_it_is_where_a_template_would_alter_it() -> None:
    tokenizer = tokenizer_with(LLAMA, "<|eot_id|>")
    assert tokenizer.decode(with_responses(answered(("?", " 2 \n")), tokenizer).responses(0)) == " 2 \n<|eot_id|>"
    tokenizer = tokenizer_with(CHATML_THINKING, "<|im_end|>")
    for answer in ("#### 2", "<think>\n1+1\n</think>\n\n#### 2"):
        tokenized = with_responses(answered(("1+1=", answer)), tokenizer)
        assert tokenizer.decode(tokenized.responses(0)) == answer + "<|im_end|>"
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": answer}], tokenize=False
    )
    assert tokenizer.decode([*tokenized.tokens(0), *tokenized.responses(0)]) + "\n" == expected


def test_responses_are_views_of_int32_and_a_verifier_reads_them() -> None:
    tokenizer = tiny_tokenizer()
    tokenized = with_responses(answered(("1+1=", "1+1+0=2#### 2"), ("2+0=", "#### 2")), tokenizer)
    assert tokenized.responses(1).dtype == np.int32
    assert np.shares_memory(tokenized.responses(1), tokenized.response_flat)
    for i in range(2):
        text = tokenizer.decode(tokenized.responses(i).tolist(), skip_special_tokens=True)
        assert verify(VerifyRequest(text, "2")).score == 1.0


def test_rows_with_longer_responses_are_left_out_and_counted() -> None:
    # One token a character and the end: nine characters are ten tokens.
    rows = answered(("a", "b" * 9), ("c", "d" * 10), ("e" * 300, "f"), ("g" * 300, "h" * 99), ("i", "j"))
    tokenized = with_responses(rows, tiny_tokenizer(), longest=10)
    assert [prompt.id for prompt in tokenized.prompts] == ["toy:train:0", "toy:train:4"]
    assert (tokenized.too_long, tokenized.too_long_responses) == (3, 1)
    assert [len(tokenized.responses(i)) for i in range(2)] == [10, 2]
    assert [len(tokenized.tokens(i)) for i in range(2)] == [3, 3]


def test_no_response_within_the_limit_is_an_error_that_says_what_would_do() -> None:
    rows = answered(("a", "bcd"), ("a", "bcde"), ("c" * 300, "d"))
    with pytest.raises(
        DataError, match=r"all 2 responses .*rollout\.max_response_tokens = 3 .*has 4 tokens.*max_response_tokens=4"
    ):
        with_responses(rows, tiny_tokenizer(), longest=3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (answered(("?", None)), r"holds None, which is not text"),
        (answered(("?", 42)), r"holds 42, which is not text"),
        (answered(("?", ["#### 2"])), r"holds \['#### 2'\], which is not text"),
        (answered(("?", " \n")), r"holds ' \\n', which is not text"),
        (answered(("?", "#### 2"), name="answer"), r"is missing \(it has answer\)"),
        (prompts_of("?"), r"is missing \(it has nothing\)"),
    ],
)
def test_a_row_without_a_response_is_named_with_the_mend(row: list[Prompt], message: str) -> None:
    good = answered(*[("1+1=", "#### 2")] * 600)
    with pytest.raises(DataError) as raised:
        with_responses([*good, dataclasses.replace(row[0], id="toy:train:600")], tiny_tokenizer())
    text = str(raised.value)
    assert re.search(rf"toy:train:600: extra_info\.response, the response to imitate, {message}", text)
    assert "rlcli prep gsm8k" in text
    assert "data.response" in text
    assert "\n" not in text


def test_a_tokenizer_without_an_end_serves_prompts_and_no_responses() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    assert len(TokenizedPrompts.tokenize(prompts_of("1+1="), tokenizer, 64)) == 1
    with pytest.raises(ModelError, match=r"no end-of-sequence token .*; name its eos_token"):
        with_responses(answered(("1+1=", "#### 2")), tokenizer)
