"""Algorithms of a user's own, from a file: what it registers when it is run can be named in the configuration."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

from rlcli.errors import ConfigError


def load_file(path: str) -> None:
    """Run the Python file at `path` as a module; a second time is no different from the first.

    It is the user's own code, and runs in every process of the run. Raises `ConfigError` where it cannot be read or
    fails.
    """
    file = Path(path).expanduser().resolve()
    name = f"rlcli_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if file.suffix != ".py" or not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"algorithm.code = '{path}' is no Python file", "give the path of a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file does when it is run
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f" in line {lines[-1]}" if lines else ""  # an error of syntax says so itself
        raise ConfigError(
            f"algorithm.code = '{path}' fails{where}: {type(error).__name__}: {error}", "mend the file"
        ) from error
