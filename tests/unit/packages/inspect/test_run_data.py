"""Run folders as they are found: complete, growing, killed, damaged, older, or no run."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rlcli_inspect.report.page_api import Api
from rlcli_inspect.report.static_report import write_report

from rlcli.errors import RlcliError
from rlcli.runs.run_data import RunData
from tests.report_runs import Settings, write_run, write_step


def opened(folder: Path) -> RunData:
    run = RunData(folder)
    run.refresh()
    return run


def test_a_run_is_read_in_columns(tmp_path: Path) -> None:
    run = opened(write_run(tmp_path / "run", steps=6))
    assert run.state == "finished"
    assert run.steps() == [1, 2, 3, 4, 5, 6]
    assert run.steps("evaluations") == list(run.evaluations()) == [0, 3, 6]
    assert run.metrics.points("reward/mean")[0] == (1, 0.25)
    assert run.metrics.last("reward/mean") == 1.0
    assert run.table(2, ["score", "prompt_id"]).column_names == ["score", "prompt_id"]
    assert run.rows(2, ["parts"])[0] == {"parts": {"exact": 1.0, "format": 1.0}}
    assert run.advantages(1)["sums/0", 0, 0] == {
        **{"advantage": 0.75, "reward": 1.0, "left_out": None, "trained_step": 1}
    }
    assert run.token_keys(1) == {("sums/0", 0, 0), ("sums/0", 0, 1)}
    assert run.tokens(1)[0]["drawn"].count(True) > 5
    assert run.timeline.steps() == [1, 2, 3, 4, 5, 6]
    line = run.timeline.line(3)
    assert line is not None
    assert (line["step"], line["lanes"][1]["name"]) == (3, "worker 0")
    assert run.timeline.line(7) is None
    assert run.notes == []


def test_refresh_reads_what_was_added_and_what_was_rewritten(tmp_path: Path) -> None:
    settings = Settings(steps=8, alive=True)
    folder = write_run(tmp_path / "run", Settings(steps=2, alive=True))
    run = opened(folder)
    assert not run.refresh()
    write_step(folder, settings, 3)
    assert run.refresh()
    assert run.metrics.steps == run.steps() == [1, 2, 3]
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    (folder / "new").write_text("".join(lines[:1]))
    (folder / "new").replace(metrics)
    assert run.refresh()
    assert run.metrics.steps == [1]


def test_a_line_in_progress_is_read_once_it_is_complete(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')
    run = opened(folder)
    assert run.metrics.steps == [1, 2]
    assert run.notes == ["metrics.jsonl: the last line is incomplete and left out"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('an": 0.5}\n')
    run.refresh()
    assert run.metrics.points("reward/mean")[-1] == (3, 0.5)
    assert run.notes == []


def test_values_that_are_no_finite_numbers_are_missing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": null, "update/grad_norm": 1e999, "x": "text", "y": true}\n')
        file.write('[1]\n{"step": "3"}\nnonsense\n{"step": 4, "reward/mean": 1' + "0" * 400 + "}\n")
    run = opened(folder)
    assert run.metrics.steps == [1, 2, 4]
    assert run.metrics.column("reward/mean") == [1.0, None, None]
    assert run.metrics.column("update/grad_norm") == [0.5, None, None]
    assert run.notes == ["metrics.jsonl: 3 lines are damaged and left out"]


def test_samples_of_an_older_version_lack_only_their_columns(tmp_path: Path) -> None:
    run = opened(write_run(tmp_path / "run", steps=2, older=True))
    row = run.rows(1, ["prompt_id", "group", "score", "messages", "turns"])[0]
    assert row == {"prompt_id": "sums/0", "group": None, "score": 1.0, "messages": None, "turns": None}
    assert (run.advantages(1), run.tokens(1), run.timeline.steps(), run.notes) == ({}, [], [], [])


def test_samples_in_the_flat_layout_of_older_runs_are_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    room = folder / "samples" / "step-000001"
    for path in list(room.glob("rank-*")):
        path.rename(folder / "samples" / f"step-000002.{path.name}")
    run = opened(folder)
    assert run.steps() == [1, 2]
    assert [path.name for path in run.files(2)] == ["step-000002.rank-0.parquet", "step-000002.rank-1.parquet"]
    assert len(run.rows(2, ["score"])) == 12


@pytest.mark.parametrize("content", [b"", b"PAR1", None])
def test_a_damaged_file_of_samples_is_left_out_with_a_note(tmp_path: Path, content: bytes | None) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    path = folder / "samples" / "step-000001" / "rank-0.parquet"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    run = opened(folder)
    assert len(run.rows(1, ["score"])) == 6
    assert run.notes == ["samples/step-000001/rank-0.parquet cannot be read: it is damaged or incomplete"]


@pytest.mark.parametrize(
    ("ranks", "note"),
    [
        ((1,), "step 2 has no file with 6 of the 12 samples that were trained on"),
        ((0, 1), "step 2 has no rank-*.parquet: its samples are missing"),
    ],
)
def test_a_missing_file_of_samples_is_noted(tmp_path: Path, ranks: tuple[int, ...], note: str) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    for rank in ranks:
        (folder / "samples" / "step-000002" / f"rank-{rank}.parquet").unlink()
    run = opened(folder)
    answer = Api([run]).answer("samples", {})
    assert len(answer["rows"]) == 36 - 6 * len(ranks)
    assert run.notes == [note]
    assert write_report([opened(folder)], tmp_path / "report").notes == [f"run: {note}"]


def test_samples_without_columns_of_all_versions_are_shown_with_a_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    file = folder / "samples" / "step-000001" / "rank-1.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["prompt_id", "score"]), file)
    written = write_report([opened(folder)], tmp_path / "report")
    assert written.coverage["run"]["samples"].groups > 1
    lacks = "samples/step-000001/rank-1.parquet is not as rlcli writes it: it lacks prompt_id, score"
    assert written.notes[0] == f"run: {lacks}"


def test_a_file_damaged_in_one_column_keeps_its_rows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    file = folder / "samples" / "step-000001" / "rank-0.parquet"
    column = pq.ParquetFile(file).schema_arrow.get_field_index("response")
    meta = pq.ParquetFile(file).metadata.row_group(0).column(column)
    content = bytearray(file.read_bytes())
    start, size = meta.dictionary_page_offset or meta.data_page_offset, meta.total_compressed_size
    content[start : start + size] = bytes(size)
    file.write_bytes(content)
    run = opened(folder)
    rows = run.rows(1, ["prompt_id", "response"])
    assert [row["response"] is None for row in rows] == [True] * 6 + [False] * 6
    assert {row["prompt_id"] for row in rows} == {"sums/0", "sums/1", "sums/2"}
    assert run.notes == ["samples/step-000001/rank-0.parquet is damaged: some of its columns cannot be read"]
    assert len(Api([run]).answer("samples", {"text": "plus"})["rows"]) == 12


@pytest.mark.parametrize("name", ["advantages.parquet", "tokens-0.parquet"])
def test_what_the_trainer_wrote_in_other_types_is_left_out(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    for file in folder.glob(f"samples/*/{name}"):
        held = pq.read_table(file)
        pq.write_table(pa.table({column: ["x"] * len(held) for column in held.column_names}), file)
    run = opened(folder)
    answered = Api([run]).answer("samples", {})
    assert len(answered["rows"]) == 24
    readable_column = {"advantages.parquet": "tokens", "tokens-0.parquet": "advantage"}[name]
    assert any(row[readable_column] for row in answered["rows"])
    assert any(f"{name}: column group has another type and is left out" in note for note in run.notes)


def test_a_run_without_configuration_is_read_with_a_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    (folder / "config.toml").unlink()
    run = opened(folder)
    assert run.config() == {}
    assert run.notes == ["config.toml cannot be read: No such file or directory"]
    (folder / "config.toml").write_text("not toml")
    assert run.config() == {}
    assert "it is not TOML" in run.notes[1]


def test_a_damaged_evaluation_is_left_out_with_a_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    (folder / "evaluations" / "step-000003.json").write_text('{"prompts": 5, "pa')
    run = opened(folder)
    assert list(run.evaluations()) == [0]
    assert run.notes == ["evaluations/step-000003.json cannot be read"]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RlcliError, match=f"{name} is not a run: "):
        RunData(tmp_path / name)


def test_reading_writes_nothing_and_takes_no_lock(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    modified_before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run = opened(folder)
    assert (run.state, len(run.rows(1, ["score"])), len(run.tokens(1))) == ("finished", 12, 2)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == modified_before


def test_a_sample_that_waited_has_the_advantage_of_a_later_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    rooms = [folder / "samples" / f"step-{step:06d}" for step in (1, 2, 3)]
    for name in ("advantages.parquet", "tokens-0.parquet"):
        rows = pq.read_table(rooms[0] / name)
        pq.write_table(rows.slice(0, 1), rooms[0] / name)
        moved = [row | {"step": 3} for row in rows.slice(1).to_pylist()]
        table = pq.read_table(rooms[2] / name)
        pq.write_table(pa.Table.from_pylist([*table.to_pylist(), *moved], schema=table.schema), rooms[2] / name)
    run = opened(folder)
    advantages = run.advantages(1)
    assert len(advantages) == 12
    assert [advantages["sums/0", 0, sample]["trained_step"] for sample in (0, 1)] == [1, 3]
    assert {row["trained_step"] for row in run.advantages(3).values()} == {3}
    assert len(run.advantages(3)) == 12
    assert run.token_keys(1) == {("sums/0", 0, 0), ("sums/0", 0, 1)}
    assert [row["step"] for row in run.tokens(1)] == [1, 3]


def test_a_step_that_trained_on_waiting_samples_alone_lacks_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    first, second = (folder / "samples" / f"step-{step:06d}" for step in (1, 2))
    for path in second.glob("*"):
        path.unlink()
    (first / "advantages.parquet").rename(second / "advantages.parquet")
    run = opened(folder)
    assert len(Api([run]).answer("samples", {})["rows"]) == 12
    assert (run.notes, len(run.advantages(1))) == ([], 12)
