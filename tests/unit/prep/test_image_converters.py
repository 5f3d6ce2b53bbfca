"""Datasets with images: from folders, from the hub and generated."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rlcli_data_prep import chartqa, clevr_count, geometry3k, hf, images, jsonl, shapes
from rlcli_data_prep.sources import from_hub
from rlcli_verifiers import exact, math, relaxed

from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.errors import ConfigError, DataError
from rlcli.images.decoding import decode
from rlcli.images.row_images import BadImage
from rlcli.prep.pipeline import Plan, prepare
from rlcli.prep.split_writer import write_splits
from rlcli.types import Converter, ConvertOptions, Prompt, VerifyRequest


def png(shade: int = 0, size: int = 4) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (size, size), shade).save(buffer, "PNG")
    return buffer.getvalue()


def stored(data: bytes) -> dict[str, Any]:
    return {"bytes": data, "path": None}


A, B, BAD = png(1), png(2), png(3)[:-20]
GEOMETRY = {"images": [stored(A)], "problem": "<image>Find x.", "answer": "4 \\sqrt { 2 }"}
CLEVR = {"image": stored(A), "problem": "How many items are there?", "solution": "<answer> 3 </answer>"}
CHART = {"image": stored(A), "query": "What is the share?", "label": ["14.5"], "human_or_machine": 0}
HUB: list[tuple[Converter, dict[str, Any]]] = [
    (geometry3k.CONVERTER, GEOMETRY),
    (clevr_count.CONVERTER, CLEVR),
    (chartqa.CONVERTER, CHART),
]


def made(folder: Path, converter: Converter, rows: list[dict[str, Any]], **options: Any) -> list[Prompt]:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    convert_options = ConvertOptions(source=str(folder), **options)
    prepared = prepare(converter, convert_options, Plan(check=True))
    return [prompt for split in prepared.splits.values() for prompt in split]


def score(verify: Any, prompt: Prompt, response: str) -> float:
    return float(verify(prompt.request(response)).score)


@pytest.mark.long
def test_geometry3k_is_read_as_verl_reads_it(tmp_path: Path) -> None:
    two = GEOMETRY | {"images": [stored(A), stored(B)], "problem": "<image> or <image>?"}
    first, second = made(tmp_path, geometry3k.CONVERTER, [GEOMETRY, two])
    assert first.messages == ({"role": "user", "content": f"<image>Find x. {geometry3k.INSTRUCTION}"},)
    assert (first.images, second.images) == ((A,), (A, B))
    assert score(math.verify, first, r"<think>so</think> \boxed{4\sqrt{2}}") == 1.0
    assert score(math.verify, first, r"<think>so</think> \boxed{4}") == 0.0


@pytest.mark.long
def test_clevr_holds_the_first_rows_out(tmp_path: Path) -> None:
    rows = [CLEVR | {"solution": f"<answer> {n} </answer>"} for n in range(5)]
    test, train = [], []
    for prompt in made(tmp_path, clevr_count.CONVERTER, rows, test_count=2, count=2):
        (train if prompt.id.split(":")[1] == "train" else test).append(prompt.ground_truth)
    assert (test, train) == (["0", "1"], ["2", "3"])
    assert len(made(tmp_path, clevr_count.CONVERTER, rows, test_count=0)) == 5
    (prompt,) = made(tmp_path, clevr_count.CONVERTER, [CLEVR], test_count=0)
    assert prompt.messages[0]["content"].startswith("<image>How many items are there? Output the thinking")
    assert score(exact.verify, prompt, "<think>1 2 3</think> <answer> 3 </answer>") == 1.0
    with pytest.raises(DataError, match="'solution' is no number in <answer>"):
        clevr_count.prompt(CLEVR | {"solution": "three"}, ConvertOptions())


def test_chartqa_accepts_numbers_within_five_percent(tmp_path: Path) -> None:
    number, word = made(tmp_path, chartqa.CONVERTER, [CHART, CHART | {"label": ["Yes"]}])
    assert number.ground_truth == "14.5"
    assert score(relaxed.verify, number, "<answer>14</answer>") == 1.0
    assert score(relaxed.verify, number, "<answer>13</answer>") == 0.0
    assert score(relaxed.verify, word, "<answer>yes</answer>") == 1.0
    with pytest.raises(DataError, match="'label' is not one answer"):
        chartqa.prompt(CHART | {"label": ["a", "b"]}, ConvertOptions())


@pytest.mark.parametrize(("converter", "row"), HUB, ids=[variant.name for variant, _ in HUB])
def test_rows_with_bad_images_are_left_out_and_counted(tmp_path: Path, converter: Converter, row: dict) -> None:
    name = "images" if "images" in row else "image"
    bad = [stored(BAD)] if name == "images" else stored(BAD)
    gone = {"bytes": None, "path": "gone.png"}
    rows = [row, row | {name: bad}, row, row | {name: [gone] if name == "images" else gone}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    options = ConvertOptions(source=str(tmp_path), test_count=0 if converter.name == "clevr_count" else None)
    done = prepare(converter, options, Plan(check=False))
    assert len(done.splits["train"]) == 2
    assert done.steps[1].removed == {"bad image": 2}
    assert "train.parquet, row 1 (the first is 0): the image is broken" in done.steps[1].examples[0]
    assert "row 3 (the first is 0): image 0: no such file" in done.steps[1].examples[1]
    pq.write_table(pa.Table.from_pylist(rows[1:2]), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="all 1 rows have bad images, the first: "):
        prepare(converter, options, Plan(check=False))


def test_an_image_outside_of_the_source_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(A)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "link.png").symlink_to("../secret.png")
    outside = [str(tmp_path / "secret.png"), "../secret.png", "link.png"]
    rows = [CHART, *(CHART | {"image": {"bytes": None, "path": path}} for path in outside)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "source" / "train.parquet")
    options = ConvertOptions(source=str(tmp_path / "source"))
    done = prepare(chartqa.CONVERTER, options, Plan(check=False))
    assert len(done.splits["train"]) == 1
    assert done.steps[1].removed == {"bad image": 3}
    assert all("lies outside the data's folder" in example for example in done.steps[1].examples)


def test_an_image_of_a_hub_dataset_lies_in_what_was_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, secret = tmp_path / "cache", tmp_path / "secret.png"
    (cache / "datasets--me--charts").mkdir(parents=True)
    for file in (cache / "datasets--me--charts" / "a.png", secret):
        file.write_bytes(A)
    images._downloads.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    try:
        for source in (None, "me/charts"):
            row = CHART | {"image": {"bytes": None, "path": str(cache / "datasets--me--charts" / "a.png")}}
            assert chartqa.prompt(row, ConvertOptions(source=source)).images == (A,)
            with pytest.raises(BadImage, match="lies outside the data's folder"):
                chartqa.prompt(CHART | {"image": {"bytes": None, "path": str(secret)}}, ConvertOptions(source=source))
    finally:
        images._downloads.cache_clear()


@pytest.mark.parametrize(("converter", "row"), HUB, ids=[variant.name for variant, _ in HUB])
def test_a_row_without_an_image_is_malformed(converter: Converter, row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="no image in column"):
        converter.prompt({name: value for name, value in row.items() if "image" not in name}, ConvertOptions())


def test_images_of_the_hub_stay_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = datasets.Features({"images": datasets.List(datasets.Image()), "n": datasets.Value("int64")})
    (tmp_path / "hub").mkdir()
    dataset = datasets.Dataset.from_dict({"images": [[stored(A), stored(B)], []], "n": [1, 2]}, features=features)
    dataset.to_parquet(tmp_path / "hub" / "train.parquet")
    rows = [row.values for row in from_hub(str(tmp_path / "hub"), None)["train"]]
    assert [[image["bytes"] for image in row["images"]] for row in rows] == [[A, B], []]
    assert [row["n"] for row in rows] == [1, 2]


@pytest.mark.parametrize("converter", [jsonl.CONVERTER, hf.CONVERTER], ids=["jsonl", "hf"])
def test_a_column_of_images_is_mapped(tmp_path: Path, converter: Converter) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(A)
    (tmp_path / "b.png").write_bytes(B)
    parts = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    rows = [
        {"q": "Which, <image> or <image>?", "a": "1", "files": ["images/a.png", str(tmp_path / "b.png")]},
        {"q": [{"role": "user", "content": parts}], "a": "2", "files": "b.png"},
        {"q": "Which?", "a": "2", "files": "b.png"},
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"prompt": "q", "answer": "a", "images": "files"}
    options = ConvertOptions(source=str(tmp_path), verifier="exact", columns=columns, instruction="One number.")
    first, second, third = prepare(converter, options).splits["train"]
    assert (first.images, second.images) == ((A, B), (B,))
    assert second.messages == third.messages
    assert second.messages[0]["content"] == "<image>Which?\n\nOne number."
    with pytest.raises(BadImage, match=r"the row has 1 image, and its messages have 2 <image> markers"):
        jsonl.prompt(rows[0] | {"files": "b.png"}, options)


def test_equal_text_about_other_images_is_no_duplicate(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    rows = [CLEVR, CLEVR | {"image": stored(B)}, CLEVR]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "raw" / "train.parquet")
    options = ConvertOptions(source=str(tmp_path / "raw"), test_count=0)
    done = prepare(clevr_count.CONVERTER, options, Plan(check=False, dedup=True))
    assert [prompt.images for prompt in done.splits["train"]] == [(A,), (B,)]
    write_splits(tmp_path / "asked", {"test": done.splits["train"][1:]}, {})
    against = Plan(check=False, against=(str(tmp_path / "asked"),), split="train")
    assert [example.images for example in prepare(clevr_count.CONVERTER, options, against).splits["train"]] == [
        (A,),
        (A,),
    ]


@pytest.mark.long
def test_files_for_trl_hold_parts_and_images_that_datasets_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    prompts = made(tmp_path / "raw", geometry3k.CONVERTER, [GEOMETRY])
    paths = write_splits(tmp_path / "trl", {"train": prompts}, {"dataset": "toy"}, "trl")
    (row,) = datasets.load_dataset("parquet", data_files=str(paths["train"]))["train"]
    parts = row["prompt"][0]["content"]
    assert [part["type"] for part in parts] == ["image", "text"]
    assert parts[1]["text"].startswith("Find x. ")
    assert [image.size for image in row["images"]] == [(4, 4)]


# Shapes


def rows_of(**options: Any) -> dict[str, list[dict[str, Any]]]:
    read = shapes.read(ConvertOptions(**options))
    return {split: [dict(row.values) for row in rows] for split, rows in read.items()}


@pytest.mark.parametrize("cells", [2, 3, 4])
def test_answers_of_a_kind_are_equally_frequent(cells: int) -> None:
    for rows in rows_of(cells=cells, count=600, test_count=120).values():
        answers: dict[str, Counter[str]] = defaultdict(Counter)
        for row in rows:
            answers[row["kind"]][row["answer"]] += 1
        assert {kind: sum(counts.values()) for kind, counts in answers.items()} == dict.fromkeys(
            shapes.KINDS, len(rows) // 3
        )
        for counts in answers.values():
            assert max(counts.values()) - min(counts.values()) <= 1


def test_the_answers_are_what_the_images_show() -> None:
    for row in rows_of(count=300, test_count=30)["train"]:
        things, words = row["scene"], row["question"].split()
        colours = Counter(thing[0] for thing in things if thing)
        if row["kind"] == "count":
            expected = str(sum(thing == (words[1], words[2]) for thing in things))
        elif row["kind"] == "compare":
            assert colours[words[1]] != colours[words[3]]
            expected = "yes" if colours[words[1]] > colours[words[3]] else "no"
        else:
            expected = things[(int(words[2]) - 1) * 3 + int(words[4]) - 1][0]
        assert row["answer"] == expected


def test_the_number_of_things_does_not_tell_a_count() -> None:
    counts_by_answer: dict[str, list[int]] = defaultdict(list)
    for row in rows_of(kinds="count", count=5000)["train"]:
        counts_by_answer[row["answer"]].append(sum(thing is not None for thing in row["scene"]))
    means = [sum(some) / len(some) for some in counts_by_answer.values()]
    assert max(means) - min(means) < 0.4


def test_a_drawn_image_has_its_things_in_its_cells() -> None:
    scene = (("red", "square"), None, None, ("blue", "circle"))
    image = decode(shapes.drawn(scene, 20))
    assert image.size == (40, 40)
    centres = [image.getpixel((x, y)) for y in (10, 30) for x in (10, 30)]
    white = (255, 255, 255)
    assert centres == [shapes.COLOURS["red"], white, white, shapes.COLOURS["blue"]]
    assert len({shapes.drawn(((colour, shape),), 28) for colour in shapes.COLOURS for shape in shapes.SHAPES}) == 15


@pytest.mark.parametrize("cells", [2, 3])
def test_no_image_is_in_both_splits_and_a_seed_repeats(cells: int) -> None:
    def done(seed: int) -> dict[str, list[Prompt]]:
        return prepare(shapes.CONVERTER, ConvertOptions(count=300, test_count=100, seed=seed, cells=cells)).splits

    first, second = done(1), done(2)
    images = {split: {image for prompt in some for image in prompt.images} for split, some in first.items()}
    assert not images["train"] & images["test"]
    assert not images["test"] & {image for prompt in second["train"] for image in prompt.images}
    assert first == done(1) != second


def test_shapes_are_written_and_read(tmp_path: Path) -> None:
    options = ConvertOptions(count=6, test_count=3, cell=8, cells=2, kinds="locate", instruction="Say it.")
    done = prepare(shapes.CONVERTER, options)
    write_splits(tmp_path, done.splits, {})
    read = list(read_prompts(tmp_path, "train"))
    assert read == done.splits["train"]
    assert read[0].messages[0]["content"].startswith("<image>colour row ")
    assert read[0].messages[0]["content"].endswith("\n\nSay it.")
    assert score(exact.verify, read[0], read[0].extra_info["response"]) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cells": 1}, "--cells = 1"),
        ({"cell": 4}, "--cell = 4"),
        ({"kinds": "count,colour"}, "--kinds: 'colour'"),
        ({"count": 0}, "--count = 0"),
    ],
)
def test_options_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shapes.read(ConvertOptions(**options))


def test_nothing_heavy_is_imported_to_list_these_datasets() -> None:
    import subprocess

    program = (
        "import sys; from rlcli_data_prep import chartqa, clevr_count, geometry3k, shapes; print('PIL' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [
        ("100", "95", True),
        ("100", "94.9", False),
        ("-2", "-2.1", True),
        ("-2", "2", False),
        ("0", "0.0", True),
        ("0", "0.01", False),
        ("1,234", "$1200", True),
        ("12%", "12", True),
        ("Yes", " yes ", True),
        ("Yes", "no", False),
        ("South Korea", "Korea", False),
        ("5", "five", False),
        ("5", "5 or 6", False),
        ("5", "1e400", False),
        ("5", "٥", False),
    ],
)
def test_relaxed_accuracy_is_that_of_the_paper(truth: str, answer: str, right: bool) -> None:
    assert relaxed.verify(VerifyRequest(f"so <answer>{answer}</answer>", truth)).score == float(right)


def test_relaxed_reads_the_tag_alone() -> None:
    assert relaxed.verify(VerifyRequest("5", "5")).outcome.value == "no_answer"
    assert relaxed.verify(VerifyRequest("<think><answer>5</answer>", "5")).outcome.value == "no_answer"
    assert relaxed.verify(VerifyRequest(relaxed.gold(VerifyRequest("", "5")), "5")).score == 1.0
    assert relaxed.verify(VerifyRequest("<answer>101</answer>", "100"), tolerance=0.0).score == 0.0
    for truth, tolerance in (("", 0.05), ("5", 1.0), ("5", -0.1)):
        with pytest.raises(ValueError, match="tolerance"):
            relaxed.verify(VerifyRequest("<answer>5</answer>", truth), tolerance=tolerance)
