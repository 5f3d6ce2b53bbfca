"""The controller's own arithmetic: metrics, work for the ranks, checkpoints kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch

from rlcli.algorithms import selection
from rlcli.algorithms.build import build_algorithm
from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import Progress, PromptTask, RolloutBatch
from rlcli.data.packer import Plan, plan_batches
from rlcli.data.rollout_stats import RolloutStats
from rlcli.errors import ConfigError, ModelError, RunFailed, SetupError
from rlcli.launch.launch import check_shared
from rlcli.launch.preflight import prepare
from rlcli.launch.role_checks import policy_roles
from rlcli.rollout.engine import Sampling
from rlcli.rollout.rollout_arguments import RolloutArguments
from rlcli.rollout.scheduler.dispatcher import collect, gather
from rlcli.training.loop.batch_selection import SelectedSamples, build_train_rows, plan_step, select_batch
from rlcli.training.loop.metrics import (
    Clock,
    Updates,
    reward_metrics,
    sample_metrics,
    staleness_metrics,
    time_metrics,
    update_metrics,
)
from rlcli.training.loop.trainer import Trainer
from rlcli.training.loop.warnings import Warnings
from rlcli.types import Outcome, Prompt, Sample, Verdict
from tests.groups import CalledByName, mock_group
from tests.trainers import PROMPTS, trainer_of


def sample(prompt: int, index: int, score: float, tokens: int, outcome: Outcome = Outcome.OK, shard: int = 0) -> Sample:
    return Sample(
        prompt=prompt,
        sample=index,
        shard=shard,
        row=10 * prompt + index,
        prompt_tokens=5,
        response_tokens=tokens,
        stop_reason="length" if tokens >= 8 else "stop",
        verdict=Verdict(score, outcome, parts={"form": score / 2}),
        version=1,
    )


@pytest.fixture
def samples() -> list[Sample]:
    return [
        sample(0, 0, 1.0, 4),
        sample(0, 1, 0.0, 8, Outcome.WRONG, shard=1),
        sample(1, 0, 0.0, 2, Outcome.WRONG),
        sample(1, 1, 0.0, 6, Outcome.NO_ANSWER, shard=1),
    ]


def planned(samples: Sequence[Sample], advantages: Sequence[float]) -> Plan:
    return plan_batches(
        [s.prompt_tokens for s in samples],
        [s.response_tokens for s in samples],
        [s.prompt for s in samples],
        minibatches=1,
        ranks=2,
        tokens_per_microbatch=32,
        max_response_tokens=8,
        active=[a != 0 for a in advantages],
    )


def test_sample_metrics_count_what_a_reader_would_count(samples: Sequence[Sample]) -> None:
    metrics = reward_metrics(SampleTable.of(samples)) | sample_metrics(SampleTable.of(samples))
    assert metrics["reward/mean"] == 0.25
    assert metrics["reward/equal_groups"] == 0.5
    assert metrics["reward/part/form"] == 0.125
    shares = [metrics[f"outcome/{name}"] for name in ("ok", "wrong", "no_answer", "timeout", "crash")]
    assert shares == [0.25, 0.5, 0.25, 0.0, 0.0]
    assert metrics["response_tokens/mean"] == 5.0
    assert metrics["response_tokens/truncated"] == 0.25


def test_staleness_is_that_of_the_oldest_token_and_age_that_of_each(samples: Sequence[Sample]) -> None:
    fresh = samples[0]
    parts = [
        replace(fresh, version=7, response_tokens=4),
        replace(fresh, version=5, response_tokens=6, newer_by=2, version_tokens=(1, 0, 5)),
        replace(fresh, version=6, response_tokens=10),
    ]
    assert staleness_metrics(SampleTable.of(parts), 7) == {
        "rollout/staleness": 1.0,
        "rollout/staleness_max": 2.0,
        "rollout/age/0": 0.45,
        "rollout/age/1": 0.5,
        "rollout/age/2": 0.05,
    }
    assert staleness_metrics(SampleTable.of(parts[:1]), 7) == {
        "rollout/staleness": 0.0,
        "rollout/staleness_max": 0.0,
        "rollout/age/0": 1.0,
    }


def test_update_metrics_are_means_over_tokens_not_over_minibatches() -> None:
    mismatch = {f"mismatch_{name}": 1.0 for name in ("k3", "ratio", "ratio_squared", "outliers", "corrected")}
    mismatch |= {"mismatch_tokens": 3.0, "mismatch_kl": 0.3}
    first = {"tokens": 3.0, "policy_loss": 3.0, "entropy": 6.0, "grad_norm": 1.0, **mismatch}
    second = {"tokens": 1.0, "policy_loss": 5.0, "entropy": 2.0, "grad_norm": 3.0, **mismatch, "mismatch_kl": 9.0}
    metrics = update_metrics([first, {}, second])
    assert metrics["update/policy_loss"] == 2.0
    assert metrics["update/entropy"] == 2.0
    assert metrics["update/grad_norm"] == 2.0
    assert metrics["mismatch/kl"] == pytest.approx(0.1)
    assert (metrics["update/count"], metrics["update/skipped"]) == (2.0, 1.0)


def test_update_metrics_of_a_step_without_any_gradient() -> None:
    assert update_metrics([{}, {}]) == {"update/count": 0.0, "update/skipped": 2.0}


def test_the_clock_adds_up_phases_and_reports_them(samples: Sequence[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    ticks = iter([3.0, 4.0, 4.0, 4.5, 6.0])  # two phases of a second and of half a second, and then the end
    monkeypatch.setattr("rlcli.training.loop.metrics.time.perf_counter", lambda: next(ticks))
    clock = Clock(heard.append, began=1.0)
    with clock.phase("generate"):
        pass
    with clock.phase("update"):
        pass
    metrics = time_metrics(
        clock,
        RolloutBatch(SampleTable.of(samples)),
        planned(samples, [0.5, -0.5, 0.0, 0.0]),
        concurrent_s=0.75,
    )
    assert (metrics["time/trainer_idle_s"], metrics["time/engine_idle_s"]) == (1.0, 3.25)
    assert heard == ["generate", "update"]
    # Only the two samples that carry a gradient are forwarded: 9 and 13 tokens.
    assert metrics["throughput/update_tokens_per_s"] == 44.0
    phases = [metrics[f"time/{name}_s"] for name in ("generate", "update", "bookkeeping", "step")]
    assert phases == [1.0, 0.5, 3.5, 5.0]


def chosen_of(
    samples: Sequence[Sample], seed: int = 0, **sections: dict[str, object]
) -> tuple[SelectedSamples, RunConfig]:
    config = RunConfig.model_validate(sections)
    algorithm = build_algorithm(**config.algorithm.model_dump())
    batch = RolloutBatch(SampleTable.of(samples), ["first", "second"])
    return select_batch(batch, algorithm, config, seed), config


def test_every_active_sample_reaches_one_rank_with_its_place(samples: Sequence[Sample]) -> None:
    selected, _ = chosen_of(samples)
    assert selected.active == [True, True, False, False]
    plan = planned(selected.samples, selected.columns.advantages)
    step = build_train_rows(plan, selected, seed=0)
    planned_samples = [sample for rank in range(2) for micros in plan.of_rank(rank) for bin in micros for sample in bin]
    shard, row = step.columns.shard, step.columns.row
    rows = [(sample, step.shards[shard[sample]], int(row[sample])) for sample in planned_samples]
    assert sorted(rows) == [(0, "first", 0), (1, "second", 1)]
    assert [(m.tokens, m.sequences, m.groups, m.max_length, m.right_tokens) for m in step.minibatches] == [
        (20, 4, 2, 8, 4)
    ]


def test_what_shaping_adds_reaches_the_advantages(samples: Sequence[Sample]) -> None:
    judged = [replace(s, verdict=replace(s.verdict, parts={"format": float(s.sample)})) for s in samples]
    selected, _ = chosen_of(
        judged,
        rollout={"max_response_tokens": 8},
        shaping={"overlong_buffer": 4, "overlong_penalty": 0.5, "length_weight": 0.1, "format_weight": 0.2},
        algorithm={"advantage": "dr_grpo"},
    )
    # Lengths 4, 8, 2, 6: half a point off at 8 tokens, a quarter at 6. Of the first group the first response is right
    # and the shorter one; in the second none is right, and the longer one has its share taken off. The second of each
    # group has the format.
    assert selected.columns.rewards.tolist() == pytest.approx([1.05, 0.2 - 0.55, 0.0, 0.2 - 0.3])
    assert selected.columns.advantages.tolist() == pytest.approx([0.7, -0.7, 0.05, -0.05])
    assert selected.mean_shaped_reward == pytest.approx(0.15)


def test_a_weight_for_a_format_that_nobody_judges_ends_the_run(samples: Sequence[Sample]) -> None:
    with pytest.raises(RunFailed, match="no verdict has a part named format"):
        chosen_of(samples, shaping={"format_weight": 0.2})


def test_what_shaping_adds_is_a_part_of_its_own(samples: Sequence[Sample]) -> None:
    """An advantage made of the verdict's parts would else not hear of it."""
    plain, _ = chosen_of(samples, algorithm={"advantage": "gdpo"})
    assert plain.columns.parts.tolist() == [[0.5], [0.0], [0.0], [0.0]]
    shaped, _ = chosen_of(
        samples,
        rollout={"max_response_tokens": 8},
        shaping={"overlong_buffer": 4},
        algorithm={"advantage": "gdpo"},
    )
    assert shaped.columns.parts.tolist() == [[0.5, 0.0], [0.0, -1.0], [0.0, 0.0], [0.0, -0.5]]
    assert shaped.columns.advantages[2] > 0 > shaped.columns.advantages[3]  # all alike but for their lengths


def test_a_row_with_one_verifier_is_rewarded_beside_rows_with_a_sum(samples: Sequence[Sample]) -> None:
    """An advantage made of the verdict's parts would else see nothing of the first group."""
    judged = [
        replace(s, verdict=replace(s.verdict, parts={"math": s.verdict.score} if s.prompt else {})) for s in samples
    ]
    selected, _ = chosen_of(judged, algorithm={"advantage": "gdpo"})
    assert selected.columns.parts.tolist() == [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert selected.columns.advantages[0] > 0 > selected.columns.advantages[1]


def test_weights_of_a_sum_of_verifiers_reach_an_advantage_of_parts(
    samples: Sequence[Sample],
) -> None:
    parts = [{"math": 1.0, "format": 0.0}, {"math": 0.0, "format": 1.0}, {}, {"format": 1.0}]
    judged = [replace(s, verdict=replace(s.verdict, parts=part)) for s, part in zip(samples, parts, strict=True)]
    config = RunConfig.model_validate({"algorithm": {"advantage": "gdpo"}, "train": {"tokens_per_microbatch": 1 << 20}})
    algorithm = build_algorithm(**config.algorithm.model_dump())

    def advantages(weights: dict[str, float]) -> list[float]:
        batch = RolloutBatch(SampleTable.of(judged), ["first", "second"], part_weights=weights)
        selected = select_batch(batch, algorithm, config, seed=0)
        assert selected.columns.parts.tolist() == [[0, 1], [1, 0], [0, 0], [1, 0]]  # format, math
        values: list[float] = selected.columns.advantages.tolist()
        return values

    # Equal weights cancel in the first group; where mathematics weighs more, its first response is the better one, and
    # where the format does, the second.
    assert advantages({})[:2] == [0.0, 0.0]
    assert advantages({"format": 0.1})[0] > 0 > advantages({"format": 0.1})[1]
    assert advantages({"math": 0.1})[0] < 0 < advantages({"math": 0.1})[1]
    assert advantages({"format": -1.0, "math": 0.0})[3] < 0


def test_a_group_is_one_in_any_order_of_its_selected_samples(
    samples: Sequence[Sample], forget_algorithms: None
) -> None:
    shuffled = torch.tensor([2, 0, 3, 1, 0])
    selection.register("mine")(lambda rewards, groups, generator: shuffled)
    selected, config = chosen_of(samples, algorithm={"select": "mine"}, train={"minibatches": 2})
    assert selected.columns.groups.tolist() == [1, 0, 1, 0, 0]
    assert selected.columns.group_tokens.tolist() == [8.0, 16.0, 8.0, 16.0, 16.0]
    plan = plan_step(selected, config, ranks=1)
    assert [(m.groups, m.samples) for m in plan.minibatches] == [(1, (0, 2)), (1, (1, 3, 4))]


def test_selected_samples_keep_the_statistics_of_their_whole_group(samples: Sequence[Sample]) -> None:
    three = [*samples[:2], sample(0, 2, 0.5, 4), *samples[2:]]
    selected, config = chosen_of(three, algorithm={"select": "pairs", "advantage": "dr_grpo"})
    assert [(s.prompt, s.sample) for s in selected.samples] == [(0, 0), (0, 1)]  # the second group prefers nothing
    assert selected.columns.pairs.tolist() == [0, 0]
    assert selected.columns.advantages.tolist() == pytest.approx([0.5, -0.5])
    assert selected.columns.group_tokens.tolist() == [12.0, 12.0]
    (minibatch,) = plan_step(selected, config, ranks=2).minibatches
    assert sorted(minibatch.ranks) == [((),), ((0, 1),)]


def test_a_step_from_which_nothing_is_selected_has_nothing_to_train(samples: Sequence[Sample]) -> None:
    wrong = samples[2:]
    selected, config = chosen_of(wrong, algorithm={"select": "right", "advantage": "one", "loss": "gpg"})
    plan = plan_step(selected, config, ranks=2)
    assert (len(selected.samples), plan.minibatches, plan.imbalance) == (0, (), 1.0)
    assert [plan.of_rank(rank) for rank in range(2)] == [[], []]
    assert build_train_rows(plan, selected, seed=0).minibatches == []


class OneWorkerAPrompt(CalledByName):
    same_bits = True

    """Answers `rollout` as two workers would, last prompt first."""

    same_bits = True

    def __init__(self) -> None:
        self.tasks: list[list[PromptTask]] = []

    def __len__(self) -> int:
        return 2

    def rollout(
        self, tasks: list[list[PromptTask]], arguments: RolloutArguments, queue: None
    ) -> Iterator[Progress | RolloutBatch]:
        self.tasks = tasks
        for rank, rank_tasks in reversed(list(enumerate(tasks))):
            samples = [
                sample(task.group, index, 1.0, 3, shard=rank) for task in rank_tasks for index in range(task.samples)
            ]
            yield from (Progress(len(samples) - 1), Progress(1))
            yield RolloutBatch(SampleTable.of(samples[::-1]), stats=RolloutStats(generate_s=1.0 + rank))

    def take_shard(self) -> list[list[str]]:
        return [["shard 0"], ["shard 1"]]


def test_prompts_are_dealt_out_and_samples_come_back_in_order(tmp_path: Path) -> None:
    row = Prompt("sums:0", ({"role": "user", "content": "1+2="},), "sums", "math", "gsm8k", "3")
    workers, heard = OneWorkerAPrompt(), []
    reports = gather(
        workers,  # type: ignore[arg-type]
        [PromptTask(position, np.arange(4, dtype=np.int32), row, 2) for position in range(4)],
        RolloutArguments(Sampling(1.0, 8), 0, "train", 1),
        slots=2,
        on_progress=lambda done, total: heard.append((done, total)),
    )
    collected = collect(workers, reports)  # type: ignore[arg-type]
    assert [[task.group for task in rank_tasks] for rank_tasks in workers.tasks] == [[0, 2], [1, 3]]
    assert [(s.prompt, s.sample) for s in collected.samples] == [(p, i) for p in range(4) for i in range(2)]
    assert collected.shards == ["shard 0", "shard 1"]
    assert collected.stats.generate_s == 2.0
    assert heard == [(3, 8), (4, 8), (7, 8), (8, 8)]


def test_the_shown_samples_are_the_steps_not_the_evaluations(tmp_path: Path) -> None:
    rollouts: list[str] = []
    workers = mock_group()
    workers.texts.side_effect = lambda count: [
        [{"prompt": "?", "response": rollouts[-1], "score": 1.0, "outcome": "ok", "messages": None, "turns": 1}]
    ]
    trainer = trainer_of(tmp_path, workers, PROMPTS, train={"steps": 2}, evaluation={"every": 1})
    trainer.log_prob_check = MagicMock()
    trainer.checkpointer = MagicMock(saved=2)
    trainer.evaluations = {0: {}}
    trainer.sync_weights = MagicMock()  # type: ignore[method-assign]

    def step(number: int) -> dict[str, float]:
        rollouts.append(f"of step {number}")
        return {"reward/mean": 1.0}

    def evaluate() -> dict[str, float]:
        rollouts.append("of an evaluation")
        trainer.evaluations[trainer.steps_done] = {}
        return {}

    trainer.step, trainer.evaluate = step, evaluate  # type: ignore[method-assign]
    with (
        patch.object(Trainer, "state_dict", return_value=({}, [])),
        patch("rlcli.training.loop.trainer.check_trained"),  # no step has trained
    ):
        trainer.run()
    shown = [call.args[0][0][1] for call in trainer.view.samples.call_args_list]  # type: ignore[attr-defined]
    assert shown == ["of step 1", "of step 2"]
    assert rollouts[1::2] == ["of an evaluation"] * 2


def test_an_engines_drift_is_reported_but_not_an_older_policys(samples: Sequence[Sample], tmp_path: Path) -> None:
    selected, _ = chosen_of(samples)
    sums = {f"mismatch_{name}": 1.0 for name in ("tokens", "k3", "ratio", "ratio_squared", "outliers", "corrected")}
    updates = Updates([{"tokens": 1.0, "grad_norm": 1.0, "mismatch_kl": 0.3, **sums}], [])
    for behind, notes in ((0, 1), (1, 0)):
        heard: list[str] = []
        trainer = trainer_of(tmp_path / str(behind), MagicMock())
        trainer.warnings = Warnings(0.2, 1.0, heard.append, MagicMock(), prompts=1, samples=4, lr=1e-6)
        trainer.version = 2 + behind  # the samples are of version 1, and the sync after the step has counted on
        batch = RolloutBatch(SampleTable.of(samples), [])
        for _ in range(2):
            metrics = trainer.measure(batch, selected, planned(samples, [1.0] * 4), updates)
            assert metrics["mismatch/kl"] == 0.3
        assert sum("warning mismatch" in note for note in heard) == notes


def test_a_run_folder_that_workers_do_not_share_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").touch()
    check_shared(tmp_path, "rank", 1)
    with pytest.raises(SetupError, match=r"worker 1 writes .*--out"):
        check_shared(tmp_path, "rank", 2)


def test_a_process_reward_model_that_lacks_tokens_of_the_policy_is_refused(tmp_path: Path) -> None:
    from rlcli.model.io.model_checks import check_model
    from rlcli.model.io.tiny_model import make_tiny_model

    tiny = str(make_tiny_model(tmp_path / "tiny"))
    config = RunConfig.model_validate({"critic": {"path": tiny}, "algorithm": {"advantage": "prime"}})
    policy = check_model(tiny)
    assert "process_reward" in policy_roles(config, policy, [], evaluates=False)
    with pytest.raises(ModelError, match=r"its vocabulary ends at \d+, but the policy's tokenizer has ids up to 99999"):
        policy_roles(config, replace(policy, tokenizer_size=100_000), [], evaluates=False)


def test_tensor_parallelism_that_does_not_divide_the_heads_is_refused(tmp_path: Path) -> None:
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.model.io.tiny_model import make_tiny_model

    rows = [Prompt("sums:0", ({"role": "user", "content": "1+2="},), "sums", "math", "gsm8k", "3")]
    write_prompts(tmp_path / "train.parquet", rows)
    config = RunConfig.model_validate(
        {
            "model": {"path": str(make_tiny_model(tmp_path / "tiny"))},
            "data": {"path": str(tmp_path)},
            "rollout": {"tensor_parallel": 3},
            "cluster": {"workers": 3, "address": "somewhere:6379", "device": "cpu"},
        }
    )
    with pytest.raises(ConfigError, match=r"tensor_parallel = 3 does not divide the 4 attention heads"):
        prepare(config)


def test_the_policys_own_warm_up_begins_when_the_critics_has_ended(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path,
        mock_group(),
        algorithm={"advantage": "gae"},
        train={"steps": 10, "warmup_steps": 2, "lr": 1.0},
        critic={"warmup_steps": 3, "lr": 4.0},
    )
    trainer.invariants, plan = MagicMock(), MagicMock(minibatches=[None])
    steps = [trainer.update(step, plan, MagicMock()) for step in range(1, 6)]
    assert [(len(updates.critic), len(updates.policy)) for updates, _ in steps] == [(1, 0)] * 3 + [(1, 1)] * 2
    assert [rates["critic/lr"] for _, rates in steps] == [2.0, 4.0, 4.0, 4.0, 4.0]
    assert [rates["update/lr"] for _, rates in steps][3:] == [0.5, 1.0]
