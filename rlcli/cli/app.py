"""Parses the command line, runs one command, turns what a user can cause into one line and an exit code."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from typer import TyperException

from rlcli import __version__
from rlcli.attempt import INTERRUPTED, RETRY, TOLD, is_supervised
from rlcli.cli.group import Root, command_line
from rlcli.errors import RlcliError, RunFailed
from rlcli.extras import TRAINING, not_installed
from rlcli.redact import redact_output, redacted

EPILOG = """Examples:

  rlcli quickstart                  watch a tiny model learn, on any machine
  rlcli prep gsm8k                  make a dataset
  rlcli train grpo --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k
  rlcli eval --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k
"""


app = typer.Typer(
    name="rlcli",
    cls=Root,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rlcli {__version__}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks. May stand anywhere on the line.")] = False,
) -> None:
    """Train reasoning models by reinforcement learning with verifiable rewards."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 1: a run failed after it had started, or a defect. 2: something the user can mend, before any work was
    done. 130: interrupted. 75, to a supervisor alone: begin again from the last checkpoint; `leave` tells it 76 for 1.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command_line.set(words if arguments is None else None)
    debug = "--debug" in words
    if arguments is None:
        start_in_utf8()
        write_utf8()
        redact_output()
    try:
        # Not standalone: Typer would draw its own errors as boxes, and import rich for them.
        done = app([word for word in words if word != "--debug"], prog_name="rlcli", standalone_mode=False)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except KeyboardInterrupt:
        done = INTERRUPTED
    except Exception as error:
        if isinstance(error, TyperException) and not error.format_message():
            return 2  # A group without a command: its help has been printed.
        if is_supervised() and isinstance(error, RunFailed) and error.retry:
            return RETRY  # The supervisor tells why: the run has noted it.
        if debug and not isinstance(error, TyperException):
            if is_supervised():
                sys.excepthook(type(error), error, error.__traceback__)
                return 1  # by way of `leave`, not of the interpreter's end: this one has been told
            raise
        mendable = _mendable(error)
        _say("error:", *str(mendable or _defect(error)).split())
        return mendable.exit_code if mendable else 1
    if done == INTERRUPTED and not is_supervised():
        _say("interrupted")
    return done if isinstance(done, int) else 0


def start_in_utf8() -> None:
    """In the C locale without UTF-8 (PYTHONUTF8=0), begin again with it: the words of the command line and the names of
    files hold no character beyond ASCII there."""
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def write_utf8() -> None:
    """Write what the locale's encoding has no character for all the same: in the C locale everything as UTF-8, here and
    in the processes that this one starts, else as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            bare = codecs.lookup(stream.encoding).name == "ascii"
            stream.reconfigure(encoding="utf-8" if bare else None, errors="backslashreplace")
            if bare:
                os.environ["PYTHONUTF8"] = "1"


def _say(*words: str) -> None:
    with contextlib.suppress(OSError):  # Whoever read it (a pager, `tee`) has ended: the exit code tells.
        print(redacted(" ".join(words)), file=sys.stderr)


def _mendable(error: Exception) -> RlcliError | None:
    if isinstance(error, TyperException):
        context = getattr(error, "ctx", None)
        return RlcliError(error.format_message().rstrip("."), f"see {context.command_path if context else 'rlcli'} -h")
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] in TRAINING:
        return not_installed(error.name.partition(".")[0])
    return error if isinstance(error, RlcliError) else _bad_path(error)


def _bad_path(error: Exception) -> RlcliError | None:
    """A path that no system call takes, wherever on the command line or in a file it was given."""
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return RlcliError(f"{error.filename!s:.100}: {error.strerror}", "give another path")
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # pathlib's, before Python 3.13
        return RlcliError(str(error), "give another path")
    if isinstance(error, ValueError) and str(error) == "embedded null byte":
        return RlcliError("a path holds a NUL character", "give another path")
    return None


def _defect(error: Exception) -> str:
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{said}; run again with --debug for the traceback"


def leave(code: int) -> NoReturn:
    """End this process. A supervised one is done once it has cleared up: a library whose threads hang or whose memory
    is torn apart when the interpreter ends would make a run that is done look like one that failed."""
    if is_supervised():
        if code != RETRY:  # What this attempt has made, such as a model's folder, the next one needs.
            atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(TOLD if code == 1 else code)
    sys.exit(code)
