"""The train batch: this rank's rows of a step, packed into micro-batches, and the values computed for their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlcli.column_records import Column, Columns
from rlcli.data.packer import Bin
from rlcli.data.sample_shard import FETCH_TIMEOUT_S, SampleShard
from rlcli.data.train_rows import MinibatchCounts, SampleColumns, TrainRows
from rlcli.data.trajectories import Trajectory
from rlcli.images.image_rule import ImageRule
from rlcli.support.files import replacing
from rlcli.training.worker.plan_integrity import PackedTokens, RowCheck

if TYPE_CHECKING:
    import numpy as np
    import torch
    from jaxtyping import Bool, Float32, Int64, Shaped
    from torch import Tensor

    from rlcli.model.device_copies import Move
    from rlcli.model.packed import PackedBatch


TokenColumn = Literal[
    "rollout_log_probs",
    "turn",
    "old_log_probs",
    "reference_log_probs",
    "teacher_log_probs",
    "teacher_agrees",
    "teacher_top",
    "teacher_top_log_probs",
    "values",
    "process_rewards",
    "advantages",
    "returns",
    "selected",
    "kept",
    "kept_indexes",
]
"""The names of `TokenColumns`."""


@dataclass(eq=False, repr=False, kw_only=True)
class TokenColumns(Columns):
    """Columns of the R response tokens of one micro-batch. All but the first two are filled in by the roles.

    >>> import torch
    >>> tokens = TokenColumns(rollout_log_probs=torch.tensor([-1.0, -0.5]))
    >>> tokens.old_log_probs = tokens.rollout_log_probs - 0.25
    >>> tokens.old_log_probs, tokens.has("advantages")
    (tensor([-1.2500, -0.7500]), False)
    """

    rollout_log_probs: Column[Tensor] = Column("float32", "R")
    """log μ, as the engine reported it. From the trajectories."""
    turn: Column[Tensor] = Column("int64", "R")
    """The turn of its sample that each token is of, from 0, if turns are rewarded. From the trajectories."""
    old_log_probs: Column[Tensor] = Column("float32", "R")
    """log π at the start of the step. From `PolicyRole.compute_old_log_probs`."""
    reference_log_probs: Column[Tensor] = Column("float32", "R")
    """log π_ref. From `PolicyRole.compute_reference_log_probs`."""
    teacher_log_probs: Column[Tensor] = Column("float32", "R")
    """log ν. From `TeacherRole`, like the next three."""
    teacher_agrees: Column[Tensor] = Column("bool", "R")
    """True if the token is the teacher's likeliest."""
    teacher_top: Column[Tensor] = Column("int64", "R", "K")
    """Ids of the teacher's K likeliest tokens."""
    teacher_top_log_probs: Column[Tensor] = Column("float32", "R", "K")
    """Their log ν."""
    values: Column[Tensor] = Column("float32", "R")
    """V of the state before each token. From `CriticRole`."""
    process_rewards: Column[Tensor] = Column("float32", "R")
    """The implicit process reward of each token. From `ProcessRewardRole`."""
    advantages: Column[Tensor] = Column("float32", "R")
    """A. From the controller's columns, or from `fill_advantages`."""
    returns: Column[Tensor] = Column("float32", "R")
    """Targets of the critic. From `fill_advantages`."""
    selected: Column[Tensor] = Column("bool", "R")
    """The tokens that the loss treats separately. From `fill_selected`."""
    kept: Column[Tensor] = Column("bool", "R")
    """The tokens that no correction rejects. From `fill_kept`."""
    kept_indexes: Column[Tensor] = Column("int64", "kept tokens")
    """Positions where `kept` is true. From `fill_kept`."""


@dataclass
class MicroBatch:
    """One micro-batch on the rank that trains it, of S sequences and R response tokens."""

    packed: PackedBatch
    """The tokens of its sequences."""
    samples: Int64[Tensor, " S"]
    """Indexes of its sequences into the step's samples."""
    lengths: Int64[Tensor, " S"]
    """Response tokens of each."""
    empty: bool
    """This rank has no rows here and only takes part in the collectives."""
    tokens: TokenColumns
    """Columns of its response tokens."""
    of_teachers: dict[int, PackedBatch] = field(default_factory=dict)
    """With several teachers: the number of each that has samples here → the pack of those samples alone."""
    rows: Sequence[Trajectory] = ()
    """The trajectories of its sequences, S of them."""

    def moved(self, move: Move) -> MicroBatch:
        """See `rlcli.model.device_copies.Movable`."""
        return replace(
            self,
            packed=self.packed.moved(move),
            samples=move(self.samples),
            lengths=move(self.lengths),
            tokens=self.tokens.map(move),
            of_teachers={number: pack.moved(move) for number, pack in self.of_teachers.items()},
        )

    @property
    def packed_tokens(self) -> PackedTokens[Tensor]:
        """The tensors that `RowCheck` compares with the samples' signatures."""
        return PackedTokens(
            samples=self.samples,
            lengths=self.lengths,
            sequence=self.packed.sequence,
            targets=self.packed.targets,
            rollout_log_probs=self.tokens.rollout_log_probs,
        )

    def spread(self, column: Shaped[Tensor, " S"] | Shaped[Tensor, "S K"]) -> Float32[Tensor, " R"]:
        """The value of each token's sequence, or of its turn."""
        at = (self.packed.sequence,) if column.ndim == 1 else (self.packed.sequence, self.tokens.turn)
        return column[at].float()


class TrainBatch:
    """This rank's rows of a step, in micro-batches."""

    minibatches: list[list[MicroBatch]]
    """[minibatch] → its micro-batches on this rank."""
    minibatch_counts: list[MinibatchCounts]
    """[minibatch] → its denominators."""
    policy_counts: list[MinibatchCounts]
    """The denominators of the policy, without the tokens that its correction rejects."""
    columns: SampleColumns[Tensor]
    """Columns of all the step's samples, the same on every rank."""
    recorded: dict[int, Trajectory]
    """Index of a sample whose tokens are recorded → its trajectory."""

    def __init__(
        self,
        bins: Sequence[Sequence[Bin]],
        step: TrainRows,
        device: torch.device,
        rule: ImageRule | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Fetch only the shards that hold this rank's rows, and pack the rows. bins: [minibatch][micro-batch] → this
        rank's samples. rule: how the model encodes images, if it does. dtype: of computation: on a GPU attention's
        indices are prepared before the first pass."""
        import numpy as np
        import ray
        import torch

        from rlcli.model.device_copies import all_moved, upload

        self.device, self.rule = device, rule
        self.seed = step.seed
        rank_samples = np.array([sample for micros in bins for bin in micros for sample in bin], np.int64)
        needed = np.unique(step.columns.shard[rank_samples]).tolist()
        shards = {shard: ray.get(step.shards[shard], timeout=FETCH_TIMEOUT_S) for shard in needed}
        self.minibatch_counts = step.minibatches
        self.policy_counts = list(step.minibatches)
        columns = step.columns.present()
        uploaded = upload([torch.tensor(values) for values in columns.values()], device)
        self.columns = SampleColumns(**dict(zip(columns, uploaded, strict=True)))
        self.recorded = {}
        packed = [self._pack(bin, step, shards) for micros in bins for bin in micros]
        if dtype is not None and device.type != "cpu":
            for micro in packed:
                for pack in (micro.packed, *micro.of_teachers.values()):
                    pack.segments.prepare(device, dtype)
        on_device = iter(all_moved(packed, device))
        self.minibatches = [[next(on_device) for _ in micros] for micros in bins]
        packed_rows = [(micro.rows, micro.packed_tokens) for micro in self if not micro.empty]
        RowCheck(step.columns, one_prompt=step.one_prompt).check(packed_rows)
        if self.columns.has("advantages"):  # computed from the rewards alone
            self.spread("advantages", self.columns.advantages)

    def __iter__(self) -> Iterator[MicroBatch]:
        for minibatch in self.minibatches:
            yield from minibatch

    def pack_of_teacher(self, micro: MicroBatch, number: int) -> PackedBatch:
        """The samples of a micro-batch that teacher `number` scores; a dummy without response tokens if there are
        none."""
        from rlcli.model.packed import dummy

        return micro.of_teachers.get(number) or dummy(self.device, self.rule)

    def spread(self, name: TokenColumn, column: Tensor) -> None:
        """Give every token the value of its sample (`[N]`) or of its turn (`[N, K]`), as the column `name`."""
        for micro in self:
            micro.tokens.set(name, micro.spread(column[micro.samples]))

    def joined(self, minibatch: int | None = None) -> Joined:
        """The tokens of all micro-batches, or of those of one minibatch, concatenated."""
        import torch

        micros = [m for m in (self if minibatch is None else self.minibatches[minibatch]) if not m.empty]
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        lengths = torch.cat([none, *(m.lengths for m in micros)])
        samples = torch.cat([none, *(m.samples for m in micros)])
        tokens = sum(len(micro.packed.targets) for micro in micros)
        indexes = torch.arange(len(lengths), device=self.device)
        sequence = torch.repeat_interleave(indexes, lengths, output_size=tokens)
        return Joined(micros, samples, lengths, sequence)

    def export(self, name: TokenColumn) -> dict[int, np.ndarray]:
        """The column `name`, by sample, for another group's batch."""
        from rlcli.model.device_copies import download

        joined = self.joined()
        samples, lengths, values = download([joined.samples, joined.lengths, joined.tokens(name)])
        parts = values.split(lengths.tolist())
        return {sample: part.numpy() for sample, part in zip(samples.tolist(), parts, strict=True)}

    def fill(self, name: TokenColumn, by_sample: Mapping[int, np.ndarray]) -> None:
        """Fill in the result of `export`, for these samples and others."""
        import numpy as np
        import torch

        for micro in self:
            values = [by_sample[sample] for sample in micro.samples.tolist()]
            flat = np.concatenate(values) if values else np.zeros(0, np.float32)
            micro.tokens.set(name, torch.tensor(flat, device=self.device))

    def save(self, minibatch: int, path: Path) -> None:
        """Write this rank's rows of a minibatch, with torch.save: enough to repeat the update, in plain values.
        `work`: the policy's denominators; `columns`: values of all the step's samples; `micros`: for each micro-batch
        its `packed` tokens, its `samples` and `lengths`, and the filled-in `tokens`."""
        import torch

        counts = {field.name: getattr(self.policy_counts[minibatch], field.name) for field in fields(MinibatchCounts)}
        packed = ("input_ids", "position_ids", "boundaries", "source", "response_index", "targets", "sequence")
        micros = [
            {
                "packed": {name: getattr(micro.packed, name) for name in (*packed, "routes", "never")}
                | {"shown": micro.packed.image_inputs},  # the file's name for them
                "samples": micro.samples,
                "lengths": micro.lengths,
                "tokens": {n: v for n, v in micro.tokens.present().items() if n != "kept_indexes"},
            }
            for micro in self.minibatches[minibatch]
            if not micro.empty
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            torch.save({"work": counts, "columns": self.columns.present(), "micros": micros}, temporary)

    def _pack(self, bin: Bin, step: TrainRows, shards: Mapping[int, SampleShard]) -> MicroBatch:
        """A micro-batch on the host."""
        import numpy as np
        import torch

        from rlcli.model.packed import dummy

        shard, row = step.columns.shard, step.columns.row
        rows = [shards[int(shard[sample])].row(int(row[sample])) for sample in bin]
        branches = [(index, branch) for index, row in enumerate(rows) for branch in row.branches]
        packed = self._packed(branches) if rows else dummy(torch.device("cpu"), self.rule)
        samples = torch.tensor(bin, dtype=torch.int64)
        lengths = torch.tensor([row.response_tokens for row in rows], dtype=torch.int64)
        log_probs = np.concatenate([np.zeros(0, np.float32), *(row.log_probs for row in rows)])
        tokens = TokenColumns(rollout_log_probs=torch.tensor(log_probs))
        if step.columns.has("turn_rewards"):
            turns = np.concatenate([np.zeros(0, np.int64), *(row.response_turns for row in rows)])
            tokens.turn = torch.tensor(turns)
        wanted = {recorded.index for recorded in step.recording.samples} if step.recording is not None else frozenset()
        self.recorded |= {sample: trajectory for sample, trajectory in zip(bin, rows, strict=True) if sample in wanted}
        of_teachers = {}
        if step.columns.has("teacher"):
            teachers = step.columns.teacher[np.array(bin, np.int64)]
            for number in dict.fromkeys(teachers.tolist()):
                scored = [(index, branch) for index, branch in branches if teachers[index] == number]
                scored = [(index, replace(branch, routes=None)) for index, branch in scored]
                of_teachers[number] = self._packed(scored)
        return MicroBatch(packed, samples, lengths, not rows, tokens, of_teachers, rows)

    def _packed(self, branches: Sequence[tuple[int, Trajectory]]) -> PackedBatch:
        """A pack, on the host. branches: of trajectories, each with the index of its sample in the micro-batch."""
        import torch

        from rlcli.model.packed import pack

        rows = [(branch.tokens, branch.prompt_tokens) for _, branch in branches]
        masks, indexes = [branch.response_mask for _, branch in branches], [index for index, _ in branches]
        routes, images = [branch.routes for _, branch in branches], [branch.images for _, branch in branches]
        return pack(rows, torch.device("cpu"), masks, indexes, routes, images, self.rule)


@dataclass(frozen=True)
class Joined:
    """Several micro-batches concatenated: S sequences, R response tokens."""

    micros: list[MicroBatch]
    """None of them is empty."""
    samples: Int64[Tensor, " S"]
    """Indexes of the sequences into the step's samples."""
    lengths: Int64[Tensor, " S"]
    """Response tokens of each."""
    sequence: Int64[Tensor, " R"]
    """The sequence of each token."""

    def tokens(self, name: TokenColumn) -> Shaped[Tensor, " R"]:
        """The column `name`."""
        import torch

        if not self.micros:
            return torch.zeros(0, device=self.lengths.device)
        return torch.cat([micro.tokens.get(name) for micro in self.micros])

    def fill(self, name: TokenColumn, values: Shaped[Tensor, " R"]) -> None:
        """Store `values` as the column `name`."""
        parts = values.split([len(micro.packed.targets) for micro in self.micros]) if self.micros else ()
        for micro, part in zip(self.micros, parts, strict=True):
            micro.tokens.set(name, part)

    def fill_kept(self, kept: Bool[Tensor, " R"]) -> None:
        """Store the mask of the tokens that no correction rejects, as `kept`; and their positions in each micro-batch,
        as `kept_indexes`, so that no pass has to wait for the device."""
        from rlcli.model.device_copies import download, upload

        self.fill("kept", kept)
        if not self.micros:
            return
        (host,) = download([kept])
        parts = host.split([len(micro.packed.targets) for micro in self.micros])
        positions = upload([part.nonzero()[:, 0] for part in parts], kept.device)
        for micro, kept_indexes in zip(self.micros, positions, strict=True):
            micro.tokens.kept_indexes = kept_indexes
