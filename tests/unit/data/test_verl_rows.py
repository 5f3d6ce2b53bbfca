"""Rows of verl's files: verifiers by `data_source`, and ground truths that are no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rlcli_port.rewards.conventions import verl

from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.data.prompts.verl_rows import VERIFIERS, verifier_of
from rlcli.errors import DataError
from rlcli.rewards.expression import parse
from rlcli.rewards.verifier_registry import check_row_may_name
from rlcli.types import VerifyRequest

TESTS = '{"inputs": ["3\\n"], "outputs": ["6\\n"]}'


def verl_file(path: Path, *rows: tuple[str, Any], style: str = "rule") -> Path:
    """A file of (data_source, ground truth) rows."""
    stored = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"Question {number}?"}],
            "reward_model": {"style": style, "ground_truth": truth},
            "extra_info": {"index": number},
        }
        for number, (source, truth) in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(stored), path)
    return path


@pytest.mark.parametrize("style", ["rule", "", "rule-lighteval/MATH_v2"])
def test_verl_s_rules_are_named_by_the_data_source(tmp_path: Path, style: str) -> None:
    rows = [
        ("openai/gsm8k", "4"),
        ("aime2024", "33"),
        ("numina_olympiads", "2"),
        ("taco", TESTS),
        ("openai/gsm8k", "5"),
    ]
    table = read_prompts(verl_file(tmp_path / "a.parquet", *rows, style=style), "train")
    assert [prompt.verifier for prompt in table] == ["gsm8k", "math", "math", "code(score=share)", "gsm8k"]
    assert table.verifiers() == {
        "gsm8k": "openai/gsm8k:train:0",
        "math": "aime2024:train:1",
        "code(score=share)": "taco:train:3",
    }


def test_a_given_verifier_overrides_the_table_of_verl(tmp_path: Path) -> None:
    file = verl_file(tmp_path / "a.parquet", ("openai/gsm8k", "4"))
    assert read_prompts(file, "train", "math")[0].verifier == "math"
    (prompt,) = read_prompts(file, "train", "auto + 0.1 * format")
    assert prompt.verifier == "gsm8k + 0.1 * format"


@pytest.mark.parametrize(
    ("style", "source"), [("rule", "searchR1_nq"), ("rule", "mine"), ("model", "openai/gsm8k"), ("rule", "GSM8K")]
)
def test_a_source_that_verl_s_table_lacks_asks_for_a_verifier(tmp_path: Path, style: str, source: str) -> None:
    rows = [("openai/gsm8k", "4"), (source, "4")] if style == "rule" else [(source, "4")]
    with pytest.raises(DataError, match=rf"row {len(rows) - 1} .*data_source '{source}'; give one with: --verifier"):
        read_prompts(verl_file(tmp_path / "a.parquet", *rows, style=style), "train")


def test_rows_may_name_every_verifier_of_the_table() -> None:
    for verifier in {*VERIFIERS.values(), verifier_of("rule", "aime_2026")}:
        for term in parse(verifier).terms:
            check_row_may_name(term)


def test_a_ground_truth_that_is_a_struct_is_json_for_its_verifier(tmp_path: Path) -> None:
    truth = {"numbers": [4, 6], "target": 24}
    (prompt,) = read_prompts(verl_file(tmp_path / "a.parquet", ("countdown", truth)), "train")
    assert (prompt.verifier, prompt.ground_truth) == ("countdown", '{"numbers": [4, 6], "target": 24}')
    (number,) = read_prompts(verl_file(tmp_path / "b.parquet", ("openai/gsm8k", 4.0)), "train")
    assert number.ground_truth == "4"


def test_a_reward_function_of_verl_takes_the_struct_itself(tmp_path: Path) -> None:
    seen: list[Any] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        seen.append(ground_truth)
        return 1.0

    file = verl_file(tmp_path / "a.parquet", ("searchR1_nq", {"target": ["Paris", "City of Light"]}))
    (struct,) = read_prompts(file, "train", "mine")
    requests: list[VerifyRequest] = [struct.request("Paris", "stop"), VerifyRequest("x", '{"target": ["Paris"]}')]
    verl(compute_score, {}).verify(requests)
    assert seen == [{"target": ["Paris", "City of Light"]}, '{"target": ["Paris"]}']
