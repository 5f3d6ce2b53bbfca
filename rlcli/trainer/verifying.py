"""The verifiers of a run: known to load before a model does, and watched while they score."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlcli.config.schema import VerifierSection
from rlcli.data.table import verifiers_of
from rlcli.errors import ConfigError, RunFailed, UnknownName, VerifierError
from rlcli.sandbox import backend_name
from rlcli.scoring.checking import check_loaded
from rlcli.scoring.nursery import Nursery
from rlcli.scoring.registry import target
from rlcli.scoring.spec import Composition, parse
from rlcli.scoring.worker import OVERRAN
from rlcli.types import Outcome, Prompt, Verdict
from rlcli.workers.samples import Samples

MOST_TIMEOUTS = 0.5
"""A larger share of a step's verifications that are killed, for CPU time or by the clock, stops the run."""

EXAMPLES = 3


def check_verifiers(rows: Sequence[Prompt], section: VerifierSection) -> tuple[tuple[str, ...], str]:
    """Load what the rows name, in a process of its own, as others' code never runs here, and open the sandbox where one
    of them runs programs.

    Returns the expressions, each once, and the name of the sandbox's backend, seen to work here; empty where nobody
    needs it. Raises `VerifierError` for one that is not there or does not load, `ConfigError` for an option that it
    does not take or a `timeout_s` that its deadline cuts short, and `SetupError` where the sandbox cannot be had.
    """
    first = verifiers_of(rows)
    compositions = {expression: parse(expression) for expression in sorted(first)}
    for expression, composition in compositions.items():
        _check_names(composition, first[expression] if parse(section.name).names_rows_own else "")
    backend = backend_name("" if section.sandbox == "auto" else section.sandbox)
    with contextlib.closing(Nursery(backend)) as nursery:
        loaded = {name: nursery.load(composition) for name, composition in compositions.items()}
    return tuple(compositions), check_loaded(loaded, section.deadline_s, backend, "verifier.deadline_s")


def _check_names(composition: Composition, row: str) -> None:
    """Raise `VerifierError` for a verifier that there is not. row: the first that names it; empty: the user did."""
    for term in composition.terms:
        try:
            target(term.ref)
        except UnknownName as error:
            raise VerifierError(error.message + (f" (row {row})" if row else ""), error.mend) from None


def part_weights(advantage: str, expressions: Iterable[str]) -> dict[str, float]:
    """Part of the reward → its weight, where verifiers are composed and the advantage function reads it; else nothing.

    Raises `ConfigError` where rows weigh one part differently: the advantage could not tell which holds.
    """
    from rlcli.algorithms import advantages
    from rlcli.algorithms.named import inputs_of

    if "weights" not in inputs_of(advantages.get(advantage)):
        return {}
    weights: dict[str, float] = {}
    for expression in expressions:
        for name, weight in parse(expression).weights.items():
            if weights.setdefault(name, weight) != weight:
                raise ConfigError(
                    f"the part {name} of the reward weighs {weights[name]:g} in some rows and {weight:g} in others",
                    "give all rows one expression with verifier.name, or take an advantage that reads no weights",
                )
    return weights


@dataclass
class Failures:
    """Verifications of one step that crashed or were killed at a deadline, with the first examples. Those that used up
    their CPU time are TIMEOUT here: a verifier that is too slow for every response must not train on zeros."""

    total: int = 0
    counts: Counter[Outcome] = field(default_factory=Counter)
    examples: dict[Outcome, list[str]] = field(default_factory=dict)

    def add(self, prompt: Prompt, verdict: Verdict) -> None:
        self.total += 1
        outcome = Outcome.TIMEOUT if verdict.detail.startswith(OVERRAN) else verdict.outcome
        if outcome not in (Outcome.CRASH, Outcome.TIMEOUT):
            return
        self.counts[outcome] += 1
        said = f"{prompt.id}, {prompt.verifier}: «{verdict.detail}»"
        told = self.examples.setdefault(outcome, [])
        if len(told) < EXAMPLES and said not in told:
            told.append(said)

    def add_samples(self, prompts: Sequence[Prompt], samples: Samples) -> None:
        """prompts: as `Sample.prompt` counts them."""
        failed = (samples.is_(Outcome.CRASH, Outcome.TIMEOUT) | samples.overran).nonzero()[0].tolist()
        self.total += len(samples) - len(failed)
        for place in failed:
            self.add(prompts[samples.prompt[place]], samples.verdict(place))

    def check(self, max_crash_rate: float) -> None:
        """Stop rather than train on the zeros of a verifier that fails. Raises `RunFailed` with examples."""
        crashed, killed = self.counts[Outcome.CRASH], self.counts[Outcome.TIMEOUT]
        if crashed > max_crash_rate * self.total:
            raise RunFailed(
                f"{crashed} of {self.total} verifications crashed, more than verifier.max_crash_rate = "
                f"{max_crash_rate:g}: {'; '.join(self.examples[Outcome.CRASH])}",
                "mend the verifier or the rows, or raise verifier.max_crash_rate",
            )
        if killed > MOST_TIMEOUTS * self.total:
            raise RunFailed(
                f"{killed} of {self.total} verifications were killed at the deadline: "
                f"{'; '.join(self.examples[Outcome.TIMEOUT])}",
                "mend the verifier, or raise verifier.deadline_s",
            )
