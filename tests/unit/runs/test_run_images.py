"""A run's images are found in its data, as long as they are those that the run has seen."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcli.config.load import dump_toml, resolve
from rlcli.data.prompts.parquet_schema import IMAGE_ROWS
from rlcli.runs.run_images import RunImages, read_images
from rlcli.types import image_digest
from tests.image_runs import drawing, write_data


def run_on(folder: Path, *sets: str, held_out: str = "", directory: Path | None = None) -> RunImages:
    folder.mkdir()
    flags = {"data.path": sets[0] if len(sets) == 1 else list(sets), "evaluation.data": held_out}
    (folder / "config.toml").write_text(dump_toml(resolve("grpo", flags)))
    (folder / "environment.json").write_text(json.dumps({"directory": str(directory or folder)}))
    return RunImages(folder)


def found(images: RunImages, image: bytes, prompt: str) -> bytes | str:
    digest = image_digest(image)
    ((key, match),) = images.find({digest: prompt})
    assert key == digest
    return match


def test_an_image_is_found_by_prompt_and_digest(tmp_path: Path) -> None:
    rows = [(drawing(0),), (), (drawing(2), drawing(3))]
    write_data(tmp_path / "data", rows)
    write_data(tmp_path / "data", [(drawing(7),)], "test")
    images = run_on(tmp_path / "run", "data", held_out="data", directory=tmp_path)
    assert found(images, drawing(3), "drawn:train:2") == drawing(3)
    assert found(images, drawing(7), "drawn:test:0") == drawing(7)
    wanted = {image_digest(drawing(n)): f"drawn:train:{n // 2 * 2}" for n in (0, 2, 3)}
    assert dict(images.find(wanted)) == {image_digest(drawing(n)): drawing(n) for n in (0, 2, 3)}


def test_sets_are_searched_one_after_the_other(tmp_path: Path) -> None:
    sets = [str(write_data(tmp_path / name, [(drawing(n),)])) for n, name in enumerate("ab")]
    images = run_on(tmp_path / "run", *sets)
    assert found(images, drawing(0), "a/drawn:train:0") == drawing(0)
    assert found(images, drawing(1), "b/drawn:train:0") == drawing(1)


def test_a_row_is_read_from_its_group_of_rows(tmp_path: Path) -> None:
    count = 2 * IMAGE_ROWS + 30
    file = write_data(tmp_path, [(drawing(n % 250, (4 + n // 250, 4)),) for n in range(count)]) / "train.parquet"
    assert pq.ParquetFile(file).metadata.num_row_groups == 3
    wanted = {0, 17, IMAGE_ROWS, count - 1, count + 5}
    read = dict(read_images(file, wanted))
    assert read == {n: (drawing(n % 250, (4 + n // 250, 4)),) for n in wanted - {count + 5}}


def test_images_in_files_and_in_a_column_of_one_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(drawing(1))
    pq.write_table(pa.table({"images": [["a.png"], ["gone.png"]]}), tmp_path / "paths.parquet")
    assert dict(read_images(tmp_path / "paths.parquet", {0, 1})) == {0: (drawing(1),), 1: ()}
    pq.write_table(pa.table({"image": [drawing(2)]}), tmp_path / "one.parquet")
    assert dict(read_images(tmp_path / "one.parquet", {0})) == {0: (drawing(2),)}
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "none.parquet")
    assert dict(read_images(tmp_path / "none.parquet", {0})) == {}


def test_what_is_not_at_hand_says_why(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", [(drawing(0),)])
    images = run_on(tmp_path / "run", "data", directory=tmp_path)
    assert found(images, drawing(1), "drawn:train:0") == "no longer in data"
    assert found(images, drawing(0), "drawn:train:99") == "no longer in data"
    assert found(images, drawing(0), "drawn:test:0") == "config.toml names no data"
    assert found(images, drawing(0), "numbered/3") == "the prompt numbered/3 is of no file"
    assert found(images, drawing(0), "drawn:train:" + "9" * 400).endswith("is of no file")  # type: ignore[union-attr]
    (data / "train.parquet").write_bytes(b"no parquet")
    assert (
        found(images, drawing(0), "drawn:train:0") == "data/train.parquet cannot be read: it is damaged or incomplete"
    )
    (data / "train.parquet").unlink()
    assert str(found(images, drawing(0), "drawn:train:0")).startswith("data has no train.parquet")
    data.rmdir()
    assert found(images, drawing(0), "drawn:train:0") == "no such file or folder: data"


@pytest.mark.parametrize("config", ["", "data = 3", "[data]\npath = 7", '[data]\npath = [{path = 3}, ""]', "\x00"])
def test_a_hostile_configuration_names_no_data(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.toml").write_text(config)
    assert found(RunImages(tmp_path), drawing(0), "drawn:train:0") == "config.toml names no data"


@pytest.mark.parametrize("path", ["~nobody-at-all/x", "x" * 5000, "a\0b", "/dev/zero", "/proc/self/mem"])
def test_a_path_that_no_file_can_have_is_a_reason(tmp_path: Path, path: str) -> None:
    (tmp_path / "config.toml").write_text(f"[data]\npath = {json.dumps(path)}")
    assert isinstance(found(RunImages(tmp_path), drawing(0), "drawn:train:0"), str)
