"""The teachers of on-policy distillation: frozen models that score the tokens which the policy drew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcli.config.schema import RunConfig
from rlcli.training.worker.backend import Loader, TrainingBackend
from rlcli.training.worker.served_teacher import Scores, ServedTeacher
from rlcli.training.worker.train_batch import MicroBatch, TokenColumn, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

    from rlcli.model.logprobs import Likeliest

OF_TOKENS: tuple[TokenColumn, ...] = ("teacher_log_probs", "teacher_agrees")
"""What teachers fill in for each drawn token."""
OF_TOP: tuple[TokenColumn, ...] = ("teacher_top", "teacher_top_log_probs")
"""The same with `teacher.top_k`: ids and log-probs of the likeliest tokens."""


class TeacherRole:
    """One or several teachers, each for the samples of its data sources. Fills in `OF_TOKENS` and `OF_TOP`."""

    def __init__(self, config: RunConfig, load: Loader) -> None:
        from rlcli.model.io.model_config import read_config

        self.temperature = config.rollout.temperature
        self.top_k = config.teacher.top_k
        self.vocabulary = read_config(config.model.path).vocab_size
        self.models: list[TrainingBackend | ServedTeacher] = [
            ServedTeacher(one.path, self.top_k, self.vocabulary)
            if one.is_served
            else load("policy", one.path, trained=False)
            for one in config.teacher.models
        ]

    @property
    def held(self) -> dict[int, TrainingBackend]:
        """By number, those that are here and not behind a server."""
        return {number: one for number, one in enumerate(self.models) if not isinstance(one, ServedTeacher)}

    def infer(self, batch: TrainBatch, number: int) -> None:
        """Compute what teacher `number` gives for its samples. Collective: a rank that has none of them takes part."""
        for micro in batch:
            self._fill(batch, micro, number)

    def _fill(self, batch: TrainBatch, micro: MicroBatch, number: int) -> None:
        import torch

        own, model = self._own(batch, micro, number), self.models[number]
        if isinstance(model, ServedTeacher):
            found = self._asked(model, batch, micro, number)
        else:
            packed = micro.packed if len(self.models) == 1 else batch.pack_of_teacher(micro, number)
            found = model.likeliest(packed, self.temperature, self.top_k, self.vocabulary)
        values = [found.log_probs, found.agrees, *((found.ids, found.top) if self.top_k else ())]
        for name, value in zip((*OF_TOKENS, *OF_TOP), values, strict=False):
            if not micro.tokens.has(name):
                whole = torch.zeros(len(own), *value.shape[1:], dtype=value.dtype, device=value.device)
                micro.tokens.set(name, whole)
            micro.tokens.get(name)[own] = value

    def _asked(self, model: ServedTeacher, batch: TrainBatch, micro: MicroBatch, number: int) -> Likeliest:
        """What a server gives for its samples, in their order."""
        import numpy as np
        import torch

        from rlcli.model.logprobs import Likeliest

        rows = micro.rows
        if len(self.models) > 1:
            mine = (batch.columns.teacher[micro.samples] == number).tolist()
            rows = [row for row, is_mine in zip(micro.rows, mine, strict=True) if is_mine]
        branches = [branch for row in rows for branch in row.branches]
        scores = model.score([(branch.tokens, branch.drawn) for branch in branches if branch.drawn.any()])
        none = Scores(np.zeros(0, np.float32), np.zeros(0, bool), *(np.zeros((0, self.top_k), t) for t in (int, "f4")))
        columns = [np.concatenate(parts) for parts in zip(none, *scores, strict=True)]
        log_probs, agrees, ids, top = (torch.tensor(column, device=batch.device) for column in columns)
        return Likeliest(log_probs=log_probs, ids=ids, top=top, agrees=agrees)

    def _own(self, batch: TrainBatch, micro: MicroBatch, number: int) -> Tensor:
        """Which of the micro-batch's tokens are of this teacher's samples: bool `[R]`."""
        import torch

        if len(self.models) == 1:
            return torch.ones_like(micro.packed.targets, dtype=torch.bool)
        return (batch.columns.teacher[micro.samples] == number)[micro.packed.sequence]
