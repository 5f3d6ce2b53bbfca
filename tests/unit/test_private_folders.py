"""Folders in places that all users of a machine share: what is refused, and where the project makes them."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rlcli_verifiers import judge_cache, judge_limits
from rlcli_verifiers.judge_limits import Limits

import rlcli
from rlcli.data.prompts import image_columns, token_cache
from rlcli.errors import SetupError
from rlcli.rewards.service.scoring_service import locked
from rlcli.rollout.vllm.hooks.process_state import sockets_in
from rlcli.support import attempt
from rlcli.support.files import closed_folder, file_mode, folder_mode, private_folder, replacing

NOBODY = 65534


def as_link(path: Path) -> str:
    (path.parent / "victim").mkdir(mode=0o700)
    path.symlink_to(path.parent / "victim")
    return "is a link"


def as_dangling_link(path: Path) -> str:
    path.symlink_to(path.parent / "nowhere")
    return "is a link"


def as_file(path: Path) -> str:
    path.touch(0o600)
    return "is not a folder"


def as_pipe(path: Path) -> str:
    os.mkfifo(path, 0o600)
    return "is not a folder"


def as_writable_by_group(path: Path) -> str:
    path.mkdir()
    path.chmod(0o770)
    return "can be changed by other users (mode 770)"


def as_writable_by_all(path: Path) -> str:
    path.mkdir()
    path.chmod(0o1777)
    return "can be changed by other users (mode 1777)"


def as_another_users(path: Path) -> str:
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)
    return f"belongs to another user (id {NOBODY})"


HOSTILE = [
    *(as_link, as_dangling_link, as_file, as_pipe, as_writable_by_group, as_writable_by_all, as_another_users),
]
Use = Callable[[Path], object]


@pytest.mark.parametrize("prepare", HOSTILE)
def test_what_another_user_may_have_made_is_refused_and_stays_as_it_is(
    tmp_path: Path, prepare: Callable[[Path], str]
) -> None:
    path = tmp_path / "rlcli-known"
    problem = prepare(path)
    initial = path.lstat()
    with pytest.raises(SetupError) as refused:
        private_folder(path)
    assert str(refused.value).startswith(f"{path} {problem}; remove it")
    current = path.lstat()
    assert (initial.st_mode, initial.st_uid, initial.st_mtime_ns) == (
        current.st_mode,
        current.st_uid,
        current.st_mtime_ns,
    )
    assert [entry.name for entry in tmp_path.iterdir() if entry.name == "nowhere"] == []


def test_a_folder_of_this_user_is_taken_and_closed(tmp_path: Path) -> None:
    initial_umask = os.umask(0)
    try:
        created = private_folder(tmp_path / "new")
        (tmp_path / "there").mkdir(0o755)
    finally:
        os.umask(initial_umask)
    assert stat.S_IMODE(created.stat().st_mode) == 0o700
    for path in (created, tmp_path / "there"):
        assert private_folder(path) == path
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    with pytest.raises(FileNotFoundError):
        private_folder(tmp_path / "nowhere" / "new")


def held(path: Path) -> None:
    with locked(path):
        pass


def limited(path: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge_limits, "shared_folder", lambda: private_folder(path))
        return Limits("http://judge", 1).folder


@pytest.mark.parametrize("use", [held, sockets_in, limited])
@pytest.mark.parametrize("prepare", [as_link, as_writable_by_all, as_another_users])
def test_each_user_of_a_known_name_looks_first(tmp_path: Path, use: Use, prepare: Callable[[Path], str]) -> None:
    prepare(tmp_path / "rlcli-known")
    with pytest.raises(SetupError, match=r"is a link|can be changed by|belongs to"):
        use(tmp_path / "rlcli-known")
    assert [entry for entry in tmp_path.rglob("*") if entry.name not in ("rlcli-known", "victim")] == []


def test_the_folder_of_a_judges_limits_is_below_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / f"rlcli-judge-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(SetupError, match="is a link"):
        judge_limits.shared_folder()


def test_leftovers_of_others_and_what_links_point_to_stay(tmp_path: Path) -> None:
    (victim := tmp_path / "victim").mkdir()
    (victim / "file").touch()
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for name in ("link", "mine", "nowhere"):
        attempt.remove_shared(tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["victim"]
    assert (victim / "file").exists()
    if not os.geteuid():
        os.chown(victim, NOBODY, NOBODY)
        attempt.remove_shared(victim)
        assert (victim / "file").exists()


def test_a_closed_folder_is_closed_even_if_it_was_open(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(0o755)
    for path in (tmp_path / "cache", tmp_path / "deep" / "cache"):
        assert stat.S_IMODE(closed_folder(path).stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("folder", "new_folder", "new_file"),
    [(0o700, 0o700, 0o600), (0o750, 0o770, 0o660), (0o755, 0o777, 0o666), (0o705, 0o707, 0o606)],
)
def test_who_cannot_enter_a_folder_gets_no_permission_in_it(
    tmp_path: Path, folder: int, new_folder: int, new_file: int
) -> None:
    tmp_path.chmod(folder)
    assert (folder_mode(tmp_path), file_mode(tmp_path)) == (new_folder, new_file)
    initial_umask = os.umask(0)
    try:
        with replacing(tmp_path / "file") as temporary:
            temporary.write_text("")
    finally:
        os.umask(initial_umask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == new_file


def test_caches_with_prompts_images_and_verdicts_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "rlcli" / "pictures").mkdir(0o755, parents=True)  # of an older version
    empty: Any = SimpleNamespace(
        **dict.fromkeys(token_cache.ARRAYS, np.zeros(0)), too_long=0, too_long_responses=0, mark=""
    )
    token_cache._store(tmp_path / "rlcli" / "prompts" / "key", empty)
    image_columns.mapped(lambda: iter([pa.record_batch({"image": [b""]})]))
    judge_cache.Cache().put("key", judge_cache.Graded(1, "so"))
    folders = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "rlcli").iterdir()}
    assert folders == {"prompts": 0o700, "pictures": 0o700, "judge": 0o700}


SHARED_PLACES = ("/tmp", "/dev/shm", "gettempdir")
LOOKED_AT = {
    "rlcli/support/attempt.py": "remove_shared: only this user's, and no link is followed",
    "rlcli/cluster/process/peak_memory.py": "the size of all of it",
    "rlcli/cluster/rendezvous.py": "private_folder",
    "rlcli/cluster/ray_session.py": "mkdtemp, and the free space",
    "rlcli/launch/machine_checks.py": "the size of all of it",
    "rlcli/launch/launch.py": "remove_shared",
    "rlcli/prep/row_store.py": "TemporaryFile, which has no name; the folder is named in an error",
    "rlcli/rollout/vllm/vllm_engine.py": "sockets_in: private_folder; unlinks what it has made",
    "packages/rlcli_sandbox/bubblewrap.py": "within the sandbox",
    "packages/rlcli_sandbox/private_folder.py": "mkdtemp; sweep: only this user's, and no link is followed",
    "rlcli/rollout/model_servers/model_server.py": "mkdtemp",
    "rlcli/rollout/servers/weight_folder.py": "for private_folder of server_engine.py",
    "rlcli/training/worker/worker_scoring.py": "private_folder, and `locked`, which calls it",
    "rlcli/training/worker/weight_sync/weight_sync.py": "TemporaryDirectory",
    "verifiers/rlcli_verifiers/judge_limits.py": "private_folder",
}
"""Every file of the packages that names a place which all users share → why that is safe there."""


@pytest.mark.long
def test_every_file_that_names_a_shared_place_is_known() -> None:
    root = Path(rlcli.__file__).parents[1]
    files = set()
    for package in ("rlcli", "packages", "verifiers", "environments", "data_prep"):
        for file in sorted((root / package).rglob("*.py")):
            names = {
                text
                for node in ast.walk(ast.parse(file.read_text()))
                for text in ([node.value] if isinstance(node, ast.Constant) else [getattr(node, "attr", "")])
                if isinstance(text, str)
            }
            if any(
                name == shared_path or name.startswith(f"{shared_path}/")
                for name in names
                for shared_path in SHARED_PLACES
            ):
                files.add(str(file.relative_to(root)))
    assert files == set(LOOKED_AT)
