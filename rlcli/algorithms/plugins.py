"""Algorithms of a user's own, from a file: what it registers when it is run can be named in the configuration."""

from __future__ import annotations

import traceback
from pathlib import Path

from rlcli.errors import ConfigError
from rlcli.importing import import_problem, run_file


def load_file(path: str) -> None:
    """Run the Python file at `path` as a module; a second time is no different from the first.

    It is the user's own code, and runs in every process of the run. Raises `ConfigError` where it cannot be read,
    fails, hangs or exits.
    """
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"algorithm.code = '{path}' is no Python file", "give the path of a .py file")
    if problem := import_problem(str(file)):
        raise ConfigError(f"algorithm.code = '{path}' {problem}", "see what the file does when it is imported")
    try:
        run_file(file, f"rlcli_user_{file.stem}")
    except (Exception, SystemExit) as error:  # whatever the file does when it is run
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f" in line {lines[-1]}" if lines else ""  # an error of syntax says so itself
        raise ConfigError(
            f"algorithm.code = '{path}' fails{where}: {type(error).__name__}: {error}", "mend the file"
        ) from error
