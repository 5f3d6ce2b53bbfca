"""Two evaluations compared: matched by prompt, paired differences, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlcli.cli.main import main
from rlcli.data.sample_files import sample_row, write_samples
from rlcli.errors import DataError
from rlcli.evaluation.evaluation_folder import EvalStore
from rlcli.evaluation.paired_comparison import compare
from rlcli.types import Outcome, Prompt, Verdict


def prompt(number: int, text: str = "") -> Prompt:
    messages = ({"role": "user", "content": text or f"{number}+1="},)
    return Prompt(f"sums:test:{number}", messages, "sums", "math", "exact", str(number + 1))


def write(path: Path, passes: Mapping[int, str], text: str = "") -> Path:
    """passes: prompt → a letter a sample: r is right, w wrong, n no answer; g a greedy one that is right."""
    rows = []
    for number, letters in passes.items():
        for index, letter in enumerate(letters):
            right = letter in "rg"
            outcome = Outcome.OK if right else Outcome.NO_ANSWER if letter == "n" else Outcome.WRONG
            verdict = Verdict(float(right), outcome, {"n": None, "w": f"w{index}"}.get(letter, "r"))
            sample_index = -1 if letter == "g" else index
            rows.append(
                sample_row(
                    prompt(number, text),
                    sample_index,
                    letter,
                    verdict,
                    prompt_tokens=4,
                    response_tokens=4,
                    finish_reason="stop",
                )
            )
    write_samples(path, 0, rows)
    return path


def test_differences_are_b_minus_a_prompt_by_prompt(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", {0: "rr", 1: "rw", 2: "ww", 3: "ww", 9: "rr"})
    b = write(tmp_path / "b.parquet", {0: "rr", 1: "rr", 2: "rw", 3: "ww", 7: "ww", 8: "ww"})
    comparison = compare(str(a), str(b), changed=10)
    overall = comparison.overall
    assert (overall.prompts, overall.only_a, overall.only_b) == (4, 1, 2)
    assert (overall.better, overall.worse, overall.same) == (2, 0, 2)
    passed = overall.measures["pass@1"]
    assert (passed.a, passed.b, passed.difference.mean) == (0.375, 0.625, 0.25)
    assert passed.difference.low < 0.25 < passed.difference.high
    assert passed.p == 0.5  # of four sign patterns of the two that differ, two are as extreme
    assert set(overall.measures) == {"pass@1", "pass@2", "maj@2", "mean@1"}
    assert [(c.prompt_id, c.a, c.b) for c in overall.changed] == [("sums:test:1", 0.5, 1.0), ("sums:test:2", 0.0, 0.5)]
    assert overall.changed[0].prompt == "1+1="
    back = compare(str(b), str(a), changed=1).overall
    assert back.measures["pass@1"].difference.mean == -0.25
    assert len(back.changed) == 1


def test_only_measures_that_both_have_are_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", {0: "rrrrg", 1: "wwwwg"})
    b = write(tmp_path / "b.parquet", {0: "rr", 1: "rw"})
    assert set(compare(str(a), str(b), 5).overall.measures) == {"pass@1", "pass@2", "maj@2", "mean@1"}
    c = write(tmp_path / "c.parquet", {0: "rrg", 1: "rwg"})
    assert "greedy" in compare(str(a), str(c), 5).overall.measures


def test_many_better_prompts_are_no_chance(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", dict.fromkeys(range(60), "w"))
    b = write(tmp_path / "b.parquet", {n: "r" if n < 40 else "w" for n in range(60)})
    overall = compare(str(a), str(b), 3).overall
    passed = overall.measures["pass@1"]
    assert passed.p < 0.001
    assert 0.5 < passed.difference.low < 2 / 3 < passed.difference.high < 0.8
    assert len(overall.changed) == 3


def test_the_same_evaluation_differs_nowhere(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", dict.fromkeys(range(5), "rw"))
    overall = compare(str(a), str(a), 5).overall
    assert (overall.same, overall.changed, overall.measures["pass@1"].p) == (5, [], 1.0)
    assert overall.measures["pass@1"].difference.low < 0 < overall.measures["pass@1"].difference.high


def test_prompts_that_are_others_are_refused_with_how_many(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", {0: "r", 1: "r", 2: "r"})
    other = write(tmp_path / "b.parquet", {1: "r", 2: "r"}, text="another?")
    with pytest.raises(DataError, match=r"2 of 2 prompts with the same id differ between .*such as sums:test:1"):
        compare(str(a), str(other), 5)
    unrelated = write(tmp_path / "c.parquet", {7: "r"})
    with pytest.raises(DataError, match="no prompt in common, of 3 and 1"):
        compare(str(a), str(unrelated), 5)


def folder(path: Path, temperature: float, **datasets: Mapping[int, str]) -> Path:
    with EvalStore.open(path, {"model": "m", "temperature": temperature}, {name: name for name in datasets}):
        for name, passes in datasets.items():
            write(path / f"{name}.parquet", passes)
    return path


def test_folders_are_matched_by_dataset_and_their_settings_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = folder(tmp_path / "a", 1.0, easy={0: "r", 1: "w"}, hard={0: "w"}, old={0: "r"})
    b = folder(tmp_path / "b", 0.5, easy={0: "r", 1: "r"}, hard={0: "r"})
    comparison = compare(str(a), str(b), 5)
    assert list(comparison.datasets) == ["easy", "hard"]
    assert comparison.unmatched == ["old"]
    assert comparison.differing == {"temperature": (1.0, 0.5)}
    assert (comparison.overall.prompts, comparison.overall.better) == (3, 2)
    assert main(["eval", "compare", str(a), str(b), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["measures"]["pass@1"]["difference"]["mean"] == pytest.approx(2 / 3)
    assert printed["datasets"]["hard"]["better"] == 1
    assert main(["eval", "compare", str(a), str(b)]) == 0
    shown = capsys.readouterr().out
    assert "temperature: 1.0 → 0.5" in shown
    assert "easy: 2 prompts: 1 better, 0 worse, 1 same" in shown
    assert "all 2 datasets: 3 prompts: 2 better, 0 worse, 1 same" in shown
    other = folder(tmp_path / "c", 1.0, math={0: "r"}, code={0: "r"})
    with pytest.raises(DataError, match=r"no dataset in common: easy, hard, old \(3\), code, math \(2\)"):
        compare(str(a), str(other), 5)


def test_the_evaluations_of_a_run_are_read_from_all_its_workers(tmp_path: Path) -> None:
    for stem, letters in (("step-000000.rank", "w"), ("step-000050/rank", "r")):  # an older rlcli had no folder a step
        for rank in (0, 1):
            write(tmp_path / f"{stem}-{rank}.parquet", {rank: letters})
    comparison = compare(str(tmp_path / "step-000000"), str(tmp_path / "step-000050.json"), 5)
    assert (comparison.overall.prompts, comparison.overall.better) == (2, 2)
    with pytest.raises(DataError, match=r"samples of a run at several steps; name one: .*/step-000000"):
        compare(str(tmp_path), str(tmp_path), 5)


def test_datasets_with_other_names_are_matched_by_their_prompts(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", 1.0, sums={0: "w"})
    b = folder(tmp_path / "b", 1.0, **{"b-sums": {0: "w", 1: "w"}, "sums": {5: "w"}, "a-sums": {0: "r"}})
    for path, marks in ((a, {"sums": "A"}), (b, {"b-sums": "B", "sums": "C", "a-sums": "A"})):
        contents = json.loads((path / "evaluation.json").read_text())
        (path / "evaluation.json").write_text(json.dumps(contents | {"datasets": marks}))
    compared = compare(str(a), str(b), 5)
    assert (list(compared.datasets), compared.overall.better) == (["sums"], 1)
    assert compared.unmatched == ["b-sums", "sums"]


def test_what_is_no_evaluation_or_not_finished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no samples of an evaluation"):
        compare(str(tmp_path), str(tmp_path), 5)
    a = folder(tmp_path / "a", 1.0, easy={0: "r"})
    write(a / "parts" / "easy.0001.rank-0-000000.parquet", {1: "r"})
    with pytest.raises(DataError, match="holds an unfinished evaluation; run the command that started it again"):
        compare(str(a), str(a), 5)
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="has no column 'prompt_id'"):
        compare(str(tmp_path / "x.parquet"), str(tmp_path / "x.parquet"), 5)
