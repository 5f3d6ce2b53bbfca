"""The source of each step's batch: its protocol, and its construction from the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rlcli.config.schema import RunConfig
from rlcli.data.messages import RolloutBatch, ShardRef
from rlcli.data.prompts.dataset_mixture import Cursor, build_cursor
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.rollout.scheduler.dispatcher import OnProgress
from rlcli.rollout.scheduler.group_checkpoint import SourceState
from rlcli.rollout.scheduler.rollouts import Rollouts
from rlcli.rollout.scheduler.streaming_rollouts import StreamingRollouts
from rlcli.rollout.scheduler.supervised_source import SupervisedSource
from rlcli.rollout.scheduler.sync_rollouts import SyncRollouts
from rlcli.rollout.worker_calls import RolloutWorkers


class BatchSource(Protocol):
    """Returns the samples of each step."""

    prompts: TokenizedPrompts
    """Rows of the dataset."""
    cursor: Cursor
    """Order of the prompts; with `state`, all state between steps."""

    @property
    def has_started(self) -> bool:
        """True if samples of the next step have been generated."""
        ...

    def take(self, step: int) -> RolloutBatch:
        """The verified samples of step `step`. `Sample.prompt` counts the groups from 0 without gaps."""
        ...

    def prefetch(self, step: int, should_stop: Callable[[], bool]) -> None:
        """While `step` is trained on, generate for later steps. should_stop: true once the engines are needed."""
        ...

    def state(self) -> tuple[SourceState, list[ShardRef]]:
        """State for `restore`: plain values, and references to shards of tokens."""
        ...

    def restore(self, state: SourceState, shards: Sequence[ShardRef]) -> None:
        """Continue from the result of `state`."""
        ...

    def discard(self) -> None:
        """Discard what was generated for later steps."""
        ...


def build_batch_source(
    config: RunConfig,
    prompts: TokenizedPrompts,
    workers: RolloutWorkers,
    samples: Path,
    *,
    greedy: bool,
    on_progress: OnProgress,
) -> BatchSource:
    """Build the source that the config selects. samples: folder where workers save their samples, if they do."""
    cursor = build_cursor(prompts.prompts, config)
    if config.data.response:
        return SupervisedSource(prompts, cursor, config.rollout.prompts_per_step)
    return scheduler_class(config)(
        workers,
        prompts,
        cursor,
        config,
        save_as=lambda step: samples_path(samples, step) if config.tracking.save_samples else "",
        greedy=greedy,
        on_progress=on_progress,
    )


def scheduler_class(config: RunConfig) -> type[Rollouts]:
    """The scheduler class that the config selects."""
    return StreamingRollouts if config.in_flight else SyncRollouts


def samples_path(folder: Path, step: int) -> str:
    """Path template of the workers' samples, `step-000001/rank-{rank}.parquet`; each worker fills in its rank. One
    folder per step: workers sync their files to disk themselves, and the controller opens none of them."""
    return str(folder / f"step-{step:06d}" / "rank-{rank}.parquet")
