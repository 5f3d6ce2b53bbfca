"""Describe a crash of a verifier in one line: the error, the line of the user's code, and the response."""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from collections.abc import Iterator
from types import FrameType

from rlcli.rewards.function_calls import BadResult, code_of
from rlcli.support.redact import redacted

OURS = ("rlcli", "rlcli_port", "rlcli_sandbox", "rlcli_verifiers", "rlcli_environments", "importlib")
"""Packages whose frames are left out of messages; the last imports the user's file."""
FILE_MODULE = "rlcli_verifier_"
"""Prefix of the module name of a user's file, see `load.find`."""
ERROR_CHARS, CODE_CHARS, SHOWN_CHARS, TRACEBACK_CHARS = 700, 100, 120, 8000
"""Maximum lengths of an error's text, of a line of code, of a response and of a traceback."""
BEFORE_RESPONSE = "; the response: "
_RESPONSE = "rlcli_response"


def describe(error: BaseException, response: str | None = None) -> str:
    """One line: the error's type and text, where it was raised in the user's code, and the response, shortened.

    response: None if it is unknown, or if the error is not about one.
    """
    try:
        text = str(error)
    except Exception:
        text = ""
    kind = "" if isinstance(error, BadResult) else f"{type(error).__name__}: "
    location = error_location(error)
    response = getattr(error, _RESPONSE, response)
    line = " ".join(f"{kind}{text}".splitlines())[:ERROR_CHARS] + (f" ({location})" if location else "")
    return redacted(line + (f"{BEFORE_RESPONSE}{shortened(response)}" if response is not None else ""))


def with_response(error: BaseException, response: str) -> BaseException:
    """Attach a response to the error, for `describe`: one that is not the request's."""
    setattr(error, _RESPONSE, response)
    return error


def without_response(detail: str) -> str:
    """Strip the response from a text of `describe`.

    >>> without_response("ValueError: no number (a.py, line 3, in f); the response: 'abc'")
    'ValueError: no number (a.py, line 3, in f)'
    """
    return detail.rpartition(BEFORE_RESPONSE)[0] or detail


def shortened(text: str) -> str:
    r"""A response in one printable line, in quotes, without its middle if it is long.

    >>> shortened("So\nit is 42"), len(shortened("x" * 1000))
    ("'So\\nit is 42'", 123)
    """
    half = SHOWN_CHARS // 2
    return repr(text if len(text) <= SHOWN_CHARS else f"{text[:half]}…{text[-half:]}")


def error_location(error: BaseException) -> str:
    """The file, the line and the text of the user's code that raised the error, or the file and the line of the
    function whose result it is about; empty for code of rlcli."""
    if isinstance(error, BadResult):
        code = code_of(error.function)
        ours = getattr(inspect.unwrap(error.function), "__module__", None) or ""
        if code is None or ours.partition(".")[0] in OURS:
            return ""
        return f"{_relative_path(code.co_filename)}, line {code.co_firstlineno}, {code.co_name}"
    frames = [(frame, line) for frame, line in _frames(error) if _root(frame) not in OURS]
    user_frames = [(frame, line) for frame, line in frames if _same_package(frame, frames[0][0])]
    if not user_frames:
        return ""
    frame, line = user_frames[-1]
    text = linecache.getline(frame.f_code.co_filename, line).strip()
    location = f"{_relative_path(frame.f_code.co_filename)}, line {line}, in {frame.f_code.co_name}"
    return f"{location}: {text[:CODE_CHARS]}" if text else location


def user_traceback(error: BaseException) -> str:
    """The traceback without the lines of rlcli, as Python prints it; empty if it has no others."""
    summary = traceback.TracebackException.from_exception(error)
    from_user = [_root(frame) not in OURS for frame, _ in _frames(error)]
    if not any(from_user):
        return ""
    summary.stack = traceback.StackSummary.from_list(
        [line for line, is_users in zip(summary.stack, from_user, strict=True) if is_users]
    )
    return redacted("".join(summary.format(chain=False)))[-TRACEBACK_CHARS:]


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames of the traceback, the innermost last."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame, step.tb_lineno
        step = step.tb_next


def _root(frame: FrameType) -> str:
    """The top-level package of a frame's module."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _same_package(frame: FrameType, first: FrameType) -> bool:
    """True if a frame is in the verifier's package, or for a file its folder. first: the verifier's outermost frame."""
    if _root(first).startswith(FILE_MODULE):
        return os.path.dirname(frame.f_code.co_filename) == os.path.dirname(first.f_code.co_filename)
    return _root(frame) == _root(first)


def _relative_path(file: str) -> str:
    """A path as a user would write it: relative if it is below the current folder."""
    try:
        relative = os.path.relpath(file)
    except OSError:  # the current folder is gone
        return file
    return file if relative.startswith(os.pardir) else relative
