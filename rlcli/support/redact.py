"""Makes text safe to record or print: without secrets (tokens and keys of the environment, passwords of URLs), and
without control characters."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TextIO

SECRET_NAME = re.compile(r"(?:^|_)(?:API_?)?(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)
"""Names of environment variables that hold secrets."""

LEAST = 8
"""Minimum characters of a secret; shorter ones may be part of any word."""

OTHER_SECRET_NAME = re.compile(r"(?:^|_)(?:AUTH|PASS|PASSWD|PASSPHRASE|PAT)(?:_|$)|._PWD$|^KUBECONFIG$", re.IGNORECASE)
"""Names of further variables that grant access: to an SSH agent, a registry, a cluster. Their values may be paths,
which are not removed from texts."""

SERVICES = ("HF_", "HUGGING_FACE_", "HUGGINGFACE_", "WANDB_", "SWANLAB_", "MLFLOW_", "TRACKIO_", "RAY_")
"""Prefixes of the variables of the hub, a tracker or Ray."""

_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of control characters, escapes, bidirectional overrides, half surrogates and line separators."""
_NOT_PLAIN = re.compile(r"[^\x20-\x7e\n\t]+")
_OUR_CODES = re.compile(r"(\x1b\[[0-9;]*[mAK]|\x1b\[\?25[hl])|\r|[^\x20-\x7e\n\t\r\x1b]+|\x1b")
"""Codes of colours, of the cursor's line and of the cursor, which our live views and progress bars write."""
_LOGIN = re.compile(r"""//[^/@\s"']*@""")


def redacted(text: str, secrets: Sequence[str] | None = None) -> str:
    """`text` with *** instead of secrets (`secrets`, by default the environment's) and of the logins of URLs.

    >>> redacted("POST https://me:hunter2@tracker.example/api failed")
    'POST https://***@tracker.example/api failed'
    """
    return _LOGIN.sub("//***@", without_values(text, values() if secrets is None else secrets))


def without_values(text: str, secrets: Sequence[str]) -> str:
    """`text` with *** instead of each secret."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def values() -> list[str]:
    """The environment's secrets and URL logins, longest first: one may be a prefix of another."""
    secrets = {value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    secrets |= {login[2:-1] for value in os.environ.values() for login in _LOGIN.findall(value)}
    return sorted((value for value in secrets if len(value) >= LEAST), key=lambda value: (-len(value), value))


def without_service_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without credentials of the hub, a tracker or a Ray cluster, for processes that run untrusted code.

    >>> without_service_secrets({"HF_TOKEN": "hf_x", "HF_HOME": "/hf", "MLFLOW_TRACKING_URI": "http://a:b@host"})
    {'HF_HOME': '/hf'}
    """
    return {
        name: value
        for name, value in environment.items()
        if not (name.startswith(SERVICES) and (SECRET_NAME.search(name) or _LOGIN.search(value)))
    }


def without_secrets(environment: Mapping[str, str], allowed: Collection[str] = ()) -> dict[str, str]:
    """`environment` without any variable whose name is that of a secret, except those in `allowed`: for third-party
    code that works for the run.

    >>> without_secrets({"AWS_SECRET_ACCESS_KEY": "x", "SSH_AUTH_SOCK": "/run/s", "HF_TOKEN": "hf_x", "LANG": "C"})
    {'LANG': 'C'}
    >>> without_secrets({"HF_TOKEN": "hf_x", "MY_API_KEY": "y"}, allowed=["MY_API_KEY"])
    {'MY_API_KEY': 'y'}
    """
    safe = without_service_secrets(environment)
    return {
        name: value
        for name, value in environment.items()
        if name in allowed or (name in safe and not SECRET_NAME.search(name) and not OTHER_SECRET_NAME.search(name))
    }


def has_login(value: str) -> bool:
    """True if the value of a variable has a URL with a login.

    >>> has_login("http://me:hunter2@proxy:8080"), has_login("http://proxy:8080")
    (True, False)
    """
    return _LOGIN.search(value) is not None


def redact_output() -> None:
    """Remove secrets, and control characters except those of our live views, from Python's standard output and error
    from now on: from prints, tracebacks, warnings, logging. Results go to standard output: URLs, which may be data, are
    unchanged there."""
    known.cache_clear()
    sys.stderr, sys.stdout = _redacting(sys.stderr, redacted), _redacting(sys.stdout, without_values)


def _redacting(stream: TextIO, redact: Callable[[str, Sequence[str]], str]) -> TextIO:
    if isinstance(stream, _Redacting):
        return stream
    if not isinstance(stream, io.TextIOWrapper):
        try:  # Ray's workers have an object of Ray's
            stream = os.fdopen(stream.fileno(), "w", 1, encoding="utf-8", errors="replace", closefd=False)
        except (AttributeError, OSError):  # no file descriptor
            return stream
    assert isinstance(stream, io.TextIOWrapper)
    return _Redacting(stream, redact)


@functools.cache
def known() -> tuple[str, ...]:
    """`values` at the last call of `redact_output`."""
    return tuple(values())


class _Redacting(io.TextIOWrapper):
    """Writes to the buffer of `stream`, which only the stream closes."""

    def __init__(self, stream: io.TextIOWrapper, redact: Callable[[str, Sequence[str]], str]) -> None:
        stream.flush()
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._stream, self._redact = stream, redact

    def write(self, text: str, /) -> int:
        super().write(_displayable(self._redact(text, known())))
        return len(text)

    def close(self) -> None:
        """Flush, but keep the buffer open. Also called on garbage collection: closing it would close the stream."""
        if not self.buffer.closed:
            self.flush()


def printable(text: str) -> str:
    """`text` with all terminal control characters (escapes, carriage returns, bidirectional overrides, half surrogates)
    written as escapes, except line feeds and tabs.

    >>> print(printable("\\x1b[31mred"))
    \\x1b[31mred
    """
    return _NOT_PLAIN.sub(lambda match: _escaped(match[0]), text)


def printable_json(text: str) -> str:
    """A JSON text with the same characters as JSON's escapes: its value is the same.

    >>> printable_json(json.dumps({"name": "\x9b31m"}, ensure_ascii=False))
    '{"name": "\\\\u009b31m"}'
    """
    return _NOT_PLAIN.sub(lambda match: _escaped(match[0], lambda character: json.dumps(character)[1:-1]), text)


def _displayable(text: str) -> str:
    """`printable`, except for carriage returns and `_OUR_CODES`."""
    return _OUR_CODES.sub(lambda match: match[0] if match[1] or match[0] == "\r" else _escaped(match[0]), text)


def _escaped(
    text: str, escape: Callable[[str], str] = lambda character: character.encode("unicode_escape").decode()
) -> str:
    if text.isprintable():
        return text
    return "".join(
        escape(character) if unicodedata.category(character) in _UNPRINTABLE else character for character in text
    )
