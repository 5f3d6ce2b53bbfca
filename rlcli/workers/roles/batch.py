"""The train batch: this rank's rows of a step, packed into micro-batches, and the values computed for their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.data.messages import MiniWork, StepWork
from rlcli.data.packer import Bin
from rlcli.data.trajectories import Trajectory
from rlcli.files import replacing
from rlcli.images.rule import ImageRule
from rlcli.workers.roles.integrity import RowCheck

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlcli.model.packed import PackedBatch

FETCH_TIMEOUT_S = 600.0
"""Longest wait for an object of another worker: for one that Ray has lost, the wait would never end."""


@dataclass
class MicroBatch:
    """One micro-batch on the rank that trains it, of S sequences and R drawn tokens.

    samples: int64 `[S]`, indexes into the step's samples. lengths: int64 `[S]`, drawn tokens of each. empty: this
    rank has no rows here and only takes part in the collectives. tokens: `[R]` by name: the engine's
    `rollout_log_probs`; if turns are rewarded, the `turn` (int64, from 0) of its sample that each is of; and what the
    roles fill in (`old_log_probs`, `reference_log_probs`, `values`, `advantages`, …), some of them `[R, K]`.
    of_teachers: with several teachers, the number of each that has samples here → the pack of those samples alone.
    rows: the samples' trajectories, S of them.
    """

    packed: PackedBatch
    samples: Tensor
    lengths: Tensor
    empty: bool
    tokens: dict[str, Tensor] = field(default_factory=dict)
    of_teachers: dict[int, PackedBatch] = field(default_factory=dict)
    rows: Sequence[Trajectory] = ()

    def spread(self, column: Tensor) -> Tensor:
        """The value of each token's sequence (`[S]`) or turn (`[S, K]`): float32 `[R]`."""
        at = (self.packed.sequence,) if column.ndim == 1 else (self.packed.sequence, self.tokens["turn"])
        return column[at].float()


class TrainBatch:
    """minibatches: [minibatch] → its micro-batches on this rank; works: their denominators; policy_works: the policy's,
    without what its correction rejects. columns: `[N, …]` of each of the step's samples, the same on every rank.
    recorded: the trajectories of those whose tokens are recorded, by their place."""

    def __init__(
        self, bins: Sequence[Sequence[Bin]], step: StepWork, device: torch.device, rule: ImageRule | None = None
    ) -> None:
        """Fetch only the shards that hold this rank's rows, and pack the rows. bins: [minibatch][micro-batch] → this
        rank's samples. rule: how the model sees pictures, if it does."""
        import numpy as np
        import ray
        import torch

        self.device, self.rule = device, rule
        self.seed = step.seed
        own = np.array([sample for micros in bins for bin in micros for sample in bin], np.int64)
        held = np.unique(step.columns["shard"][own]).tolist()
        shards = {shard: ray.get(step.shards[shard], timeout=FETCH_TIMEOUT_S) for shard in held}
        self.works: list[MiniWork] = step.minibatches
        self.policy_works = list(step.minibatches)
        self.columns: dict[str, Tensor] = {
            name: torch.tensor(values, device=device) for name, values in step.columns.items()
        }
        self.recorded: dict[int, Trajectory] = {}
        rows = RowCheck(step.columns, one_prompt=step.one_prompt)
        self.minibatches = [[self._pack(bin, step, shards, rows) for bin in micros] for micros in bins]
        if "advantages" in self.columns:  # computed from the rewards alone
            self.spread("advantages", self.columns["advantages"])

    def __iter__(self) -> Iterator[MicroBatch]:
        for minibatch in self.minibatches:
            yield from minibatch

    def of(self, micro: MicroBatch, column: str) -> Tensor:
        """A column for the sequences of a micro-batch: `[S]`."""
        return self.columns[column][micro.samples]

    def pack_of_teacher(self, micro: MicroBatch, number: int) -> PackedBatch:
        """The samples of a micro-batch that teacher `number` scores; a dummy without drawn tokens if there are none."""
        from rlcli.model.packed import dummy

        return micro.of_teachers.get(number) or dummy(self.device, self.rule)

    def spread(self, name: str, column: Tensor) -> None:
        """Give every token the value of its sample (`[N]`) or of its turn (`[N, K]`)."""
        for micro in self:
            micro.tokens[name] = micro.spread(column[micro.samples])

    def joined(self, minibatch: int | None = None) -> Joined:
        """The tokens of all micro-batches, or of those of one minibatch, concatenated."""
        import torch

        micros = [m for m in (self if minibatch is None else self.minibatches[minibatch]) if not m.empty]
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        lengths = torch.cat([none, *(m.lengths for m in micros)])
        samples = torch.cat([none, *(m.samples for m in micros)])
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=self.device), lengths)
        return Joined(micros, samples, lengths, sequence)

    def export(self, name: str) -> dict[int, Any]:
        """The values under `name`, by sample, as arrays, for another group's batch."""
        return {
            sample: values.cpu().numpy()
            for micro in self
            if not micro.empty
            for sample, values in zip(
                micro.samples.tolist(), micro.tokens[name].split(micro.lengths.tolist()), strict=True
            )
        }

    def fill(self, name: str, by_sample: dict[int, Any]) -> None:
        """Fill in the result of `export`, for these samples and others."""
        import numpy as np
        import torch

        for micro in self:
            values = [by_sample[sample] for sample in micro.samples.tolist()]
            flat = np.concatenate(values) if values else np.zeros(0, np.float32)
            micro.tokens[name] = torch.tensor(flat, device=self.device)

    def save(self, minibatch: int, path: Path) -> None:
        """Write what this rank trains on in a minibatch, with torch.save: enough to repeat the update, in plain values.
        `work`: the policy's denominators; `columns`: values of all the step's samples; `micros`: for each micro-batch
        its `packed` tokens, its `samples` and `lengths`, and the filled-in `tokens`."""
        import torch

        work = {field.name: getattr(self.policy_works[minibatch], field.name) for field in fields(MiniWork)}
        packed = ("input_ids", "position_ids", "boundaries", "source", "response_index", "targets", "sequence")
        micros = [
            {
                "packed": {name: getattr(micro.packed, name) for name in (*packed, "routes", "shown", "never")},
                "samples": micro.samples,
                "lengths": micro.lengths,
                "tokens": micro.tokens,
            }
            for micro in self.minibatches[minibatch]
            if not micro.empty
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            torch.save({"work": work, "columns": self.columns, "micros": micros}, temporary)

    def _pack(self, bin: Bin, step: StepWork, shards: dict[int, Any], check: RowCheck) -> MicroBatch:
        import numpy as np
        import torch

        from rlcli.model.packed import dummy

        shard, row = step.columns["shard"], step.columns["row"]
        rows = [shards[int(shard[sample])].row(int(row[sample])) for sample in bin]
        branches = [(place, branch) for place, row in enumerate(rows) for branch in row.branches]
        packed = self._packed(branches) if rows else dummy(self.device, self.rule)
        samples = torch.tensor(bin, dtype=torch.int64, device=self.device)
        lengths = torch.tensor([row.drawn_tokens for row in rows], dtype=torch.int64, device=self.device)
        log_probs = np.concatenate([np.zeros(0, np.float32), *(row.log_probs for row in rows)])
        tokens = {"rollout_log_probs": torch.tensor(log_probs, device=self.device)}
        if "turn_rewards" in step.columns:
            turns = np.concatenate([np.zeros(0, np.int64), *(row.turn_of_drawn for row in rows)])
            tokens["turn"] = torch.tensor(turns, device=self.device)
        wanted = {one.place for one in step.recording.samples} if step.recording is not None else frozenset()
        self.recorded |= {sample: whole for sample, whole in zip(bin, rows, strict=True) if sample in wanted}
        if rows:
            check.check(packed, samples, lengths, tokens["rollout_log_probs"], rows)
        of_teachers = {}
        if "teacher" in step.columns:
            teachers = step.columns["teacher"][np.array(bin, np.int64)]
            for number in dict.fromkeys(teachers.tolist()):
                own = [(place, branch) for place, branch in branches if teachers[place] == number]
                own = [(place, replace(branch, routes=None)) for place, branch in own]
                of_teachers[number] = self._packed(own)
        return MicroBatch(packed, samples, lengths, not rows, tokens, of_teachers, rows)

    def _packed(self, branches: Sequence[tuple[int, Trajectory]]) -> PackedBatch:
        """Of the branches of trajectories, each with the place of its sample in the micro-batch."""
        from rlcli.model.packed import pack

        given = [(branch.tokens, branch.prompt_tokens) for _, branch in branches]
        masks, places = [branch.drawn for _, branch in branches], [place for place, _ in branches]
        routes, pictures = [branch.routes for _, branch in branches], [branch.pictures for _, branch in branches]
        return pack(given, self.device, masks, places, routes, pictures, self.rule)


@dataclass(frozen=True)
class Joined:
    """Several micro-batches concatenated: S sequences, T drawn tokens. samples, lengths: int64 `[S]`; sequence:
    int64 `[T]`."""

    micros: list[MicroBatch]
    samples: Tensor
    lengths: Tensor
    sequence: Tensor

    def tokens(self, name: str) -> Tensor:
        """`[T]` of the values under `name`."""
        import torch

        if not self.micros:
            return torch.zeros(0, device=self.lengths.device)
        return torch.cat([micro.tokens[name] for micro in self.micros])

    def fill(self, name: str, values: Tensor) -> None:
        """Store `values` (`[T]`) under `name`."""
        parts = values.split([int(micro.lengths.sum()) for micro in self.micros]) if self.micros else ()
        for micro, part in zip(self.micros, parts, strict=True):
            micro.tokens[name] = part
