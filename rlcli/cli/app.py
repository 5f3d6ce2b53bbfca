"""Parses the command line, runs one command and turns user errors into one line and an exit code."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer import TyperException

from rlcli import __version__
from rlcli.cli.bash_words import rejoined_words
from rlcli.cli.command_group import Root, command_line
from rlcli.errors import DEBUG, RlcliError, RunFailed
from rlcli.support.attempt import INTERRUPTED, REFUSED, REPORTED, RETRY, error_file, is_supervised, run_exit_functions
from rlcli.support.extras import TRAINING, not_installed
from rlcli.support.importing import keep_current_folder_out
from rlcli.support.redact import printable, redact_output, redacted

if TYPE_CHECKING:
    from typer._click.core import Context

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
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks, of verifiers too. Allowed anywhere on the line.")
    ] = False,
) -> None:
    """Train reasoning models by reinforcement learning with verifiable rewards."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 1: a run failed after it had started, or a bug. 2: an error that the user can fix, before any work was
    done. 130: interrupted. 75, only for a supervisor: restart from the last checkpoint; `leave` gives it 76 for 1.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command_line.set(words if arguments is None else None)
    debug = "--debug" in words
    if arguments is None:
        keep_current_folder_out()
        start_in_utf8()
        write_utf8()
        redact_output()
        warnings.formatwarning = _format_warning
    if not words or {"-h", "--help"} & {*words}:
        _leave_colons()
    try:
        # Not standalone: Typer would print its errors in boxes, and import rich for them.
        with rejoined_words(), _debugging(debug):
            result = app([word for word in words if word != "--debug"], prog_name="rlcli", standalone_mode=False)
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except KeyboardInterrupt:
        result = INTERRUPTED
    except Exception as error:
        if isinstance(error, TyperException) and not error.format_message():
            return REFUSED  # A group without a command: its help has been printed.
        if is_supervised() and isinstance(error, RunFailed) and error.retry:
            return RETRY  # The supervisor prints why: the run has recorded it.
        if debug and not isinstance(error, TyperException):
            if is_supervised():
                sys.excepthook(type(error), error, error.__traceback__)
                return 1  # through `leave`, not the interpreter's exit: this error is printed
            raise
        return _report(error)
    if result == INTERRUPTED and not is_supervised():
        _print("interrupted")
    return result if isinstance(result, int) else 0


@contextlib.contextmanager
def _debugging(debug: bool) -> Iterator[None]:
    """Enable tracebacks in this process and those that it starts, if `debug`."""
    if not debug:
        yield
        return
    previous = os.environ.get(DEBUG)
    os.environ[DEBUG] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[DEBUG]


def _report(error: Exception) -> int:
    """Print an error, or pass it to the program that has started this command. Returns the exit code."""
    failure = _user_error(error)
    if file := error_file():
        if failure is None:
            sys.excepthook(type(error), error, error.__traceback__)
            failure = RunFailed(f"{type(error).__name__}: {error}".rstrip(": "), "its traceback is above")
        facts = {"kind": type(failure).__name__, "message": failure.message, "hint": failure.hint}
        file.write_text(redacted(json.dumps(facts)), encoding="utf-8")
        return failure.exit_code
    _print("error:", *str(failure or _defect(error)).split())
    return failure.exit_code if failure else 1


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning for the user in one line; those of libraries with their location."""
    location = "" if category.__module__.startswith("rlcli.") else f"{filename}:{lineno}: {category.__name__}: "
    return printable(f"{location or 'warning: '}{message}\n")


def start_in_utf8() -> None:
    """In the C locale without UTF-8 (PYTHONUTF8=0), restart with UTF-8: otherwise arguments and file names cannot
    contain characters beyond ASCII."""
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def write_utf8() -> None:
    """Make every character writable in any locale: in the C locale as UTF-8, here and in the processes that this one
    starts; in others, characters that the encoding lacks become escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            bare = codecs.lookup(stream.encoding).name == "ascii"
            stream.reconfigure(encoding="utf-8" if bare else None, errors="backslashreplace")
            if bare:
                os.environ["PYTHONUTF8"] = "1"


def _print(*words: str) -> None:
    with contextlib.suppress(OSError):  # The reader (a pager, `tee`) has exited; the exit code remains.
        print(printable(redacted(" ".join(words))), file=sys.stderr)


def _user_error(error: Exception) -> RlcliError | None:
    if isinstance(error, TyperException):
        context = getattr(error, "ctx", None)
        hint = _as_a_key(getattr(error, "option_name", ""), context)
        hint += f"see {context.command_path if context else 'rlcli'} -h"
        return RlcliError(error.format_message().rstrip("."), hint)
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] in (*TRAINING, "vllm"):
        return not_installed(error.name.partition(".")[0])
    return error if isinstance(error, RlcliError) else _bad_path(error)


def _as_a_key(option: str, context: Context | None) -> str:
    """A hint with the keys for an unknown option, which may have the name of verl or TRL, for a command that takes
    keys; else empty."""
    command = getattr(context, "command", None)
    if not option or not any("--set" in parameter.opts for parameter in getattr(command, "params", ())):
        return ""
    from rlcli.config.keys import counterparts, keys

    name = option.lstrip("-").replace("-", "_")
    same_name = sorted(
        (key for key in keys() if key.partition(".")[2] == name), key=lambda key: not key.startswith("train.")
    )
    suggestions = counterparts(name) or same_name
    return f"give it as a key: {' or '.join(f'--set {key}=…' for key in suggestions[:3])}; " if suggestions else ""


def _bad_path(error: Exception) -> RlcliError | None:
    """The error for a path that no system call accepts, from the command line or from a file."""
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return RlcliError(f"{error.filename!s:.100}: {error.strerror}", "give another path")
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # pathlib's, before Python 3.13
        return RlcliError(str(error), "give another path")
    if isinstance(error, ValueError) and str(error) == "embedded null byte":
        return RlcliError("a path holds a NUL character", "give another path")
    return None


def _defect(error: Exception) -> str:
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{message}; run again with --debug for the traceback"


def _leave_colons() -> None:
    """Keep rich from reading names between colons in a help text, as in a prompt's id `sums:train:7`, as emoji."""
    import rich.markup

    def same(text: str, default_variant: str | None = None) -> str:
        return text

    vars(rich.markup)["_emoji_replace"] = same


def leave(code: int) -> NoReturn:
    """Exit this process. A supervised one skips the interpreter's shutdown after cleaning up: library threads that hang
    or memory that is corrupted there would make a finished run look failed."""
    if is_supervised():
        if code != RETRY:  # The next attempt needs the files of this one, such as a model folder.
            run_exit_functions()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(REPORTED if code == 1 else code)
    sys.exit(code)
