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
"""The run stops if a larger share of a step's verifications is killed, for CPU time or wall time, or if a larger share
of a judge's replies cannot be read."""

EXAMPLES = 3


def part_weights(advantage: str, expressions: Iterable[str]) -> dict[str, float]:
    """Part of the reward → its weight, if verifiers are composed and the advantage function reads it; else empty.

    Raises `ConfigError` if rows give one part different weights: the advantage could not know which applies.
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
    """Verifications of one step that gave no verdict (`UNVERIFIED`), with the first examples. Those that exceeded
    their CPU time are TIMEOUT here: a verifier that is too slow for every response must not train on zeros."""

    total: int = 0
    counts: Counter[Outcome] = field(default_factory=Counter)
    examples: dict[Outcome, list[str]] = field(default_factory=dict)

    def add(self, prompt: Prompt, verdict: Verdict) -> None:
        self.total += 1
        outcome = Outcome.TIMEOUT if verdict.detail.startswith(OVERRAN) else verdict.outcome
        if outcome not in UNVERIFIED:
            return
        self.counts[outcome] += 1
        by = "" if outcome is Outcome.ENVIRONMENT else f", {prompt.verifier}"
        example = f"{prompt.id}{by}: «{verdict.detail}»"
        found = self.examples.setdefault(outcome, [])
        if len(found) < EXAMPLES and example not in found:
            found.append(example)

    def add_samples(self, prompts: Mapping[int, Prompt], samples: SampleTable) -> None:
        """prompts: by `Sample.prompt`."""
        failed = (samples.is_(*UNVERIFIED) | samples.overran).nonzero()[0].tolist()
        self.total += len(samples) - len(failed)
        for place in failed:
            self.add(prompts[int(samples.prompt[place])], samples.verdict(place))

    def check(self, max_crash_rate: float, max_failure_rate: float) -> None:
        """Stop instead of training on the zeros of a failing verifier, or without the samples of a failing environment.
        Raises `RunFailed` with examples."""
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
