"""What `--dry-run` tries before it says that a run could begin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcli.cli.main import main
from rlcli.config.load import resolve
from rlcli.config.rules import without_effect
from rlcli.data.schema import row, write_rows
from rlcli.data.table import read_prompts
from rlcli.errors import DataError, ModelError, VerifierError
from rlcli.model.facts import check_lora, check_weights, read_config
from rlcli.model.loading import read_policy
from rlcli.model.tiny import make_tiny_model
from rlcli.trainer.trying import check_golds, check_not_empty

MINE = """
def trl(completions, level, **columns):
    return [1.0 for _ in completions]
def gold(request):
    return request.ground_truth
def two(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == "2")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


def data(folder: Path, *truths: str, verifier: str = "gsm8k", question: str = "1+1=") -> Path:
    file, messages = folder / "train.parquet", [{"role": "user", "content": question}]
    rows = [row(data_source="toy", messages=messages, verifier=verifier, ground_truth=one) for one in truths]
    write_rows(file, rows)
    return file


def tried(file: Path, verifier: str = "auto", deadline_s: float = 5.0) -> list[str]:
    notes: list[str] = []
    check_golds(read_prompts(file, "train", verifier), deadline_s, "", notes.append)
    return notes


def test_answers_that_score_leave_nothing_to_note(tmp_path: Path) -> None:
    assert tried(data(tmp_path, "2", "3"), "0.5 * gsm8k(mode=flexible) + format") == []


def test_an_answer_that_its_verifier_rejects_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (note,) = tried(data(tmp_path, "2", "two"), f"{tmp_path}/mine.py:two")
    assert "rejects the answers of 1 of the first 2 rows: row toy:train:1, whose ground truth is 'two' (" in note


def test_a_verifier_that_rejects_every_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(DataError, match=r"rejects the answers of the first 2 rows: row toy:train:0.*--verifier"):
        tried(data(tmp_path, "1", "3"), f"{tmp_path}/mine.py:two")


def test_an_answer_that_crashes_its_verifier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match=r"'gsm8k' fails \(crash\) on row toy:train:1, whose ground truth is 'two'"):
        tried(data(tmp_path, "2", "two"))


def test_a_column_that_a_reward_of_trl_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(VerifierError, match=r"mine\.py:trl' fails \(crash\) on row toy:train:0, .* a column 'level'"):
        tried(data(tmp_path, "2"), f"{tmp_path}/mine.py:trl")


def test_a_verifier_without_a_gold_only_has_to_end(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def zero(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
    )
    assert tried(data(tmp_path, "2"), f"{tmp_path}/mine.py:zero") == []


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_prompt_is_refused(question: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the prompt of row toy:train:0 is empty"):
        check_not_empty(read_prompts(data(tmp_path, "2", question=question), "train"), print)


def test_empty_answers_are_noted(tmp_path: Path) -> None:
    notes: list[str] = []
    check_not_empty(read_prompts(data(tmp_path, "2", " ", ""), "train"), notes.append)
    assert notes == ["2 rows have an empty ground truth, toy:train:1 the first: few verifiers can score them"]


def test_layers_that_the_model_lacks_get_no_adapter(model: Path) -> None:
    check_lora(str(model), "q_proj, v_proj")
    with pytest.raises(ModelError, match="the model has no linear layer 'query'; there is: down_proj, "):
        check_lora(str(model), "query")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_named(value: float, model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    path, says = str(tmp_path), r"1 of \d+ weights of model.layers.1.mlp.up_proj.weight are NaN or infinite; download"
    check_weights(str(model))
    with pytest.raises(ModelError, match=says):
        check_weights(path)
    with pytest.raises(ModelError, match=says):
        read_policy(path, read_config(path), None)


def test_keys_without_effect_are_named() -> None:
    given = ["evaluation.every=5", "lora.alpha=8", "dynamic_sampling.low=0.1", "shaping.overlong_penalty=2"]
    assert without_effect(resolve("grpo", {}, given).config) == [
        "evaluation.every = 5 has no effect: evaluation.data is unset",
        "lora.alpha = 8.0 has no effect: lora.rank = 0 trains all weights",
        "dynamic_sampling.low = 0.1 has no effect: keep is not accuracy",
        "shaping.overlong_penalty = 2.0 has no effect: shaping.overlong_buffer = 0",
    ]
    assert without_effect(resolve("grpo", {}, []).config) == []


def test_a_dry_run_tries_them_all(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["data.max_prompt_tokens=16", "rollout.max_response_tokens=16", "cluster.device=cpu", "evaluation.every=5"]
    (tmp_path / "mine.py").write_text(MINE)
    mine = ["--verifier", f"{tmp_path}/mine.py:two"]
    words = [
        "train",
        "grpo",
        *mine,
        "--model",
        str(model),
        "--data",
        str(data(tmp_path, "2", "two")),
        "--dry-run",
        "--json",
    ]
    assert main([*words, *(word for size in sizes for word in ("--set", size))]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("evaluation.every = 5 has no effect" in note for note in notes)
    assert any("rejects the answers of 1 of the first 2 rows" in note for note in notes)
