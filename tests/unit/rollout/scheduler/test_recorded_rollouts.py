"""Batches, engine requests and checkpoints of the schedulers, in many settings, against records.

`python -m tests.unit.rollout.scheduler.test_recorded_rollouts` writes the records anew: only after a change that is
meant to change them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import pytest

from rlcli.config.schema import RunConfig
from rlcli.data.messages import Progress, PromptTask, RolloutBatch
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.data.rollout_stats import RolloutStats
from rlcli.errors import RunFailed
from rlcli.rewards.service.scoring_client import Scored
from rlcli.rollout.rollout_arguments import RolloutArguments
from rlcli.rollout.scheduler import streaming_rollouts
from rlcli.rollout.scheduler.batch_source import build_batch_source
from rlcli.rollout.worker.verdicts import Verification
from rlcli.rollout.worker.work_queue import NO_SHARED_TASKS, RoundTasks
from rlcli.types import Outcome, Prompt, Verdict
from tests.unit.rollout.scheduler.test_in_flight import Engine
from tests.unit.rollout.scheduler.test_in_flight import Workers as Roles

RECORDS = Path(__file__).parent / "recorded_rollouts.json"
SETTINGS, STEPS = 72, 6


class Scorer:
    """Scores 0, 0.5 or 1 by the tokens; one verification in thirteen times out, and it may crash."""

    def submit(self, prompt: Prompt, tokens: bytes, spare: int, fields: Any) -> Future[Scored]:
        number = crc32(tokens + prompt.id.encode())
        done: Future[Scored] = Future()
        score, outcome = number % 3 / 2, Outcome.OK if number % 3 == 2 else Outcome.WRONG
        if number % 13 == 0:
            score, outcome = 0.0, Outcome.TIMEOUT if number % 2 else Outcome.CRASH
        done.set_result(Scored(str(number), Verdict(score, outcome, parts={"half": score / 2})))
        return done


class Workers(Roles):
    """Ranks that generate one after another, so that nothing depends on time, and count what real ones would."""

    def __init__(self, engines: Sequence[Engine], keep: bool, same_bits: bool) -> None:
        super().__init__(engines, keep)
        self.same_bits, self.calls = same_bits, list[Any]()
        for role in self.roles:
            role.verification = Verification(Scorer())  # type: ignore[arg-type]

    def rollout(
        self, tasks: list[list[PromptTask]], arguments: RolloutArguments, queue: RoundTasks | None
    ) -> Iterator[Progress | RolloutBatch]:
        shared = queue or NO_SHARED_TASKS
        described_tasks = [[described(task) for task in rank_tasks] for rank_tasks in [*tasks, shared.tasks]]
        self.calls.append([repr(replace(arguments, progress_s=0.0)), described_tasks, shared.until])
        for rank, role in enumerate(self.roles):
            items = list(role.run(tasks[rank], arguments, shared))
            yield Progress(sum(item.finished for item in items if isinstance(item, Progress)))
            yield counted(next(item for item in items if isinstance(item, RolloutBatch)), rank)


def described(task: PromptTask) -> Any:
    partials = [
        (key, partial.sample, partial.shard, partial.row, partial.tokens, partial.version)
        for key, partial in sorted(task.partial.items())
    ]
    identity = [task.group, task.prompt.id, list(task.indexes), task.first_sample, task.greedy, task.step]
    return [*identity, task.tokens.tolist(), partials, len(task.shards)]


def counted(report: RolloutBatch, rank: int) -> RolloutBatch:
    """A report with other seconds and counts than those of this machine."""
    size = report.stats.generated_tokens
    stats = replace(
        report.stats,
        generate_s=1.0 + rank / 3 + size / 7,
        verify_s=size / 11,
        replay_diverged=size % 3,
        drafted=3 * size,
        accepted=size + rank,
    )
    return replace(report, stats=stats)


def figures(stats: RolloutStats) -> dict[str, Any]:
    """The inputs of a step's metrics, by the name of the metric."""
    return {
        "rollout/rounds": stats.rounds,
        "rollout/generated": stats.generated,
        "rollout/dropped_groups": stats.dropped,
        "rollout/carried_over_groups": stats.carried_over,
        "rollout/in_flight_groups": stats.in_flight,
        "rollout/too_old_groups": stats.too_old,
        "rollout/stale": stats.stale,
        "rollout/aborted": stats.aborted,
        "rollout/resumed": stats.resumed,
        "rollout/replay_diverged": stats.replay_diverged,
        "rollout/drafted": stats.drafted,
        "accepted": stats.accepted,
        "reward/generated": stats.mean_score,
        "tokens": stats.generated_tokens,
        "generate_s": stats.generate_s,
        "time/verify_wait_s": stats.verify_s,
        "time/idle_s": stats.idle_s,
        "version": stats.version,
    }


@dataclass
class Setting:
    """Of a run: the config's sections, the engines, and what becomes of it between its steps."""

    number: int
    config: RunConfig
    engines: int
    slots: int
    rows: int
    greedy: bool
    keep: bool
    events: list[str]

    @classmethod
    def of(cls, number: int) -> Setting:
        draw = random.Random(number)
        kind = ("sync", "prefetch", "streaming", "streaming_beside")[number % 4]
        engines = draw.randint(1, 3)
        keep = draw.choice(["all", "all", "unequal", "accuracy"])
        bounds = draw.choice([(0.3, 0.8), (0.3, 0.8), (0.72, 0.74)])
        steps = {"sync": None, "prefetch": 0}.get(kind, draw.choice([None, 5, 5, 40]))
        sections = {
            "rollout": {
                "prompts_per_step": draw.choice([2, 4]),
                "samples_per_prompt": draw.choice([2, 3]),
                "max_response_tokens": 40,
                "max_concurrent": (slots := draw.choice([2, 6, 32])),
                "oversample": draw.choice([1.0, 1.5, 2.5]) if kind == "sync" else 1.0,
                "workers": engines if kind in ("prefetch", "streaming") else 0,
            },
            "cluster": {"workers": engines},
            "async": {
                "staleness": 0 if kind == "sync" else draw.randint(1, 3),
                "engine_steps": steps,
                "too_old": draw.choice([None, None, "drop", "keep"]),
            },
            "dynamic_sampling": {
                "keep": keep,
                **(dict(zip(("low", "high"), bounds, strict=True)) if keep == "accuracy" else {}),
                "oversample": draw.choice([1.0, 1.5]),
                "max_batches": draw.choice([2, 5, 20]),
            },
            "data": {"sampling": draw.choice(["uniform", "uniform", "thompson"])},
            "verifier": {"max_crash_rate": draw.choice([0.5, 0.5, 0.5, 0.04])},
            "train": {
                "seed": 5,
                "steps": STEPS,
                "truncated": draw.choice(["keep", "mask", "zero_reward"]),
                "deterministic": kind == "streaming_beside" and draw.random() < 0.5,
            },
            "tracking": {"save_samples": draw.random() < 0.3},
        }
        events = [draw.choice(["", "", "", "resume", "state", "drop", "roll_back", "lower"]) for _ in range(STEPS)]
        rows, greedy, keep_partials = (
            draw.choice([7, 50]),
            draw.random() < 0.3,
            kind == "streaming" and draw.random() < 0.4,
        )
        return cls(number, RunConfig.model_validate(sections), engines, slots, rows, greedy, keep_partials, events)

    def prompts(self) -> TokenizedPrompts:
        row = ({"role": "user", "content": "?"},)
        prompts = [Prompt(f"row:{i}", row, "s", "math", "gsm8k", "3") for i in range(self.rows)]
        flat: np.ndarray = np.repeat(np.arange(self.rows, dtype=np.int32), 4)
        return TokenizedPrompts(tuple(prompts), 0, flat, np.arange(0, 4 * self.rows + 1, 4))


@dataclass
class Run:
    setting: Setting
    folder: Path
    steps: list[list[str]] = field(default_factory=list)

    def begin(self) -> None:
        setting, config = self.setting, self.setting.config
        engines = [Engine(setting.slots) for _ in range(setting.engines)]
        self.workers = Workers(engines, setting.keep, bool(config.train.deterministic or setting.number % 3 == 0))
        self.progress: list[Any] = []
        self.source: Any = build_batch_source(
            config,
            setting.prompts(),
            self.workers,  # type: ignore[arg-type]
            self.folder,
            greedy=setting.greedy,
            on_progress=lambda done, total: self.progress.append((done, total)),
        )

    def trace(self) -> list[list[str]]:
        """Of each step: a digest of all that can be observed, and its prompts. Of a run that fails: why."""
        self.begin()
        for step in range(1, STEPS + 1):
            self.workers.load(step)
            try:
                batch = self.source.take(step)
                self.seen = [self.of_batch(batch)]
                if self.setting.config.rollout.workers and step < STEPS:
                    self.source.prefetch(step, self.looks(step))
                self.event(self.setting.events[step - 1], step)
            except RunFailed as error:
                self.steps.append([str(error)])
                break
            self.seen += [self.workers.calls, self.progress[-1:], self.source.has_started, self.source.cursor.state()]
            text = json.dumps(self.seen, sort_keys=True, default=repr).replace(str(self.folder), "")
            digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            rows = [name.removeprefix("row:") for name in batch.prompt_ids]
            self.steps.append([digest, " ".join(rows)])
            self.workers.calls, self.progress = [], []
        return self.steps

    def looks(self, step: int) -> Callable[[], bool]:
        """When the engines are needed: after so many looks."""
        looks = iter([False] * (step % 3) + [True] * 99)
        return looks.__next__

    def of_batch(self, batch: RolloutBatch) -> Any:
        samples = [
            (repr(sample), trajectory.tokens.tolist(), repr(trajectory.spans), trajectory.log_probs.tolist())
            for sample in batch.samples
            for trajectory in [batch.shards[sample.shard].row(sample.row)]
        ]
        groups = [list(batch.sources), list(batch.data_sources), list(batch.prompt_ids), dict(batch.part_weights)]
        group_state = [repr(sorted(batch.baselines.items())), list(batch.scored_groups), dict(batch.selection)]
        return [samples, figures(batch.stats), groups, group_state, len(batch.shards)]

    def state(self) -> tuple[Any, Any, Any]:
        """A checkpoint, and its tokens to see."""
        plain, shards = self.source.state()
        tokens = [[shard.row(row).tokens.tolist() for row in range(len(shard))] for shard in shards]
        self.seen += [json.dumps(plain), tokens]
        return json.loads(json.dumps(plain)), shards, json.loads(json.dumps(self.source.cursor.state()))

    def event(self, event: str, step: int) -> None:
        if event in ("resume", "state", "roll_back"):
            self.workers.load(step + 1)
            plain, shards, cursor = self.state()
            if event == "resume":
                self.begin()
            if event != "state":
                self.source.cursor = self.source.cursor.restored(cursor)
                self.source.restore(plain, shards)
        elif event == "drop":
            self.source.discard()
        elif event == "lower" and self.setting.config.async_.staleness > 1:
            self.source.config = self.source.config.changed(async_={"staleness": 1})


def recorded(number: int, folder: Path) -> list[list[str]]:
    with patch.object(streaming_rollouts, "SLICE_STEPS", 3), patch.object(streaming_rollouts, "SLICE_S", 0.0):
        return Run(Setting.of(number), folder).trace()


@pytest.mark.parametrize("number", range(SETTINGS))
def test_schedulers_do_what_was_recorded(number: int, tmp_path: Path) -> None:
    records = json.loads(RECORDS.read_text())
    assert json.loads(json.dumps(recorded(number, tmp_path))) == records[number]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps(recorded(number, Path(folder) / str(number))) for number in range(SETTINGS)]
    RECORDS.write_text("[\n" + ",\n".join(lines) + "\n]\n")
