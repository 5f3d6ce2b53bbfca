"""Checkpoints as folders: whole or not there, judged by every byte, and pruned by rule."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.errors import CheckpointError, RunFailed
from rlcli.runs.checkpoint import Checkpoints, is_checkpoint, kept_steps, read_checkpoint
from rlcli.support.files import described

SHARD = "policy/__0_0.distcp"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=3)


def written(partial: Path) -> dict[str, dict[str, Any]]:
    """Writes the files that two workers would write."""
    names = (SHARD, "policy/__1_0.distcp", "policy/.metadata", "policy/rank-0.pt", "policy/rank-1.pt")
    (partial / "policy").mkdir()
    for number, name in enumerate(names):
        (partial / name).write_bytes(bytes([number]) * 4096)
    return {name: described(partial / name) for name in names}


def made(checkpoints: Checkpoints, *steps: int, scores: dict[int, float] | None = None) -> Path:
    for step in steps:
        partial = checkpoints.begin(step)
        path = checkpoints.commit(step, {"step": step, "kl": step / 3}, "a = 1\n", written(partial), scores or {})
    return path


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.root.iterdir())


def heard(checkpoints: Checkpoints) -> tuple[int | None, list[str]]:
    notes: list[str] = []
    newest = checkpoints.newest(notes.append)
    return newest.step if newest else None, notes


def test_a_checkpoint_holds_what_was_committed(checkpoints: Checkpoints) -> None:
    path = made(checkpoints, 50)
    assert path == checkpoints.root / "step-000050"
    checkpoint = read_checkpoint(path)
    assert (checkpoint.path, checkpoint.step, checkpoint.state) == (path, 50, {"step": 50, "kl": 50 / 3})
    assert (path / "config.toml").read_text() == "a = 1\n"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["world"] == 2
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert set(manifest["files"]) == files - {"manifest.json"}
    assert (checkpoints.root / "latest").resolve() == path
    assert read_checkpoint(checkpoints.root / "latest") == checkpoint


def test_floats_come_back_to_the_last_bit(checkpoints: Checkpoints) -> None:
    state = {"step": 1, "numbers": [0.1, 1e-308, 1 / 3, float("inf")], "none": None}
    path = checkpoints.commit(1, state, "", written(checkpoints.begin(1)), {})
    assert read_checkpoint(path).state == state


def test_what_is_being_written_is_no_checkpoint_and_a_later_run_removes_it(checkpoints: Checkpoints) -> None:
    made(checkpoints, 10)
    written(checkpoints.begin(20))
    assert heard(checkpoints) == (10, [])
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [10]
    next_run = Checkpoints(checkpoints.root, keep=3)
    assert next_run.newest(print) is not None
    assert (checkpoints.root / ".step-000020.partial").exists()  # whoever only reads may do so beside a live run
    next_run.begin(30)
    assert names(checkpoints) == [".step-000030.partial", "latest", "step-000010"]


def test_one_that_is_begun_leaves_alone_what_is_still_being_written(checkpoints: Checkpoints) -> None:
    first = checkpoints.begin(10)
    files = written(first)
    checkpoints.begin(20)
    assert checkpoints.commit(10, {"step": 10}, "", files, {}).is_dir()
    assert (checkpoints.root / ".step-000020.partial").is_dir()


def test_what_is_abandoned_leaves_nothing(checkpoints: Checkpoints) -> None:
    written(checkpoints.begin(10))
    checkpoints.abandon(10)
    checkpoints.abandon(10)
    assert names(checkpoints) == []


def cut(path: Path) -> None:
    os.truncate(path, 10)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def forge(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated shard": (lambda f: cut(f / SHARD), r"policy/__0_0\.distcp has 10 bytes of 4,096"),
    "missing shard": (lambda f: (f / SHARD).unlink(), r"policy/__0_0\.distcp is missing"),
    "missing folder": (lambda f: shutil.rmtree(f / "policy"), r"policy/.* is missing"),
    "flipped bit in a shard": (lambda f: flip(f / SHARD), r"policy/__0_0\.distcp differs from what was written"),
    "flipped bit in the metadata": (lambda f: flip(f / "policy/.metadata"), r"policy/\.metadata differs from"),
    "flipped bit in the state": (lambda f: flip(f / "state.json"), r"state\.json differs from"),
    "longer file": (lambda f: (f / SHARD).open("ab").write(b"x"), r"policy/__0_0\.distcp has 4,097 bytes of 4,096"),
    "folder in a file's place": (lambda f: ((f / SHARD).unlink(), (f / SHARD).mkdir()), r"policy/__0_0\.distcp"),
    "missing state": (lambda f: (f / "state.json").unlink(), r"state\.json is missing"),
    "missing configuration": (lambda f: (f / "config.toml").unlink(), r"config\.toml is missing"),
    "missing manifest": (lambda f: (f / "manifest.json").unlink(), r"it has no manifest\.json"),
    "empty manifest": (lambda f: (f / "manifest.json").write_bytes(b""), r"manifest\.json is not JSON"),
    "truncated manifest": (lambda f: cut(f / "manifest.json"), r"manifest\.json is not JSON"),
    "manifest of bytes": (lambda f: (f / "manifest.json").write_bytes(os.urandom(512)), r"manifest\.json is not JSON"),
    "manifest of a list": (lambda f: (f / "manifest.json").write_text("[]"), r"manifest\.json names no format"),
    "manifest without files": (forge("manifest.json", lambda m: m.pop("files")), r"manifest\.json: files: Field req"),
    "manifest without a hash": (
        forge("manifest.json", lambda m: m["files"][SHARD].pop("sha256")),
        r"manifest\.json: files\.policy/__0_0\.distcp\.sha256: Field required",
    ),
    "manifest that lists no state": (
        forge("manifest.json", lambda m: m["files"].pop("state.json")),
        r"manifest\.json does not list state\.json",
    ),
    "manifest of another step": (forge("manifest.json", lambda m: m.update(step=40)), r"state\.json is of step 50"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_named_and_the_one_before_is_used(checkpoints: Checkpoints, damage: str) -> None:
    path = made(checkpoints, 40, 50)
    hurt, why = DAMAGE[damage]
    hurt(path)
    with pytest.raises(CheckpointError, match=rf"^step-000050 is damaged: {why}.*; use another checkpoint of /") as e:
        read_checkpoint(path)
    assert e.value.exit_code == 2
    step, notes = heard(checkpoints)
    assert step == 40
    assert len(notes) == 1
    assert re.fullmatch(rf"step-000050 is damaged: {why}.*; going back to step-000040", notes[0])


def test_without_a_sound_one_there_is_none_and_each_is_named(checkpoints: Checkpoints) -> None:
    assert heard(checkpoints) == (None, [])
    for path in (made(checkpoints, 40), made(checkpoints, 50)):
        cut(path / SHARD)
    step, notes = heard(checkpoints)
    assert step is None
    assert [note.rpartition("; ")[2] for note in notes] == ["going back to step-000040", "no earlier one exists"]


def test_files_that_nobody_listed_are_no_harm(checkpoints: Checkpoints) -> None:
    path = made(checkpoints, 50)
    (path / "policy" / ".nfs0001").write_text("x")
    (path / "note.txt").write_text("mine")
    (checkpoints.root / "step-000060").write_text("a file")
    (checkpoints.root / "step-final").mkdir()
    assert heard(checkpoints) == (50, [])


def test_a_dangling_latest_harms_no_run_and_is_named_to_who_follows_it(checkpoints: Checkpoints) -> None:
    path = made(checkpoints, 40, 50)
    shutil.rmtree(path)
    assert heard(checkpoints) == (40, [])
    with pytest.raises(CheckpointError, match=r"latest links to .*step-000050, which is missing"):
        read_checkpoint(checkpoints.root / "latest")
    made(checkpoints, 60)
    assert read_checkpoint(checkpoints.root / "latest").step == 60


@pytest.mark.parametrize(("version", "hint"), [(2, "use the version that wrote it"), (0, "remove it")])
def test_another_format_is_refused_and_not_gone_back_from(checkpoints: Checkpoints, version: int, hint: str) -> None:
    path = made(checkpoints, 40, 50)
    forge("manifest.json", lambda m: (m.clear(), m.update(format=version, rlcli="9.1", files="packed")))(path)
    pattern = rf"step-000050 was written by rlcli 9\.1, format {version}; this rlcli \([\d.]+\) reads up to 1; .*{hint}"
    for read in (lambda: read_checkpoint(path), lambda: checkpoints.newest(print)):
        with pytest.raises(CheckpointError, match=pattern):
            read()


@contextmanager
def nobody(closed: Path) -> Iterator[None]:
    """Without the right to read `closed`; root has it always, and so becomes another user."""
    mode = closed.stat().st_mode
    closed.chmod(0)
    if os.geteuid():
        yield
    else:
        for folder in closed.parents:
            if folder.stat().st_uid == 0 and "pytest-of" in str(folder):
                folder.chmod(0o755)
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    closed.chmod(mode)


@pytest.mark.parametrize("name", [SHARD, "state.json", "manifest.json", "policy"])
def test_what_may_not_be_read_is_not_taken_for_damage(checkpoints: Checkpoints, name: str) -> None:
    path = made(checkpoints, 40, 50)
    with nobody(path / name), pytest.raises(CheckpointError, match=rf"cannot read .*step-000050/{name}.*: Permission"):
        checkpoints.newest(print)


def test_a_folder_that_may_not_be_listed_is_named(checkpoints: Checkpoints) -> None:
    made(checkpoints, 40)
    with nobody(checkpoints.root), pytest.raises(CheckpointError, match=r"cannot read .*checkpoints: Permission"):
        checkpoints.newest(print)


def test_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such checkpoint: .*step-000001"):
        read_checkpoint(tmp_path / "step-000001")


def test_a_damaged_one_is_replaced_when_its_step_comes_again(checkpoints: Checkpoints) -> None:
    path = made(checkpoints, 40, 50)
    cut(path / SHARD)
    assert made(checkpoints, 50) == path
    assert heard(checkpoints) == (50, [])
    assert names(checkpoints) == ["latest", "step-000040", "step-000050"]


def test_a_damaged_later_one_does_not_cost_the_sound_ones_their_place(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    cut(made(checkpoints, 50) / SHARD)
    made(checkpoints, 20)
    assert heard(checkpoints)[0] == 20
    made(checkpoints, 30)
    assert names(checkpoints) == ["latest", "step-000030", "step-000050"]
    made(checkpoints, 60)
    assert names(checkpoints) == ["latest", "step-000060"]


def test_a_file_that_is_not_where_the_controller_looks_fails_the_commit(checkpoints: Checkpoints) -> None:
    files = written(checkpoints.begin(10))
    files["policy/__2_0.distcp"] = files[SHARD]
    with pytest.raises(RunFailed, match=r"policy/__2_0\.distcp with 4,096 bytes, but here it is missing; mount the"):
        checkpoints.commit(10, {"step": 10}, "", files, {})
    checkpoints.abandon(10)
    assert names(checkpoints) == []


def test_a_disk_that_takes_no_more_fails_the_commit_in_one_line(tmp_path: Path) -> None:
    program = f"""
import resource
from pathlib import Path
from rlcli.runs.checkpoint import Checkpoints
checkpoints = Checkpoints(Path({str(tmp_path)!r}), keep=1)
checkpoints.begin(10)
checkpoints.commit(10, {{"step": 10}}, "", {{}}, {{}})
checkpoints.begin(20)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    checkpoints.commit(20, {{"step": 20, "much": "x" * 1000}}, "", {{}}, {{}})
except Exception as error:
    print(type(error).__name__, error)
checkpoints.abandon(20)
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
"""
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "RunFailed cannot write the checkpoint" in completed.stdout, completed.stderr
    assert "File too large; free some space or give a writable folder" in completed.stdout
    assert len(completed.stdout.splitlines()) == 1
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert heard(checkpoints) == (10, [])
    assert names(checkpoints) == ["latest", "step-000010"]


def test_checkpoints_work_on_a_file_system_without_links_or_folder_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    def symlink_to(path: Path, target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    checkpoints = Checkpoints(tmp_path, keep=1)
    made(checkpoints, 10, 20)
    assert names(checkpoints) == ["step-000020"]
    assert heard(checkpoints) == (20, [])


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RunFailed, match=r"cannot write the checkpoint .*checkpoints/\.step-000010\.partial: "):
        Checkpoints(tmp_path / "checkpoints", keep=1).begin(10)


def test_the_newest_the_best_and_every_so_manieth_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=2, keep_every=40)
    made(checkpoints, *range(10, 101, 10), scores={10: 0.9, 20: 0.5, 30: 0.1, 60: 0.5, 70: 0.2})
    steps = [checkpoint.step for checkpoint in checkpoints.all()]
    assert steps == [10, 40, 60, 80, 90, 100]  # 20 and 60 scored alike: the newer stays
    assert (tmp_path / "latest").readlink() == Path("step-000100")
    assert heard(checkpoints) == (100, [])


def test_scores_that_come_later_count_from_then_on(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=1)
    made(checkpoints, 10, scores={})
    made(checkpoints, 20, scores={10: 0.5})
    made(checkpoints, 30, scores={10: 0.5, 20: 0.4})
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [10, 30]


@given(
    steps=st.sets(st.integers(1, 60), min_size=1),
    scores=st.dictionaries(st.integers(1, 60), st.sampled_from([0.0, 0.5, 1.0])),
    keep=st.integers(1, 4),
    keep_best=st.integers(0, 4),
    keep_every=st.integers(0, 7),
)
def test_what_stays_is_the_union_of_the_rules(
    steps: set[int], scores: dict[int, float], keep: int, keep_best: int, keep_every: int
) -> None:
    retained = kept_steps(list(steps), scores, keep, keep_best, keep_every)
    assert max(steps) in retained <= steps
    rank = {step: sum(other >= step for other in steps) for step in steps}
    for step in steps:
        better = sum((scores[s], s) > (scores[step], step) for s in steps & scores.keys()) if step in scores else 99
        wanted = rank[step] <= keep or better < keep_best or bool(keep_every and step % keep_every == 0)
        assert (step in retained) == wanted


def killed_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> list[str]:
    """Have the process die before the `moment`-th call that changes the disk for good."""
    calls: list[str] = []

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) >= moment:  # nothing that comes later, in a `finally` say, would run either
                raise KeyboardInterrupt
            return real(*args, **options)

        return call

    for owner, name in ((os, "replace"), (os, "fsync"), (os, "symlink"), (os, "unlink"), (os, "rmdir"), (os, "mkdir")):
        monkeypatch.setattr(owner, name, dying(name, getattr(owner, name)))
    return calls


def test_a_kill_at_any_moment_leaves_the_one_before_or_the_new_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes, moment = [], 0
    while True:
        moment += 1
        root = tmp_path / str(moment)
        checkpoints = Checkpoints(root, keep=1)
        made(checkpoints, 10)
        (root / ".step-000005.old").mkdir()
        files = written(checkpoints.begin(20))
        with monkeypatch.context() as patch:
            calls = killed_at(patch, moment)
            try:
                checkpoints.commit(20, {"step": 20}, "", files, {})
            except KeyboardInterrupt:
                outcomes.append(calls[-1])
            else:
                break
        step, notes = heard(checkpoints)
        assert step in (10, 20)
        assert not notes
        assert (root / "latest").resolve().is_dir()
        made(Checkpoints(root, keep=1), 30)
        assert names(checkpoints) == ["latest", "step-000030"]
    assert {"replace", "fsync", "symlink", "unlink", "rmdir"} <= set(outcomes)
    assert len(outcomes) > 15


def test_a_checkpoint_is_told_from_a_model_and_from_a_run(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = made(checkpoints, 50)
    assert is_checkpoint(path)
    assert is_checkpoint(checkpoints.root / "latest")
    (path / "manifest.json").unlink()
    assert is_checkpoint(path)  # a damaged one, which reading will say
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "absent")
    model = tmp_path / "step-000070"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert not is_checkpoint(model)
    (model / "manifest.json").write_text("{}")
    assert is_checkpoint(model)
