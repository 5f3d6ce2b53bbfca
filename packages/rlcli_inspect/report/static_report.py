"""Writes a report: the pages with their data in files that open from disk, without a server and without a network.

A small report is one HTML file, with its samples compressed. A larger one has its samples in pieces, one a step, which
the page loads when it needs them. Samples are limited to a size: of a run that has more, evenly spaced steps are kept
with the first and the last, and of each step whole groups, in the order of its files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlcli.errors import SetupError
from rlcli.runs.run_data import Kind, RunData, add_training, key_of
from rlcli.runs.run_images import where_of
from rlcli.support.files import remove
from rlcli.support.reading import opened
from rlcli_inspect.report import overview, sample_details
from rlcli_inspect.report.page_api import Api, as_json, comparison_of, lanes_of, signals_of
from rlcli_inspect.report.page_assembly import FILE, GENERATOR, PIECES, page
from rlcli_inspect.report.page_images import Album

MB = 1_000_000
MOST_BYTES = 50 * MB
ONE_FILE = 12 * MB
"""Largest data in one HTML file, before it is compressed."""
ENVELOPE = 100
"""Bytes of a piece beside its groups."""
LEAST_STEPS = 64
"""Of a run with more samples than fit, a step gets at most this part of the space, so that about as many are kept."""
EVALUATIONS_SHARE = 0.2
PICTURES_SHARE = 0.4
"""Of the space of a run with pictures, the part that its samples leave to them."""
KINDS: Sequence[Kind] = ("evaluations", "samples")
MOST_TEXT = 40_000
"""Characters of one text."""
MOST_TIMES = 200
"""Steps with their lanes."""
FIGURES = ("engine_log_prob", "trainer_log_prob", "entropy", "advantage")
OnProgress = Callable[[str, int, int | None], None]


@dataclass
class Kept:
    """How much of one kind of samples is in the report. steps, of: steps with samples, kept and in all; groups, of
    those steps."""

    steps: int = 0
    of: int = 0
    groups: int = 0
    of_groups: int = 0

    @property
    def all(self) -> bool:
        return (self.steps, self.groups) == (self.of, self.of_groups)


@dataclass(frozen=True)
class Written:
    """A report on disk. path: what to open. bytes: of all files. kept: name of the run → kind → how much. pictures:
    name of a run that has any → how many are shown, of how many distinct ones in the kept samples."""

    path: Path
    bytes: int
    files: int
    kept: Mapping[str, Mapping[str, Kept]]
    notes: Sequence[str]
    pictures: Mapping[str, tuple[int, int]]


@dataclass
class Pieces:
    """The pieces on disk so far: names in order, and their sizes."""

    folder: Path
    names: list[str] = field(default_factory=list)
    bytes: int = 0

    def add(self, name: str, json: str) -> None:
        """Write a piece as a script that gives its data to the page."""
        path = self.folder / f"{name}.js"
        path.parent.mkdir(parents=True, exist_ok=True)
        # JSON is JavaScript, and U+2028 in strings too, since 2019.
        self.bytes += path.write_bytes(f'rlcliPiece("{name}",{json});\n'.encode())
        self.names.append(name)

    def read(self) -> Iterator[tuple[str, str]]:
        """Name and JSON of each piece."""
        for name in self.names:
            text = (self.folder / f"{name}.js").read_text(encoding="utf-8")
            yield name, text[text.index(",") + 1 : -3]


def write_report(
    runs: Sequence[RunData],
    out: Path,
    most_bytes: int = MOST_BYTES,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Written:
    """Write the report into the folder `out`, which is made, or replaced if it holds a report. Memory does not grow
    with the runs. SetupError if the folder has other files or cannot be written."""
    check_out(out)
    beside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        beside.mkdir(parents=True)
        kept, albums = _write(runs, beside, most_bytes, on_progress)
        sizes = [path.stat().st_size for path in beside.rglob("*") if path.is_file()]
        remove(out)
        beside.rename(out)
    except OSError as error:
        raise SetupError(f"cannot write {out}: {error.strerror or error}", "give another folder with --out") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    pictures = {name: (len(one.pieces), len(one.wanted)) for name, one in albums.items() if one.wanted}
    return Written(out / "index.html", sum(sizes), len(sizes), kept, notes, pictures)


def check_out(out: Path) -> None:
    """SetupError if `out` has files that are not a report's."""
    mark = f'<meta name="generator" content="{GENERATOR}">'
    try:
        if not out.is_dir():
            if out.exists():
                raise SetupError(f"--out {out} is a file", "give a folder")
            return
        with opened(out / "index.html", links=True) as file:
            ours = mark.encode() in file.read(2000)
    except FileNotFoundError:
        ours = not any(out.iterdir())
    except OSError as error:
        raise SetupError(f"--out {out} cannot be read: {error.strerror or error}", "give another folder") from error
    if not ours:
        raise SetupError(f"--out {out} has files that are not a report's", "give another folder")


def _write(
    runs: Sequence[RunData], folder: Path, most_bytes: int, on_progress: OnProgress
) -> tuple[dict[str, dict[str, Kept]], dict[str, Album]]:
    api = Api(runs)
    about: dict[str, list[Any]] = {"overview": [], "series": [], "steps": [], "time": [], "signals": []}
    for run in runs:
        run.refresh()
        about["overview"].append(overview.overview(run))
        about["series"].append(overview.series(run, run.metrics.names()))
        about["time"].append(_times(run))
        about["signals"].append(signals_of(run))
    compared = comparison_of(runs) if len(runs) == 2 else None
    left = most_bytes - len(as_json([about, compared])) - MB // 2  # the page itself
    pieces = Pieces(folder / "data")
    kept: dict[str, dict[str, Kept]] = {}
    albums: dict[str, Album] = {}
    for number, (run, name) in enumerate(zip(runs, api.names, strict=True)):
        steps, kept[name], albums[name] = _of_run(run, number, left // len(runs), pieces, on_progress)
        about["steps"].append(steps)
    for run, about_run in zip(runs, about["overview"], strict=True):
        about_run["notes"] = run.notes  # those about samples are known now
    data = {"index": api.index(), **about, "compare": compared, "kept": {n: _counts(k) for n, k in kept.items()}}
    data["pictures"] = [album.as_dict() for album in albums.values()]
    one = pieces.bytes <= ONE_FILE
    blocks = [("data", as_json(data | {"pieces": not one}))]
    text = page(FILE, blocks, pieces.read()) if one else page(PIECES, blocks)
    (folder / "index.html").write_text(text, encoding="utf-8")
    if one:
        shutil.rmtree(folder / "data", ignore_errors=True)
    return kept, albums


def _of_run(
    run: RunData, number: int, share: int, pieces: Pieces, on_progress: OnProgress
) -> tuple[dict[str, list[int]], dict[str, Kept], Album]:
    """Write the pieces of a run into `share` bytes: its samples, then their pictures. The steps of each kind that have
    a piece (of pictures: the numbers of theirs), how much was kept, and the pictures."""
    end = pieces.bytes + share
    if _has_pictures(run):
        share -= int(share * PICTURES_SHARE)
    steps: dict[str, list[int]] = {}
    kept: dict[str, Kept] = {}
    album = Album()
    for kind in KINDS:
        before = pieces.bytes
        room = int(share * EVALUATIONS_SHARE) if kind == "evaluations" else share
        steps[kind], kept[kind] = _samples(run, kind, f"{number}/{kind}", room, pieces, album, on_progress)
        share -= pieces.bytes - before
    on_progress(f"{run.name}: pictures", 0, None)
    album.write(run.folder, end - pieces.bytes, lambda at, some: pieces.add(f"{number}/pictures/{at}", as_json(some)))
    if album.pieces:
        steps["pictures"] = sorted(set(album.pieces.values()))
    return steps, kept, album


def _has_pictures(run: RunData) -> bool:
    last = [(kind, step) for kind in KINDS for step in run.steps(kind)[-1:]]
    if any(run.files(step, "pictures-", kind) for kind, step in last):
        return True
    tables = [run.table(step, ["images"], kind) for kind, step in last]
    return any(table["images"].null_count < len(table) for table in tables)


def _counts(kept: Mapping[str, Kept]) -> dict[str, Any]:
    return {kind: asdict(one) | {"all": one.all} for kind, one in kept.items()}


def _times(run: RunData) -> dict[str, Any]:
    steps = run.timeline.steps()
    chosen = [steps[place] for place in evenly(len(steps), MOST_TIMES)]
    lines = ((step, run.timeline.line(step)) for step in chosen)
    return {str(step): {"start": line.get("start"), "lanes": lanes_of(line)} for step, line in lines if line}


def _samples(
    run: RunData,
    kind: Kind,
    prefix: str,
    room: int,
    pieces: Pieces,
    album: Album,
    on_progress: OnProgress,
) -> tuple[list[int], Kept]:
    """Write the pieces of a run's samples into `room` bytes; the steps and how much was kept. album: gets the pictures
    that they show."""
    steps = run.steps(kind)
    chosen, most = _choice(run, kind, steps, room)
    kept, end = Kept(of=len(steps)), pieces.bytes + room
    written: list[int] = []
    for done, place in enumerate(spread(len(chosen))):
        on_progress(f"{run.name}: {kind}", done, len(chosen))
        step = chosen[place]
        groups = groups_of(run, kind, step)
        texts = list(_fitting(groups, most, end - pieces.bytes))
        if texts or not groups:
            kept.steps += 1
            kept.groups += len(texts)
            kept.of_groups += len(groups)
            album.add(groups[: len(texts)])
            if texts:
                pieces.add(f"{prefix}/{step}", f'{{"step":{step},"groups":[{",".join(texts)}]}}')
                written.append(step)
    return sorted(written), kept


def _choice(run: RunData, kind: Kind, steps: Sequence[int], room: int) -> tuple[list[int], int]:
    """Which steps to keep and the most bytes of each, by the sizes of the first, the middle and the last one."""
    if not steps:
        return [], room
    probed = {steps[0], steps[len(steps) // 2], steps[-1]}
    sizes = [len(as_json(groups_of(run, kind, step)).encode()) + ENVELOPE for step in probed]
    if max(sizes) * len(steps) <= room:
        return list(steps), room
    most = room // min(LEAST_STEPS, len(steps))
    number = max(1, room // max(1, min(most, sum(sizes) // len(sizes))))
    return [steps[place] for place in evenly(len(steps), number)], most


def _fitting(groups: Sequence[Mapping[str, Any]], most: int, room: int) -> Iterator[str]:
    """The first groups, as JSON, that together take at most `most` bytes; the first one alone up to `room`."""
    taken = 0
    for number, group in enumerate(groups):
        text = as_json(group)
        taken += len(text.encode()) + 1
        if taken + ENVELOPE > (min(most, room) if number else room):
            return
        yield text


def groups_of(run: RunData, kind: Kind, step: int) -> list[dict[str, Any]]:
    """The samples of a step by group: the prompt's messages once, and of each sample what followed them."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    known = sample_details.advantages_of(run, kind, step)
    tokens = {key_of(row): _rounded(row) for row in (run.tokens(step) if kind == "samples" else ())}
    rows = run.rows(step, sample_details.OF_SAMPLE, kind)
    for row in rows:
        row["group"] = row["group"] or 0
        key = key_of(row)
        add_training(row, known)
        sample_details.shorten_verdict(row)
        asked, row["said"] = sample_details.conversation(row, where_of(kind, step), MOST_TEXT)
        for name in ("messages", "response", "prompt", "images"):
            del row[name]
        if key in tokens:
            row["token_columns"] = tokens[key]
        own = found.setdefault(
            key[:2],
            {"prompt_id": key[0], "group": key[1], "ground_truth": row["ground_truth"], "messages": asked, "rows": []},
        )
        if asked != own["messages"]:
            row["asked"] = asked
        own["rows"].append({name: value for name, value in row.items() if value is not None})
    return list(found.values())


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of tokens, with four digits."""
    columns = {name: row.get(name) for name in ("text", "drawn", "version")}
    for name in FIGURES:
        columns[name] = [None if one is None else float(f"{one:.4g}") for one in row.get(name) or ()]
    return columns


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, the first and the last among them.

    >>> evenly(100, 4), evenly(3, 10), evenly(5, 1)
    ([0, 33, 66, 99], [0, 1, 2], [4])
    """
    if count <= most:
        return list(range(count))
    return [count - 1] if most == 1 else [place * (count - 1) // (most - 1) for place in range(most)]


def spread(count: int) -> list[int]:
    """All places in an order in which any beginning of it is spread over all: the last, the first, the middle, …

    >>> spread(5)
    [4, 0, 2, 1, 3]
    """
    order = dict.fromkeys([count - 1, 0][: min(count, 2)])
    stretches = [(0, count - 1)]
    while stretches:
        below = [((low + high) // 2, low, high) for low, high in stretches if high - low > 1]
        order |= dict.fromkeys(middle for middle, _, _ in below)
        stretches = [ends for middle, low, high in below for ends in ((low, middle), (middle, high))]
    return list(order)
