"""The folder in which the pages' commands and code are run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rlcli_planner.machine.machine_rates import cache_file

from tests.judges import KEY, judging, says, sound
from tests.page_blocks import write_files


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, datasets and runs that pages name: to be read, not changed."""
    from tests.page_folder import make_page_folder

    root = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        return make_page_folder(root)


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of this machine's rates, so that the pages after the first need not measure them."""
    return tmp_path_factory.mktemp("measured") / "rates.json"


@pytest.fixture
def enter_page_folder(
    prepared: Path, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Path], Path]]:
    """Changes to a copy of that folder with the files that a page shows, and returns it."""

    def change(page: Path) -> Path:
        folder = shutil.copytree(prepared, tmp_path / "here", symlinks=True)
        write_files(page, folder)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("HOME", str(folder / "home"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "home" / ".cache"))
        if measured.exists():
            cache_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy(measured, cache_file())
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("WANDB_MODE", "offline")  # an imported configuration names it
        return folder

    yield change
    if cache_file().is_relative_to(tmp_path) and cache_file().exists():
        shutil.copy(cache_file(), measured)


@pytest.fixture(scope="session")
def judge() -> Iterator[str]:
    """The address of a judge by the name that pages give it, for whom no response is better than another."""
    equal = json.dumps({"reason": "equal", "score": 1})
    with judging(lambda texts, chat: sound(texts, chat) if "response" in texts else equal) as server:
        server.on_models = says(200, {"data": [{"id": "Qwen/Qwen3-8B"}]})
        yield server.url
