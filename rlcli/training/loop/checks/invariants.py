"""Invariants checked at every step, whatever the data and the model: a violation stops the run.

The controller compares what the workers report with its plan. The comparisons are exact, or exact up to rounding;
what may have a harmless reason is a warning instead (`rlcli.training.loop.warnings`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlcli.errors import REPORT, RunFailed
from rlcli.training.worker.plan_integrity import MIN_WATCHED, signature_weights, sum_over_turns

if TYPE_CHECKING:
    from rlcli.data.columns import SampleTable
    from rlcli.data.packer import Plan
    from rlcli.training.loop.batch_selection import SelectedSamples

REMEMBERED = 8
"""Steps whose seeds are compared with those of the current one."""
ROUNDING = 1e-6
"""Relative error of sums that ranks add up in another order."""


class Invariants:
    """Checks each step. Its only state is the seeds of the last steps."""

    def __init__(self) -> None:
        self._seeds: deque[Sequence[int]] = deque(maxlen=REMEMBERED)

    def check_seeds(self, samples: SampleTable) -> None:
        """Raise RunFailed if two samples have one seed, in this step or in the last ones."""
        import numpy as np

        seeds = samples.seed[samples.seed != 0]
        repeated = len(seeds) - len(np.unique(seeds))
        earlier = max((len(np.intersect1d(seeds, earlier_seeds)) for earlier_seeds in self._seeds), default=0)
        self._seeds.append(seeds)
        if repeated or earlier:
            where = f"{repeated} of this step's" if repeated else f"{earlier} of an earlier step's"
            raise RunFailed(f"{len(seeds)} samples share seeds: {where}; they repeat earlier samples", REPORT)

    def forget(self) -> None:
        """Forget all seeds: the run returns to an earlier step, whose samples may be generated again."""
        self._seeds.clear()

    def check_update(self, plan: Plan, selected: SelectedSamples, minibatch: int, sums: Mapping[str, float]) -> None:
        """Raise RunFailed if an update did not report what was planned."""
        import numpy as np

        if not sums or "bad" in sums:
            return
        planned = plan.minibatches[minibatch]
        active = np.fromiter((s for rank in planned.ranks for micro in rank for s in micro), np.int64)
        signatures = selected.columns.signatures[active]
        # `tokens` excludes those that the correction rejects; the mismatch includes them.
        forwarded = "mismatch_tokens" if "mismatch_tokens" in sums else "tokens"
        expected = {
            "check_denominator": ("response tokens in the loss's denominator", float(planned.tokens)),
            forwarded: ("response tokens forwarded", float(selected.columns.lengths[active].sum())),
            "check_rows": ("signatures of the samples trained on", float(signatures.sum())),
        }
        for name, (quantity, value) in expected.items():
            self._compare(quantity, value, sums.get(name, value), abs(value))
        if selected.columns.has("advantages"):
            advantages = selected.columns.advantages[active].astype(np.float64)
            size = float(np.abs(advantages).sum())
            total = float((sum_over_turns(advantages) * signature_weights(signatures)).sum())
            self._compare("advantages of the samples trained on", total, sums.get("check_advantages", total), size)
        if sums.get("check_watched", 0.0) >= MIN_WATCHED and not sums["check_moved"]:
            raise RunFailed(f"an optimizer step with gradient norm {sums['grad_norm']:.3g} changed no weight", REPORT)

    @staticmethod
    def _compare(quantity: str, expected: float, reported: float, size: float) -> None:
        if not math.isclose(reported, expected, rel_tol=ROUNDING, abs_tol=ROUNDING * size):
            raise RunFailed(f"{quantity}: {reported:.10g} over all workers, {expected:.10g} by the plan", REPORT)
