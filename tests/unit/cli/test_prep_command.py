"""`rlcli prep` on the command line, and the two datasets that the project's tests and quickstart use."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rlcli_data_prep import arithmetic, gsm8k
from rlcli_verifiers.gsm8k import verify
from typer.testing import CliRunner

from rlcli.cli.prep.prep import app
from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.errors import ConfigError, DataError, RlcliError, UnknownName
from rlcli.prep.pipeline import Plan, prepare
from rlcli.types import ConvertOptions, Outcome, Prompt, VerifyRequest
from tests.shared_data import shared_data

QUESTIONS = [
    {"question": "How many legs have 3 cats?", "answer": "3*4=<<3*4=12>>12\n#### 12"},
    {"question": "And the price?\u2028In all?", "answer": "It costs\n#### 1,234"},
    {"question": "How cold?", "answer": "#### -2.5"},
]


def run(*arguments: str | Path) -> str:
    """Output of `rlcli prep`; errors are raised."""
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def prep_json(*arguments: str | Path) -> dict[str, Any]:
    return dict(json.loads(run(*arguments, "--json")))


def splits_of(options: ConvertOptions) -> dict[str, list[Prompt]]:
    return prepare(arithmetic.CONVERTER, options).splits


def score(prompt: Prompt) -> float:
    """Score of the row's own response by the row's verifier, with the same inputs as in training."""
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
    # verl's own files name the answer like this.
    assert [prompt.extra_info["answer"] for prompt in train] == [row["answer"] for row in QUESTIONS]
    assert [prompt.extra_info["response"] for prompt in train] == [row["answer"] for row in QUESTIONS]
    assert [score(prompt) for prompt in train] == [1.0, 1.0, 1.0]
    assert len(read_prompts(tmp_path / "out", "test")) == 1


@pytest.mark.long
def test_gsm8k_as_published_gives_7473_and_1319_rows() -> None:
    splits = prepare(gsm8k.CONVERTER, ConvertOptions(source=str(shared_data("gsm8k"))), Plan()).splits
    assert {split: len(prompts) for split, prompts in splits.items()} == {"train": 7473, "test": 1319}
    for prompt in [*splits["train"], *splits["test"]]:
        float(prompt.ground_truth)
        assert str(prompt.extra_info["answer"]).replace(",", "").endswith(f"#### {prompt.ground_truth}")
        assert prompt.extra_info["response"] == prompt.extra_info["answer"]
    assert [prompt.id for split in splits.values() for prompt in split if score(prompt) != 1.0] == []


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ('{"question": "a", "answer": "#### 1"}\n{"question": "b"}', r"train\.jsonl, line 2: .*'answer'"),
        ('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "2"}', "line 2: .*does not end in"),
        ('{"question": "a", "answer": "#### two"}', "line 1: .*#### two"),
        ('{"question": "a", "answer": "#### 1"}\n{"question": "a"', "line 2: not JSON"),
    ],
)
def test_a_bad_row_stops_with_file_line_and_mend_or_is_left_out(tmp_path: Path, content: str, pattern: str) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(DataError, match=pattern) as error:
        run("gsm8k", "--source", tmp_path, "--out", tmp_path / "out")
    assert error.value.hint.endswith("or leave such rows out with --skip-bad")
    assert not (tmp_path / "out").exists()
    skipping = ("gsm8k", "--source", tmp_path, "--out", tmp_path / "out", "--skip-bad")
    if "\n" not in content:
        with pytest.raises(DataError, match=f"all 1 rows are malformed, the first: .*{pattern}"):
            run(*skipping)
        return
    step = prep_json(*skipping)["steps"][1]
    assert (step["step"], step["rows"], step["removed"]) == ("convert", {"train": 1}, {"malformed": 1})
    assert re.search(pattern, step["examples"][0])


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_test_sums_and_their_mirror_images_are_held_out(digits: int) -> None:
    splits = splits_of(ConvertOptions(difficulty=digits))
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
    assert splits_of(ConvertOptions(seed=3)) == splits_of(ConvertOptions(seed=3))
    assert splits_of(ConvertOptions(seed=3)) != splits_of(ConvertOptions(seed=4))


def test_the_working_is_right_at_every_place() -> None:
    assert arithmetic.working(5, 67, digits=2) == "5+7+0=12,0+6+1=7#### 72"
    for a, b in [(0, 0), (999, 1), (456, 789)]:
        steps, answer = arithmetic.working(a, b, digits=3).split("#### ")
        sums = [int(step.split("=")[1]) for step in steps.split(",")]
        assert all(eval(step.replace("=", "==")) for step in steps.split(","))
        assert sum(s % 10 * 10**i for i, s in enumerate(sums)) + sums[-1] // 10 * 1000 == int(answer) == a + b


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (ConvertOptions(difficulty=5), "--difficulty = 5"),
        (ConvertOptions(difficulty=0), "--difficulty = 0"),
        (ConvertOptions(count=0), "--count = 0"),
        (ConvertOptions(test_count=-1), "--test-count = -1"),
        (ConvertOptions(difficulty=1, count=90), "than the 100 sums"),
    ],
)
def test_counts_out_of_bounds_are_refused(options: ConvertOptions, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        splits_of(options)


@pytest.mark.long
def test_a_second_run_replaces_its_own_files_and_says_what_it_left(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    run("arithmetic", "--out", folder, "--count", "9", "--test-count", "2")
    (folder / "other.parquet").write_bytes((folder / "test.parquet").read_bytes())
    second = prep_json("arithmetic", "--out", folder, "--count", "5", "--test-count", "2")
    assert second["splits"]["train"] == {"path": str(folder / "train.parquet"), "rows": 5}
    assert second["older"] == ["other.parquet"]
    assert len(read_prompts(folder, "train")) == 5


def test_the_output_shows_rows_and_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run("arithmetic", "--count", "9", "--test-count", "2")
    assert "train: 9 rows in data/arithmetic/train.parquet" in shown
    assert re.search(r"user: \d+\+\d+=\n  ground truth: \d+ \(verifier gsm8k\)", shown)


@pytest.mark.parametrize(
    ("words", "kind", "pattern"),
    [
        (["arithmetics"], UnknownName, "did you mean arithmetic"),
        (["show", "arithmetics"], UnknownName, "did you mean arithmetic"),
        (["gsm8k", "--seed", "1"], ConfigError, "--seed: gsm8k does not read it; its options are: --source"),
        (["arithmetic", "--format", "csv"], ConfigError, "--format = csv .*verl, trl"),
        (["arithmetic", "--columns", "prompt"], ConfigError, "'prompt' is not OURS=THEIRS"),
        (["arithmetic", "--columns", "prompt=question"], ConfigError, "--columns: arithmetic does not read it"),
        (
            ["arithmetic", "--max-prompt-tokens", "5"],
            ConfigError,
            "--max-prompt-tokens and --tokenizer need each other",
        ),
        (["arithmetic", "--min-prompt-chars", "9", "--max-prompt-chars", "8"], ConfigError, "= 9 is more than"),
        (["arithmetic", "--ngram", "8"], ConfigError, "need --decontaminate"),
        (["arithmetic", "--decontaminate", "x", "--split", "test"], ConfigError, "--split = test"),
        (["jsonl", "--verifier", "f.py:g"], ConfigError, "--verifier = f.py:g: rows may name installed verifiers only"),
        (["jsonl", "--verifier", "judge(url='http://a', model=b)"], ConfigError, "and it names the verifier judge"),
        (
            ["jsonl", "--verifier", "code(timeout_s=9)"],
            ConfigError,
            "and it sets the option timeout_s of the verifier code",
        ),
        (["jsonl", "--verifier", "mathh", "--no-check"], UnknownName, "did you mean math"),
        (["jsonl", "--verifier", "auto", "--no-check"], ConfigError, "name a verifier"),
        (["arithmetic", "--split", "dev"], DataError, "--split = dev: arithmetic has only train, test"),
        (["arithmetic", "--max-prompt-chars", "2"], DataError, r"no row .*train.* is left \(read: 4096, length: 0\)"),
        (["arithmetic", "--decontaminate", "none.parquet"], DataError, "no such file or folder: none.parquet"),
    ],
)
def test_what_prep_cannot_do_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], kind: type[RlcliError], pattern: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=pattern):
        run(*words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "contacts_hub"),
    [
        (["jsonl", "--source", "none/rows.jsonl.gz", "--verifier", "math"], False),
        (["gsm8k", "--source", "none.parquet"], False),
        (["gsm8k", "--source", "some/dataset"], True),
        (["gsm8k"], True),
    ],
)
def test_the_hub_is_asked_only_where_rows_may_be_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], contacts_hub: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "rlcli.cli.main", "prep", *words]
    completed = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 2, completed.stderr
    assert ("cannot be reached" in completed.stderr) is contacts_hub
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/train\.parquet"):
        run("arithmetic", "--out", tmp_path / "file")


@pytest.mark.long
def test_the_steps_come_in_order_and_are_in_the_file(source: Path, tmp_path: Path) -> None:
    lines = [{"question": f"How much is {n} and {n}?", "answer": f"#### {2 * n}"} for n in (1, 2, 3, 4, 4, 20000)]
    (source / "train.jsonl.gz").unlink()
    (source / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (source / "test.jsonl").write_text("\n".join(map(json.dumps, lines[1:3])))
    run("gsm8k", "--source", source, "--split", "test", "--out", tmp_path / "asked")
    longest = len(f"How much is 4 and 4?\n\n{gsm8k.INSTRUCTION}")
    summary = prep_json(
        *("gsm8k", "--source", source, "--split", "train", "--out", tmp_path / "out", "--limit", "2"),
        *("--max-prompt-chars", longest, "--dedup", "--decontaminate", tmp_path / "asked", "--shuffle", "1"),
    )
    assert [(step["step"], step["rows"]["train"]) for step in summary["steps"]] == [
        *(("read", 6), ("length", 5), ("dedup", 4), ("decontaminate", 2), ("shuffle", 2), ("limit", 2), ("check", 2))
    ]
    assert summary["steps"][3]["removed"] == {f"near 2 rows of {tmp_path / 'asked'}": 2}
    assert {prompt.ground_truth for prompt in read_prompts(tmp_path / "out", "train")} == {"2", "8"}
    shown = json.loads(run("show", tmp_path / "out" / "train.parquet", "--json"))
    record = shown["provenance"]
    assert shown["rows"] == 2
    assert record["dataset"] == "gsm8k"
    assert record["arguments"]["shuffle"] == 1
    assert [step["step"] for step in record["steps"]] == [step["step"] for step in summary["steps"]]
    (origin,) = record["sources"]
    assert origin["file"] == str(source / "train.jsonl")
    hashed = subprocess.run(["sha256sum", origin["file"]], capture_output=True, text=True, check=True).stdout.split()[0]
    assert origin["sha256"] == hashed


@pytest.mark.long
def test_tokens_are_counted_by_the_model_s_tokenizer(tmp_path: Path) -> None:
    from rlcli.data.prompts.tokenized_prompts import load_tokenizer, prompt_lengths
    from rlcli.model.io.tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path / "tiny")
    run("arithmetic", "--difficulty", "3", "--out", tmp_path / "all", "--count", "50", "--test-count", "9")
    prompts = read_prompts(tmp_path / "all", "train")
    lengths = prompt_lengths(prompts, load_tokenizer(str(model)))
    limit = sorted(lengths)[25]
    words = ("arithmetic", "--difficulty", "3", "--out", tmp_path / "some", "--count", "50", "--test-count", "9")
    summary = prep_json(*words, "--max-prompt-tokens", limit, "--tokenizer", model, "--split", "train")
    fitting = [prompt.ground_truth for prompt, length in zip(prompts, lengths, strict=True) if length <= limit]
    assert [prompt.ground_truth for prompt in read_prompts(tmp_path / "some", "train")] == fitting
    assert summary["steps"][1]["removed"] == ({"longer": 50 - len(fitting)} if len(fitting) < 50 else {})


@pytest.mark.long
def test_tokens_of_images_are_counted_as_the_model_sees_them(tmp_path: Path) -> None:
    from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts, load_tokenizer
    from rlcli.model.io.model_checks import image_rule
    from rlcli.model.io.tiny_model import make_tiny_model
    from rlcli.model.io.tiny_vision import save_vision_model, vision_model

    save_vision_model(vision_model(), vlm := tmp_path / "vlm")
    shapes = ("shapes", "--count", "12", "--test-count", "2", "--split", "train", "--cell", "40")
    run(*shapes, "--out", tmp_path / "all")
    prompts = read_prompts(tmp_path / "all", "train")
    tokenized = TokenizedPrompts.tokenize(prompts, load_tokenizer(str(vlm)), 10_000, rule=image_rule(str(vlm)))
    lengths = np.diff(tokenized.offsets)
    limit = int(np.sort(lengths)[5])
    summary = prep_json(*shapes, "--out", tmp_path / "some", "--max-prompt-tokens", str(limit), "--tokenizer", vlm)
    assert len(read_prompts(tmp_path / "some", "train")) == (lengths <= limit).sum() < 12
    note = summary["steps"][1]["note"]
    assert note.startswith("12 images counted as ")
    assert note.endswith(f"{int((tokenized.flat == tokenized.rule.token).sum())} in all")  # type: ignore[union-attr]
    assert json.loads(run("show", tmp_path / "some" / "train.parquet", "--json"))["provenance"]["steps"][1]["note"]
    text_model = make_tiny_model(tmp_path / "text_model")
    printed = run(*shapes, "--out", tmp_path / "text", "--max-prompt-tokens", "10000", "--tokenizer", text_model)
    assert f"tokens: 12 images counted as the text <image>: {text_model} is no vision-language model" in printed


def test_trl_s_format_is_flat(source: Path, tmp_path: Path) -> None:
    run("gsm8k", "--source", source, "--out", tmp_path / "out", "--format", "trl")
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert rows[1]["prompt"][0]["content"].startswith("And the price?")
    assert [row["solution"] for row in rows] == ["$12$", "$1234$", "$-2.5$"]
    assert [row["answer"] for row in rows] == ["12", "1234", "-2.5"]
    assert [row["extra_answer"] for row in rows] == [row["answer"] for row in QUESTIONS]
    assert rows[0]["index"] == 0
    assert rows[0]["verifier"] == "gsm8k"


def test_list_and_show_tell_every_dataset_with_its_options() -> None:
    listed = {entry["name"]: entry for entry in json.loads(run("list", "--json"))}
    assert listed["gsm8k"]["source"] == "openai/gsm8k"
    assert "--test-count" in listed["arithmetic"]["options"]
    assert "gsm8k" in run("list")
    assert json.loads(run("show", "gsm8k", "--json")) == listed["gsm8k"]
    assert "arXiv:2110.14168" in run("show", "gsm8k")


def test_show_reads_any_parquet_file_and_says_what_is_none(tmp_path: Path) -> None:
    import pyarrow as pa

    pq.write_table(pa.table({"a": ["\x1b[31mred"]}), tmp_path / "their.parquet")
    shown = run("show", tmp_path / "their.parquet")
    assert "has no record of how it was made" in shown
    assert "\x1b" not in shown
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    for path, pattern in [
        ("torn.parquet", "cannot be read"),
        ("none.parquet", "not a file"),
        (".", "folder with their"),
    ]:
        with pytest.raises(DataError, match=pattern):
            run("show", tmp_path / path)


@pytest.mark.long
def test_prep_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from rlcli.cli.main import main; "
        f"code = main(['prep', 'arithmetic', '--out', {str(tmp_path)!r}, '--count', '9', '--test-count', '2']); "
        "sys.exit(str([code, *(m for m in ('torch', 'transformers', 'ray', 'vllm') if m in sys.modules)]))"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert completed.stderr.strip() == "[0]"
