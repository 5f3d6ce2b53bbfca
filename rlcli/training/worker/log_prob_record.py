"""What a worker records for the log-prob check: log-probs of engine and trainer for equal tokens and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcli.algorithms.correction.log_prob_check import Comparison, joined, sample_table

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rlcli.data.trajectories import Trajectory
    from rlcli.training.worker.train_batch import MicroBatch


class LogProbRecord:
    """One rank's part. A step's own samples are compared: their engine log-probs came with them, and the trainer's are
    those of the first forward pass, before the step's first optimizer step. Tokens of earlier weights are left out.

    version: of the trainer's weights, as a number of weight syncs. equal_weights: no optimizer step was taken since.
    """

    def __init__(self) -> None:
        self.version = 0
        self.equal_weights = False
        self._log_probs: dict[int, tuple[MicroBatch, Tensor]] = {}
        self._rows: list[Trajectory] = []

    def begin(self, version: int) -> None:
        """A step begins: no optimizer step was taken since the weight sync `version`."""
        self.version, self.equal_weights = version, True
        self._log_probs = {}

    def end(self) -> None:
        """An optimizer step was taken: from here on the weights differ from the engine's."""
        self.equal_weights = False

    @property
    def tokens(self) -> int:
        """Tokens of the current weights whose log-probs were kept since the last call of `end`."""
        if not self.equal_weights:
            return 0
        return sum(
            int(drawn_by(row, self.version).sum()) for micro, _ in self._log_probs.values() for row in micro.rows
        )

    def saw(self, micro: MicroBatch, log_probs: Tensor) -> None:
        """Keep the trainer's log-probs of a micro-batch, `[R]`. A later call for the same one replaces the first."""
        if self.equal_weights and not micro.empty:
            self._log_probs[id(micro)] = micro, log_probs.detach()

    def comparison(self) -> Comparison:
        """Of all samples recorded in this step, which are then forgotten."""
        import numpy as np

        from rlcli.model.device_copies import download

        tables: list[np.ndarray] = []
        micros = [micro for micro, _ in self._log_probs.values()]
        log_probs = [values.float() for _, values in self._log_probs.values()]
        on_host = download([*log_probs, *(micro.tokens.rollout_log_probs for micro in micros)])
        arrays = [tensor.numpy() for tensor in on_host]
        for micro, trainer, engine in zip(micros, arrays, arrays[len(micros) :], strict=False):
            current = np.concatenate([drawn_by(row, self.version) for row in micro.rows])
            # A trainer that computes no number is the update guard's to report: its gradient is bad.
            used = current & np.isfinite(trainer)
            sample: np.ndarray = np.repeat(np.arange(len(micro.rows)), [row.drawn_tokens for row in micro.rows])
            lengths = np.bincount(sample[used], minlength=len(micro.rows))
            tables.append(sample_table(trainer[used], engine[used], lengths, drawn=True))
        self._log_probs = {}
        return Comparison.of(joined(tables))

    def remember(self, rows: Sequence[Trajectory]) -> None:
        """Keep a step's samples for `recent`: no earlier ones, so that a run that resumes equals one that does not."""
        self._rows = list(rows)

    def recent(self, tokens: int) -> list[tuple[np.ndarray, int]]:
        """Samples of the step with about this many drawn tokens in all, each the int32 tokens of its last branch and
        how many of them are its prompt; none with pictures."""
        rows: list[tuple[np.ndarray, int]] = []
        for row in self._rows:
            branch = row.branches[-1]
            if not branch.pictures and branch.drawn_tokens and tokens > 0:
                rows.append((branch.tokens, branch.prompt_tokens))
                tokens -= branch.drawn_tokens
        return rows


def drawn_by(row: Trajectory, version: int) -> np.ndarray:
    """Which of the drawn tokens of a trajectory the weights `version` drew: bool `[D]`."""
    import numpy as np

    parts = [np.full(span.end - span.start, span.version == version) for span in row.spans if span.speaker == "policy"]
    mask: np.ndarray = np.concatenate([np.zeros(0, bool), *parts])
    return mask
