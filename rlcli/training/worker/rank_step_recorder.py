"""What a worker records of the step that it trains on, for viewers: the tokens of some samples, and mean advantages.

Nothing is computed for it that the update does not compute. The values of a step stay on the device until the
controller asks for the worker's report, when the device is idle; they are written in the background.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.algorithms.correction.log_prob_check import Comparison
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
    from torch import Tensor

    from rlcli.model.policy import TokenOutputs


@dataclass(frozen=True)
class StepReport:
    """What a worker reports after a step. memory: its peaks. spans: its calls since the last report. advantages: of a
    selected sample, by its place, if the controller does not know it: the mean over its drawn tokens. problem: why
    something could not be recorded, or empty. engine: counts of its engine (see `Counting`). compared: engine and
    trainer on the step's samples, as far as both computed them with the same weights."""

    memory: Peaks
    spans: Sequence[Span]
    advantages: dict[int, float] = field(default_factory=dict)
    problem: str = ""
    engine: Mapping[str, float] = field(default_factory=dict)
    compared: Comparison | None = None


class StepRecorder:
    """One worker's part. rank: of the worker."""

    _recording: Recording | None
    _rows: dict[int, Trajectory]
    _idle: list[tuple[RecordedSample, Any, int]]
    _parts: dict[int, list[tuple[int, int, int]]]
    _seen: dict[tuple[int, str], Tensor]
    _means: tuple[Tensor, Tensor] | None

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._texts = TokenTexts("")
        self._writer = BackgroundWriter("token records")
        self._drop()

    def begin(self, step: TrainRows, bins: Sequence[Sequence[Bin]], batch: TrainBatch, *, spare: bool) -> None:
        """Record this step, if it is to be. What is there of one that was broken off is dropped. bins: of this rank's
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
            self._idle = [
                (one, step.shards[int(shard[one.place])], int(row[one.place]))
                for one in recording.samples
                if not one.forwarded
            ]
        if batch.columns.has("advantages") and batch.columns.advantages.ndim > 1:
            self.saw_advantages(batch)

    def saw_advantages(self, batch: TrainBatch) -> None:
        """Keep the mean advantage of each sample, whose tokens' advantages differ."""
        import torch

        if self._recording is None:
            return
        joined = batch.joined()
        sums = torch.zeros(len(joined.samples), dtype=torch.float64, device=batch.device)
        sums.index_add_(0, joined.sequence, joined.tokens("advantages").double())
        self._means = (joined.samples, sums / joined.lengths)

    def saw_outputs(self, micro: MicroBatch, outputs: TokenOutputs) -> None:
        """Keep what a micro-batch's first forward pass in an update gave for its recorded samples."""
        parts = self._parts.pop(id(micro), ())
        old = micro.tokens.old_log_probs if micro.tokens.has("old_log_probs") else outputs.log_probs
        found = {"trainer_log_probs": old, "entropy": outputs.entropy, "advantages": micro.tokens.get("advantages")}
        for place, start, end in parts:
            for name, values in found.items():
                if values is not None:  # a copy: the whole tensor is not kept
                    self._seen[place, name] = values[start:end].detach().float().clone()

    def finish(self) -> tuple[dict[int, float], str]:
        """The step is over: the mean advantages by place, and a problem. Its tokens are written in the background."""
        means: dict[int, float] = {}
        if self._means is not None:
            places, values = (column.tolist() for column in self._means)
            means = dict(zip(places, values, strict=True))
        if self._recording is not None and (self._rows or self._idle):
            self._writer.put(partial(self._write, self._recording, self._rows, self._values(), self._idle))
        self._drop()
        return means, self._writer.problem()

    @property
    def idle(self) -> bool:
        """Whether everything is written."""
        return self._writer.idle

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.flush()

    def problem(self) -> str:
        """Why something since the last report could not be written; empty if all was."""
        return self._writer.problem()

    def _drop(self) -> None:
        self._recording, self._means = None, None
        self._rows, self._idle, self._parts, self._seen = {}, [], {}, {}

    def _values(self) -> dict[int, TokenValues]:
        """What was seen, on the host: one transfer for all of it."""
        import torch

        if not self._seen:
            return {}
        flat = torch.cat([*self._seen.values()]).cpu()
        parts = flat.split([len(values) for values in self._seen.values()])
        found: dict[int, dict[str, Any]] = {}
        for (place, name), part in zip(self._seen, parts, strict=True):
            found.setdefault(place, {})[name] = part.numpy()
        return {place: TokenValues(**values) for place, values in found.items()}

    def _write(
        self,
        recording: Recording,
        rows: Mapping[int, Trajectory],
        values: Mapping[int, TokenValues],
        idle: Sequence[tuple[RecordedSample, Any, int]],
    ) -> None:
        """Write the file of this rank. idle: samples that no rank forwards, whose tokens are fetched only here."""
        import ray

        if self._texts.model != recording.tokenizer:
            self._texts = TokenTexts(recording.tokenizer)
        found = [(one, rows[one.place]) for one in recording.samples if one.place in rows]
        found += [(one, ray.get(shard, timeout=FETCH_TIMEOUT_S).row(row)) for one, shard, row in idle]
        table = tokens_table(
            [
                tokens_row(
                    recording.step, one, whole, self._texts.of(whole.tokens), values.get(one.place, TokenValues())
                )
                for one, whole in found
            ]
        )
        write_table(Path(filled_path(recording.path, "rank", self._rank)), table)
