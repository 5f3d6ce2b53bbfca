"""The heap of a worker on a CPU: it keeps memory that is freed between passes, and wastes little of it."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
from pathlib import Path

JEMALLOC = {
    "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0,lg_extent_max_active_fit:30,narenas:1"
}
"""No memory is returned to the system, including that of large tensors (whose arena by default returns all at once).
Free memory serves tensors of any size: by default a piece more than 64 times as large is not split, so a checkpoint's
copy, which is many small tensors, found no room where an update had been. One arena serves all threads: memory freed by
one can be used by another."""

GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""The largest amount that glibc's heap can be made to keep."""

PAGE = 4096
"""The page size that Ray's jemalloc is built for; with larger pages it does not start."""


def environment() -> dict[str, str]:
    """Variables for a worker's process. Those set in this process are kept: a user's own LD_PRELOAD (also an empty one,
    which means glibc's heap), MALLOC_CONF and thresholds.

    With fresh pages for every pass, the default of glibc's heap, an update takes 1 to 30% longer. Made to keep pages,
    that heap has so many holes that an update takes up to a half more memory than its tensors; jemalloc, which Ray
    includes on Linux, keeps them and takes a tenth more.
    """
    library = _library()
    defaults = GLIBC  # also with jemalloc, which ignores it: on another machine Ray may be installed elsewhere
    if library and "LD_PRELOAD" not in os.environ:
        defaults = GLIBC | JEMALLOC | {"LD_PRELOAD": library}
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def _library() -> str:
    """Path of Ray's jemalloc; empty if it is missing or would not run: LD_PRELOAD separates names by white space and
    colons."""
    ray = importlib.util.find_spec("ray")
    path = Path(ray.origin).with_name("core") / "libjemalloc.so" if ray is not None and ray.origin else Path()
    runs = path.is_file() and resource.getpagesize() == PAGE and not re.search(r"[\s:]", str(path))
    return str(path) if runs else ""
