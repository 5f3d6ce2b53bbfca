"""Checks that the machines of a cluster have this rlcli: another version would compute something else.

`code_here` is sent to each machine by its source, so it runs there with any rlcli, or none. It needs the standard
library alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlcli.errors import SetupError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from rlcli.cluster.placement import Reservation

PACKAGES = (
    *("rlcli", "rlcli_port", "rlcli_sandbox"),  # the packages of ours that workers import
    *("rlcli_data_prep", "rlcli_recipes", "rlcli_verifiers"),
)
TIMEOUT_S = 120.0
HINT = "install the same rlcli on all machines, for example from one image (docs/clusters.md)"


def code_here(packages: Sequence[str]) -> dict[str, Any]:
    """`host`, and `files`: package/file → digest, for all Python files of these packages on this machine."""
    import hashlib
    import importlib.util
    import socket
    from pathlib import Path

    files = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for file in sorted(Path(folder).rglob("*.py")):
                name = f"{package}/{file.relative_to(folder).as_posix()}"
                files[name] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    return {"host": socket.gethostname(), "files": files}


def check_same_code(reservations: Sequence[Reservation]) -> None:
    """Compare the code on each machine of these reservations with that of this process. Raises `SetupError` for the
    first machine on which it differs."""
    import sys

    import ray
    from ray import cloudpickle
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    machines: dict[str, tuple[PlacementGroup, int]] = {}
    for reservation in reservations:
        for bundle, node in placement_group_table(reservation.group)["bundles_to_node_id"].items():
            machines.setdefault(node, (reservation.group, bundle))
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        references = [
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
    local_files = code_here(PACKAGES)["files"]
    for remote in ray.get(references, timeout=TIMEOUT_S):
        if why := difference(local_files, remote["files"]):
            raise SetupError(f"the machine {remote['host']} {why}", HINT)


def difference(local: Mapping[str, str], remote: Mapping[str, str]) -> str:
    """The difference between the files of another machine and the local ones; an empty text if there is none.

    >>> difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    'has another rlcli: 1 of 2 files differ, such as b'
    >>> difference({"a": "1"}, {}), difference({"a": "1"}, {"a": "1"})
    ('has no rlcli for its Ray to import', '')
    """
    if not remote:
        return "has no rlcli for its Ray to import"
    names = sorted(local.keys() | remote.keys())
    differing = [name for name in names if local.get(name) != remote.get(name)]
    return (
        f"has another rlcli: {len(differing)} of {len(names)} files differ, such as {differing[0]}" if differing else ""
    )
