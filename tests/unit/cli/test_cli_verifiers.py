"""`rlcli verifiers` on the command line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcli.cli.main import main
from rlcli.data.prompts.parquet_schema import row, write_rows

FAULTY = Path(__file__).parents[1] / "audited_verifiers.py"
RIGHT = {"completion": "so\n#### 42", "ground_truth": "42", "id": "é"}
WRONG = {"completion": "#### 41", "ground_truth": "42", "prompt": "6 × 7?", "extra_info": {"level": 2}}


def rlcli(capsys: pytest.CaptureFixture[str], *words: str, expect: int = 0) -> tuple[str, str]:
    code = main(["verifiers", *words])
    captured = capsys.readouterr()
    assert code == expect, captured.err
    return captured.out, captured.err


def lines(path: Path, rows: list[Any]) -> str:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.decode().splitlines()]


def test_list_names_the_built_ins(capsys: pytest.CaptureFixture[str]) -> None:
    verifiers = {entry["name"]: entry for entry in json.loads(rlcli(capsys, "list", "--json")[0])}
    assert {"math", "gsm8k", "format", "code", "multiple_choice", "countdown"} <= set(verifiers)
    assert verifiers["gsm8k"]["loads"]
    assert verifiers["gsm8k"]["summary"]


def test_show_tells_options_kind_origin_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(rlcli(capsys, "show", "gsm8k", "--json")[0])
    assert shown["name"] == "gsm8k"
    assert shown["source"].startswith("rlcli ")
    assert shown["answer_kind"] == "number"
    assert "####" in shown["reads"]
    assert "42" in shown["example"]["completion"]
    text = rlcli(capsys, "show", "gsm8k")[0]
    assert "#### 42" in text
    assert "mode" in text


def test_show_takes_a_file_and_an_expression(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(rlcli(capsys, "show", f"{FAULTY}:flexible", "--json")[0])
    assert shown["reads"] == "The first line of its documentation.\n\nAnd more of it."
    assert shown["options"][0] == {"name": "places", "type": "int", "default": 2, "required": False}
    assert shown["options"][1]["name"] == "names"
    combined = json.loads(rlcli(capsys, "show", "math + 0.1 * format", "--json")[0])
    assert [(term["name"], term["weight"]) for term in combined["terms"]] == [("math", 1.0), ("format", 0.1)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", "did you mean gsm8k?"),
        ("math + gsm9k", "did you mean gsm8k?"),
        ("math +", "expected"),
        ("auto", "name one"),
        (f"{FAULTY}:souund", "did you mean"),
        ("no/such/file.py:verify", "there is no file"),
        ("my/file.py", "write my/file.py:FUNCTION"),
    ],
)
def test_show_refuses_what_there_is_not(capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
    stdout, stderr = rlcli(capsys, "show", name, expect=2)
    assert stdout == ""
    assert message in stderr
    assert len(stderr.splitlines()) == 1


@pytest.mark.long
def test_a_broken_plugin_is_named_and_hides_no_other(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    entries = "[rlcli.verifiers]\ngone = no_such_module:verify\nnumber = just_a_number:verify\n"
    (info / "entry_points.txt").write_text(entries)
    (tmp_path / "just_a_number.py").write_text("verify = 3")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rlcli.cli.main", "verifiers", *words],
            env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )

    verifiers = {entry["name"]: entry for entry in json.loads(run("list", "--json").stdout)}
    assert not verifiers["gone"]["loads"]
    assert "(broken 1.0, no_such_module:verify) does not load: ModuleNotFoundError" in verifiers["gone"]["summary"]
    assert "is of type int, not a function" in verifiers["number"]["summary"]
    assert verifiers["math"]["loads"]
    for name, message in (("gone", "broken 1.0"), ("number", "of type int")):
        completed = run("show", name)
        assert (completed.returncode, message in completed.stderr, "Traceback" in completed.stderr) == (2, True, False)
    assert run("show", "gsm8k").returncode == 0


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_run_keeps_rows_and_their_order_and_adds_what_was_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    source = lines(tmp_path / f"in.{suffix}", [RIGHT, WRONG, "", {"completion": "?", "ground_truth": "7", "score": 9}])
    output = tmp_path / "new" / f"out.{suffix}"
    stdout, stderr = rlcli(capsys, "run", "gsm8k", "--input", source, "--output", str(output), "--processes", "2")
    assert stdout == ""
    assert "mean score" in stderr
    rows = read(output)
    assert [(row["score"], row["outcome"], row["extracted"]) for row in rows] == [
        (1.0, "ok", "42"),
        (0.0, "wrong", "41"),
        (0.0, "no_answer", None),
    ]
    assert RIGHT.items() <= rows[0].items()
    assert WRONG.items() <= rows[1].items()
    assert all(row["seconds"] > 0 for row in rows)
    assert "parts" not in rows[0]
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_run_gives_parts_of_a_sum_and_a_summary_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = lines(tmp_path / "in.jsonl", [RIGHT, WRONG])
    output = tmp_path / "out.jsonl"
    words = ("run", "gsm8k + 0.1 * format", "--input", source, "--output", str(output), "--json")
    summary = json.loads(rlcli(capsys, *words)[0])
    assert (summary["rows"], summary["mean_score"], summary["outcomes"]) == (2, 0.5, {"ok": 1, "wrong": 1})
    assert summary["parts"] == {"gsm8k": 0.5, "format": 0.0}
    assert set(summary["seconds"]) == {"p50", "p90", "p99", "max"}
    assert read(output)[0]["parts"] == {"gsm8k": 1.0, "format": 0.0}


@pytest.mark.long
def test_run_reads_standard_input_and_writes_standard_output() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "rlcli.cli.main", "verifiers", "run", "gsm8k", "--input", "-", "--output", "-"],
        input=json.dumps(RIGHT) + "\n" + json.dumps({**WRONG, "note": "\ud800"}) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = map(json.loads, completed.stdout.splitlines())
    assert (first["score"], first["id"]) == (1.0, "é")
    assert (second["score"], second["note"]) == (0.0, "\ud800")
    assert "\x1b" not in completed.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oh", "is not JSON"),
        ('{"completion": NaN}', "NaN"),
        ("[1]", "not a JSON object but a list"),
        ('{"ground_truth": "1"}', "'completion', the response, as text, is missing"),
        ('{"completion": "1", "ground_truth": 1}', "'ground_truth', the right answer, as text, is a number"),
        ('{"completion": "1", "ground_truth": "1", "prompt": [{"role": "user"}]}', "'prompt' must be text or"),
        ('{"completion": "1", "ground_truth": "1", "extra_info": []}', "'extra_info' is a list"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_malformed_line_stops_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    source = lines(tmp_path / "in.jsonl", [RIGHT, "", line])
    output = tmp_path / "out.jsonl"
    _, stderr = rlcli(capsys, "run", "gsm8k", "--input", source, "--output", str(output), expect=2)
    assert f"{source}, line 3:" in stderr
    assert message in stderr
    assert "--skip-bad" in stderr
    assert not output.exists()
    words = ("run", "gsm8k", "--input", source, "--output", str(output), "--skip-bad", "--json")
    assert json.loads(rlcli(capsys, *words)[0])["skipped"] == 1
    assert len(read(output)) == 1


@pytest.mark.long
def test_run_refuses_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = lines(tmp_path / "in.jsonl", [RIGHT])
    empty = lines(tmp_path / "empty.jsonl", [])
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(json.dumps(RIGHT).encode())[:-9])
    for words, message in (
        (("gsm9k", "--input", source), "did you mean gsm8k?"),
        (("gsm8k", "--input", str(tmp_path / "none.jsonl")), "cannot read"),
        (("gsm8k", "--input", empty), "has no row"),
        (("gsm8k", "--input", str(torn)), "cannot read"),
        (("gsm8k", "--input", source, "--output", "-", "--json"), "both use standard output"),
        (("auto", "--input", source), "auto"),
        (("code", "--input", source, "--sandbox", "bwarp"), "no sandbox is called 'bwarp'"),
        (("code", "--input", source, "--deadline", "4"), "killed at --deadline = 4, before"),
        (("code(score=some)", "--input", source), "should be 'all' or 'share'"),
    ):
        assert message in rlcli(capsys, "run", *words, expect=2)[1]


@pytest.mark.long
def test_a_verifier_that_hangs_or_crashes_costs_its_rows_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"completion": f"\\boxed{{{text}}}", "ground_truth": "4"} for text in ("2^2", "4", "2^2", "5")]
    source, output = lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    words = ("run", f"{FAULTY}:hangs_on_powers", "--input", source, "--output", str(output), "--deadline", "0.2")
    rlcli(capsys, *words)
    assert [row["outcome"] for row in read(output)] == ["wrong", "ok", "wrong", "wrong"]
    assert "used up its CPU time twice (more than 0.2 s)" in read(output)[0]["detail"]
    words = (
        "run",
        f"{FAULTY}:needs_a_number",
        "--input",
        lines(tmp_path / "in.jsonl", [WRONG | {"ground_truth": "x"}]),
    )
    stderr = rlcli(capsys, *words, expect=2)[1]
    assert "crashes on the only response; on the one with the ground truth 'x': ValueError" in stderr


def test_a_file_is_verified_though_its_first_prompt_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"completion": "#### 3", "ground_truth": truth} for truth in ["a point"] * 4 + ["3"] * 5]
    output = tmp_path / "scored.jsonl"
    rlcli(capsys, "run", "gsm8k", "--input", lines(tmp_path / "rows.jsonl", rows), "--output", str(output))
    assert [row["outcome"] for row in read(output)] == ["crash"] * 4 + ["ok"] * 5


@pytest.mark.long
def test_audit_ends_with_a_verdict_and_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "train.parquet"
    answers = [("12", "\\boxed{12}"), ("345", "\\boxed{345}")]
    messages = [{"role": "user", "content": "What is it?"}]
    write_rows(
        data,
        [
            row(
                data_source="d",
                messages=messages,
                verifier="math",
                ground_truth=truth,
                extra_info={"response": response},
            )
            for truth, response in answers
        ],
    )
    words = ("--data", str(tmp_path), "--mutations", "6")
    stdout, _ = rlcli(capsys, "audit", f"{FAULTY}:sound", *words, "--html", str(tmp_path / "page.html"))
    assert stdout.rstrip().splitlines()[-1].startswith("PASS")
    assert "the row's response" in stdout
    assert "latency: p50" in stdout
    assert "Pass" in (tmp_path / "page.html").read_text()
    stdout, _ = rlcli(capsys, "audit", f"{FAULTY}:credulous", *words, expect=1)
    verdicts = [line for line in stdout.splitlines() if line.startswith("FAIL: ")]
    assert (verdicts[0], verdicts[-1]) == (stdout.splitlines()[1], stdout.splitlines()[-1])
    assert "row 0, near-miss" in stdout
    report = json.loads(rlcli(capsys, "audit", f"{FAULTY}:strict_beyond_reason", *words, "--json", expect=1)[0])
    assert report["passed"] is False
    assert {surprise["row"] for surprise in report["surprises"]} == {0, 1}
    assert "no such file" in rlcli(capsys, "audit", "math", "--data", str(tmp_path / "none"), expect=2)[1]
