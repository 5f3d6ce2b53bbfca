"""Records of a worker of the step that it trains on, for viewers: the tokens of some samples, and mean advantages.

Nothing is computed only for the record. The values of a step stay on the device until the
controller asks for the worker's report, when the device is idle; they are written in the background.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.algorithms.correction.log_prob_check import LogProbComparison
from rlcli.cluster.process.busy_lanes import Span
from rlcli.cluster.process.peak_memory import Peaks
from rlcli.data.packer import Bin
from rlcli.data.sample_files import write_table
from rlcli.data.sample_shard import FETCH_TIMEOUT_S
from rlcli.data.step_files import RecordedSample, Recording, TokenValues, tokens_row, tokens_table
from rlcli.data.train_rows import TrainRows
from rlcli.data.trajectories import Trajectory
from rlcli.support.background_writer import BackgroundWriter
from rlcli.support.files import filled_path
from rlcli.training.worker.token_texts import TokenTexts
from rlcli.training.worker.train_batch import MicroBatch, TrainBatch

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Float64, Int64
    from ray import ObjectRef
    from torch import Tensor

    from rlcli.data.sample_shard import SampleShard
    from rlcli.model.policy import TokenOutputs


@dataclass(frozen=True)
class StepReport:
    """A worker's report after a step."""

    memory: Peaks
    """Peak memory by phase."""
    spans: Sequence[Span]
    """Its calls since the last report."""
    advantages: dict[int, float] = field(default_factory=dict)
    """Mean advantage over the response tokens of selected samples, by index, where the controller does not know it."""
    problem: str = ""
    """Why something could not be recorded; empty if all was."""
    engine: Mapping[str, float] = field(default_factory=dict)
    """Counts of its engine (see `Counting`)."""
    compared: LogProbComparison | None = None
    """Log-probs of engine and trainer on the step's samples, where both used the same weights."""


class StepRecorder:
    """Records the steps of one worker. rank: of the worker."""

    _recording: Recording | None
    """The samples to record of this step, if any."""
    _rows: dict[int, Trajectory]
    """Recorded samples that this rank forwards, by index."""
    _unforwarded: list[tuple[RecordedSample, ObjectRef[SampleShard], int]]
    """Recorded samples that no rank forwards, each with its shard and its row in the shard."""
    _parts: dict[int, list[tuple[int, int, int]]]
    """Id of a micro-batch → index, first and last token of each recorded sample in it."""
    _outputs: dict[tuple[int, str], Float[Tensor, " R"]]
    """(Index of a sample, column) → values of its response tokens."""
    _means: tuple[Int64[Tensor, " S"], Float64[Tensor, " S"]] | None
    """Indexes of samples, and their mean advantages."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._texts = TokenTexts("")
        self._writer = BackgroundWriter("token records")
        self._drop()

    def begin(self, step: TrainRows, bins: Sequence[Sequence[Bin]], batch: TrainBatch, *, spare: bool) -> None:
        """Start the record of a step, if it has one; an unfinished earlier one is dropped. bins: of this rank's
        `batch`. spare: this rank also records the samples that no rank forwards."""
        self._drop()
        recording = step.recording
        if recording is None:
            return
        self._recording = recording
        self._rows = batch.recorded
        packed = [micro for micros in batch.minibatches for micro in micros]
        for micro, bin in zip(packed, (bin for micros in bins for bin in micros), strict=True):
            ends = step.columns.lengths[list(bin)].cumsum().tolist()
            starts = [0, *ends][: len(ends)]
            self._parts[id(micro)] = [part for part in zip(bin, starts, ends, strict=True) if part[0] in self._rows]
        if spare:
            shard, row = step.columns.shard, step.columns.row
            self._unforwarded = [
                (recorded, step.shards[int(shard[recorded.index])], int(row[recorded.index]))
                for recorded in recording.samples
                if not recorded.forwarded
            ]
        if batch.columns.has("advantages") and batch.columns.advantages.ndim > 1:
            self.record_advantages(batch)

    def record_advantages(self, batch: TrainBatch) -> None:
        """Keep the mean advantage of each sample, whose tokens' advantages differ."""
        import torch

        if self._recording is None:
            return
        joined = batch.joined()
        sums = torch.zeros(len(joined.samples), dtype=torch.float64, device=batch.device)
        sums.index_add_(0, joined.sequence, joined.tokens("advantages").double())
        self._means = (joined.samples, sums / joined.lengths)

    def record_outputs(self, micro: MicroBatch, outputs: TokenOutputs) -> None:
        """Keep the outputs of a micro-batch's first forward pass in an update, for its recorded samples."""
        parts = self._parts.pop(id(micro), ())
        old = micro.tokens.old_log_probs if micro.tokens.has("old_log_probs") else outputs.log_probs
        columns = {"trainer_log_probs": old, "entropy": outputs.entropy, "advantages": micro.tokens.get("advantages")}
        for sample, start, end in parts:
            for name, values in columns.items():
                if values is not None:  # a copy: the whole tensor is not kept
                    self._outputs[sample, name] = values[start:end].detach().float().clone()

    def finish(self) -> tuple[dict[int, float], str]:
        """End the step; returns the mean advantages by index, and a problem. Tokens are written in the background."""
        means: dict[int, float] = {}
        if self._means is not None:
            samples, values = (column.tolist() for column in self._means)
            means = dict(zip(samples, values, strict=True))
        if self._recording is not None and (self._rows or self._unforwarded):
            self._writer.put(partial(self._write, self._recording, self._rows, self._values(), self._unforwarded))
        self._drop()
        return means, self._writer.problem()

    @property
    def idle(self) -> bool:
        """True if everything is written."""
        return self._writer.idle

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.flush()

    def problem(self) -> str:
        """Why something since the last report could not be written; empty if all was."""
        return self._writer.problem()

    def _drop(self) -> None:
        self._recording, self._means = None, None
        self._rows, self._unforwarded, self._parts, self._outputs = {}, [], {}, {}

    def _values(self) -> dict[int, TokenValues]:
        """The recorded outputs, on the host: one transfer for all."""
        import torch

        if not self._outputs:
            return {}
        flat = torch.cat([*self._outputs.values()]).cpu()
        parts = flat.split([len(values) for values in self._outputs.values()])
        by_sample: dict[int, dict[str, np.ndarray]] = {}
        for (sample, name), part in zip(self._outputs, parts, strict=True):
            by_sample.setdefault(sample, {})[name] = part.numpy()
        return {sample: TokenValues(**values) for sample, values in by_sample.items()}

    def _write(
        self,
        recording: Recording,
        rows: Mapping[int, Trajectory],
        values: Mapping[int, TokenValues],
        unforwarded: Sequence[tuple[RecordedSample, ObjectRef[SampleShard], int]],
    ) -> None:
        """Write the file of this rank. unforwarded: samples whose tokens are fetched only now."""
        import ray

        if self._texts.model != recording.tokenizer:
            self._texts = TokenTexts(recording.tokenizer)
        trajectories = [(sample, rows[sample.index]) for sample in recording.samples if sample.index in rows]
        trajectories += [
            (sample, ray.get(shard, timeout=FETCH_TIMEOUT_S).row(row)) for sample, shard, row in unforwarded
        ]
        table = tokens_table(
            [
                tokens_row(
                    recording.step,
                    sample,
                    trajectory,
                    self._texts.of(trajectory.tokens),
                    values.get(sample.index, TokenValues()),
                )
                for sample, trajectory in trajectories
            ]
        )
        write_table(Path(filled_path(recording.path, "rank", self._rank)), table)
