"""A folder whose Python files have the names of other modules: importing one of them leaves a folder `marks/NAME`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGES = {
    *("accelerate", "aiohttp", "datasets", "httpx", "huggingface_hub", "jinja2", "numpy", "packaging", "peft", "PIL"),
    *("psutil", "pyarrow", "pydantic", "ray", "rich", "safetensors", "sitecustomize", "tokenizers", "torch"),
    *("transformers", "typer", "usercustomize", "vllm", "yaml"),
    *("rlcli", "rlcli_audit", "rlcli_inspect", "rlcli_planner", "rlcli_port", "rlcli_quickstart", "rlcli_sandbox"),
    *("rlcli_data_prep", "rlcli_environments", "rlcli_recipes", "rlcli_verifiers"),
}
CODE = "import posix\nposix.mkdir({mark!r})\nraise SystemExit('the module {name} of the current folder was imported')\n"


def make(folder: Path) -> Path:
    """The folder, with a file for each module of the standard library and for `PACKAGES`."""
    (folder / "marks").mkdir(parents=True)
    for name in {*sys.stdlib_module_names, *PACKAGES} - set(sys.builtin_module_names):
        (folder / f"{name}.py").write_text(CODE.format(mark=str(folder / "marks" / name), name=name))
    return folder


def marks(folder: Path) -> list[str]:
    """The modules that were imported from the folder."""
    return sorted(path.name for path in (folder / "marks").iterdir())


def environment(**variables: str) -> dict[str, str]:
    """Environment of this process without variables that would add to a child's sys.path."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
