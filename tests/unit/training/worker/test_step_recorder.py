"""Records of the samples that a worker trains on: values that the update computes anyway, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlcli.algorithms.build import build_algorithm
from rlcli.config.schema import RunConfig
from rlcli.data.columns import SampleTable
from rlcli.data.messages import RolloutBatch
from rlcli.data.sample_shard import ShardBuilder
from rlcli.data.step_files import RecordedSample, Recording
from rlcli.data.trajectories import Trajectory
from rlcli.model.policy import TokenOutputs
from rlcli.training.loop.batch_selection import build_train_rows, plan_step, select_batch
from rlcli.training.worker.rank_step_recorder import StepRecorder
from rlcli.training.worker.token_texts import TokenTexts
from rlcli.training.worker.train_batch import TrainBatch
from rlcli.types import Outcome, Sample, Verdict

SCORES = (1.0, 0.0, 1.0, 1.0, 0.0, 1.0)
"""Two samples each of three prompts; the samples of the second one have no advantage."""


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the shards themselves."""
    monkeypatch.setattr("ray.get", lambda reference, *, timeout: reference)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer of single bytes: the ids are not those bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=bytewise).save_pretrained(folder)
    return str(folder)


def collected() -> RolloutBatch:
    builder, samples = ShardBuilder(), []
    for index, score in enumerate(SCORES):
        length = 2 + index
        tokens = np.arange(length, dtype=np.int32) + 10 * index
        row = builder.add(Trajectory.single(np.array([1, 2], np.int32), tokens, np.full(length, -0.5, np.float32)))
        verdict = Verdict(score, Outcome.OK if score else Outcome.WRONG)
        samples.append(Sample(index // 2, index % 2, 0, row, 2, length, "stop", verdict, 1))
    return RolloutBatch(SampleTable.of(samples), [builder.build()])


class Step:
    """One step on `ranks` ranks, of which each records samples 0, 3 and 5."""

    def __init__(self, folder: Path, tokenizer: str, ranks: int = 1, **algorithm: Any) -> None:
        config = RunConfig.model_validate({"algorithm": algorithm, "rollout": {"max_response_tokens": 8}})
        self.algorithm = build_algorithm(**config.algorithm.model_dump())
        selected = select_batch(collected(), self.algorithm, config, 0)
        active = selected.active or [True] * 6
        samples = [RecordedSample(index, f"row:{index}", 1, 0, index, active[index]) for index in (0, 3, 5)]
        recording = Recording(1, str(folder / "tokens-{rank}.parquet"), tokenizer, samples)
        plan = plan_step(selected, config, ranks)
        self.work = build_train_rows(plan, selected, 0, recording)
        self.folder, self.ranks = folder, range(ranks)
        self.bins = [plan.of_rank(rank) for rank in self.ranks]
        self.batches = [TrainBatch(bins, self.work, torch.device("cpu")) for bins in self.bins]
        self.recorders = [StepRecorder(rank) for rank in self.ranks]

    def begin(self) -> None:
        for rank, recorder in enumerate(self.recorders):
            recorder.begin(self.work, self.bins[rank], self.batches[rank], spare=rank == 0)

    def update(self, shift: float = 0.0) -> None:
        """A forward pass whose log-probs are −(sample + 1) and whose entropies are the number of the drawn token."""
        for recorder, batch in zip(self.recorders, self.batches, strict=True):
            for micro in batch:
                if not micro.empty:
                    log_probs = shift - micro.spread(micro.samples + 1.0)
                    counts = [torch.arange(length) for length in micro.lengths.tolist()]
                    recorder.record_outputs(micro, TokenOutputs(log_probs, torch.cat(counts).float()))

    def rows(self) -> dict[int, dict[str, Any]]:
        """Sample → its recorded row, of all ranks."""
        for recorder in self.recorders:
            assert recorder.finish()[1] == ""
            recorder.flush()
            assert recorder.finish() == ({}, ""), "once a step"
        rows = [row for file in self.folder.glob("tokens-*") for row in pq.read_table(file).to_pylist()]
        assert len({row["sample"] for row in rows}) == len(rows)
        return {row["sample"]: row for row in rows}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_values_are_those_of_the_first_forward_pass(ranks: int, tmp_path: Path, tokenizer: str) -> None:
    step = Step(tmp_path, tokenizer, ranks)
    step.begin()
    step.update()
    step.update(shift=-50.0)  # another pass, after an update
    rows = step.rows()
    assert sorted(rows) == [0, 3, 5]
    for sample in (0, 5):
        row, length = rows[sample], 2 + sample
        assert row["trainer_log_prob"] == [None, None, *[-1.0 - sample] * length]
        assert row["entropy"] == [None, None, *map(float, range(length))]
        assert row["engine_log_prob"] == [None, None, *[-0.5] * length]
        assert row["advantage"][2:] == [row["advantage"][2]] * length
        assert (row["advantage"][2] > 0) == (SCORES[sample] == 1.0)
    assert rows[3]["ids"] == [1, 2, *range(30, 35)], "no rank forwards it, and the first one has its tokens"
    assert rows[3]["trainer_log_prob"] == rows[3]["entropy"] == rows[3]["advantage"] == [None] * 7


def test_old_log_probs_are_the_trainers_before_the_first_update(tmp_path: Path, tokenizer: str) -> None:
    step = Step(tmp_path, tokenizer)
    for micro in step.batches[0]:
        micro.tokens.old_log_probs = torch.full((int(micro.lengths.sum()),), -0.75)
    step.begin()
    step.update()
    assert step.rows()[0]["trainer_log_prob"][2:] == [-0.75] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_mean_advantages_are_reported_where_tokens_differ(ranks: int, tmp_path: Path, tokenizer: str) -> None:
    step = Step(tmp_path, tokenizer, ranks, advantage="gae")
    step.begin()
    for recorder, batch in zip(step.recorders, step.batches, strict=True):
        for micro in batch:
            counts = [torch.arange(length) for length in micro.lengths.tolist()]
            micro.tokens.advantages = torch.cat(counts).float()
        recorder.record_advantages(batch)
    means = {index: value for recorder in step.recorders for index, value in recorder.finish()[0].items()}
    assert means == {sample: (1 + sample) / 2 for sample in range(6)}, "of 0, 1, …, length - 1"


def test_what_a_broken_off_step_has_left_is_not_recorded(tmp_path: Path, tokenizer: str) -> None:
    step = Step(tmp_path, tokenizer)
    step.begin()
    step.update()
    step.recorders[0].begin(replace(step.work, recording=None), step.bins[0], step.batches[0], spare=True)
    assert step.rows() == {}


def test_a_file_that_cannot_be_written_is_a_problem_and_no_error(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "room").write_text("in the way")
    step = Step(tmp_path / "room", tokenizer)
    step.begin()
    step.recorders[0].finish()
    step.recorders[0].flush()
    assert "token records could not be written" in step.recorders[0].finish()[1]


def test_texts_of_tokens_join_to_the_text_whole_characters_first(tokenizer: str) -> None:
    texts, encode = TokenTexts(tokenizer), PreTrainedTokenizerFast.from_pretrained(tokenizer).encode
    assert texts.of(np.array(encode(" a b"))) == [" ", "a", " ", "b"]
    assert texts.of(np.array(encode("aé€b"))) == ["a", "é€", "", "", "", "", "b"]
    assert texts.of(np.array(encode("€")[:2])) == ["\ufffd", ""]
    assert texts.of(np.array([], np.int32)) == []
