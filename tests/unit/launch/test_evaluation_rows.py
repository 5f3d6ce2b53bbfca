"""Notes and errors on data before a run starts: repeated rows, rows that are evaluated too, control tokens, and the
choice of a best checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlcli.config.load import resolve
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.errors import ConfigError, DataError
from rlcli.launch.preflight import prepare
from rlcli.launch.prepared_run import Prepared
from rlcli.model.io.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def write(path: Path, questions: Sequence[str]) -> str:
    rows = [
        row(
            data_source="toy",
            messages=[{"role": "user", "content": question}],
            verifier="gsm8k",
            ground_truth="2",
            extra_info={"index": number},
        )
        for number, question in enumerate(questions)
    ]
    write_rows(path, rows)
    return str(path)


def prepared(
    model: Path, folder: Path, train: Sequence[str], test: Sequence[str] = (), sets: Sequence[str] = ()
) -> tuple[Prepared, list[str]]:
    flags = {"model.path": str(model), "data.path": write(folder / "train.parquet", train), "train.steps": 40}
    if test:
        flags["evaluation.data"] = write(folder / "test.parquet", test)
    notes: list[str] = []
    settings = ["cluster.device=cpu", "data.max_prompt_tokens=40", "rollout.max_response_tokens=8", *sets]
    return prepare(resolve("grpo", flags, settings).config, on_note=notes.append), notes


def test_repeated_rows_and_rows_that_are_evaluated_too_are_counted(model: Path, tmp_path: Path) -> None:
    _, notes = prepared(model, tmp_path, ["1+1=", "2+2=", "1+1=", "1+1="], ["1+1=", "3+3=", "3+3="])
    assert notes == [
        "2 of 4 training rows repeat the prompt of another one: each row is drawn once an epoch, as a separate "
        "group, so that a prompt weighs as much as it has rows",
        "evaluation: 3 rows are 2 prompts: rows with equal prompt and ground truth count as samples of one prompt",
        "3 of 4 training rows are evaluated too (the same prompt): the evaluation shows what was memorised; take them "
        "out with: rlcli prep … --decontaminate EVALUATION",
    ]


def test_other_rows_are_not_mentioned(model: Path, tmp_path: Path) -> None:
    assert prepared(model, tmp_path, ["1+1=", "2+2="], ["3+3=", "4+4="])[1] == []


def test_an_evaluation_set_of_one_prompt_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test\.parquet: all 3 rows to evaluate ask the same prompt, '1\+1='"):
        prepared(model, tmp_path, ["2+2=", "3+3="], ["1+1="] * 3)


def test_rows_that_are_left_out_and_control_tokens_are_named(model: Path, tmp_path: Path) -> None:
    ready, notes = prepared(model, tmp_path, ["1+1=", "2" * 99, "<|user|>1="], ["3+3=", "4" * 50, "5+5="])
    assert notes == [
        "1 of 3 training rows left out: longer than data.max_prompt_tokens",
        "1 of 2 training rows have control tokens in their text (<|user|> in toy:train:2, for one): the model reads "
        "them as what they mean, not as text",
        "1 of 3 evaluation rows left out: longer than data.max_prompt_tokens",
    ]
    assert ready.held_out is not None
    assert ready.held_out.left_out["longer than data.max_prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["checkpoint.every=20", "evaluation.every=20"], None),
        (["checkpoint.every=10", "evaluation.every=20"], None),
        (
            ["checkpoint.every=20", "evaluation.every=10"],
            "checkpoint.keep_best = 2: 2 of 3 evaluations before the last are of steps without a checkpoint "
            "(evaluation.every = 10, checkpoint.every = 20), so the best of them cannot be kept",
        ),
        (["checkpoint.every=0", "evaluation.every=20"], "1 of 1 evaluations before the last are of steps without"),
        ([], "checkpoint.keep_best = 2 has no effect: of the checkpoints only the last is evaluated"),
    ],
)
def test_it_is_said_whether_the_best_checkpoint_can_be_kept(
    sets: list[str], says: str | None, model: Path, tmp_path: Path
) -> None:
    _, notes = prepared(model, tmp_path, ["1+1="], ["2+2="], ["checkpoint.keep_best=2", *sets])
    assert len(notes) == (says is not None)
    assert says is None or says in notes[0]


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["data.max_prompt_tokens=4096"], "positions of"),
        (["checkpoint.keep_best=1", "checkpoint.best_by=pass@64"], "the evaluations measure pass@1, mean@1"),
    ],
)
def test_what_rows_and_config_json_show_is_refused_before_ray_starts(
    sets: list[str], says: str, model: Path, tmp_path: Path
) -> None:
    paths = {"train": write(tmp_path / "train.parquet", ["1+1="]), "test": write(tmp_path / "test.parquet", ["2+2="])}
    flags = {"model.path": str(model), "data.path": paths["train"], "evaluation.data": paths["test"]}
    config = resolve("grpo", flags, ["cluster.device=cpu", "rollout.max_response_tokens=64", *sets]).config

    def starts(config: object, device: str) -> None:
        pytest.fail("Ray starts here")

    with pytest.raises(ConfigError, match=says):
        prepare(config, on_checked=starts)


def test_nothing_is_the_best_without_evaluations(model: Path, tmp_path: Path) -> None:
    _, notes = prepared(model, tmp_path, ["1+1="], sets=["checkpoint.keep_best=2"])
    assert notes == [
        "checkpoint.keep_best = 2 has no effect: nothing is evaluated (evaluation.data is unset), so no checkpoint is "
        "the best"
    ]


@pytest.mark.long
def test_the_best_is_by_a_measure_that_the_evaluations_have(model: Path, tmp_path: Path) -> None:
    sampled = ["evaluation.samples=2", "evaluation.temperature=1"]
    with pytest.raises(
        ConfigError, match=r"best_by = pass@4: the evaluations measure pass@1, pass@2, maj@2, mean@1, mea"
    ):
        prepared(model, tmp_path, ["1+1="], ["2+2=", "3+3="], [*sampled, "checkpoint.best_by=pass@4"])
    # Two rows each of two prompts: four samples of each.
    prepared(model, tmp_path, ["1+1="], ["2+2=", "3+3="] * 2, [*sampled, "checkpoint.best_by=pass@4"])
    with pytest.raises(ConfigError, match=r"checkpoint\.best_by .*a measure of evaluations"):
        resolve("grpo", {}, ["checkpoint.best_by=reward"])
