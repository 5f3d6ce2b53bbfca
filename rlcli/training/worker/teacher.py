"""The teachers of on-policy distillation: frozen models that score the policy's response tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcli.config.schema import RunConfig
from rlcli.training.worker.backend import Loader, PolicyBackend
from rlcli.training.worker.served_teacher import Scores, ServedTeacher
from rlcli.training.worker.train_batch import MicroBatch, TokenColumn, TrainBatch

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

    from rlcli.model.logprobs import Likeliest

OF_TOKENS: tuple[TokenColumn, ...] = ("teacher_log_probs", "teacher_agrees")
"""Columns that teachers fill in for each response token."""
OF_TOP: tuple[TokenColumn, ...] = ("teacher_top", "teacher_top_log_probs")
"""The same with `teacher.top_k`: ids and log-probs of the likeliest tokens."""


class TeacherRole:
    """One or several teachers, each for the samples of its data sources. Fills in `OF_TOKENS` and `OF_TOP`."""

    def __init__(self, config: RunConfig, load: Loader) -> None:
        from rlcli.model.io.model_config import read_config

        self.temperature = config.rollout.temperature
        self.top_k = config.teacher.top_k
        self.vocabulary = read_config(config.model.path).vocab_size
        self.models: list[PolicyBackend | ServedTeacher] = [
            ServedTeacher(teacher.path, self.top_k, self.vocabulary)
            if teacher.is_served
            else load("policy", teacher.path, trained=False)
            for teacher in config.teacher.models
        ]

    @property
    def local(self) -> dict[int, PolicyBackend]:
        """Teachers in this process, not behind a server, by number."""
        return {number: model for number, model in enumerate(self.models) if not isinstance(model, ServedTeacher)}

    def infer(self, batch: TrainBatch, number: int) -> None:
        """Fill in the columns of teacher `number` for its samples. Collective: ranks without such samples take part."""
        for micro in batch:
            self._fill(batch, micro, number)

    def _fill(self, batch: TrainBatch, micro: MicroBatch, number: int) -> None:
        import torch

        mask, model = self._mask(batch, micro, number), self.models[number]
        if isinstance(model, ServedTeacher):
            outputs = self._from_server(model, batch, micro, number)
        else:
            packed = micro.packed if len(self.models) == 1 else batch.pack_of_teacher(micro, number)
            outputs = model.likeliest(packed, self.temperature, self.top_k, self.vocabulary)
        values = [outputs.log_probs, outputs.agrees, *((outputs.ids, outputs.top) if self.top_k else ())]
        for name, value in zip((*OF_TOKENS, *OF_TOP), values, strict=False):
            if not micro.tokens.has(name):
                column = torch.zeros(len(mask), *value.shape[1:], dtype=value.dtype, device=value.device)
                micro.tokens.set(name, column)
            micro.tokens.get(name)[mask] = value

    def _from_server(self, model: ServedTeacher, batch: TrainBatch, micro: MicroBatch, number: int) -> Likeliest:
        """A served teacher's scores of its samples, in their order."""
        import numpy as np
        import torch

        from rlcli.model.logprobs import Likeliest

        rows = micro.rows
        if len(self.models) > 1:
            mask = (batch.columns.teacher[micro.samples] == number).tolist()
            rows = [row for row, selected in zip(micro.rows, mask, strict=True) if selected]
        branches = [branch for row in rows for branch in row.branches]
        scores = model.score(
            [(branch.tokens, branch.response_mask) for branch in branches if branch.response_mask.any()]
        )
        empty = Scores(np.zeros(0, np.float32), np.zeros(0, bool), *(np.zeros((0, self.top_k), t) for t in (int, "f4")))
        columns = [np.concatenate(parts) for parts in zip(empty, *scores, strict=True)]
        log_probs, agrees, ids, top = (torch.tensor(column, device=batch.device) for column in columns)
        return Likeliest(log_probs=log_probs, ids=ids, top=top, agrees=agrees)

    def _mask(self, batch: TrainBatch, micro: MicroBatch, number: int) -> Bool[Tensor, " R"]:
        """Mask of the response tokens of this teacher's samples."""
        import torch

        if len(self.models) == 1:
            return torch.ones_like(micro.packed.targets, dtype=torch.bool)
        return (batch.columns.teacher[micro.samples] == number)[micro.packed.sequence]
