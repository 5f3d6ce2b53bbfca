"""Where a run's metrics go: metrics.jsonl always, other trackers by option."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rlcli.errors import SetupError
from rlcli.trainer.run_folder import RunFolder


class Tracker(Protocol):
    """Something that is told each step's metrics. It may raise: the run then goes on without it.

    class Printer:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            print(step, metrics)

        def close(self) -> None: ...
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """metrics.jsonl and the trackers asked for, as one.

    A tracker's first failure is told once through `warn`, and it is off from then on. metrics.jsonl is the record of
    the run, so its failure is not swallowed.
    """

    def __init__(self, folder: RunFolder, trackers: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._live = dict(trackers)
        self._warn = warn

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._folder.append_metrics({"step": step, **metrics})
        for name, tracker in list(self._live.items()):
            self._guarded(name, partial(tracker.log, step, metrics))

    def close(self) -> None:
        for name, tracker in list(self._live.items()):
            self._guarded(name, tracker.close)
        self._live.clear()

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            del self._live[name]
            self._warn(f"{name} is off for the rest of the run: {_line(error)}")


def open_trackers(
    names: Sequence[str],
    folder: RunFolder,
    project: str,
    config: Mapping[str, Any],
    warn: Callable[[str], None],
) -> Trackers:
    """Start the trackers called `names` (`wandb`, `tensorboard`) for the run in `folder`.

    project: the project's name in the tracker. config: the run's resolved configuration, nested. Raises `SetupError`
    where a package or wandb's key is missing; any other failure to start is told through `warn`.
    """
    for name in names:
        _check(name)
    started: dict[str, Tracker] = {}
    for name in names:
        try:
            started[name] = _STARTERS[name](folder.path, project, config)
        except Exception as error:
            warn(f"{name} is off for this run: {_line(error)}")
    return Trackers(folder, started, warn)


def _check(name: str) -> None:
    if find_spec(name) is None:
        raise SetupError(
            f"tracking.trackers names {name}, which is not installed", f"pip install 'rlcli[{name}]', or leave it out"
        )
    # Without a key wandb would ask for one on the terminal and hold up the run.
    if name == "wandb" and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        if not wandb.login(prompt=False, verify=False):
            raise SetupError("wandb has no API key", "run `wandb login`, or set WANDB_MODE=offline")


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class _Wandb:
    """Weights & Biases. WANDB_MODE, WANDB_ENTITY and its other variables hold."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        # The live view has the terminal; and an unreachable server must not hold the process at the end.
        settings = wandb.Settings(silent=True, console="off", finish_timeout=60)
        self._run = wandb.init(
            project=project, name=folder.name, dir=str(folder), config=dict(config), settings=settings
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    """Event files in `tensorboard/` of the run folder."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


_STARTERS: Mapping[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "wandb": _Wandb,
    "tensorboard": _TensorBoard,
}
