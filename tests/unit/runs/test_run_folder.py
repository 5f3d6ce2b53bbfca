from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.errors import RlcliError, RunFailed, SetupError
from rlcli.runs.folder import (
    LOCK,
    RunFolder,
    add_event,
    default_out,
    evaluation_folder,
    events_of,
    finite,
    progress_of,
    write_json,
)
from rlcli.runs.software_record import environment


def lines(path: Path) -> list[dict[str, object]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_new_folder_has_the_layout_and_the_environment(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "deep" / "run") as folder:
        folder.write_config("[train]\nsteps = 3\n")
        assert {entry.name for entry in folder.path.iterdir()} == {
            *(".lock", ".place", "config.toml", "environment.json"),
            *("samples", "evaluations", "checkpoints", "logs"),
        }
        recorded = json.loads((folder.path / "environment.json").read_text())
        assert recorded["python"].startswith("3.")
        assert recorded["packages"]["rlcli"]
        assert recorded["platform"]


def test_what_is_known_of_a_run_stands_beside_what_it_ran_on(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", facts={"sandbox": "bwrap"}) as folder:
        recorded = json.loads((folder.path / "environment.json").read_text())
    assert recorded["sandbox"] == "bwrap"
    assert recorded["python"]


def test_the_environment_names_the_commit_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment()["commit"] == ""
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@t")
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "a").write_text("1")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    recorded = environment()
    assert len(recorded["commit"]) == 40
    assert recorded["modified"] is False
    (tmp_path / "a").write_text("2")
    assert environment()["modified"] is True


def test_metrics_are_one_json_object_a_line_and_on_disk_at_once(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        folder.append_metrics({"step": 1, "reward/mean": np.float32(0.5), "note": "größer"})
        assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "note": "größer"}]
        folder.append_metrics({"step": np.int64(2), "a": math.nan, "b": -math.inf, "c": np.float32("inf")})
    assert '"step": 2,' in (tmp_path / "metrics.jsonl").read_text()
    assert lines(tmp_path / "metrics.jsonl")[1] == {
        **{"step": 2, "a": None, "b": None, "c": None},
        "nonfinite": {"a": "nan", "b": "-inf", "c": "inf"},
    }


@given(st.dictionaries(st.text(), st.floats() | st.integers() | st.text() | st.none() | st.booleans()))
def test_any_metrics_are_valid_json_and_finite_ones_come_back_unchanged(metrics: dict[str, object]) -> None:
    metrics.pop("nonfinite", None)
    back = json.loads(json.dumps(finite(metrics), allow_nan=False))
    odd = back.pop("nonfinite", {})
    assert set(odd) == {name for name, v in metrics.items() if isinstance(v, float) and not math.isfinite(v)}
    assert {name: v for name, v in back.items() if name not in odd} == {
        name: v for name, v in metrics.items() if name not in odd
    }


def test_events_are_lines_that_tell_what_and_when(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        start_time = time.time()
        folder.event("saved", step=np.int64(3), seconds=0.5, loss=math.nan, path=Path("a"), why="größer\u2028")
    add_event(tmp_path, "restarted", attempt=2)
    saved, restarted = events_of(tmp_path)
    assert start_time - 0.001 <= saved.pop("time") <= time.time() + 0.001  # it is rounded
    assert saved == {
        **{"event": "saved", "step": 3, "seconds": 0.5, "loss": None, "path": "a", "why": "größer\u2028"},
        "nonfinite": {"loss": "nan"},
    }
    assert (restarted["event"], restarted["attempt"]) == ("restarted", 2)


def test_a_line_that_a_kill_cut_off_costs_no_other(tmp_path: Path) -> None:
    assert events_of(tmp_path) == []
    (tmp_path / "events.jsonl").write_bytes(b'{"time": 1, "event": "a"}\n[1]\n{"time": 2, "event": "gr\xc3')
    add_event(tmp_path, "b")
    add_event(tmp_path, "c")
    assert [event["event"] for event in events_of(tmp_path)] == ["a", "b", "c"]


def test_where_a_run_is_can_be_read_while_it_lives_and_after(tmp_path: Path) -> None:
    assert progress_of(tmp_path) == {}
    with RunFolder.create(tmp_path) as folder:
        assert progress_of(tmp_path) == {}
        folder.at(7, "generate, with a name that is longer than the next")
        folder.at(7, "update")
        progress = progress_of(tmp_path)
        assert (progress["step"], progress["phase"], progress["pid"]) == (7, "update", os.getpid())
        assert abs(progress["time"] - time.time()) < 60
    assert progress_of(tmp_path)["phase"] == "update"
    stranger = os.open(tmp_path / "stranger", os.O_WRONLY | os.O_CREAT)
    folder.at(8, "late")  # the closed folder's descriptor may be another file's by now
    os.close(stranger)
    assert (tmp_path / "stranger").read_bytes() == b""
    RunFolder.create(tmp_path).close()
    assert progress_of(tmp_path) == {}
    (tmp_path / ".place").write_text("[]")
    assert progress_of(tmp_path) == {}


def test_a_phase_too_long_for_its_place_is_cut(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        folder.at(7, "x" * 1000)
        assert progress_of(tmp_path)["phase"].startswith("xxx")
        folder.at(8, "y")
        assert progress_of(tmp_path)["step"] == 8


def test_the_environment_keeps_passwords_and_networks_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rlcli", "train", "--set", "verifier.sandbox=https://me:secret@box:8080/run"])
    monkeypatch.setattr("platform.node", lambda: "node7.lab.example")
    recorded = environment()
    assert recorded["command"][-1] == "verifier.sandbox=https://***@box:8080/run"
    assert recorded["host"] == "node7"
    assert "secret" not in json.dumps(recorded)
    assert "lab.example" not in json.dumps(recorded)


def test_force_removes_what_trackers_have_left(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        folder.append_metrics({"step": 1})
        for name in ("trackers.json", "reward.png", "events.jsonl"):
            (tmp_path / name).write_text("{}")
        for name in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio", "exports", "bad-batches"):
            (tmp_path / name).mkdir()
    with RunFolder.create(tmp_path, force=True):
        assert {path.name for path in tmp_path.iterdir()} == {
            *(".lock", ".place", "environment.json", "samples", "evaluations", "checkpoints", "logs")
        }


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"pass@1": 0.5})

    def fail(target: Path, text: str, **_: object) -> None:
        target.write_bytes(text.encode()[:3])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"pass@1": 0.75})
    assert json.loads(path.read_text()) == {"pass@1": 0.5}
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_folder_in_use_is_refused_even_by_force(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path):
        for force in (False, True):
            with pytest.raises(RlcliError, match=rf"in use by process {os.getpid()} on .*; .*--out"):
                RunFolder.create(tmp_path, force=force)


def test_a_check_whether_a_run_is_alive_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It locks the folder for a moment: whoever resumes the run tries again."""
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config("")
    looking = os.open(tmp_path / "run" / LOCK, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            os.close(looking)

    monkeypatch.setattr("rlcli.runs.folder.time.sleep", pause)
    RunFolder.resume(tmp_path / "run").close()
    assert len(pauses) == 2


def test_a_full_disk_is_named_with_a_hint_for_a_running_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with RunFolder.create(tmp_path / "run") as folder:
        monkeypatch.setattr("rlcli.runs.folder.write_synced", full)
        with pytest.raises(SetupError, match=r"run folder .*: No space left on device; free some space"):
            folder.write_config("a = 1")
        monkeypatch.setattr(Path, "write_text", lambda path, *args, **options: full(path, b""))
        with pytest.raises(RunFailed, match=r"step-000003\.json cannot be written: No space left on device; free "):
            folder.write_evaluation(3, {})
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_killed_run_holds_its_folder_no_longer(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from rlcli.runs.folder import RunFolder\n"
        f"folder = RunFolder.create(Path({str(tmp_path)!r})); folder.append_metrics({{}}); print('held', flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(RlcliError, match=f"in use by process {child.pid}"):
            RunFolder.create(tmp_path)
        child.send_signal(signal.SIGKILL)
        child.wait()
    with pytest.raises(RlcliError, match="already holds a run"):
        RunFolder.create(tmp_path)
    RunFolder.create(tmp_path, force=True).close()


def test_a_finished_run_is_replaced_only_by_force_and_other_files_stay(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        folder.append_metrics({"step": 1})
        (folder.samples / "step-000001.rank-0.parquet").write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RlcliError, match="already holds a run; give another folder with --out"):
        RunFolder.create(tmp_path)
    assert (tmp_path / "metrics.jsonl").exists()
    with RunFolder.create(tmp_path, force=True) as folder:
        assert not (tmp_path / "metrics.jsonl").exists()
        assert not list(folder.samples.iterdir())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_with_other_files_is_refused_even_by_force_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "thesis.tex").write_text("years")
    for force in (False, True):
        with pytest.raises(RlcliError, match="not a run's; give another folder with --out"):
            RunFolder.create(tmp_path, force=force)
    assert [path.name for path in tmp_path.rglob("*")] == ["samples", "thesis.tex"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(SetupError, match=rf"run folder {path} cannot be written: .*/file is a file; .*--out"):
            RunFolder.create(path)
    # Not even root makes a folder there.
    with pytest.raises(SetupError, match=r"run folder /proc/run cannot be written: .*; .*--out"):
        RunFolder.create(Path("/proc/run"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SetupError, match="cannot be written: Permission denied"):
        RunFolder.create(tmp_path)


def test_a_run_that_failed_to_start_can_be_tried_again_in_its_folder(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        folder.write_config("[train]\nsteps = 3\n")
        (folder.logs / "rank-0.log").write_text("no such cluster")
    with RunFolder.create(tmp_path) as folder:
        assert not list(folder.logs.iterdir())
        (folder.checkpoints / "step-1").mkdir()
    with pytest.raises(RlcliError, match="already holds a run"):
        RunFolder.create(tmp_path)


def test_a_refused_folder_is_let_go_of(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        folder.append_metrics({"step": 1})
    for _ in range(2):
        with pytest.raises(RlcliError, match="already holds"):
            RunFolder.create(tmp_path)


@pytest.mark.parametrize("deep", ["run", "a/b/run"])
def test_a_check_leaves_no_trace(deep: str, tmp_path: Path) -> None:
    RunFolder.check(tmp_path / deep)
    assert not list(tmp_path.iterdir())


def test_a_check_refuses_what_create_would_and_changes_nothing(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        folder.append_metrics({"step": 1})
        with pytest.raises(RlcliError, match="in use by process"):
            RunFolder.check(folder.path, force=True)
    with pytest.raises(RlcliError, match="already holds a run"):
        RunFolder.check(folder.path)
    RunFolder.check(folder.path, force=True)
    assert lines(folder.path / "metrics.jsonl") == [{"step": 1}]
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="is a file"):
        RunFolder.check(tmp_path / "file" / "run")


def test_the_next_free_name_is_the_default(tmp_path: Path) -> None:
    assert default_out("grpo", tmp_path) == tmp_path / "grpo-1"
    (tmp_path / "grpo-1").mkdir()
    assert default_out("grpo", tmp_path) == tmp_path / "grpo-2"


def test_an_evaluation_writes_to_any_folder_but_a_runs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert evaluation_folder(tmp_path) == tmp_path
    assert evaluation_folder(tmp_path / "new" / "ü x") == tmp_path / "new" / "ü x"
    with pytest.raises(SetupError, match=r"folder .*/notes\.txt cannot be written: .* is a file; .*--out"):
        evaluation_folder(tmp_path / "notes.txt")
    RunFolder.create(tmp_path / "run").close()
    with pytest.raises(RlcliError, match="holds a run; give another folder"):
        evaluation_folder(tmp_path / "run")


def test_files_get_the_permissions_that_the_umask_allows(tmp_path: Path) -> None:
    from rlcli.support.files import by_umask

    (tmp_path / "inner").mkdir()
    private = tmp_path / "inner" / "model.safetensors"
    private.touch(mode=0o600)
    previous_umask = os.umask(0o027)
    try:
        by_umask(tmp_path)
    finally:
        os.umask(previous_umask)
    assert private.stat().st_mode & 0o777 == 0o640


def modes(path: Path) -> dict[str, int]:
    """Permissions of a folder and of what is in it."""
    return {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in (path, *path.iterdir())}


def written(path: Path, *, shared: bool = False) -> dict[str, int]:
    """A run with one of each record; the modes of its folder."""
    previous_umask = os.umask(0o022)
    try:
        with RunFolder.create(path, force=True, shared=shared) as folder:
            folder.write_config("[train]\nsteps = 3\n")
            folder.append_metrics({"step": 1})
            folder.event("started")
    finally:
        os.umask(previous_umask)
    return modes(path)


@pytest.mark.parametrize("exists", [False, True])
def test_only_this_user_can_enter_a_new_run_folder(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "run").mkdir(0o755)
    modes = written(tmp_path / "run")
    folders = ("run", "samples", "evaluations", "checkpoints", "logs")
    assert {modes.pop(name) for name in folders} == {0o700}
    assert set(modes) == {".lock", ".place", "config.toml", "environment.json", "metrics.jsonl", "events.jsonl"}
    assert set(modes.values()) == {0o600}


def test_a_shared_run_folder_follows_the_umask(tmp_path: Path) -> None:
    modes = written(tmp_path / "run", shared=True)
    assert {modes.pop(name) for name in ("run", "samples", "evaluations", "checkpoints", "logs")} == {0o755}
    assert set(modes.values()) == {0o644}


def test_a_run_is_resumed_with_the_modes_of_its_folder(tmp_path: Path) -> None:
    """Runs of before were open to others, who may read them."""
    written(tmp_path / "run", shared=True)
    (tmp_path / "run" / "samples").rmdir()
    (tmp_path / "run").chmod(0o750)
    with RunFolder.resume(tmp_path / "run") as folder:
        folder.append_metrics({"step": 2})
    resumed_modes = modes(tmp_path / "run")
    assert (resumed_modes["run"], resumed_modes["samples"], resumed_modes["checkpoints"]) == (0o750, 0o750, 0o755)
    assert resumed_modes["metrics.jsonl"] == 0o644


def test_a_new_folder_of_an_evaluation_is_closed(tmp_path: Path) -> None:
    assert stat.S_IMODE(evaluation_folder(tmp_path / "new").stat().st_mode) == 0o700
    (tmp_path / "old").mkdir(0o755)
    assert stat.S_IMODE(evaluation_folder(tmp_path / "old").stat().st_mode) == 0o755
    previous_umask = os.umask(0o027)
    try:
        assert stat.S_IMODE(evaluation_folder(tmp_path / "open", shared=True).stat().st_mode) == 0o750
    finally:
        os.umask(previous_umask)
