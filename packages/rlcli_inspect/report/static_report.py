"""Writes a report: the pages with their data in files that open from disk, without a server and without a network.

A small report is one HTML file, with its samples compressed. A larger one has its samples in pieces, one a step, which
the page loads when it needs them. Samples are limited to a size: of a run that has more, evenly spaced steps are kept
with the first and the last, and of each step whole groups, in the order of its files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
DEFAULT_BYTES = 50 * MB
ONE_FILE = 12 * MB
"""Largest data in one HTML file, before it is compressed."""
ENVELOPE = 100
"""Bytes of a piece in addition to its groups."""
LEAST_STEPS = 64
"""If not all samples fit, a step gets at most this part of the space, so that about this many steps are kept."""
EVALUATIONS_SHARE = 0.2
IMAGES_SHARE = 0.4
"""Share of the space of a run with images that is reserved for them."""
KINDS: Sequence[Kind] = ("evaluations", "samples")
MAX_TEXT = 40_000
"""Characters of one text."""
MAX_TIMES = 200
"""Steps with their lanes."""
FIGURES = ("engine_log_prob", "trainer_log_prob", "entropy", "advantage")
OnProgress = Callable[[str, int, int | None], None]


@dataclass
class Coverage:
    """Amount of one kind of samples in a report."""

    steps: int = 0
    """Steps in the report."""
    total_steps: int = 0
    """Steps with samples in the run."""
    groups: int = 0
    """Groups in the report."""
    total_groups: int = 0
    """Groups of the steps in the report."""

    @property
    def all(self) -> bool:
        """True if it contains all samples."""
        return (self.steps, self.groups) == (self.total_steps, self.total_groups)

    def as_dict(self) -> dict[str, object]:
        """For `--json` and for the page."""
        return {
            "steps": self.steps,
            "of": self.total_steps,
            "groups": self.groups,
            "of_groups": self.total_groups,
        }


@dataclass(frozen=True)
class WrittenReport:
    """A report on disk."""

    path: Path
    """File to open."""
    bytes: int
    """Size of all files."""
    files: int
    """Number of files."""
    coverage: Mapping[str, Mapping[str, Coverage]]
    """Name of the run → kind → how much the report contains."""
    notes: Sequence[str]
    """Problems of the runs' files."""
    images: Mapping[str, tuple[int, int]]
    """Name of a run with images → images shown, and distinct images in the samples of the report."""


@dataclass
class Pieces:
    """The pieces of a report that are on disk."""

    folder: Path
    """Folder of the pieces."""
    names: list[str] = field(default_factory=list)
    """Their names, in order."""
    bytes: int = 0
    """Their total size."""

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
    folder: Path,
    max_bytes: int = DEFAULT_BYTES,
    on_progress: OnProgress = lambda label, done, total: None,
) -> WrittenReport:
    """Write the report into the folder `folder`, which is created, or replaced if it contains a report. Memory does not
    grow with the runs. SetupError if the folder has other files or cannot be written."""
    check_out(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        coverage, albums = _write(runs, temporary, max_bytes, on_progress)
        sizes = [path.stat().st_size for path in temporary.rglob("*") if path.is_file()]
        remove(folder)
        temporary.rename(folder)
    except OSError as error:
        raise SetupError(
            f"cannot write {folder}: {error.strerror or error}", "give another folder with --out"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    images = {name: (len(album.pieces), len(album.wanted)) for name, album in albums.items() if album.wanted}
    return WrittenReport(folder / "index.html", sum(sizes), len(sizes), coverage, notes, images)


def check_out(folder: Path) -> None:
    """SetupError if `folder` has files that are not a report's."""
    mark = f'<meta name="generator" content="{GENERATOR}">'
    try:
        if not folder.is_dir():
            if folder.exists():
                raise SetupError(f"--out {folder} is a file", "give a folder")
            return
        with opened(folder / "index.html", links=True) as file:
            ours = mark.encode() in file.read(2000)
    except FileNotFoundError:
        ours = not any(folder.iterdir())
    except OSError as error:
        raise SetupError(f"--out {folder} cannot be read: {error.strerror or error}", "give another folder") from error
    if not ours:
        raise SetupError(f"--out {folder} has files that are not a report's", "give another folder")


def _write(
    runs: Sequence[RunData], folder: Path, max_bytes: int, on_progress: OnProgress
) -> tuple[dict[str, dict[str, Coverage]], dict[str, Album]]:
    api = Api(runs)
    about: dict[str, list[Any]] = {"overview": [], "series": [], "steps": [], "time": [], "signals": []}
    for run in runs:
        run.refresh()
        about["overview"].append(overview.overview(run))
        about["series"].append(overview.series(run, run.metrics.names()))
        about["time"].append(_times(run))
        about["signals"].append(signals_of(run))
    compared = comparison_of(runs) if len(runs) == 2 else None
    available = max_bytes - len(as_json([about, compared])) - MB // 2  # the page itself
    pieces = Pieces(folder / "data")
    coverage: dict[str, dict[str, Coverage]] = {}
    albums: dict[str, Album] = {}
    for number, (run, name) in enumerate(zip(runs, api.names, strict=True)):
        steps, coverage[name], albums[name] = _of_run(run, number, available // len(runs), pieces, on_progress)
        about["steps"].append(steps)
    for run, about_run in zip(runs, about["overview"], strict=True):
        about_run["notes"] = run.notes  # notes about samples are complete now
    data = {"index": api.index(), **about, "compare": compared, "kept": {n: _counts(k) for n, k in coverage.items()}}
    data["pictures"] = [album.as_dict() for album in albums.values()]
    single_file = pieces.bytes <= ONE_FILE
    blocks = [("data", as_json(data | {"pieces": not single_file}))]
    text = page(FILE, blocks, pieces.read()) if single_file else page(PIECES, blocks)
    (folder / "index.html").write_text(text, encoding="utf-8")
    if single_file:
        shutil.rmtree(folder / "data", ignore_errors=True)
    return coverage, albums


def _of_run(
    run: RunData, number: int, share: int, pieces: Pieces, on_progress: OnProgress
) -> tuple[dict[str, list[int]], dict[str, Coverage], Album]:
    """Write the pieces of a run into `share` bytes: its samples, then their images. Returns the steps of each kind that
    have a piece (for images: the numbers of the pieces), the coverage, and the images."""
    end = pieces.bytes + share
    if _has_images(run):
        share -= int(share * IMAGES_SHARE)
    steps: dict[str, list[int]] = {}
    coverage: dict[str, Coverage] = {}
    album = Album()
    for kind in KINDS:
        size_before = pieces.bytes
        budget = int(share * EVALUATIONS_SHARE) if kind == "evaluations" else share
        steps[kind], coverage[kind] = _samples(run, kind, f"{number}/{kind}", budget, pieces, album, on_progress)
        share -= pieces.bytes - size_before
    on_progress(f"{run.name}: images", 0, None)
    album.write(run.folder, end - pieces.bytes, lambda at, some: pieces.add(f"{number}/pictures/{at}", as_json(some)))
    if album.pieces:
        steps["pictures"] = sorted(set(album.pieces.values()))
    return steps, coverage, album


def _has_images(run: RunData) -> bool:
    last = [(kind, step) for kind in KINDS for step in run.steps(kind)[-1:]]
    if any(run.files(step, "pictures-", kind) for kind, step in last):
        return True
    tables = [run.table(step, ["images"], kind) for kind, step in last]
    return any(table["images"].null_count < len(table) for table in tables)


def _counts(coverage: Mapping[str, Coverage]) -> dict[str, object]:
    return {kind: part.as_dict() | {"all": part.all} for kind, part in coverage.items()}


def _times(run: RunData) -> dict[str, object]:
    steps = run.timeline.steps()
    selected = [steps[index] for index in evenly(len(steps), MAX_TIMES)]
    lines = ((step, run.timeline.line(step)) for step in selected)
    return {str(step): {"start": line.get("start"), "lanes": lanes_of(line)} for step, line in lines if line}


def _samples(
    run: RunData,
    kind: Kind,
    prefix: str,
    budget: int,
    pieces: Pieces,
    album: Album,
    on_progress: OnProgress,
) -> tuple[list[int], Coverage]:
    """Write the pieces of a run's samples into `budget` bytes; the steps and how much was kept. album: gets the
    images that they show."""
    steps = run.steps(kind)
    selected, step_budget = _choice(run, kind, steps, budget)
    coverage, end = Coverage(total_steps=len(steps)), pieces.bytes + budget
    written: list[int] = []
    for done, index in enumerate(spread(len(selected))):
        on_progress(f"{run.name}: {kind}", done, len(selected))
        step = selected[index]
        groups = groups_of(run, kind, step)
        texts = list(_fitting(groups, step_budget, end - pieces.bytes))
        if texts or not groups:
            coverage.steps += 1
            coverage.groups += len(texts)
            coverage.total_groups += len(groups)
            album.add(groups[: len(texts)])
            if texts:
                pieces.add(f"{prefix}/{step}", f'{{"step":{step},"groups":[{",".join(texts)}]}}')
                written.append(step)
    return sorted(written), coverage


def _choice(run: RunData, kind: Kind, steps: Sequence[int], budget: int) -> tuple[list[int], int]:
    """The steps to keep and the maximum bytes of each, from the sizes of the first, the middle and the last one."""
    if not steps:
        return [], budget
    probed = {steps[0], steps[len(steps) // 2], steps[-1]}
    sizes = [len(as_json(groups_of(run, kind, step)).encode()) + ENVELOPE for step in probed]
    if max(sizes) * len(steps) <= budget:
        return list(steps), budget
    step_budget = budget // min(LEAST_STEPS, len(steps))
    number = max(1, budget // max(1, min(step_budget, sum(sizes) // len(sizes))))
    return [steps[index] for index in evenly(len(steps), number)], step_budget


def _fitting(groups: Sequence[Mapping[str, Any]], step_budget: int, budget: int) -> Iterator[str]:
    """The first groups, as JSON, that together take at most `step_budget` bytes; the first one alone up to `budget`."""
    size = 0
    for number, group in enumerate(groups):
        text = as_json(group)
        size += len(text.encode()) + 1
        if size + ENVELOPE > (min(step_budget, budget) if number else budget):
            return
        yield text


def groups_of(run: RunData, kind: Kind, step: int) -> list[dict[str, Any]]:
    """The samples of a step by group: the prompt's messages once, and for each sample the messages after them."""
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    known = sample_details.advantages_of(run, kind, step)
    tokens = {key_of(row): _rounded(row) for row in (run.tokens(step) if kind == "samples" else ())}
    rows = run.rows(step, sample_details.SAMPLE_COLUMNS, kind)
    for row in rows:
        row["group"] = row["group"] or 0
        key = key_of(row)
        add_training(row, known)
        sample_details.shorten_verdict(row)
        prompt_messages, row["said"] = sample_details.conversation(row, where_of(kind, step), MAX_TEXT)
        for name in ("messages", "response", "prompt", "images"):
            del row[name]
        if key in tokens:
            row["token_columns"] = tokens[key]
        group = groups.setdefault(
            key[:2],
            {
                "prompt_id": key[0],
                "group": key[1],
                "ground_truth": row["ground_truth"],
                "messages": prompt_messages,
                "rows": [],
            },
        )
        if prompt_messages != group["messages"]:
            row["asked"] = prompt_messages
        group["rows"].append({name: value for name, value in row.items() if value is not None})
    return list(groups.values())


def _rounded(row: Mapping[str, Any]) -> dict[str, object]:
    """The token columns, rounded to four digits."""
    columns = {name: row.get(name) for name in ("text", "drawn", "version")}
    for name in FIGURES:
        columns[name] = [None if figure is None else float(f"{figure:.4g}") for figure in row.get(name) or ()]
    return columns


def evenly(count: int, limit: int) -> list[int]:
    """At most `limit` of `count` indices, with the first and the last among them.

    >>> evenly(100, 4), evenly(3, 10), evenly(5, 1)
    ([0, 33, 66, 99], [0, 1, 2], [4])
    """
    if count <= limit:
        return list(range(count))
    return [count - 1] if limit == 1 else [index * (count - 1) // (limit - 1) for index in range(limit)]


def spread(count: int) -> list[int]:
    """All indices, in an order of which each prefix is spread over the range: the last, the first, the middle, …

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
