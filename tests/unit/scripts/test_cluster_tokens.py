"""Every Ray cluster that a page or a script starts asks for a token."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
TURNED_OFF = re.compile(r"""RAY_AUTH_MODE["']?\s*[=:,]\s*["']?disabled""")


def files(*folders: str) -> list[Path]:
    """Texts of these folders, and of the top."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in (*paths, *ROOT.glob("*.md")) if b"\0" not in path.read_bytes()[:1000]]


def test_no_script_page_or_program_turns_the_token_off() -> None:
    off = [
        path
        for path in files("scripts", "docs", "rlcli", "packages")
        if TURNED_OFF.search(path.read_text(errors="replace"))
    ]
    assert off == []
    assert TURNED_OFF.search("export RAY_AUTH_MODE=disabled")
    assert TURNED_OFF.search('{"RAY_AUTH_MODE": "disabled"}')


def test_where_a_cluster_is_started_its_token_is_set() -> None:
    starts = [
        path for path in files("scripts", "docs") if re.search(r"\bray\"? start\b", path.read_text(errors="replace"))
    ]
    assert {"slurm.sbatch", "several_machines.md"} <= {path.name for path in starts}
    for path in starts:
        assert "RAY_AUTH_MODE" in path.read_text(), path


def test_no_token_is_an_argument_of_a_command() -> None:
    """The file's name may be: only its owner can read it."""
    for name in ("scripts/clusters/slurm.sbatch", "docs/several_machines.md", "docs/clusters.md"):
        text = (ROOT / name).read_text()
        assert not re.search(r"(ray|rlcli|srun|step\[@\]\}\").*RAY_AUTH_TOKEN\b", text), name


def test_kuberay_makes_a_token() -> None:
    cluster = yaml.safe_load((ROOT / "scripts" / "clusters" / "rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "it refuses older ones"
    pinned = re.search(r"^ray==(\S+)", (ROOT / "requirements" / "gpu.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["rayVersion"] == pinned[1], "the image has what is pinned"


def test_every_ray_that_may_be_installed_knows_tokens() -> None:
    bounds = re.findall(r'"ray>=([\d.]+),<3"', (ROOT / "pyproject.toml").read_text())
    assert len(bounds) == 3
    assert all(tuple(map(int, bound.split("."))) >= (2, 52) for bound in bounds)
