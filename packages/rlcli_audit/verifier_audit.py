"""Run an audit: first the gold answers, then probes made from the accepted ones, then a part of them again."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.errors import ConfigError, DataError, VerifierError
from rlcli.images.image_descriptions import described
from rlcli.rewards.crash import without_response
from rlcli.rewards.expression import Composition, parse
from rlcli.rewards.latency import Latency
from rlcli.rewards.processes.scoring_pool import ScoringPool, in_order
from rlcli.rewards.processes.scoring_worker import OVERRAN
from rlcli.rewards.verifier_checks import check_loaded, key_notes
from rlcli.rewards.verifier_registry import of_row
from rlcli.types import UNVERIFIED, Outcome, Prompt, Verdict, VerifyRequest
from rlcli_audit import mutations
from rlcli_audit.audit_images import split_of
from rlcli_audit.audit_report import END_CHARS, Determinism, Report, Surprise, Tally
from rlcli_audit.audit_subject import GoldFailed, Subject, refuse_installed_judges, subject
from rlcli_audit.forms import OWN, Form, accepted, bare, choose, stating
from rlcli_audit.probes import Case, Group, Probe

CALIBRATION_ROWS = 12
"""Rows on which the forms of an answer are tried."""

REPEATED_PROBES = 200
"""Maximum number of repeated verifications; also at most REPEATED_SHARE of all."""

REPEATED_SHARE = 0.1

LONG_CHARS = 100_000
MAX_LONG_PROBES = 50
"""Maximum number of probes longer than LONG_CHARS per kind: they test the effect of length."""

MOST_TIMEOUTS = 10
"""Maximum number of timeouts of a kind before it is skipped: it has failed, and the rest would take hours."""

CRASHING_ROWS = 4
"""Rows of a verifier on which it is tried before all else."""
WITHOUT_ANSWER = ("?", "I do not know.")
"""Responses that no verifier accepts."""

RESPONSE = "the row's response"
STATEMENT = "the answer stated"

OnProgress = Callable[[str, int, int], None]
"""Called with the current activity, how much of it is done, and the total."""


@dataclass(frozen=True)
class Options:
    """limit: the first rows only, 0 for all. mutations: probes per row besides its gold, 0 for all. processes,
    deadline_s, sandbox: as the pool takes them. strict: warnings fail the audit too."""

    limit: int = 0
    seed: int = 0
    mutations: int = 12
    processes: int = 2
    deadline_s: float = 5.0
    sandbox: str = ""
    strict: bool = False


def audit(
    verifier: str, data: Path, options: Options, on_progress: OnProgress = lambda what, done, total: None
) -> Report:
    """Audit the expression `verifier` (`auto`: what each row names) on a parquet file or a folder's train.parquet.

    Raises `DataError` for an unusable file and for a row whose ground truth the verifier cannot read, `VerifierError`
    for a verifier that fails on every row, and what the pool raises.
    """
    started = time.monotonic()
    prompts = _read(data, verifier)
    rows = prompts[: options.limit] if options.limit else prompts
    compositions = _compositions(verifier, rows, data)
    distinct = {str(one): one for one in dict.fromkeys(compositions)}
    expressions = sorted(distinct)
    refuse_installed_judges(distinct.values())
    with (
        ScoringPool(options.processes, options.deadline_s, expressions, options.sandbox) as pool,
        ScoringPool(1, options.deadline_s, expressions, options.sandbox) as another,
    ):
        check_loaded(pool.loaded, options.deadline_s, options.sandbox, "--deadline")
        known = {one: subject(one, pool.loaded[name], another) for name, one in distinct.items()}
        subjects = [known[one] for one in compositions]
        run = _Audit(rows, subjects, pool, options, on_progress)
        run.refuse_crashing()
        run.gold()
        run.mutated()
        sent = key_notes(pool.loaded)
        if not run.seconds:
            raise DataError(
                f"data: {data}: no row has a right answer to try"
                + (f"; the verifier crashes on some responses: {run.crash}" if run.crash else ""),
                "fix the verifier" if run.crash else "give rows an extra_info.response, or the verifier a gold",
            )
        determinism = run.again(another)
    return Report(
        verifier=verifier,
        data=str(data),
        seed=options.seed,
        strict=options.strict,
        rows=len(rows),
        rows_in_file=len(prompts),
        forms={name: form.name if form else "none found" for name, form in run.forms.items()},
        tallies=tuple(sorted(run.tallies.values(), key=lambda tally: list(Group).index(tally.group))),
        surprises=tuple(run.surprises),
        determinism=determinism,
        latency=Latency.of(run.seconds),
        verifications=len(run.seconds),
        seconds=time.monotonic() - started,
        notes=(*sent, *run.notes()),
    )


def _read(data: Path, verifier: str) -> Sequence[Prompt]:
    names_rows_own = parse(verifier).names_rows_own
    return read_prompts(data, split_of(data), "auto" if names_rows_own else verifier)


def _compositions(verifier: str, rows: Sequence[Prompt], data: Path) -> list[Composition]:
    """The verifier of each row."""
    composition = parse(verifier).located()
    if not composition.names_rows_own:
        return [composition] * len(rows)
    known: dict[str, Composition] = {}
    for number, row in enumerate(rows):
        if row.verifier not in known:
            try:
                known[row.verifier] = of_row(composition, row.verifier).located()
            except ConfigError as error:
                raise DataError(f"data: {data}, row {number} (the first is 0): {error.message}", error.hint) from error
    return [known[row.verifier] for row in rows]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One verification: its row, its verifier, and its probe."""

    row: int
    subject: Subject
    probe: Probe
    request: VerifyRequest


@dataclass
class _Audit:
    """A running audit. rights: by row, the right response from which its probes are made. crash: the first that was met
    while the forms of an answer were tried."""

    rows: Sequence[Prompt]
    subjects: Sequence[Subject]
    pool: ScoringPool
    options: Options
    on_progress: OnProgress
    forms: dict[str, Form | None] = field(default_factory=dict)
    rights: dict[int, tuple[str, bool]] = field(default_factory=dict)
    tallies: dict[tuple[Group, str], Tally] = field(default_factory=dict)
    surprises: list[Surprise] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sample: list[tuple[_Asked, Verdict]] = field(default_factory=list)
    untried: list[int] = field(default_factory=list)
    timeouts: Counter[tuple[Group, str]] = field(default_factory=Counter)
    crash: str = ""

    def __post_init__(self) -> None:
        self.random = random.Random(self.options.seed)
        self.requests = [row.request() for row in self.rows]

    def refuse_crashing(self) -> None:
        """Raise `VerifierError` if a verifier crashes on its first rows, whatever the response: nothing could be tried.

        One that crashes in the same way on the first row alone cannot read that row, which `gold` reports.
        """
        places: dict[str, list[int]] = {}
        for number, one in enumerate(self.subjects):
            if len(some := places.setdefault(one.expression, [])) < CRASHING_ROWS:
                some.append(number)
        for expression, numbers in places.items():
            requests = [
                replace(self.requests[number], completion=text)
                for number in numbers
                for text in (self.requests[number].ground_truth, *WITHOUT_ANSWER)
            ]
            verdicts = self._verify([(expression, request) for request in requests])
            if all(verdict.outcome is Outcome.CRASH for verdict in verdicts):
                of_all = "every row" if len(numbers) == len(self.rows) else f"the first {len(numbers)} rows"
                raise VerifierError(
                    f"{expression} fails on {of_all}, whatever the response: {verdicts[0].detail}", "fix it"
                )

    def gold(self) -> None:
        """Try the right answers of every row."""
        self._choose_forms()
        failed: dict[int, str] = {}
        for asked, verdict in self._verdicts(self._golds(), "gold answers", 2 * len(self.rows)):
            self._count(asked, verdict)
            if accepted(verdict, asked.subject):
                # A statement is short and plain: the best source of probes.
                stated = asked.probe.kind == STATEMENT
                if stated or asked.row not in self.rights:
                    self.rights[asked.row] = (asked.request.completion, stated)
            elif verdict.outcome is Outcome.CRASH:
                failed[asked.row] = verdict.detail
        self._refuse_unreadable(failed)

    def mutated(self) -> None:
        """Try the probes made from the accepted right answers."""
        for asked, verdict in self._verdicts(self._mutations(), "mutations", len(self.rights) * self.options.mutations):
            self._count(asked, verdict)

    def again(self, pool: ScoringPool) -> Determinism:
        """Repeat some verifications: in reverse order, in another process."""
        chosen = self.sample[: max(1, int(REPEATED_SHARE * len(self.seconds)))][::-1]
        verdicts = [
            verdict for _, verdict in self._verdicts((asked for asked, _ in chosen), "determinism", len(chosen), pool)
        ]
        differing = [
            self._surprise(asked, verdict)
            for (asked, before), verdict in zip(chosen, verdicts, strict=True)
            if (verdict.score, verdict.outcome, verdict.answer) != (before.score, before.outcome, before.answer)
        ]
        return Determinism(len(chosen), tuple(differing))

    def notes(self) -> Iterator[str]:
        """Notes for the reader on how it was done."""
        kinds = {one.expression: one for one in self.subjects}
        for name, form in self.forms.items():
            if form is None:
                yield f"{name}: no usual statement of the answer is accepted; probes are made of the rows' responses"
            elif form.name != OWN:
                yield f"{name}: it has no gold that fits; answers are stated as: {form.name}"
            if not kinds[name].kind:
                yield f"{name}: its module sets no ANSWER_KIND; the kind was detected from each ground truth"
            elif kinds[name].kind == mutations.WITHOUT_ANSWER:
                yield f"{name}: it reads no answer, so only its gold can be tried"
        for (group, kind), times in self.timeouts.items():
            if times >= MOST_TIMEOUTS and group is not Group.GOLD:
                yield f"{kind} was given up after {times} timeouts"
        if self.untried:
            some = ", ".join(map(str, self.untried[:5]))
            yield f"{len(self.untried)} rows have no right answer to try (the first: {some})"

    def _choose_forms(self) -> None:
        by_expression: dict[str, list[int]] = {}
        for number, one in enumerate(self.subjects):
            by_expression.setdefault(one.expression, []).append(number)
        for expression, numbers in by_expression.items():
            step = max(1, len(numbers) // CALIBRATION_ROWS)
            some = [self.requests[number] for number in numbers[::step][:CALIBRATION_ROWS]]
            one = self.subjects[numbers[0]]
            self.forms[expression] = choose(one, some, self._verify)

    def _golds(self) -> Iterator[_Asked]:
        for number, (one, request) in enumerate(zip(self.subjects, self.requests, strict=True)):
            response = request.extra_info.get("response")
            given = [(RESPONSE, response)] if isinstance(response, str) and response.strip() else []
            statement = self._statement(number, one, request)
            given += [(STATEMENT, statement)] if statement else []
            if not given:
                self.untried.append(number)
            for kind, text in given:
                yield _Asked(number, one, Probe(Group.GOLD, kind, text), replace(request, completion=text))

    def _statement(self, number: int, one: Subject, request: VerifyRequest) -> str | None:
        form = self.forms[one.expression]
        try:
            return form.right(request) if form else None
        except GoldFailed as error:
            raise self._unreadable(number, str(error)) from error

    def _mutations(self) -> Iterator[_Asked]:
        tried: Counter[tuple[Group, str]] = Counter()
        for number, (right, stated) in sorted(self.rights.items()):
            one, request = self.subjects[number], replace(self.requests[number], completion=right)
            answer = bare(request.ground_truth)
            form = self.forms[one.expression] if stated else None
            case = Case(request, answer, stating(form, request, answer))
            made = self._allowed(mutations.probes(case, one.kind), tried)
            # As many of each kind as possible: kinds that few rows allow go first.
            probes = sorted(made, key=lambda probe: (tried[probe.group, probe.kind], self.random.random()))
            for probe in probes[: self.options.mutations or None]:
                tried[probe.group, probe.kind] += 1
                yield _Asked(number, one, probe, replace(request, completion=probe.completion))

    def _allowed(self, made: Iterable[Probe], tried: Counter[tuple[Group, str]]) -> Iterator[Probe]:
        for probe in made:
            kind = probe.group, probe.kind
            long = len(probe.completion) >= LONG_CHARS and tried[kind] >= MAX_LONG_PROBES
            if not long and self.timeouts[kind] < MOST_TIMEOUTS:
                yield probe

    def _verify(self, pairs: Sequence[tuple[str, VerifyRequest]]) -> list[Verdict]:
        verdicts = [future.result() for future in [self.pool.submit(name, request) for name, request in pairs]]
        crashed = (verdict.detail for verdict in verdicts if verdict.outcome is Outcome.CRASH)
        self.crash = self.crash or next(crashed, "")
        return verdicts

    def _verdicts(
        self, asked: Iterable[_Asked], what: str, total: int, pool: ScoringPool | None = None
    ) -> Iterator[tuple[_Asked, Verdict]]:
        """The verdicts, in order."""

        def submit(numbered: tuple[int, _Asked]) -> Future[Verdict]:
            done, one = numbered
            self.on_progress(what, done, total)
            return (pool or self.pool).submit(one.subject.expression, one.request)

        return ((one, verdict) for (_, one), verdict in in_order(enumerate(asked), submit))

    def _count(self, asked: _Asked, verdict: Verdict) -> None:
        probe = asked.probe
        tally = self.tallies.setdefault((probe.group, probe.kind), Tally(probe.group, probe.kind))
        overran = verdict.detail.startswith(OVERRAN)
        failed = overran or verdict.outcome in UNVERIFIED
        right = not failed and accepted(verdict, asked.subject) == probe.group.accepted
        tally.tried += 1
        tally.failed += failed
        self.timeouts[probe.group, probe.kind] += overran or verdict.outcome is Outcome.TIMEOUT
        tally.as_expected += right
        if not right:
            self.surprises.append(self._surprise(asked, verdict))
        self.seconds.append(verdict.latency_s)
        # A reservoir: each verification is as likely as any other to be done again.
        if len(self.sample) < REPEATED_PROBES:
            self.sample.append((asked, verdict))
        elif (place := self.random.randrange(len(self.seconds))) < REPEATED_PROBES:
            self.sample[place] = (asked, verdict)

    def _refuse_unreadable(self, failed: dict[int, str]) -> None:
        """Rows whose verification crashes in the same way for any response: the row is the cause."""
        for number, detail in sorted(failed.items()):
            one, request = self.subjects[number], self.requests[number]
            pairs = [(one.expression, replace(request, completion=text)) for text in WITHOUT_ANSWER]
            same = without_response(detail)
            if any(
                without_response(verdict.detail) != same or verdict.outcome is not Outcome.CRASH
                for verdict in self._verify(pairs)
            ):
                continue
            if len(failed) == len(self.rows) > 1:
                raise VerifierError(f"{one.expression} fails on every row, whatever the response: {detail}", "fix it")
            raise self._unreadable(number, detail, len(failed) - 1)

    def _unreadable(self, number: int, detail: str, others: int = 0) -> DataError:
        more = f" ({others} other rows fail too)" if others else ""
        return DataError(
            f"data: row {number} (the first is 0): {self.subjects[number].expression} cannot read the ground truth "
            f"{self.rows[number].ground_truth!r:.80}: {detail}{more}",
            "fix or drop that row, or name another verifier",
        )

    def _surprise(self, asked: _Asked, verdict: Verdict) -> Surprise:
        return Surprise(
            row=asked.row,
            group=asked.probe.group,
            kind=asked.probe.kind,
            verifier=asked.subject.expression,
            ground_truth=asked.request.ground_truth[-END_CHARS:],
            response_end=asked.probe.completion[-END_CHARS:],
            score=verdict.score,
            outcome=str(verdict.outcome),
            extracted=verdict.answer,
            detail=verdict.detail,
            images=described(self.rows[asked.row].images),
        )
