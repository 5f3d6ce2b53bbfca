"""Generated images of coloured shapes in a grid, with questions that only the image answers."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.errors import ConfigError
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.images import asked

DATA_SOURCE = "rlcli/shapes"
TRAIN_ROWS, TEST_ROWS, CELLS, CELL = 4096, 512, 3, 28
COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 87, 200),
    "yellow": (245, 200, 30),
    "purple": (140, 60, 170),
}
SHAPES = ("circle", "square", "triangle")
KINDS = ("count", "compare", "locate")
TEST_SHARE = 5
"""One in this many images belongs to the test split."""

Thing = tuple[str, str]
"""Colour and shape."""
Scene = tuple[Thing | None, ...]
"""The cells, row by row."""


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    """Rows whose kinds, and whose answers within a kind, are equally frequent. No image is in both splits."""
    cells = CELLS if options.cells is None else options.cells
    cell = CELL if options.cell is None else options.cell
    kinds = [kind.strip() for kind in (options.kinds or ",".join(KINDS)).split(",")]
    count = TRAIN_ROWS if options.count is None else options.count
    test_count = TEST_ROWS if options.test_count is None else options.test_count
    if not 2 <= cells <= 8:
        raise ConfigError(f"--cells = {cells} is not a grid's side from 2 to 8", "give 2 to 8")
    if not 8 <= cell <= 256:
        raise ConfigError(f"--cell = {cell} is not a number of pixels from 8 to 256", "give 8 to 256")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--kinds: '{unknown[0]}' is not known", f"give some of {','.join(KINDS)}")
    if count < 1 or test_count < 1:
        raise ConfigError(f"--count = {count}, --test-count = {test_count}: too few", "give 1 or more of each")
    seed = options.seed or 0
    return {split: _rows(seed, split, rows, kinds, cells) for split, rows in (("train", count), ("test", test_count))}


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    images = (drawn(row["scene"], CELL if options.cell is None else options.cell),)
    question = row["question"] + (f"\n\n{options.instruction}" if options.instruction else "")
    return Prompt(
        id="",
        messages=asked(question, images),
        data_source=DATA_SOURCE,
        ability="vision",
        verifier="exact",
        ground_truth=row["answer"],
        extra_info={"kind": row["kind"], "response": f"<think>{_worked(row)}</think>{row['answer']}"},
        images=images,
    )


def drawn(scene: Scene, cell: int) -> bytes:
    """The scene as a PNG with `cell` pixels a cell's side."""
    from PIL import Image, ImageDraw

    side = round(len(scene) ** 0.5)
    image = Image.new("RGB", (side * cell, side * cell), "white")
    draw = ImageDraw.Draw(image)
    margin = cell // 7
    for index, thing in enumerate(scene):
        if thing is None:
            continue
        x0, y0 = index % side * cell + margin, index // side * cell + margin
        x1, y1 = x0 + cell - 2 * margin - 1, y0 + cell - 2 * margin - 1
        colour, shape = COLOURS[thing[0]], thing[1]
        if shape == "circle":
            draw.ellipse((x0, y0, x1, y1), fill=colour)
        elif shape == "square":
            draw.rectangle((x0, y0, x1, y1), fill=colour)
        else:
            draw.polygon(((x0, y1), (x1, y1), ((x0 + x1) // 2, y0)), fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _rows(seed: int, split: str, rows: int, kinds: list[str], cells: int) -> Iterator[RawRow]:
    rng = random.Random(f"{seed}:{split}")
    make = {"count": _count, "compare": _compare, "locate": _locate}
    for number in range(rows):
        kind = kinds[number % len(kinds)]
        while True:
            scene, question, answer = make[kind](rng, number // len(kinds), cells * cells)
            if _split_of(scene) == split:
                break
        values = {"scene": scene, "kind": kind, "question": question, "answer": answer}
        yield RawRow(values, f"{split} image {number}")


def _split_of(scene: Scene) -> str:
    """The split that an image belongs to, whatever the question."""
    digest = hashlib.blake2b(repr(scene).encode(), digest_size=8).digest()
    return "train" if int.from_bytes(digest, "little") % TEST_SHARE else "test"


def _count(rng: random.Random, turn: int, cells: int) -> tuple[Scene, str, str]:
    """Ask for the number of things of one colour and shape, 0 to 4, independent of the number of all things."""
    max_count = min(4, cells - 1)
    wanted, answer = (rng.choice(list(COLOURS)), rng.choice(SHAPES)), turn % (max_count + 1)
    others = [thing for thing in _every_thing() if thing != wanted]
    scene = _scattered(rng, [wanted] * answer, others, rng.randint(max_count, cells), cells)
    return scene, f"count {wanted[0]} {wanted[1]}", str(answer)


def _compare(rng: random.Random, turn: int, cells: int) -> tuple[Scene, str, str]:
    """Ask if there are more things of one colour than of another; they are never equally many."""
    max_count = min(4, cells // 2)
    first, second = rng.sample(list(COLOURS), 2)
    smaller, greater = sorted(rng.sample(range(max_count + 1), 2))
    numbers = (greater, smaller) if turn % 2 else (smaller, greater)
    things = [
        (colour, rng.choice(SHAPES)) for colour, n in zip((first, second), numbers, strict=True) for _ in range(n)
    ]
    others = [thing for thing in _every_thing() if thing[0] not in (first, second)]
    scene = _scattered(rng, things, others, rng.randint(len(things), cells), cells)
    return scene, f"more {first} than {second}", "yes" if turn % 2 else "no"


def _locate(rng: random.Random, turn: int, cells: int) -> tuple[Scene, str, str]:
    """Ask for the colour of the thing in one cell."""
    answer, at, side = list(COLOURS)[turn % len(COLOURS)], rng.randrange(cells), round(cells**0.5)
    things = list(_scattered(rng, [], _every_thing(), rng.randint(0, cells - 1), cells - 1))
    things.insert(at, (answer, rng.choice(SHAPES)))
    return tuple(things), f"colour row {at // side + 1} column {at % side + 1}", answer


def _scattered(rng: random.Random, required: list[Thing], others: list[Thing], things: int, cells: int) -> Scene:
    """Place `required` and random ones of `others` in random cells. things: their total number."""
    scene: list[Thing | None] = [*required, *rng.choices(others, k=things - len(required))]
    scene += [None] * (cells - things)
    rng.shuffle(scene)
    return tuple(scene)


def _worked(row: Mapping[str, Any]) -> str:
    """The content of each cell, row by row, with the count so far of the things to be counted."""
    words, count = [], 0
    for thing in row["scene"]:
        description = "empty" if thing is None else " ".join(thing)
        count += row["question"] == f"count {description}"
        words.append(f"{description} {count}" if row["kind"] == "count" else description)
    return " ".join(words)


def _every_thing() -> list[Thing]:
    return [(colour, shape) for colour in COLOURS for shape in SHAPES]


CONVERTER = Converter(
    name="shapes",
    summary="Images of coloured shapes: count, compare, locate",
    source="generated",
    verifier="exact",
    read=read,
    prompt=prompt,
    options={
        "kinds": f"of question, separated by commas ({','.join(KINDS)})",
        "cells": f"side of the grid, 2 to 8 ({CELLS})",
        "cell": f"side of a cell in pixels, 8 to 256 ({CELL})",
        "seed": "seed of the draw (0)",
        "count": f"rows of the train split ({TRAIN_ROWS})",
        "test_count": f"rows of the test split, held out ({TEST_ROWS})",
        "instruction": "text to append to each question (none)",
    },
)
