"""Resolve the extras of pyproject.toml into the pinned files of requirements/.

Usage: .venv/bin/python scripts/lock.py [--upgrade]

The files name no index and hold for Linux x86_64 with Python 3.11 and 3.12: a pin without a marker serves both.
Without `--upgrade` a pin moves only where pyproject.toml makes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
PYTHONS = ("3.11", "3.12")
# 1 GB of GPU compiler that only xgrammar asks for; on a CPU nothing here calls it.
UNUSED_ON_CPU = ("triton",)


def main() -> None:
    flags = sys.argv[1:]
    if flags not in ([], ["--upgrade"]):
        sys.exit(__doc__)
    cpu = resolve("cpu", flags, excluded=UNUSED_ON_CPU)
    gpu = resolve("gpu", flags)
    write("cpu", cpu)
    write("gpu", gpu)
    # The development tools go on top of either set, so what both hold already is left to them.
    shared = held(cpu) & held(gpu)
    write("dev", [pin for pin in resolve("dev", [*flags, "-c", str(FOLDER / "cpu.txt")]) if not held([pin]) <= shared])


def resolve(extra: str, flags: list[str], excluded: tuple[str, ...] = ()) -> list[Requirement]:
    """Pins for `extra` and the light core, for every platform; the previous pins are kept where they still fit."""
    with tempfile.TemporaryDirectory() as folder:
        output, excludes = Path(folder, "pins.txt"), Path(folder, "excludes.txt")
        previous = FOLDER / f"{extra}.txt"
        output.write_text(previous.read_text() if previous.exists() else "")
        excludes.write_text("\n".join(excluded))
        command = [sys.executable, "-P", "-m", "uv", "pip", "compile", "--quiet", "--output-file", str(output), *flags]
        command += ["--universal", "--python-version", PYTHONS[0], "--extra", extra, "--excludes", str(excludes)]
        command += ["--no-emit-index-url", "--no-header", "--no-annotate", *wheel_sources(extra), "pyproject.toml"]
        subprocess.run(command, cwd=ROOT, check=True)
        return [Requirement(line) for line in output.read_text().splitlines() if line]


def wheel_sources(extra: str) -> list[str]:
    """Where the CPU build of torch is: a folder of wheels when the environment names one, else its own index."""
    if extra != "cpu":  # a folder with a CPU torch must not reach the other sets
        return []
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    return [part for link in links for part in ("--find-links", link)] or ["--torch-backend", "cpu"]


def write(extra: str, pins: list[Requirement]) -> None:
    lines = [line for pin in pins if (line := line_for(pin))]
    (FOLDER / f"{extra}.txt").write_text("\n".join(lines) + "\n")
    print(f"requirements/{extra}.txt: {len(lines)} pins")


def line_for(pin: Requirement) -> str | None:
    """The pin with its marker reduced to the Pythons it serves, or None where it serves neither."""
    served = pythons(pin)
    if not served:
        return None
    bare = f"{pin.name}{pin.specifier}"
    return bare if len(served) == len(PYTHONS) else f'{bare} ; python_version == "{served[0]}"'


def pythons(pin: Requirement) -> list[str]:
    """The Python versions that the pin applies to."""
    return [python for python in PYTHONS if pin.marker is None or pin.marker.evaluate(linux(python))]


def held(pins: list[Requirement]) -> set[tuple[str, str]]:
    """Pins by Python version."""
    return {(pin.name, python) for pin in pins for python in pythons(pin)}


def linux(python: str) -> dict[str, str]:
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.9",
        "python_version": python,
        "sys_platform": "linux",
    }


if __name__ == "__main__":
    main()
