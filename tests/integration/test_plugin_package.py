"""A package that brings a verifier and a dataset, installed with pip, is found and works; its broken part is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "packages" / "rlcli-last-word"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has put the package and its metadata: a folder for PYTHONPATH, so that the environment stays as is."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, *alone, str(PACKAGE)], check=True, timeout=120)
    return target


def rlcli(installed: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "rlcli.cli.main", *words]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_its_verifier_is_listed_and_its_broken_part_is_named(installed: Path, tmp_path: Path) -> None:
    done = rlcli(installed, "verifiers", "list", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    listed = {verifier["name"]: verifier for verifier in json.loads(done.stdout)}
    assert listed["last-word"]["source"] == "rlcli-last-word 1.0"
    assert listed["last-word"]["summary"] == "The last word of the response is the ground truth."
    assert "a_module_that_nobody_has" in json.dumps(listed["last-word-broken"])
    assert listed["math"]["source"].startswith("rlcli ")


def test_its_data_is_prepared_audited_and_scored_by_its_verifier(installed: Path, tmp_path: Path) -> None:
    done = rlcli(installed, "prep", "capitals", "--out", "capitals", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = rlcli(installed, "verifiers", "audit", "last-word", "--data", "capitals/train.parquet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout

    rows = [("I think of Paris.", "Paris"), ("paris", "Paris"), ("Rome or Paris?", "Rome"), ("", "Rome")]
    lines = [json.dumps({"completion": completion, "ground_truth": truth}) for completion, truth in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    run = ["verifiers", "run", "last-word(ignore_case=true)", "--input", "rows.jsonl", "--output", "out.jsonl"]
    done = rlcli(installed, *run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    scored = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in scored] == ["ok", "ok", "wrong", "no_answer"]
    assert [row["score"] for row in scored] == [1.0, 1.0, 0.0, 0.0]
    assert scored[0]["extracted"] == "Paris"


def test_the_broken_part_stops_what_asks_for_it_in_one_line(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"completion": "x", "ground_truth": "x"}))
    run = ["verifiers", "run", "last-word-broken", "--input", "rows.jsonl", "--output", "out.jsonl"]
    done = rlcli(installed, *run, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "rlcli-last-word 1.0" in line
    assert "a_module_that_nobody_has" in line
    assert not (tmp_path / "out.jsonl").exists()
