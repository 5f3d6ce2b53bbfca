"""The subject of an audit: an expression, the kind of its answers and the form of a right answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlcli.errors import VerifierError
from rlcli.rewards.crash import without_response
from rlcli.rewards.expression import Composition, Term
from rlcli.rewards.gold_verifiers import gold_writer
from rlcli.rewards.processes.fork_server import Facts
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.verifier_modules import module_of
from rlcli.rewards.verifier_registry import target
from rlcli.types import Outcome, VerifyRequest

KINDS = ("number", "latex", "choice", "text", "code", "countdown", "shape", "length")

JUDGED = "judged"
"""The ANSWER_KIND of a judge's module."""

Gold = Callable[[VerifyRequest], str]


class GoldFailed(Exception):
    """A module's `gold` did not write a response for a row; the message has the reason."""


@dataclass(frozen=True)
class Subject:
    """A verifier, or a sum of several, as the audit uses it."""

    expression: str
    """Expression for the scoring pool."""
    kind: str
    """The ANSWER_KIND of its first term; empty if it declares none."""
    gold: Gold | None
    """Writes the gold response of the first term; None if it has none."""
    has_options: bool
    """True if the first term has options, which its gold does not receive."""
    composed: bool
    """True if scores are added, so that 1 is not the full score."""

    @property
    def full_score(self) -> bool:
        """True if a right answer scores 1, which is false for sums and penalties."""
        return not self.composed and self.kind != "length"


def refuse_installed_judges(compositions: Iterable[Composition]) -> None:
    """Raise `VerifierError` if an expression begins with a judge of an installed package, before it is loaded: a judge
    would call its endpoint."""
    for composition in compositions:
        if ":" not in composition.terms[0].ref:
            _refuse_judge(composition, getattr(module_of(composition.terms[0].ref), "ANSWER_KIND", ""))


def _refuse_judge(composition: Composition, kind: str) -> None:
    if kind == JUDGED:
        judge = composition.terms[0].verifier
        raise VerifierError(f"'{composition}' begins with a judge", f"audit the judge alone: {judge}")


def make_subject(composition: Composition, facts: Facts, golds: ScoringPool) -> Subject:
    """The subject of an audit of `composition`. facts: of the loaded expression. golds: runs the module's `gold`, which
    is untrusted code. Raises `VerifierError` if the kind of its answers is unknown."""
    first = composition.terms[0]
    kind = facts.answer_kind
    _refuse_judge(composition, kind)
    if kind and kind not in KINDS:
        raise VerifierError(
            f"the verifier '{first.ref}': its module's ANSWER_KIND is {kind!r}", f"make it one of {', '.join(KINDS)}"
        )
    gold = _gold(first, golds) if facts.has_gold else None
    return Subject(str(composition), kind, gold, bool(first.options), composition.is_sum)


def _gold(term: Term, pool: ScoringPool) -> Gold:
    """The `gold` of the module that has this verifier, run in a process of `pool`."""
    expression = gold_writer(target(term.ref), term)

    def gold(request: VerifyRequest) -> str:
        verdict = pool.submit(expression, request).result()
        if verdict.outcome is not Outcome.OK:
            raise GoldFailed(without_response(verdict.detail))
        return verdict.answer or ""

    return gold
