"""The heap of workers on CPUs: which library, whose settings, and what it keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcli.cluster.process import malloc

TWICE = """
import ctypes, resource

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def tensors():
    held = [b"x" * (size << 20) for size in (1, 3, 40, 7, 100)]
    return sum(map(len, held))

before = faults()
size = tensors()
first = faults() - before
before = faults()
tensors()
print(hasattr(ctypes.CDLL(None), "mallctl"), size // resource.getpagesize(), first, faults() - before)
"""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "MALLOC_CONF", *malloc.GLIBC):
        monkeypatch.delenv(name, raising=False)


def test_rays_jemalloc_is_taken() -> None:
    library = Path(malloc.environment()["LD_PRELOAD"])
    assert library.name == "libjemalloc.so"
    assert library.is_file()
    assert malloc.environment()["MALLOC_CONF"] == malloc.JEMALLOC["MALLOC_CONF"]


@pytest.mark.parametrize(
    "environment", [malloc.environment, lambda: malloc.GLIBC, dict], ids=["jemalloc", "glibc", "none"]
)
def test_what_is_freed_stays_for_the_next_pass(environment: Callable[[], dict[str, str]]) -> None:
    """And glibc's heap as it comes gives large tensors back: this test would see it."""
    completed = subprocess.run(
        [sys.executable, "-c", TWICE], env=os.environ | environment(), capture_output=True, text=True, check=True
    )
    assert completed.stderr == ""
    preloaded, pages, first, second = completed.stdout.split()
    assert preloaded == str("LD_PRELOAD" in environment())
    assert int(first) > 0.9 * int(pages)
    if environment() == {}:
        assert int(second) > 0.5 * int(pages)
    elif preloaded == "True":
        assert int(second) < 0.01 * int(pages)
    else:  # tensors of 32 MiB and more are mapped by themselves
        assert int(second) < 0.95 * int(pages)


def test_a_users_own_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_CONF", "narenas:2")
    assert malloc.environment()["MALLOC_CONF"] == "narenas:2"
    monkeypatch.setenv("LD_PRELOAD", "")  # glibc's heap
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert malloc.environment() == malloc.GLIBC | {"MALLOC_TRIM_THRESHOLD_": "1"}
    monkeypatch.setenv("LD_PRELOAD", "/lib/libtcmalloc.so")
    assert "LD_PRELOAD" not in malloc.environment()


@pytest.mark.parametrize("folder", ["my models", "a:b", "none"])
def test_a_library_that_cannot_be_preloaded_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    library = tmp_path / folder / "ray" / "core" / "libjemalloc.so"
    library.parent.mkdir(parents=True)
    library.parent.with_name("__init__.py").touch()
    if folder != "none":
        library.touch()
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert malloc.environment() == malloc.GLIBC


def test_a_library_built_for_other_pages_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc.resource, "getpagesize", lambda: 1 << 16)
    assert malloc.environment() == malloc.GLIBC
