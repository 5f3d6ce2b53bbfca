"""The audit as one HTML page: no scripts, no external resources; all text from data or a model is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import log10
from pathlib import Path
from string import Template

from rlcli.errors import DataError
from rlcli.rewards.latency import Latency
from rlcli.support.files import replacing
from rlcli_audit.audit_images import html_images
from rlcli_audit.audit_report import PLURALS, Report, Tally, UnexpectedVerdict, percent
from rlcli_audit.probes import Group

MAX_SHOWN = 200
"""Maximum number of unexpected verdicts on the page; the JSON report has all."""

_HERE = Path(__file__).parent
# Characters that change how others are rendered are shown by name: otherwise a response could look like another one.
_RANGES = ((0, 9), (11, 32), (127, 160), (0x200B, 0x2010), (0x2028, 0x202F), (0x2060, 0x2070), (0xD800, 0xE000))
_HIDDEN = {code: f"⟨U+{code:04X}⟩" for start, end in _RANGES for code in range(start, end)} | {0xFEFF: "⟨U+FEFF⟩"}


def write_page(path: Path, report: Report) -> None:
    """Write the page, atomically. Raises `DataError` if `path` cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}", "give a writable path") from error


def page(report: Report) -> str:
    """The report as HTML."""
    latency, checks = report.latency, report.determinism
    return Template((_HERE / "page.html").read_text(encoding="utf-8")).substitute(
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        verifier=text(report.verifier),
        data=text(report.data),
        state="pass" if report.passed else "fail",
        verdict="Pass" if report.passed else "Fail",
        reasons=_reasons(report),
        tiles="".join(_tile(group, report.tallies) for group in Group),
        tables="".join(_table(group, report.tallies) for group in Group),
        histogram=histogram(latency),
        p50=_time(latency.p50),
        p90=_time(latency.p90),
        p99=_time(latency.p99),
        slowest=_time(latency.max),
        throughput=f"{report.per_second:,.0f}",
        verifications=f"{report.verifications:,}",
        seconds=f"{report.seconds:,.1f}",
        rows=f"{report.rows:,}" + (f" of {report.rows_in_file:,}" if report.rows < report.rows_in_file else ""),
        seed=report.seed,
        checked=checks.checked,
        differing=len(checks.differing),
        forms="".join(f"<li><code>{text(name)}</code>: {text(form)}</li>" for name, form in report.forms.items()),
        notes="".join(f"<li>{text(note)}</li>" for note in report.notes),
        surprises=_surprises(report),
    )


def text(value: str) -> str:
    """`value` as HTML text: escaped, and with hidden characters written out.

    >>> text("<b>\\u202e\\0")
    '&lt;b&gt;⟨U+202E⟩⟨U+0000⟩'
    """
    return escape(value.translate(_HIDDEN))


def histogram(latency: Latency) -> str:
    """A histogram (SVG) of the verification times, on a logarithmic scale of time."""
    width, height, floor = 720.0, 190.0, 160.0
    bar, highest = width / len(latency.counts), max(latency.counts)
    elements = []
    for index, count in enumerate(latency.counts):
        # At least one pixel: a single slow verification must stay visible.
        tall = max(1.0, 140.0 * count / highest) if count else 0.0
        shown = f"{count:,} took {_time(latency.bounds[index])} to {_time(latency.bounds[index + 1])}"
        elements.append(
            f'<rect x="{index * bar + 1:.1f}" y="{floor - tall:.1f}" width="{max(1.0, bar - 2):.1f}" '
            f'height="{tall:.1f}" rx="2"><title>{shown}</title></rect>'
        )
    for index, bound in enumerate(latency.bounds):
        if round(bound / 10 ** round(log10(bound)), 6) == 1:  # a power of ten
            middle = min(max(index * bar, 22.0), width - 22.0)
            elements.append(f'<text x="{middle:.1f}" y="{height - 8:.0f}">{_time(bound)}</text>')
            elements.append(f'<line x1="{index * bar:.1f}" x2="{index * bar:.1f}" y1="{floor}" y2="{floor + 6}"/>')
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="Histogram of latencies">'
        f'<line x1="0" x2="{width:.0f}" y1="{floor}" y2="{floor}"/>{"".join(elements)}</svg>'
    )


def _reasons(report: Report) -> str:
    lines = [("fault", line) for line in report.faults] + [("warning", line) for line in report.warnings]
    if not lines:
        lines = [("fine", "Every verdict is as expected.")]
    return "".join(f'<li class="{kind}">{text(line)}</li>' for kind, line in lines)


def _tile(group: Group, tallies: Iterable[Tally]) -> str:
    kinds = [tally for tally in tallies if tally.group is group]
    tried, right = sum(tally.tried for tally in kinds), sum(tally.as_expected for tally in kinds)
    share, title = percent(right, tried) if tried else "–", PLURALS[group].capitalize()
    return (
        f'<div class="tile {_state(group, right, tried)}"><h3>{title}</h3><p class="figure">{share}</p>'
        f"<p>{right:,} of {tried:,}<br>{group.rule}</p></div>"
    )


def _table(group: Group, tallies: Iterable[Tally]) -> str:
    kinds = [tally for tally in tallies if tally.group is group]
    if not kinds:
        return ""
    rows = []
    for tally in sorted(kinds, key=lambda x: (x.share, x.kind)):
        failed = f'<span class="note">{tally.failed:,} crashed or timed out</span>' if tally.failed else ""
        state = _state(group, tally.as_expected, tally.tried)
        rows.append(
            f'<tr class="{state}"><th scope="row">{text(tally.kind)}{failed}</th>'
            f'<td class="bar"><span style="width:{100 * tally.share:.2f}%"></span></td>'
            f"<td>{percent(tally.as_expected, tally.tried)}</td><td>{tally.as_expected:,} of {tally.tried:,}</td></tr>"
        )
    title = PLURALS[group].capitalize()
    return f"<section><h2>{title} <small>{group.rule}</small></h2><table>{''.join(rows)}</table></section>"


def _state(group: Group, right: int, tried: int) -> str:
    if right == tried:
        return "right" if tried else "none"
    return "grave" if group.grave else "mild"


def _surprises(report: Report) -> str:
    surprises = (*report.surprises, *report.determinism.differing)
    if not surprises:
        return "<p>None.</p>"
    shown = _evenly(sorted(surprises, key=lambda surprise: not surprise.group.grave))
    images = html_images(report, shown)
    hidden = len(surprises) - len(shown)
    footer = f"<p>And {hidden:,} more; <code>--json</code> lists them all.</p>" if hidden else ""
    return "".join(_surprise(surprise, images.get(surprise.row, "")) for surprise in shown) + footer


def _evenly(surprises: Sequence[UnexpectedVerdict]) -> list[UnexpectedVerdict]:
    """Select surprises round-robin over the kinds: the first of each, then the second, up to MAX_SHOWN."""
    seen: dict[tuple[str, str], int] = {}
    ranked = []
    for surprise in surprises:
        turn = seen[surprise.group, surprise.kind] = seen.get((surprise.group, surprise.kind), 0) + 1
        ranked.append((turn, surprise))
    selected = {id(surprise) for _, surprise in sorted(ranked, key=lambda pair: pair[0])[:MAX_SHOWN]}
    return [surprise for surprise in surprises if id(surprise) in selected]


def _surprise(surprise: UnexpectedVerdict, images: str) -> str:
    """A surprise as HTML. images: images of its row, as HTML."""
    state = "grave" if surprise.group.grave else "mild"
    facts = [("ground truth", surprise.ground_truth), ("extracted", surprise.extracted), ("detail", surprise.detail)]
    shown = "".join(f"<dt>{name}</dt><dd><code>{text(value)}</code></dd>" for name, value in facts if value)
    return (
        f'<details class="{state}"><summary><b>row {surprise.row}</b> {text(surprise.group)}: {text(surprise.kind)}'
        f"<span>{surprise.score:g} · {text(surprise.outcome)}</span></summary>"
        f"{f'<p class=images>{images}</p>' if images else ''}"
        f"<dl><dt>verifier</dt><dd><code>{text(surprise.verifier)}</code></dd>{shown}</dl>"
        f"<pre>{text(surprise.response_end)}</pre></details>"
    )


def _time(seconds: float) -> str:
    """A duration with its unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
