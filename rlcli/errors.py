"""Errors that a user can cause, each with a hint. Broken invariants are `assert`s, not these."""

from __future__ import annotations

from typing import Any

DEBUG = "RLCLI_DEBUG"
"""Environment variable, set by --debug: print the traceback of a verifier that fails too."""
REPORT = "please report this with the run's config.toml"
"""The hint of an error that only a fault of rlcli can cause."""


class RlcliError(Exception):
    """A failure that the user can fix: printed as one line, without a traceback, with exit code 2.

    `message` names the field, file or row and its value; `hint` is how to fix it.

    >>> print(RlcliError("data: no such folder 'gsm8k'", "make it with: rlcli prep gsm8k"))
    data: no such folder 'gsm8k'; make it with: rlcli prep gsm8k
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}; {hint}" if hint else message)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries (Ray, the scoring pool); the default would lose `hint`.
        return type(self), (self.message, self.hint), self.__dict__


class ConfigError(RlcliError):
    """A key that is unknown, out of bounds, or in conflict with another."""


class DataError(RlcliError):
    """A dataset, file, column or row that cannot be used."""


class ModelError(RlcliError):
    """A model folder, tokenizer or chat template that cannot be used."""


class SetupError(RlcliError):
    """The machine lacks something: an extra, a GPU, disk, /dev/shm, a port."""


class UnknownName(RlcliError):
    """A name that is not in a registry."""


class CheckpointError(RlcliError):
    """A checkpoint that is damaged, cannot be read, or does not fit its target."""


class VerifierError(RlcliError):
    """A verifier that cannot be loaded, or that fails too often to train on."""


class EndpointError(RlcliError):
    """A served model that cannot be reached or violates the protocol."""


class RunFailed(RlcliError):
    """A run that had started and had to stop: a worker died, a check failed. Exit code 1.

    retry: the cause is outside the run (a process was killed, a machine went down), so that resuming from the last
    checkpoint may help. who: what failed: `worker 3`, `the Ray head`, `the run`.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "", *, retry: bool = False, who: str = "the run") -> None:
        super().__init__(message, hint)
        self.retry, self.who = retry, who
