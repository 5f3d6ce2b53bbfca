"""Construction of the source of a run's samples from its config."""

from __future__ import annotations

from pathlib import Path

from rlcli.config.schema import RunConfig
from rlcli.data.prompts.dataset_mixture import cursor_of
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.rollout.scheduler.dispatcher import OnProgress
from rlcli.rollout.scheduler.groups import Source
from rlcli.rollout.scheduler.rollouts import Rollouts
from rlcli.rollout.scheduler.streaming_rollouts import StreamingRollouts
from rlcli.rollout.scheduler.supervised_source import SupervisedSource
from rlcli.rollout.scheduler.sync_rollouts import SyncRollouts
from rlcli.rollout.worker_calls import RolloutWorkers


def source_of(
    config: RunConfig,
    prompts: TokenizedPrompts,
    workers: RolloutWorkers,
    samples: Path,
    *,
    greedy: bool,
    on_progress: OnProgress,
) -> Source:
    """Build the source that the config selects. samples: folder where workers save their samples, if they do."""
    cursor = cursor_of(prompts.prompts, config)
    if config.data.response:
        return SupervisedSource(prompts, cursor, config.rollout.prompts_per_step)
    return rollouts_of(config)(
        workers,
        prompts,
        cursor,
        config,
        save_as=lambda step: by_rank(samples, step) if config.tracking.save_samples else "",
        greedy=greedy,
        on_progress=on_progress,
    )


def rollouts_of(config: RunConfig) -> type[Rollouts]:
    """The scheduler class that the config selects."""
    return StreamingRollouts if config.in_flight else SyncRollouts


def by_rank(folder: Path, step: int) -> str:
    """Path template of the workers' samples, `step-000001/rank-{rank}.parquet`; each worker fills in its rank. One
    folder per step: workers sync their files to disk themselves, and the controller opens none of them."""
    return str(folder / f"step-{step:06d}" / "rank-{rank}.parquet")
