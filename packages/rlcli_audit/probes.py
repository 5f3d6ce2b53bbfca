"""Probes: responses for which the audit knows in advance whether they are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rlcli.types import VerifyRequest


class Group(StrEnum):
    """Relation of a probe to the answer, which decides the expected verdict and the severity of another one."""

    GOLD = "gold"
    """The row's right answer: the response that came with it, or the verifier's statement of its ground truth."""
    EQUIVALENT = "equivalent"
    """The same answer in another form."""
    NEAR_MISS = "near-miss"
    """Another answer, almost the right one, or the right one retracted."""
    HEDGE = "hedge"
    """The right answer among others, without a choice."""
    EXPLOIT = "exploit"
    """No answer, or a wrong one, with a trick."""

    @property
    def accepted(self) -> bool:
        """True if a verifier must accept it."""
        return self in (Group.GOLD, Group.EQUIVALENT)

    @property
    def rule(self) -> str:
        """The expected verdict, in words."""
        return f"{'must' if self.grave else 'should'} be {'accepted' if self.accepted else 'rejected'}"

    @property
    def grave(self) -> bool:
        """True if one unexpected verdict fails the audit; the other groups warn, unless the audit is strict."""
        return self in (Group.GOLD, Group.NEAR_MISS, Group.EXPLOIT)


@dataclass(frozen=True, slots=True)
class Probe:
    """A response to verify."""

    group: Group
    """Relation to the right answer, which decides the expected verdict."""
    kind: str
    """Change to the right answer, for example `off by one`."""
    completion: str
    """Text of the response."""


@dataclass(frozen=True)
class Case:
    """A row and how its answer is stated."""

    request: VerifyRequest
    """The row, with a response that the verifier accepted as its completion."""
    answer: str
    """Its ground truth without a solution."""
    state: Callable[[str], str | None]
    """Builds a response with another text as the answer, in the form that this verifier reads; None if it
    cannot."""

    def stated(self, group: Group, kind: str, text: str) -> list[Probe]:
        """The probe that states `text` as the answer; empty if it cannot be stated."""
        response = self.state(text)
        return [Probe(group, kind, response)] if response else []

    @property
    def prompt(self) -> str:
        """All messages of the prompt, as one text."""
        return "\n".join(message["content"] for message in self.request.prompt)
