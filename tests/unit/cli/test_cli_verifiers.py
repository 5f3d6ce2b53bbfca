"""`rlcli verifiers` as a user types it."""

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
    done = capsys.readouterr()
    assert code == expect, done.err
    return done.out, done.err


def lines(path: Path, rows: list[Any]) -> str:
    text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.decode().splitlines()]


def test_list_names_the_built_ins(capsys: pytest.CaptureFixture[str]) -> None:
    found = {one["name"]: one for one in json.loads(rlcli(capsys, "list", "--json")[0])}
    assert {"math", "gsm8k", "format", "code", "multiple_choice", "countdown"} <= set(found)
    assert found["gsm8k"]["loads"]
    assert found["gsm8k"]["summary"]


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
    both = json.loads(rlcli(capsys, "show", "math + 0.1 * format", "--json")[0])
    assert [(term["name"], term["weight"]) for term in both["terms"]] == [("math", 1.0), ("format", 0.1)]


@pytest.mark.parametrize(
    ("name", "said"),
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
def test_show_refuses_what_there_is_not(capsys: pytest.CaptureFixture[str], name: str, said: str) -> None:
    out, err = rlcli(capsys, "show", name, expect=2)
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


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

    found = {one["name"]: one for one in json.loads(run("list", "--json").stdout)}
    assert not found["gone"]["loads"]
    assert "(broken 1.0, no_such_module:verify) does not load: ModuleNotFoundError" in found["gone"]["summary"]
    assert "is of type int, not a function" in found["number"]["summary"]
    assert found["math"]["loads"]
    for name, said in (("gone", "broken 1.0"), ("number", "of type int")):
        done = run("show", name)
        assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    assert run("show", "gsm8k").returncode == 0


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_run_keeps_rows_and_their_order_and_adds_what_was_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    source = lines(tmp_path / f"in.{suffix}", [RIGHT, WRONG, "", {"completion": "?", "ground_truth": "7", "score": 9}])
    output = tmp_path / "new" / f"out.{suffix}"
    out, err = rlcli(capsys, "run", "gsm8k", "--input", source, "--output", str(output), "--processes", "2")
    assert out == ""
    assert "mean score" in err
    rows = read(output)
    assert [(one["score"], one["outcome"], one["extracted"]) for one in rows] == [
        (1.0, "ok", "42"),
        (0.0, "wrong", "41"),
        (0.0, "no_answer", None),
    ]
    assert RIGHT.items() <= rows[0].items()
    assert WRONG.items() <= rows[1].items()
    assert all(one["seconds"] > 0 for one in rows)
    assert "parts" not in rows[0]
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_run_gives_parts_of_a_sum_and_a_summary_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = lines(tmp_path / "in.jsonl", [RIGHT, WRONG])
    output = tmp_path / "out.jsonl"
    words = ("run", "gsm8k + 0.1 * format", "--input", source, "--output", str(output), "--json")
    said = json.loads(rlcli(capsys, *words)[0])
    assert (said["rows"], said["mean_score"], said["outcomes"]) == (2, 0.5, {"ok": 1, "wrong": 1})
    assert said["parts"] == {"gsm8k": 0.5, "format": 0.0}
    assert set(said["seconds"]) == {"p50", "p90", "p99", "max"}
    assert read(output)[0]["parts"] == {"gsm8k": 1.0, "format": 0.0}


@pytest.mark.long
def test_run_reads_standard_input_and_writes_standard_output() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlcli.cli.main", "verifiers", "run", "gsm8k", "--input", "-", "--output", "-"],
        input=json.dumps(RIGHT) + "\n" + json.dumps({**WRONG, "note": "\ud800"}) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["score"], first["id"]) == (1.0, "é")
    assert (second["score"], second["note"]) == (0.0, "\ud800")
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    source = lines(tmp_path / "in.jsonl", [RIGHT, "", line])
    output = tmp_path / "out.jsonl"
    _, err = rlcli(capsys, "run", "gsm8k", "--input", source, "--output", str(output), expect=2)
    assert f"{source}, line 3:" in err
    assert said in err
    assert "--skip-bad" in err
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
    for words, said in (
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
        assert said in rlcli(capsys, "run", *words, expect=2)[1]


@pytest.mark.long
def test_a_verifier_that_hangs_or_crashes_costs_its_rows_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"completion": f"\\boxed{{{text}}}", "ground_truth": "4"} for text in ("2^2", "4", "2^2", "5")]
    source, output = lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    words = ("run", f"{FAULTY}:hangs_on_powers", "--input", source, "--output", str(output), "--deadline", "0.2")
    rlcli(capsys, *words)
    assert [one["outcome"] for one in read(output)] == ["wrong", "ok", "wrong", "wrong"]
    assert "used up its CPU time twice (more than 0.2 s)" in read(output)[0]["detail"]
    words = (
        "run",
        f"{FAULTY}:needs_a_number",
        "--input",
        lines(tmp_path / "in.jsonl", [WRONG | {"ground_truth": "x"}]),
    )
    said = rlcli(capsys, *words, expect=2)[1]
    assert "crashes on the only response; on the one with the ground truth 'x': ValueError" in said


def test_a_file_is_verified_though_its_first_prompt_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"completion": "#### 3", "ground_truth": truth} for truth in ["a point"] * 4 + ["3"] * 5]
    out = tmp_path / "scored.jsonl"
    rlcli(capsys, "run", "gsm8k", "--input", lines(tmp_path / "rows.jsonl", rows), "--output", str(out))
    assert [row["outcome"] for row in read(out)] == ["crash"] * 4 + ["ok"] * 5


@pytest.mark.long
def test_audit_ends_with_a_verdict_and_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "train.parquet"
    told = [("12", "\\boxed{12}"), ("345", "\\boxed{345}")]
    message = [{"role": "user", "content": "What is it?"}]
    write_rows(
        data,
        [
            row(data_source="d", messages=message, verifier="math", ground_truth=truth, extra_info={"response": said})
            for truth, said in told
        ],
    )
    words = ("--data", str(tmp_path), "--mutations", "6")
    out, _ = rlcli(capsys, "audit", f"{FAULTY}:sound", *words, "--html", str(tmp_path / "page.html"))
    assert out.rstrip().splitlines()[-1].startswith("PASS")
    assert "the row's response" in out
    assert "latency: p50" in out
    assert "Pass" in (tmp_path / "page.html").read_text()
    out, _ = rlcli(capsys, "audit", f"{FAULTY}:credulous", *words, expect=1)
    verdicts = [line for line in out.splitlines() if line.startswith("FAIL: ")]
    assert (verdicts[0], verdicts[-1]) == (out.splitlines()[1], out.splitlines()[-1])
    assert "row 0, near-miss" in out
    said = json.loads(rlcli(capsys, "audit", f"{FAULTY}:strict_beyond_reason", *words, "--json", expect=1)[0])
    assert said["passed"] is False
    assert {one["row"] for one in said["surprises"]} == {0, 1}
    assert "no such file" in rlcli(capsys, "audit", "math", "--data", str(tmp_path / "none"), expect=2)[1]
