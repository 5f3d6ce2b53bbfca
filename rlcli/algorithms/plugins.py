"""Loads user-defined algorithms from a file: the functions that it registers can be named in the configuration."""

from __future__ import annotations

import traceback
from pathlib import Path

from rlcli.errors import ConfigError
from rlcli.support.importing import import_problem, run_file


def load_file(path: str) -> None:
    """Run the Python file at `path` as a module; a second run has no further effect.

    It is the user's code, and runs in every process of the run. Raises `ConfigError` if it cannot be read, fails, hangs
    or exits.
    """
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"algorithm.code = '{path}' is not a Python file", "give the path of a .py file")
    if problem := import_problem(str(file)):
        raise ConfigError(f"algorithm.code = '{path}' {problem}", "check what the file does when it is imported")
    try:
        run_file(file, f"rlcli_user_{file.stem}")
    except (Exception, SystemExit) as error:  # anything that the file may raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f" in line {lines[-1]}" if lines else ""  # the message of a SyntaxError has the line
        raise ConfigError(
            f"algorithm.code = '{path}' fails{where}: {type(error).__name__}: {error}", "fix the file"
        ) from error
