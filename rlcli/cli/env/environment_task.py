"""A row, its environment's process, and a session with it, for `rlcli env show` and `try`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import completion
from rlcli.errors import ConfigError, RlcliError

if TYPE_CHECKING:
    from rlcli.config.schema import RunConfig
    from rlcli.environments.environment import Opening
    from rlcli.environments.environment_host import EnvironmentHost, Session
    from rlcli.types import Prompt

RECIPE = "grpo"
"""The source of values that no option sets."""

EnvironmentName = Annotated[
    str,
    typer.Argument(
        help="Name, module:Class, path/to/file.py:Class, or functions there.", autocompletion=completion.environments
    ),
]
TaskData = Annotated[
    Path | None,
    typer.Option(
        help="A parquet file, or a folder with train.parquet; unset: numbered rows, as in a run.",
        autocompletion=completion.datasets,
    ),
]
RowNumber = Annotated[int, typer.Option(min=0, help="The row, from 0.")]


@dataclass(frozen=True)
class Task:
    """A row and the environment that plays it."""

    config: RunConfig
    """The resolved configuration."""
    prompt: Prompt
    """The row."""
    host: EnvironmentHost
    """The environment's process."""
    seed: int
    """Argument of `reset`."""

    def reset(self) -> tuple[Session, Opening]:
        """A session and its first messages. Raises `RlcliError`."""
        from rlcli.environments.environment import EnvironmentFailed
        from rlcli.environments.environment_pool import row_of

        session = self.host.session()
        try:
            return session, session.reset(row_of(self.prompt), self.seed).result()
        except EnvironmentFailed as error:
            raise RlcliError(f"the environment '{self.host.spec.name}' opens no conversation: {error}") from None


@contextmanager
def opened(
    name: str, data: Path | None, row: int, sets: Sequence[str], *, seed: int | None = None, model: str | None = None
) -> Iterator[Task]:
    """The environment and its row, as a run with these settings would have them; its process ends with the block.

    seed: of `reset`; None: the row's, as in a run. Raises `RlcliError` for errors that a user can cause.
    """
    from rlcli.environments.environment_host import EnvironmentHost
    from rlcli.environments.environment_pool import name_of, spec_of
    from rlcli.rollout.worker.conversations import row_seed

    config, prompt = config_and_row(name, data, row, sets, model=model)
    if config.environment.is_command:
        raise ConfigError(f"'{name}' is a program, which only a model can answer", "rlcli env try NAME --model MODEL")
    with EnvironmentHost(spec_of(config, name_of(config.environment, prompt))) as host:
        yield Task(config, prompt, host, row_seed(prompt.id) if seed is None else seed)


def config_and_row(
    name: str, data: Path | None, row: int, sets: Sequence[str], *, model: str | None = None
) -> tuple[RunConfig, Prompt]:
    """The configuration and the row. Raises `RlcliError` for errors that a user can cause."""
    from rlcli.config.load import resolve
    from rlcli.launch.environment_checks import numbered_rows

    flags = {"environment.name": name, "data.path": str(data) if data else None, "model.path": model}
    config = resolve(RECIPE, flags, sets).config
    rows: Sequence[Prompt]
    if data:
        from rlcli.data.prompts.prompt_table import read_prompts

        rows = read_prompts(data, "train")
    else:
        rows = numbered_rows(config)
    if row >= len(rows):
        raise ConfigError(f"--row {row}: there are {len(rows)} rows", f"give 0 to {len(rows) - 1}")
    return config, rows[row]
