"""The steps between a converter and a file, on datasets made up here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.data.prompts.provenance import provenance
from rlcli.errors import ConfigError, DataError, UnknownName
from rlcli.prep.pipeline import Plan, Step, prepare
from rlcli.prep.split_writer import write_splits
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow


def of(verifier: str = "gsm8k", **splits: Sequence[tuple[str, str]]) -> Converter:
    """A dataset of (question, answer) rows."""

    def read(options: ConvertOptions) -> dict[str, list[RawRow]]:
        return {
            split: [RawRow({"q": q, "a": a}, f"{split}.jsonl, line {i}") for i, (q, a) in enumerate(rows, start=1)]
            for split, rows in splits.items()
        }

    def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
        messages = ({"role": "system", "content": "Answer."}, {"role": "user", "content": row["q"]})
        return Prompt("", messages, "toy", "math", verifier, row["a"], {"kept": True})

    return Converter("toy", "Toy", "generated", verifier, read, prompt)


def questions(converter: Converter, split: str = "train", **plan: Any) -> list[str]:
    prepared = prepare(converter, ConvertOptions(), Plan(**plan))
    return [prompt.messages[-1]["content"] for prompt in prepared.splits[split]]


def last_step(converter: Converter, **plan: Any) -> Step:
    return prepare(converter, ConvertOptions(), Plan(**plan)).steps[-1]


def test_a_prompt_gets_its_id_split_and_index_as_the_source_counts_them() -> None:
    converter = of(train=[("one?", "1"), ("two?", "2"), ("three?", "3")], test=[("four?", "4")])
    prepared = prepare(converter, ConvertOptions(), Plan(min_chars=len("Answer.four?")))
    assert prepared.splits["train"][0].id == "toy:train:2"
    assert prepared.splits["train"][0].extra_info == {"split": "train", "index": 2, "kept": True}
    assert prepared.steps[1] == Step("length", {"train": 1, "test": 1}, {"shorter": 2, "longer": 0})


def test_a_converters_failure_names_its_row() -> None:
    converter = of(train=[("one?", "1")])
    broken = Converter("toy", "", "", "", converter.read, lambda row, options: row["question"])
    with pytest.raises(DataError, match=r"train\.jsonl, line 1: the converter fails on it: KeyError\('question'\)"):
        prepare(broken, ConvertOptions())

    def refuses(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
        raise ConfigError("--task = odd", "give another")

    with pytest.raises(ConfigError, match="--task = odd"):  # which no row can help
        prepare(Converter("toy", "", "", "", converter.read, refuses), ConvertOptions(), Plan(skip_bad=True))


def test_no_split_and_no_rows_are_refused() -> None:
    with pytest.raises(DataError, match="the converter gave no split"):
        prepare(of(), ConvertOptions())
    with pytest.raises(DataError, match="no row of the train split: it is empty"):
        prepare(of(train=[]), ConvertOptions())


@pytest.mark.long
def test_equal_prompts_are_kept_once_and_rather_in_test() -> None:
    train = [("Two  plus two?", "4"), ("two plus TWO?", "5"), ("three?", "3"), ("asked?", "1")]
    converter = of(train=train, test=[("asked?", "1"), ("asked? ", "1")])
    assert questions(converter, dedup=True) == ["Two  plus two?", "three?"]
    assert questions(converter, "test", dedup=True) == ["asked?"]
    step = last_step(converter, dedup=True, check=False)
    assert step.removed == {"repeated": 1, "in another split": 1, "repeated with another answer": 1}
    assert "train.jsonl, line 2 repeats train.jsonl, line 1" in step.examples


def test_a_column_named_split_does_not_assign_equal_prompts_to_splits() -> None:
    converter = of(train=[("asked?", "1"), ("asked?", "1")])
    with_split = replace(
        converter,
        prompt=lambda row, options: replace(converter.prompt(row, options), extra_info={"split": "weird"}),
    )
    assert last_step(with_split, dedup=True, check=False).removed == {"repeated": 1}


@pytest.mark.long
def test_a_shuffle_depends_on_the_seed_alone_and_a_limit_counts_rows() -> None:
    converter = of(train=[(f"{n}?", str(n)) for n in range(20)])
    assert questions(converter, shuffle=1) == questions(converter, shuffle=1)
    assert questions(converter, shuffle=1) != questions(converter, shuffle=2)
    assert sorted(questions(converter, shuffle=1)) == sorted(questions(converter))
    assert questions(converter, limit=3) == ["0?", "1?", "2?"]
    assert last_step(converter, limit=3, check=False).removed == {"over the limit": 17}


@pytest.mark.long
def test_an_answer_that_its_verifier_cannot_read_stops_or_is_left_out() -> None:
    converter = of(train=[("one?", "1"), ("two?", "two apples"), ("three?", "")])
    with pytest.raises(
        DataError, match=r"train\.jsonl, line 2: the verifier 'gsm8k' rejects .* 'two apples': .*1 more rows"
    ) as error:
        prepare(converter, ConvertOptions(), Plan())
    assert "--skip-bad" in error.value.hint
    assert questions(converter, skip_bad=True) == ["one?"]
    assert last_step(converter, skip_bad=True).removed == {"answer refused": 2}
    assert len(questions(converter, check=False)) == 3


@pytest.mark.long
def test_an_answer_that_takes_for_ever_to_write_holds_up_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    from rlcli.rewards.verifier_registry import VERIFIERS

    (tmp_path / "slow_gold.py").write_text(
        "def verify(request): return 1.0\n"
        "def gold(request):\n    while request.ground_truth == 'slow': pass\n    return request.ground_truth\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = EntryPoint("slow-gold", "slow_gold:verify", VERIFIERS.group)
    monkeypatch.setattr(VERIFIERS, "_published", {**VERIFIERS._published, "slow-gold": entry})
    monkeypatch.setattr("rlcli.prep.gold_check.DEADLINE_S", 0.2)
    converter = of("slow-gold", train=[("one?", "1"), ("two?", "slow")])
    assert questions(converter, skip_bad=True) == ["one?"]


def test_the_first_of_several_verifiers_judges_the_answer() -> None:
    converter = of("gsm8k(mode=flexible) + 0.1 * format", train=[("one?", "1")])
    assert last_step(converter).removed == {"answer refused": 0}


def test_what_cannot_be_checked_is_said_and_an_unknown_verifier_refused() -> None:
    patterns = of("regex", train=[("one?", "1"), ("two?", "2")])
    assert last_step(patterns).examples == ["2 rows of the verifier 'regex' are not checked here"]
    with pytest.raises(UnknownName, match="did you mean gsm8k"):
        prepare(of("gsm9k", train=[("one?", "1")]), ConvertOptions(), Plan())


def test_tests_of_code_are_read_though_there_is_no_program_to_try() -> None:
    readable = '{"inputs": ["3\\n"], "outputs": ["6\\n"]}'
    converter = of("code", train=[("one?", readable), ("two?", '{"inputs": ["3\\n"], "outputs": []}')])
    with pytest.raises(DataError, match=r"line 2: the verifier 'code' cannot read .*'outputs' is not a list of tests"):
        prepare(converter, ConvertOptions(), Plan())
    assert questions(converter, skip_bad=True) == ["one?"]


@pytest.mark.long
def test_an_answer_is_checked_with_the_options_of_its_verifier() -> None:
    some = '{"numbers": [1, 1, 100], "target": 2}'
    right = {"multiple_choice(truth=index0)": "1", "exact(extract=tag)": "Paris", "countdown(use_all=false)": some}
    right["format(pattern='#### [0-9]+')"] = "#### 4"
    for verifier, truth in right.items():
        assert questions(of(verifier, train=[("one?", truth)])) == ["one?"]
    wrong = {"multiple_choice(truth=index1)": "0", "exact(extract=line)": "two\nlines", "countdown": some}
    for verifier, truth in wrong.items():
        with pytest.raises(DataError, match="rejects the row's own answer"):
            questions(of(verifier, train=[("one?", truth)]))


def test_a_failed_write_leaves_both_splits_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(of(train=[("one?", "1")], test=[("two?", "2")]), ConvertOptions()).splits
    write_splits(tmp_path, first, provenance("toy", "local", [], {}, []))
    initial = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    replace, calls = os.replace, []

    def fail_at_the_second(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_at_the_second)
    second = prepare(of(train=[("three?", "3")], test=[("four?", "4")]), ConvertOptions()).splits
    with pytest.raises(DataError, match=r"train\.parquet and .*test\.parquet: No space left"):
        write_splits(tmp_path, second, {})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == initial
    calls.clear()
    with pytest.raises(DataError, match="No space left"):
        write_splits(tmp_path / "new", second, {})
    assert list((tmp_path / "new").iterdir()) == []
    write_splits(tmp_path, second, {})
    assert [prompt.ground_truth for prompt in read_prompts(tmp_path, "test")] == ["4"]


def test_rows_that_repeat_others_are_noted_and_kept() -> None:
    converter = of(
        train=[("One?", "1"), ("two?", "2"), ("one? ", "1")], test=[("one?", "1"), ("one?", "1"), ("3?", "3")]
    )
    prepared = prepare(converter, ConvertOptions(), Plan(check=False))
    assert prepared.steps[-1] == Step(
        "repeats",
        {"train": 3, "test": 3},
        note="2 of 3 train rows ask what a test row asks (--dedup takes them out); 3 test rows are 2 prompts (equal "
        "ones are evaluated as one)",
    )
    assert [step.name for step in prepare(converter, ConvertOptions(), Plan(check=False, dedup=True)).steps] == [
        "read",
        "dedup",
    ]
