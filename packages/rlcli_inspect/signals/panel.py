"""All signals of a run, from its metrics and its samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.runs.record_files import metrics_of
from rlcli_inspect.signals.metric_signals import Line, metric_signals
from rlcli_inspect.signals.sample_record import Record, examples_of
from rlcli_inspect.signals.sample_rows import Row, rescored_rows, sampled_rows
from rlcli_inspect.signals.sample_signals import paid_signals, property_signals
from rlcli_inspect.signals.second_verifier import second_verifier_signal
from rlcli_inspect.signals.signal import Example, Signal
from rlcli_inspect.signals.windows import ends_of


def panel(
    lines: Sequence[Line],
    steps: Iterable[tuple[int, Sequence[Row]]],
    rescored: Iterable[Mapping[str, Any]] = (),
) -> list[Signal]:
    """The signals of a run, those that warn first.

    lines: of metrics.jsonl. steps: step and rows of samples, ascending, as `sample_rows.sampled_rows` yields them.
    rescored: lines that `rlcli rescore` wrote."""
    record = Record()
    for number, rows in steps:
        record.add(number, rows)
    return signals_of(lines, record, rescored)


def panel_of(run: Path) -> list[Signal]:
    """The signals of the run in a folder, as far as it can be read."""
    return panel(metrics_of(run), sampled_rows(run), rescored_rows(run))


def signals_of(lines: Sequence[Line], record: Record, rescored: Iterable[Mapping[str, Any]] = ()) -> list[Signal]:
    """The signals of the samples read so far."""
    ends = ends_of(record)
    signals = [
        second_verifier_signal(rescored),
        *property_signals(record, ends),
        *paid_signals(record, ends),
        *metric_signals(lines, _last_rewarded(record)),
    ]
    order = {"warning": 0, "ok": 1, "unknown": 2}
    return sorted(signals, key=lambda signal: order[signal.state])


def _last_rewarded(record: Record) -> list[Example]:
    """Rewarded samples of the last step."""
    middle = (record.low + record.high) / 2
    last = record.steps[-1].step if record.steps else 0
    rows = [row for step, row in record.recent if step == last and float(row["score"]) > middle]
    return examples_of(last, rows, "rewarded, in the last step that was read")
