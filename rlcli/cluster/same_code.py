"""Whether the machines of a cluster have this rlcli: with another one they would compute something else.

`code_here` is sent to each machine by its source, so it runs there whatever rlcli that has, or none. It needs the
standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlcli.errors import SetupError

if TYPE_CHECKING:
    from rlcli.cluster.placement import Places

PACKAGES = (
    *("rlcli", "rlcli_port", "rlcli_sandbox"),  # the packages of ours that workers import
    *("rlcli_data_prep", "rlcli_recipes", "rlcli_verifiers"),
)
TIMEOUT_S = 120.0
HINT = "install the same rlcli on all machines, for example from one image (docs/clusters.md)"


def code_here(packages: Sequence[str]) -> dict[str, Any]:
    """`host`, and `files`: package/file → a digest of it, of all Python files of these packages that are here."""
    import hashlib
    import importlib.util
    import socket
    from pathlib import Path

    files = {}
    for package in packages:
        found = importlib.util.find_spec(package)
        for place in (found.submodule_search_locations or ()) if found else ():
            for file in sorted(Path(place).rglob("*.py")):
                name = f"{package}/{file.relative_to(place).as_posix()}"
                files[name] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    return {"host": socket.gethostname(), "files": files}


def check_same_code(groups: Sequence[Places]) -> None:
    """Compare the code on each machine of these places with that of this process. Raises `SetupError` for the first
    machine on which it differs."""
    import sys

    import ray
    from ray import cloudpickle
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    machines: dict[str, tuple[Any, int]] = {}
    for places in groups:
        for bundle, node in placement_group_table(places.group)["bundles_to_node_id"].items():
            machines.setdefault(node, (places.group, bundle))
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        asked = [
            ray.remote(code_here)
            .options(
                num_cpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            .remote(PACKAGES)
            for group, bundle in machines.values()
        ]
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    own = code_here(PACKAGES)["files"]
    for found in ray.get(asked, timeout=TIMEOUT_S):
        if why := difference(own, found["files"]):
            raise SetupError(f"the machine {found['host']} {why}", HINT)


def difference(own: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What is different about the files of another machine, or an empty text.

    >>> difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    'has another rlcli: 1 of 2 files differ, such as b'
    >>> difference({"a": "1"}, {}), difference({"a": "1"}, {"a": "1"})
    ('has no rlcli for its Ray to import', '')
    """
    if not theirs:
        return "has no rlcli for its Ray to import"
    names = sorted(own.keys() | theirs.keys())
    others = [name for name in names if own.get(name) != theirs.get(name)]
    return f"has another rlcli: {len(others)} of {len(names)} files differ, such as {others[0]}" if others else ""
