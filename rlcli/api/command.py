"""Runs a command of rlcli for a program, as a child process: Ray, the engine and their memory stay out of the program,
and their failure does not end it."""

from __future__ import annotations

import codecs
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcli import errors
from rlcli.config.load import to_toml
from rlcli.support.attempt import INTERRUPTED, error_to
from rlcli.support.files import read_object

POLL_MS = 100
"""Interval at which the end of a command is checked: a process that it leaves behind may keep its standard error
open."""


def call(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Run `rlcli NAME WORDS… --json` and return its result.

    Its progress output goes to this program's standard error: on a terminal as the command's live view, else line by
    line, as into a notebook's cell. Ctrl-C, or a notebook's interrupt, is forwarded to the command, which finishes the
    step of a run; then KeyboardInterrupt is raised. Raises the command's error.
    """
    with tempfile.TemporaryDirectory(prefix="rlcli-call-") as folder:
        error, result = Path(folder) / "error.json", Path(folder) / "result.json"
        status, interrupted = _run([name, *words, "--json"], result, {**os.environ, **error_to(error)})
        if interrupted or status == INTERRUPTED:
            raise KeyboardInterrupt
        if status:
            raise _error(name, status, error)
        report: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return report


def option(name: str, value: object) -> list[str]:
    """The words of an option: none for None and False, the flag alone for True, one for each item of a list.

    >>> option("eval_data", ["a", "b"]), option("force", True), option("steps", None)
    (['--eval-data=a', '--eval-data=b'], ['--force'], [])
    """
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    items = value if isinstance(value, list | tuple) else [value]
    return [f"{flag}={item}" for item in items]


def settings_words(settings: Mapping[str, object] | None) -> list[str]:
    """The `--set` options for dotted keys and their values.

    >>> settings_words({"train.lr": 1e-5, "tracking.trackers": ["wandb"], "verifier.name": Path("a.py:f")})
    ['--set=train.lr=1e-05', '--set=tracking.trackers=["wandb"]', '--set=verifier.name="a.py:f"']
    """
    return [f"--set={key}={to_toml(_plain(key, value))}" for key, value in (settings or {}).items()]


def _plain(key: str, value: Any) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(key, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0:  # NumPy's scalars
        return value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise errors.ConfigError(
        f"settings: {key} = {value!r:.100} is of type {type(value).__name__}",
        "give a number, text, True or False, or a list or dict of these",
    )


def _run(words: Sequence[str], result: Path, environment: Mapping[str, str]) -> tuple[int, bool]:
    """The exit code of the command, and True if this program was interrupted meanwhile."""
    # -P: files in the current folder must not shadow a library.
    command = [sys.executable, "-P", "-m", "rlcli.api.command_child", str(os.getpid()), *words]
    interrupted = False
    with result.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if _on_terminal() else subprocess.PIPE,
            env=environment,
            process_group=0,  # a terminal or a notebook may signal this program's group, and it forwards that
        )
    with _ended(process):
        relay = _OutputRelay(process)
        while True:
            try:
                return relay.until_exit(), interrupted
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which is terminated and waited for if an error leaves the block."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        if process.stderr:
            process.stderr.close()


class _OutputRelay:
    """Copies the standard error of a process to this program's, if it is a pipe."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def until_exit(self) -> int:
        """Copy all output, and return the exit code. May be called again after an exception."""
        if self._process.stderr is None:
            return self._process.wait()
        pipe, poll = self._process.stderr.fileno(), select.poll()  # a notebook may have too many files for `select`
        poll.register(pipe, select.POLLIN)
        while True:
            over = self._process.poll() is not None
            if poll.poll(0 if over else POLL_MS):
                if not (data := os.read(pipe, 1 << 16)):
                    return self._process.wait()
                self._print(data)
            elif over:
                return self._process.wait()

    def _print(self, data: bytes) -> None:
        if sys.stderr is not None:
            sys.stderr.write(self._decoder.decode(data))
            sys.stderr.flush()


def _on_terminal() -> bool:
    """True if this program's standard error is a terminal that a child process inherits, and not a notebook's
    object."""
    try:
        return sys.stderr is not None and sys.stderr.isatty() and sys.stderr.fileno() == 2
    except (OSError, ValueError):
        return False


def _error(name: str, status: int, file: Path) -> errors.RlcliError:
    """The error that a command has written to `file`; else one with its exit code."""
    content = read_object(file)
    kind = getattr(errors, str(content.get("kind")), None)
    if kind is None:
        cause = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        return errors.RunFailed(f"rlcli {name} {cause}", "what it printed is above")
    error: errors.RlcliError = kind(content["message"], content["hint"])
    return error
