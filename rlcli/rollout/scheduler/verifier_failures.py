"""Failed verifications of a step, and the weights of the parts of a reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlcli.data.columns import SampleTable
from rlcli.errors import ConfigError, RunFailed
from rlcli.rewards.expression import parse
from rlcli.rewards.processes.scoring_worker import OVERRAN
from rlcli.types import UNVERIFIED, Outcome, Prompt, Verdict

MOST_TIMEOUTS = 0.5
"""Largest share of a step's verifications that may be killed, for CPU time or wall time, or of a judge's replies that
may be unreadable. Beyond it the run stops."""

EXAMPLES = 3
"""Examples of each outcome in an error message."""


def part_weights(advantage: str, expressions: Iterable[str]) -> dict[str, float]:
    """Weight of each part of the reward, if verifiers are composed and the advantage function reads weights; else
    empty.

    Raises `ConfigError` if rows give one part different weights: the advantage could not know which one applies.
    """
    from rlcli.algorithms import advantages

    if "part_weights" not in advantages.part(advantage).needs:
        return {}
    weights: dict[str, float] = {}
    for expression in expressions:
        for name, weight in parse(expression).weights.items():
            if weights.setdefault(name, weight) != weight:
                raise ConfigError(
                    f"the part {name} of the reward weighs {weights[name]:g} in some rows and {weight:g} in others",
                    "set one expression for all rows with verifier.name, or use an advantage that reads no weights",
                )
    return weights


@dataclass
class Failures:
    """Verifications of one step that returned no verdict (`UNVERIFIED`). Those that exceeded their CPU time count as
    TIMEOUT: a run must not train on the zeros of a verifier that is too slow for every response."""

    total: int = 0
    """All verifications."""
    counts: Counter[Outcome] = field(default_factory=Counter)
    """Failed ones, by outcome."""
    examples: dict[Outcome, list[str]] = field(default_factory=dict)
    """The first examples of each outcome, for error messages."""

    def add(self, prompt: Prompt, verdict: Verdict) -> None:
        """Add one verification."""
        self.total += 1
        outcome = Outcome.TIMEOUT if verdict.detail.startswith(OVERRAN) else verdict.outcome
        if outcome not in UNVERIFIED:
            return
        self.counts[outcome] += 1
        by = "" if outcome is Outcome.ENVIRONMENT else f", {prompt.verifier}"
        example = f"{prompt.id}{by}: «{verdict.detail}»"
        examples = self.examples.setdefault(outcome, [])
        if len(examples) < EXAMPLES and example not in examples:
            examples.append(example)

    def add_samples(self, prompts: Mapping[int, Prompt], samples: SampleTable) -> None:
        """Add the verifications of samples. prompts: by `Sample.prompt`."""
        failed = (samples.is_(*UNVERIFIED) | samples.overran).nonzero()[0].tolist()
        self.total += len(samples) - len(failed)
        for index in failed:
            self.add(prompts[int(samples.prompt[index])], samples.verdict(index))

    def check(self, max_crash_rate: float, max_failure_rate: float) -> None:
        """Raise `RunFailed`, with examples, if too many verifications or environments failed: a run must not train on
        the zeros of a failing verifier, or without the samples of a failing environment."""
        crashed, killed, lost = (self.counts[o] for o in (Outcome.CRASH, Outcome.TIMEOUT, Outcome.ENVIRONMENT))
        if lost > max_failure_rate * self.total:
            raise RunFailed(
                f"the environment of {lost} of {self.total} samples failed twice, more than "
                f"environment.max_failure_rate = {max_failure_rate:g}: "
                f"{'; '.join(self.examples[Outcome.ENVIRONMENT])}",
                "fix the environment (rlcli env try), or raise environment.max_failure_rate",
            )
        if crashed > max_crash_rate * self.total:
            raise RunFailed(
                f"{crashed} of {self.total} verifications crashed, more than verifier.max_crash_rate = "
                f"{max_crash_rate:g}: {'; '.join(self.examples[Outcome.CRASH])}",
                "fix the verifier or the rows, or raise verifier.max_crash_rate",
            )
        if killed > MOST_TIMEOUTS * self.total:
            raise RunFailed(
                f"{killed} of {self.total} verifications were killed at the deadline: "
                f"{'; '.join(self.examples[Outcome.TIMEOUT])}",
                "fix the verifier, or raise verifier.deadline_s",
            )
        unparsed = self.counts[Outcome.UNPARSED]
        if unparsed > MOST_TIMEOUTS * self.total:
            raise RunFailed(
                f"{unparsed} of {self.total} replies of the judge could not be read: "
                f"{'; '.join(self.examples[Outcome.UNPARSED])}",
                "raise its max_tokens, or use a judge that supports structured output",
            )
