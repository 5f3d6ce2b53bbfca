"""Which heap a worker on a CPU has: one that keeps what is freed between passes, and wastes little of it."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
from pathlib import Path

JEMALLOC = {
    "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0,lg_extent_max_active_fit:30,narenas:1"
}
"""Nothing is given back, also of large tensors (which by default have an arena that gives all back at once). What is
free serves tensors of any size: by default a piece that is more than 64 times as large is left whole, and a
checkpoint's copy, which is many small tensors, found no room where an update had been. One arena serves all threads:
what one frees another can use."""

GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""The most that glibc's heap can be made to keep."""

PAGE = 4096
"""For which Ray's jemalloc is built; with larger ones it would not start."""


def environment() -> dict[str, str]:
    """For a worker's process, and what stands in this process's environment stays: a user's own LD_PRELOAD (also an
    empty one, which means glibc's heap), MALLOC_CONF and thresholds.

    Fresh pages for every pass, as glibc's heap has it by default, make an update longer by 1 to 30%. Made to keep them
    that heap has so many holes that an update takes up to a half more than its tensors; jemalloc, which comes with Ray
    on Linux, keeps them and takes a tenth more.
    """
    library = _library()
    found = GLIBC  # also beside jemalloc, which ignores it: on another machine Ray may lie elsewhere
    if library and "LD_PRELOAD" not in os.environ:
        found = GLIBC | JEMALLOC | {"LD_PRELOAD": library}
    return {name: os.environ.get(name, value) for name, value in found.items()}


def _library() -> str:
    """Ray's jemalloc; empty where there is none, or it would not run: in LD_PRELOAD white space and colons part
    names."""
    ray = importlib.util.find_spec("ray")
    path = Path(ray.origin).with_name("core") / "libjemalloc.so" if ray is not None and ray.origin else Path()
    runs = path.is_file() and resource.getpagesize() == PAGE and not re.search(r"[\s:]", str(path))
    return str(path) if runs else ""
