"""Uses rlcli from a checkout without installing it, by the metadata that `pip install --no-deps .` would write.

The machines that lend a GPU often have no network and no build backend, so that nothing can be built there. Built-in
verifiers, converters and recipes come through entry points, which are read from the metadata of an installation: a
folder `rlcli-VERSION.dist-info` anywhere on sys.path. That folder is made here from pyproject.toml.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "gpu-check-site"


def is_installed() -> bool:
    """True if this interpreter finds rlcli and its entry points."""
    try:
        metadata.version("rlcli")
    except metadata.PackageNotFoundError:
        return False
    return bool(metadata.entry_points(group="rlcli.verifiers"))


def make_site(site: Path = SITE, root: Path = ROOT) -> list[str]:
    """Write the metadata of the checkout `root` to the folder `site`; returns the folders for PYTHONPATH."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    about = project["project"]
    info = site / f"{about['name']}-{about['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_metadata(about))
    (info / "entry_points.txt").write_text(_entry_points(about))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return [str(site), *dict.fromkeys(str((root / package).parent) for package in packages)]


def python_path(folders: list[str], environment: Mapping[str, str] = os.environ) -> str:
    """PYTHONPATH with `folders` first."""
    return os.pathsep.join([*folders, *filter(None, [environment.get("PYTHONPATH", "")])])


def _metadata(about: Mapping[str, Any]) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {about['name']}", f"Version: {about['version']}"]
    lines += [f"Requires-Python: {about['requires-python']}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in about["dependencies"]]
    for extra, requirements in about["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {_with_extra(requirement, extra)}" for requirement in requirements]
    return "\n".join(lines) + "\n"


def _with_extra(requirement: str, extra: str) -> str:
    name, _, marker = requirement.partition(";")
    combined = f"({marker.strip()}) and extra == '{extra}'" if marker else f"extra == '{extra}'"
    return f"{name.strip()}; {combined}"


def _entry_points(about: Mapping[str, Any]) -> str:
    groups = {"console_scripts": about["scripts"], **about["entry-points"]}
    sections = (
        "\n".join([f"[{group}]", *(f"{name} = {to}" for name, to in entries.items())])
        for group, entries in groups.items()
    )
    return "\n\n".join(sections) + "\n"
