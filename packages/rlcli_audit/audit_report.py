"""The findings of an audit, and whether it passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlcli.rewards.latency import Latency
from rlcli_audit.probes import Group

END_CHARS = 400
"""Number of characters kept from the end of a response."""


@dataclass
class Tally:
    """The results of the probes of one kind. failed: verifications that crashed or timed out, none of them expected."""

    group: Group
    kind: str
    tried: int = 0
    as_expected: int = 0
    failed: int = 0

    @property
    def share(self) -> float:
        return self.as_expected / self.tried if self.tried else 1.0


def percent(right: int, tried: int) -> str:
    """A share as text, rounded down: 100% means all."""
    return "100%" if right == tried else f"{int(1000 * right / tried) / 10:.1f}%"


@dataclass(frozen=True, slots=True)
class Surprise:
    """An unexpected verdict. row: counted from 0. response_end: the end of the verified response. images: digests and
    sizes of the row's pictures."""

    row: int
    group: Group
    kind: str
    verifier: str
    ground_truth: str
    response_end: str
    score: float
    outcome: str
    extracted: str | None
    detail: str
    images: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Determinism:
    """Probes verified again, in another order and by another process. differing: those whose verdict changed."""

    checked: int = 0
    differing: tuple[Surprise, ...] = ()


@dataclass(frozen=True)
class Report:
    """An audit's outcome.

    rows: number audited, of rows_in_file. forms: how answers were stated, by verifier. golds: rows by how many of their
    right answers were tried (see the tallies of the group `gold`). seconds: duration of the audit.
    """

    verifier: str
    data: str
    seed: int
    strict: bool
    rows: int
    rows_in_file: int
    forms: dict[str, str]
    tallies: tuple[Tally, ...]
    surprises: tuple[Surprise, ...]
    determinism: Determinism
    latency: Latency
    verifications: int
    seconds: float
    notes: tuple[str, ...] = field(default=())

    @property
    def faults(self) -> list[str]:
        """The reasons why the audit fails; empty if it passes."""
        return [
            *self._unexpected(grave=True),
            *(self._unexpected(grave=False) if self.strict else []),
            *self._unstable(),
        ]

    @property
    def warnings(self) -> list[str]:
        """Problems that do not fail it."""
        return [] if self.strict else self._unexpected(grave=False)

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def per_second(self) -> float:
        return self.verifications / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The whole report, with every surprise."""
        plain = asdict(self)
        plain["tallies"] = [asdict(tally) | {"share": tally.share} for tally in self.tallies]
        return {
            "passed": self.passed,
            "faults": self.faults,
            "warnings": self.warnings,
            "verifications_per_second": self.per_second,
            **plain,
        }

    def _unexpected(self, *, grave: bool) -> list[str]:
        found = []
        for group in Group:
            kinds = [tally for tally in self.tallies if tally.group is group]
            missed = sum(tally.tried - tally.as_expected for tally in kinds)
            if missed and group.grave == grave:
                tried = sum(tally.tried for tally in kinds)
                word = "not accepted" if group.accepted else "not cleanly rejected"
                found.append(f"{missed:,} of {tried:,} {PLURALS[group]} {word}")
        return found

    def _unstable(self) -> list[str]:
        differing = len(self.determinism.differing)
        return [f"{differing} of {self.determinism.checked} verdicts differ when repeated"] if differing else []


PLURALS = {
    Group.GOLD: "gold answers",
    Group.EQUIVALENT: "equivalent forms",
    Group.NEAR_MISS: "near-misses",
    Group.HEDGE: "hedges",
    Group.EXPLOIT: "exploits",
}
