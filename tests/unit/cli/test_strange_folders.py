"""Folders from elsewhere, with pipes, devices, links and endless files in place of records: no command hangs, fills the
memory or reads files outside the folder, and each names the file in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.model.io.tiny_model import make_tiny_model
from rlcli.support.files import described
from tests.readers import Result, results_of
from tests.report_runs import write_run
from tests.unit.support.test_reading import make_socket, make_sparse

TOP = ("config.toml", "environment.json", "metrics.jsonl", "events.jsonl", "timeline.jsonl", "prompts.jsonl")
EVALUATION, SAMPLES = "evaluations/step-000000.json", "samples/step-000002/rank-0.parquet"
NO_FILE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "folder": Path.mkdir,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "random": lambda path: path.symlink_to("/dev/urandom"),
    "secret": lambda path: path.symlink_to(path.parents[2] / "secret"),
    "nowhere": lambda path: path.symlink_to("nowhere"),
}
SECRET = '{"step": 1, "event": "started", "reward/mean": 0.123456}\n'


def first(number: int, values: Iterable[Any]) -> list[Any]:
    """The first `number` of `values` as parameters, and the others marked `exhaustive`: the same code refuses them."""
    return [
        value if index < number else pytest.param(value, marks=pytest.mark.exhaustive)
        for index, value in enumerate(values)
    ]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: `odd`, to be changed, and `good`."""
    root = tmp_path_factory.mktemp("strange")
    (root / "secret").write_text(SECRET)
    for name in ("odd", "good"):
        write_run(root / "runs" / name, steps=2, prompts=2, samples=2)
        (root / "runs" / name / "prompts.jsonl").write_text('{"step": 1, "groups": [["sums/0", 2, 1, 9, true]]}\n')
    return root


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "strange"))


def replaced(run: Path, name: str, make: Callable[[Path], object]) -> None:
    (run / name).unlink()
    make(run / name)


def readers(report_folder: str = "report") -> list[list[str]]:
    """Commands that read the records of a run. None loads a model or starts Ray."""
    return [
        ["runs", "show", "odd"],
        ["runs", "show", "odd", "--json"],
        ["runs", "samples", "odd"],
        ["runs", "prompts", "odd"],
        ["runs", "signals", "odd"],
        ["runs", "watch", "odd"],
        ["runs", "compare", "good", "odd"],
        ["report", "odd", "--out", report_folder],
        ["pages", "runs/odd", "runs/good"],
        ["rescore", "odd", "--verifier", "exact"],
        ["engines", "list", "odd"],
        ["runs", "resume", "odd"],
        ["train", "--resume", "runs/odd"],
        ["export", "runs/odd", "--out", "exported"],
        ["chat", "odd", "--prompt", "1+1"],
    ]


def refused(result: Result, name: str) -> None:
    """Check that the last line names the file, and that no content of its target was printed."""
    last = result.err.splitlines()[-1]
    assert result.code == 2, (result.words, last)
    assert last.startswith("error: "), (result.words, last)
    assert name in last, (result.words, last)
    assert "0.123" not in result.out + result.err


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("pipe", ("config.toml", "metrics.jsonl")),
        ("secret", ("metrics.jsonl",)),
        pytest.param("pipe", TOP, marks=pytest.mark.exhaustive),  # the same code refuses all
        *(
            pytest.param(kind, ("config.toml", "metrics.jsonl"), marks=pytest.mark.exhaustive)
            for kind in ("secret", "zero", "socket", "folder", "random", "nowhere")
        ),
    ],
)
def test_a_record_that_is_no_file_is_refused_by_every_reader(kind: str, names: Sequence[str], folder: Path) -> None:
    for name in names:
        content = (folder / "runs" / "odd" / name).read_bytes()
        replaced(folder / "runs" / "odd", name, NO_FILE[kind])
        some = readers() if kind in ("pipe", "zero") else readers()[:1]
        listed, *results = results_of([["runs", "list"], *some], folder)
        assert listed.code == 0
        assert "good" in listed.out
        assert "unreadable" in listed.out
        assert listed.err.startswith(f"odd: runs/odd/{name} is ")
        for result in results:
            refused(result, f"odd/{name}")
        path = folder / "runs" / "odd" / name
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        path.write_bytes(content)


@pytest.mark.parametrize("name", [EVALUATION, SAMPLES])
@pytest.mark.parametrize("kind", first(1, ["secret", "pipe", "zero", "socket"]))
def test_a_file_of_a_step_that_is_none_is_refused_by_what_reads_it(kind: str, name: str, folder: Path) -> None:
    run = folder / "runs" / "odd"
    replaced(run, name, NO_FILE[kind] if kind != "secret" else lambda path: path.symlink_to(folder / "secret"))
    only = [words for words in readers()[:9] if words[1] in ("show", "samples") or words[0] in ("report", "pages")]
    reads = only if name == SAMPLES else [words for words in only if words[1] != "samples"]
    listed, *results = results_of([["runs", "list"], *reads], folder)
    assert listed.code == 0
    assert ("unreadable" in listed.out) == (name == EVALUATION)
    for result in results:
        refused(result, f"odd/{name}")


@pytest.mark.parametrize("room", first(1, ["samples/step-000001", "samples", "evaluations", "logs"]))
def test_a_folder_of_a_run_that_is_a_link_is_refused(room: str, folder: Path) -> None:
    run = folder / "runs" / "odd"
    (run / room).rename(folder / "moved")
    (run / room).symlink_to(folder / "moved")
    for result in results_of([["runs", "show", "odd"], ["report", "odd", "--out", "report"]], folder):
        refused(result, f"odd/{room} is a link")


def test_a_lock_that_is_no_file_blocks_nobody(folder: Path) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to(folder / "secret")):
        replaced(folder / "runs" / "odd", ".lock", make)
        listed, shown = results_of([["runs", "list"], ["runs", "show", "odd"]], folder)
        assert "odd/.lock is" in listed.err
        refused(shown, "odd/.lock")
    assert (folder / "secret").read_text() == SECRET


@pytest.mark.parametrize(
    "name", first(1, ["metrics.jsonl", "config.toml", "events.jsonl", "environment.json", EVALUATION])
)
def test_a_file_of_10_gib_without_content_is_refused(name: str, folder: Path) -> None:
    replaced(folder / "runs" / "odd", name, make_sparse)
    reads = readers()[7:9] if name == "environment.json" else [*readers()[:2], *readers()[7:9]]
    listed, *results = results_of([["runs", "list"], *reads], folder)
    assert listed.code == 0
    assert "good" in listed.out
    for result in results:
        refused(result, f"odd/{name} has ")


@pytest.mark.parametrize("name", first(1, ["metrics.jsonl", "timeline.jsonl", "events.jsonl"]))
def test_a_line_of_100_mib_is_refused(name: str, folder: Path) -> None:
    with (folder / "runs" / "odd" / name).open("ab") as file:
        file.truncate(file.tell() + (100 << 20))
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 3}\n')
    for result in results_of([*readers()[:1], *readers()[5:9]], folder):
        if "compare" not in result.words or name != "events.jsonl":
            refused(result, f"odd/{name} has a line of more than 16 MiB") if result.words[1] != "watch" else None


def test_samples_of_10_gib_without_content_are_left_out_with_a_note(folder: Path) -> None:
    replaced(folder / "runs" / "odd", SAMPLES, make_sparse)
    shown, report = results_of([["runs", "samples", "odd", "--step", "2"], ["report", "odd", "--out", "out"]], folder)
    assert "rank-0.parquet cannot be read" in shown.err + report.err
    assert (shown.code, report.code) == (0, 0)


@pytest.mark.parametrize("kind", first(1, ["bytes", "lists", "objects"]))
def test_text_that_breaks_a_reader_is_left_out_with_a_note(kind: str, folder: Path) -> None:
    nested = b"[" * 1000 + b"]" * 1000, b'{"a":' * 1000 + b"1" + b"}" * 1000
    text = dict(zip(("bytes", "lists", "objects"), (b"\xff\xfe\x00" * 99, *nested), strict=True))[kind]
    run = folder / "runs" / "odd"
    for name in (*TOP, EVALUATION):
        (run / name).write_bytes(text + b"\n")
    listed, *results = results_of([["runs", "list"], *readers()[:9]], folder)
    assert listed.code == 0
    for result in results:
        assert result.code in (0, 1, 2), result
        assert "Traceback" not in result.err
        assert "run again with --debug" not in result.err, result  # no defect
    for name in ("config.toml", "metrics.jsonl", "events.jsonl"):
        assert f"warning: {name}" in results[0].err


def test_an_evaluation_from_elsewhere_is_compared_without_waiting(folder: Path) -> None:
    rows = folder / "runs" / "good" / SAMPLES
    for name in ("a", "b"):
        (folder / name).mkdir()
        shutil.copy(rows, folder / name / "sums.parquet")
        (folder / name / "evaluation.json").write_text(json.dumps({"format": 1, "settings": {}, "datasets": {}}))
    for name, make in [("evaluation.json", os.mkfifo), ("evaluation.json", make_sparse), ("sums.parquet", os.mkfifo)]:
        content = (folder / "b" / name).read_bytes()
        replaced(folder / "b", name, make)
        (result,) = results_of([["eval", "compare", "a", "b"]], folder)
        refused(result, f"b/{name} ")
        (folder / "b" / name).unlink()
        (folder / "b" / name).write_bytes(content)
    (fine,) = results_of([["eval", "compare", "a", "b"]], folder)
    assert fine.code == 0, fine.err


@pytest.mark.parametrize("kind", first(1, ["pipe", "zero", "folder"]))
def test_a_recipe_that_is_no_file_is_refused(kind: str, folder: Path) -> None:
    NO_FILE[kind](folder / "odd.toml")
    for result in results_of([["recipes", "diff", "grpo", "odd.toml"], ["recipes", "show", "odd.toml"]], folder):
        refused(result, "odd.toml is ")


@pytest.mark.parametrize("kind", first(1, ["pipe", "zero", "sparse"]))
def test_a_checkpoint_with_a_file_that_is_none_is_not_loaded(kind: str, folder: Path) -> None:
    checkpoint = folder / "runs" / "odd" / "checkpoints" / "step-000002"
    for name in ("manifest.json", "state.json") if kind != "sparse" else ("manifest.json",):
        shutil.rmtree(checkpoint, ignore_errors=True)
        (checkpoint / "policy").mkdir(parents=True)
        (checkpoint / "state.json").write_text('{"step": 2}\n')
        (checkpoint / "config.toml").write_bytes((folder / "runs" / "odd" / "config.toml").read_bytes())
        files = {file: described(checkpoint / file) for file in ("state.json", "config.toml")}
        files["state.json"]["size"] = (
            files["state.json"]["size"] if name == "manifest.json" else 0
        )  # the size of a pipe
        manifest = {"format": 1, "rlcli": "0.1.0", "step": 2, "world": 1, "files": files}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        replaced(checkpoint, name, make_sparse if kind == "sparse" else NO_FILE[kind])
        for result in results_of([["export", "runs/odd", "--out", "exported"], ["runs", "resume", "odd"]], folder):
            assert result.code == 2
            assert f"{name} " in result.err, result.err


@pytest.mark.parametrize("names", first(1, [("tokenizer.json", "chat_template.jinja"), ("generation_config.json",)]))
def test_a_model_folder_with_a_pipe_is_refused_before_it_is_loaded(names: Sequence[str], folder: Path) -> None:
    make_tiny_model(folder / "tiny")
    messages = [{"role": "user", "content": "1+1"}]
    (folder / "data").mkdir()
    rows = [row(data_source="sums", messages=messages, verifier="exact", ground_truth="2")] * 4
    write_rows(folder / "data" / "train.parquet", rows)
    trains = ["train", "grpo", "--model", "tiny", "--data", "data", "--dry-run"]
    for name in names:
        (folder / "tiny" / name).unlink(missing_ok=True)
        os.mkfifo(folder / "tiny" / name)
        for result in results_of([["chat", "tiny", "--prompt", "1+1"], trains], folder):
            refused(result, f"tiny/{name} is a named pipe")
        (folder / "tiny" / name).unlink()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_line_of_data_without_end_is_refused(name: str, folder: Path) -> None:
    make_sparse(folder / name)
    (result,) = results_of([["prep", "gsm8k", "--source", name, "--out", "made"]], folder)
    assert result.code == 2
    assert name in result.err
    assert "a line of more than 256 MiB" in result.err
