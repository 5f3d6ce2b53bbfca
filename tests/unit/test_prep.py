from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from rlcli_data_prep import arithmetic, gsm8k
from rlcli_data_prep.sources import read_file, read_splits
from rlcli_verifiers.gsm8k import verify
from typer.testing import CliRunner

from rlcli.cli.prep import prep
from rlcli.data.prompts import read_prompts
from rlcli.errors import ConfigError, DataError, UnknownName
from rlcli.types import ConvertOptions, Outcome, Prompt, VerifyRequest
from tests.shared_data import shared_data

QUESTIONS = [
    {"question": "How many legs have 3 cats?", "answer": "3*4=<<3*4=12>>12\n#### 12"},
    {"question": "And the price?\u2028In all?", "answer": "It costs\n#### 1,234"},
    {"question": "How cold?", "answer": "#### -2.5"},
]


def run(*arguments: str) -> str:
    """Output of `rlcli prep`; errors come through as exceptions."""
    app = typer.Typer()
    app.command()(prep)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def score(prompt: Prompt) -> float:
    """What the row's verifier, told nothing but what it is told in training, gives the row's own response."""
    assert prompt.verifier == "gsm8k"
    response, rest = prompt.extra_info["response"], prompt.extra_info
    verdict = verify(VerifyRequest(response, prompt.ground_truth, prompt.messages, prompt.data_source, rest))
    assert (verdict.outcome is Outcome.OK) == (verdict.score == 1.0)
    return verdict.score


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in QUESTIONS)
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "test.jsonl").write_text(json.dumps(QUESTIONS[0]) + "\n\n")
    (folder / "README.md").write_text("not data")
    return folder


def test_gsm8k_rows_hold_question_instruction_and_number(source: Path, tmp_path: Path) -> None:
    run("gsm8k", "--source", str(source), "--out", str(tmp_path / "out"))
    train = read_prompts(tmp_path / "out", "train")
    assert [prompt.ground_truth for prompt in train] == ["12", "1234", "-2.5"]
    assert train[0].verifier == "gsm8k"
    content = train[0].messages[0]["content"]
    assert content.startswith("How many legs have 3 cats?")
    assert "####" in content
    # verl's own files have the answer under this name.
    assert [prompt.extra_info["answer"] for prompt in train] == [row["answer"] for row in QUESTIONS]
    assert [prompt.extra_info["response"] for prompt in train] == [row["answer"] for row in QUESTIONS]
    assert [score(prompt) for prompt in train] == [1.0, 1.0, 1.0]
    assert len(read_prompts(tmp_path / "out", "test")) == 1


def test_gsm8k_as_published_gives_7473_and_1319_rows() -> None:
    splits = gsm8k.convert(ConvertOptions(source=str(shared_data("gsm8k"))))
    assert {split: len(prompts) for split, prompts in splits.items()} == {"train": 7473, "test": 1319}
    for prompt in [*splits["train"], *splits["test"]]:
        float(prompt.ground_truth)
        assert str(prompt.extra_info["answer"]).replace(",", "").endswith(f"#### {prompt.ground_truth}")
        assert prompt.extra_info["response"] == prompt.extra_info["answer"]
    assert [prompt.id for split in splits.values() for prompt in split if score(prompt) != 1.0] == []


@pytest.mark.parametrize("kind", ["json", "json.gz", "parquet", "jsonl"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"train-00000-of-00001.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(QUESTIONS), file)
    elif kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    else:
        text = json.dumps(QUESTIONS).encode()
        file.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    assert read_splits(str(file), "hub/id", "main") == {"train": QUESTIONS}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"question": "a", "answer": "#### 1"}\n{"question": "b"}', r"train, row 1 .*'answer' \(it has question\)"),
        ('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "2"}', "train, row 1 .*does not end in"),
        ('{"question": "a", "answer": "#### two"}', "train, row 0 .*#### two"),
        ('{"question": "a"', "line 1 is not JSON"),
        ("[1]", "row 0 .*not an object"),
        ("", "no rows"),
    ],
)
def test_a_bad_source_is_named_by_file_and_row(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "train.json").write_text(content)
    with pytest.raises(DataError, match=named):
        gsm8k.convert(ConvertOptions(source=str(tmp_path)))


def test_a_source_without_splits_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        read_splits(str(tmp_path / "none"), "hub/id", "main")
    (tmp_path / "trainees.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"holds no file of a split \(it holds trainees\.jsonl\)"):
        read_splits(str(tmp_path), "hub/id", "main")
    whole = gzip.compress(b"".join(b"%d\n" % number for number in range(999)))
    for damaged in (whole[:20], whole[:20] + b"x" * 40 + whole[60:], b"no gzip at all"):
        (tmp_path / "train.jsonl.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"train\.jsonl\.gz cannot be read: .*; check that the file is whole"):
            read_file(tmp_path / "train.jsonl.gz")
    with pytest.raises(DataError, match="no such file or folder: /dev/null"):
        read_splits("/dev/null", "hub/id", "main")
    with pytest.raises(DataError, match=r"train\.jsonl\.gz cannot be read"):
        read_splits(str(tmp_path), "hub/id", "main")


def test_an_unreachable_hub_points_to_source(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*_: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=r"openai/gsm8k .*no route.*--source"):
        gsm8k.convert(ConvertOptions())


def test_the_hub_is_asked_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a: asked.append(a) or {"train": QUESTIONS, "other": []})
    assert [prompt.ground_truth for prompt in gsm8k.convert(ConvertOptions())["train"]] == ["12", "1234", "-2.5"]
    assert asked == [("openai/gsm8k", "main")]


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_test_sums_and_their_mirror_images_are_held_out(digits: int) -> None:
    splits = arithmetic.convert(ConvertOptions(difficulty=digits))
    pairs = {
        split: [tuple(map(int, re.findall(r"\d+", prompt.messages[0]["content"]))) for prompt in prompts]
        for split, prompts in splits.items()
    }
    assert not {frozenset(pair) for pair in pairs["test"]} & {frozenset(pair) for pair in pairs["train"]}
    for split, prompts in splits.items():
        assert len(set(pairs[split])) == len(prompts) > 0
        for (a, b), prompt in zip(pairs[split], prompts, strict=True):
            assert prompt.messages == ({"role": "user", "content": f"{a}+{b}="},)
            assert prompt.ground_truth == str(a + b)
            assert max(a, b) < 10**digits
            assert prompt.extra_info["response"] == arithmetic.working(a, b, digits)
            assert score(prompt) == 1.0
    if digits > 1:
        assert (len(pairs["train"]), len(pairs["test"])) == (4096, 512)


def test_sums_depend_on_the_seed_alone() -> None:
    assert arithmetic.convert(ConvertOptions(seed=3)) == arithmetic.convert(ConvertOptions(seed=3))
    assert arithmetic.convert(ConvertOptions(seed=3)) != arithmetic.convert(ConvertOptions(seed=4))


def test_the_working_is_right_at_every_place() -> None:
    assert arithmetic.working(5, 67, digits=2) == "5+7+0=12,0+6+1=7#### 72"
    for a, b in [(0, 0), (999, 1), (456, 789)]:
        steps, answer = arithmetic.working(a, b, digits=3).split("#### ")
        sums = [int(step.split("=")[1]) for step in steps.split(",")]
        assert all(eval(step.replace("=", "==")) for step in steps.split(","))
        assert sum(s % 10 * 10**i for i, s in enumerate(sums)) + sums[-1] // 10 * 1000 == int(answer) == a + b


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (ConvertOptions(difficulty=5), "--difficulty = 5"),
        (ConvertOptions(difficulty=0), "--difficulty = 0"),
        (ConvertOptions(count=0), "--count = 0"),
        (ConvertOptions(test_count=-1), "--test-count = -1"),
        (ConvertOptions(difficulty=1, count=90), "than the 100 sums"),
    ],
)
def test_counts_out_of_bounds_are_refused(options: ConvertOptions, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        arithmetic.convert(options)


def test_a_second_run_replaces_its_own_files_and_says_what_it_left(tmp_path: Path) -> None:
    out = tmp_path / "sums"
    run("arithmetic", "--out", str(out), "--count", "9", "--test-count", "2")
    (out / "other.parquet").write_bytes((out / "test.parquet").read_bytes())
    made = json.loads(run("arithmetic", "--out", str(out), "--count", "5", "--test-count", "2", "--json"))
    assert made["splits"]["train"] == {"path": str(out / "train.parquet"), "rows": 5}
    assert made["older"] == ["other.parquet"]
    assert len(read_prompts(out, "train")) == 5


def test_the_output_shows_rows_and_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run("arithmetic", "--count", "9", "--test-count", "2")
    assert "train: 9 rows in data/arithmetic/train.parquet" in shown
    assert re.search(r"user: \d+\+\d+=\n  ground truth: \d+ \(verifier gsm8k\)", shown)


def test_what_prep_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean arithmetic"):
        run("arithmetics")
    with pytest.raises(ConfigError, match="--seed: gsm8k does not read it; its options are: --source"):
        run("gsm8k", "--seed", "1")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/train\.parquet"):
        run("arithmetic", "--out", str(tmp_path / "file"))


def test_list_names_every_dataset_with_its_options() -> None:
    listed = {entry["name"]: entry for entry in json.loads(run("list", "--json"))}
    assert listed["gsm8k"]["source"] == "openai/gsm8k"
    assert "--test-count" in listed["arithmetic"]["options"]
    assert "gsm8k: GSM8K" in run("list")


def test_prep_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rlcli.cli.prep import prep; "
        f"prep('arithmetic', out=Path({str(tmp_path)!r}), count=9, test_count=2); "
        "sys.exit(str([m for m in ('torch', 'transformers', 'ray', 'vllm') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"
