"""Records of a worker for the log-prob check: log-probs of engine and trainer for equal tokens and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcli.algorithms.correction.log_prob_check import LogProbComparison, joined, sample_table

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Float
    from torch import Tensor

    from rlcli.data.trajectories import Trajectory
    from rlcli.training.worker.calls import Row
    from rlcli.training.worker.train_batch import MicroBatch


class LogProbRecord:
    """The records of one rank. The samples of a step are compared: their engine log-probs came with them, and the
    trainer's are those of the first forward pass, before the step's first optimizer step. Tokens of earlier weights are
    left out.
    """

    def __init__(self) -> None:
        self.version = 0
        """Of the trainer's weights, as a number of weight syncs."""
        self.equal_weights = False
        """No optimizer step was taken since that sync."""
        self._log_probs: dict[int, tuple[MicroBatch, Tensor]] = {}
        self._rows: list[Trajectory] = []

    def begin(self, version: int) -> None:
        """Start a step: no optimizer step was taken since the weight sync `version`."""
        self.version, self.equal_weights = version, True
        self._log_probs = {}

    def weights_changed(self) -> None:
        """Stop recording for this step: an optimizer step was taken, and the weights differ from the engine's."""
        self.equal_weights = False

    @property
    def tokens(self) -> int:
        """Tokens of the current weights whose log-probs were kept; 0 after `weights_changed`."""
        if not self.equal_weights:
            return 0
        return sum(
            int(sampled_by(row, self.version).sum()) for micro, _ in self._log_probs.values() for row in micro.rows
        )

    def record(self, micro: MicroBatch, log_probs: Float[Tensor, " R"]) -> None:
        """Keep the trainer's log-probs of a micro-batch. A later call for the same one replaces the first."""
        if self.equal_weights and not micro.empty:
            self._log_probs[id(micro)] = micro, log_probs.detach()

    def comparison(self) -> LogProbComparison:
        """Compare the samples recorded in this step, and forget them."""
        import numpy as np

        from rlcli.model.device_copies import download

        tables: list[np.ndarray] = []
        micros = [micro for micro, _ in self._log_probs.values()]
        log_probs = [values.float() for _, values in self._log_probs.values()]
        on_host = download([*log_probs, *(micro.tokens.rollout_log_probs for micro in micros)])
        arrays = [tensor.numpy() for tensor in on_host]
        for micro, trainer, engine in zip(micros, arrays, arrays[len(micros) :], strict=False):
            current = np.concatenate([sampled_by(row, self.version) for row in micro.rows])
            # A trainer that computes no number is the update guard's to report: its gradient is bad.
            used = current & np.isfinite(trainer)
            sample: np.ndarray = np.repeat(np.arange(len(micro.rows)), [row.response_tokens for row in micro.rows])
            lengths = np.bincount(sample[used], minlength=len(micro.rows))
            tables.append(sample_table(trainer[used], engine[used], lengths, sampled=True))
        self._log_probs = {}
        return LogProbComparison.of(joined(tables))

    def remember(self, rows: Sequence[Trajectory]) -> None:
        """Keep a step's samples for `recent`: no earlier ones, so that a run that resumes equals one that does not."""
        self._rows = list(rows)

    def recent(self, tokens: int) -> list[Row]:
        """Samples of the step with about this many response tokens in all, each the tokens of its last branch and how
        many of them are its prompt; none with images."""
        rows: list[Row] = []
        for row in self._rows:
            branch = row.branches[-1]
            if not branch.images and branch.response_tokens and tokens > 0:
                rows.append((branch.tokens, branch.prompt_tokens))
                tokens -= branch.response_tokens
        return rows


def sampled_by(row: Trajectory, version: int) -> Bool[np.ndarray, " R"]:
    """Mask of the response tokens of a trajectory that the weights `version` sampled."""
    import numpy as np

    parts = [np.full(span.end - span.start, span.version == version) for span in row.spans if span.speaker == "policy"]
    mask: np.ndarray = np.concatenate([np.zeros(0, bool), *parts])
    return mask
