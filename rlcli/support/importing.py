"""Tests the import of a plugin in another process first, so that a hang or exit does not end the command."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

IMPORT_TIMEOUT_S = 120.0
"""Maximum time of an import."""
SAFE_PATH, SET_HERE = "PYTHONSAFEPATH", "rlcli"
"""Any text in this variable keeps the current folder, and a script's, out of sys.path. This text marks that rlcli set
it."""

_trusted = False


def python(module: str, *arguments: str) -> list[str]:
    """The command that calls `main(*arguments)` of `module`, texts, in a fresh interpreter with this one's sys.path.

    Neither `-m` nor multiprocessing, which would load this process's `__main__`. -P: `import json` must not find a file
    of that name in the current folder.
    """
    path = json.dumps([str(folder) for folder in sys.path])
    start = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(*sys.argv[2:])"
    return [sys.executable, "-P", "-c", start, path, *arguments]


def keep_current_folder_out() -> None:
    """Set `PYTHONSAFEPATH` for all processes that this one starts from now on: libraries start a Python with `-c` or
    `-m` (multiprocessing, vLLM), which would import modules of the current folder before those of the installation."""
    os.environ[SAFE_PATH] = os.environ.get(SAFE_PATH) or SET_HERE


def without_safe_path(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a program of the user: a script finds the modules in its folder, unless the user set otherwise.

    >>> without_safe_path({"PYTHONSAFEPATH": "rlcli", "HOME": "/root"}), without_safe_path({"PYTHONSAFEPATH": "1"})
    ({'HOME': '/root'}, {'PYTHONSAFEPATH': '1'})
    """
    return {name: value for name, value in environment.items() if (name, value) != (SAFE_PATH, SET_HERE)}


def trust_imports() -> None:
    """Skip the test in this process from now on: its driver has done it."""
    global _trusted
    _trusted = True


def run_file(file: Path, name: str) -> ModuleType:
    """Import the Python file as the module `name`. Raises `ImportError` if it is not a Python file, and any error of
    the file; the name is then free again."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if previous is not None:
            sys.modules[name] = previous
        raise
    return module


@functools.cache
def import_problem(target: str) -> str:
    """The problem if the import of a module, or of a Python file whose path ends in .py, does not end in
    IMPORT_TIMEOUT_S seconds, or ends the process. Empty if it does neither; the import may raise.

    Tested once a process, in another one with the same sys.path; never in workers, as their driver has done so.
    """
    import select
    import subprocess

    if _trusted:
        return ""
    read, write = os.pipe()
    # Standard input stays open: an import that reads it waits, as it would on a terminal.
    child = subprocess.Popen(
        python("rlcli.support.importing", target, str(write)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[write],
        start_new_session=True,
    )
    os.close(write)
    try:
        if not select.select([read], [], [], IMPORT_TIMEOUT_S)[0]:
            return f"does not end its import in {IMPORT_TIMEOUT_S:g} s"
        if os.read(read, 1):
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"ends the process that imports it ({how_ended(child.wait(IMPORT_TIMEOUT_S))})"
        return "closes the files of the process that imports it"
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def main(target: str, done: str) -> None:
    """Import, report the end on the file descriptor `done`, and exit at once, even if threads were started."""
    try:
        if target.endswith(".py"):
            sys.path.append(os.path.dirname(target))
            run_file(Path(target), "rlcli_tried")
        else:
            importlib.import_module(target)
    except BaseException as error:
        del error  # the next import reports it
    os.write(int(done), b"1")
    os._exit(0)


def how_ended(status: int | None) -> str:
    """An exit status, negative for a signal, as text."""
    if status is None or status >= 0:
        return f"exit status {status}"
    return f"signal {-status}: {signal.strsignal(-status)}"
