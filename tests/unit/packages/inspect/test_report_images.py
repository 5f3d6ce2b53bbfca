"""Images of prompts on the pages: where their markers are, from the run's data, encoded here, within the limit."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rlcli_inspect.report import page_images, static_report
from rlcli_inspect.report.page_api import Api
from rlcli_inspect.report.static_report import MB, write_report

from rlcli.data.sample_files import sample_row, write_samples
from rlcli.data.step_images import images_path, write_images
from rlcli.errors import RlcliError
from rlcli.images.decoding import size_of
from rlcli.images.image_descriptions import described
from rlcli.images.thumbnails import thumbnail
from rlcli.runs.run_data import RunData
from rlcli.runs.tracking.tracked_samples import tracked_samples
from rlcli.types import IMAGE, Outcome, Prompt, Verdict, image_digest
from tests.image_runs import drawing, encoded, noise, write_data, write_image_run
from tests.report_runs import unpacked

ROWS = [(drawing(0),), (noise(1, (600, 400)), drawing(2)), (), (noise(3)[:300],), (drawing(0),)]
"""One image; two, of which one is large; none; a broken one; the first one again."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    data = write_data(tmp_path / "data", ROWS)
    return write_image_run(tmp_path / "run", data, held_out=write_data(tmp_path / "data", [(drawing(9),)], "test"))


def api_of(run: Path) -> Api:
    return Api([RunData(run)])


def asked(api: Api, where: str, image: bytes, **extra_query: str) -> dict[str, str]:
    query = {"digest": image_digest(image), "where": where, **extra_query}
    return dict(api.answer("image", query))


def decoded(src: str) -> bytes:
    assert re.match(r"data:image/(png|jpeg);base64,", src)
    return base64.b64decode(src.partition(",")[2])


def data_of(html: str, name: str) -> Any:
    match = re.search(rf'"application/(\w+)" data-name="{name}">(.*?)</script>', html)
    return json.loads(match[2] if match[1] == "json" else unpacked(match[2])) if match else None


def with_unpacked(html: str) -> bytes:
    """The page, and what its compressed blocks hold."""
    packed = re.findall(r'"application/gzip" data-name="[^"]*">(.*?)</script>', html)
    assert packed
    return html.encode() + b"".join(map(unpacked, packed))


def test_messages_have_the_images_of_their_markers(run: Path) -> None:
    group = api_of(run).answer("group", {"step": "2", "prompt": "drawn:train:1"})
    system, user = group["messages"]
    assert "images" not in system
    assert [(image["width"], image["height"], image["where"]) for image in user["images"]] == [
        (600, 400, "drawn:train:1"),
        (84, 56, "drawn:train:1"),
    ]
    assert all("images" not in message for row in group["rows"] for message in row["said"])
    sample = api_of(run).answer("sample", {"step": "2", "prompt": "drawn:train:1", "sample": "1"})
    assert sample["messages"] == group["messages"]
    assert "images" not in sample
    without = api_of(run).answer("group", {"step": "2", "prompt": "drawn:train:2"})
    assert all("images" not in message for message in without["messages"])


def test_what_an_environment_showed_is_beside_its_step(run: Path, tmp_path: Path) -> None:
    """The row's own image comes from the data, the others are kept; one that is gone has its reason."""
    prompt_image, other, lost = drawing(0), noise(40, (600, 400)), noise(41)
    prompt = Prompt("drawn:train:0", ({"role": "user", "content": IMAGE},), "", "", "", "", images=(prompt_image,))
    conversation = [
        {"role": "user", "content": f"{IMAGE}?", "images": described([prompt_image])},
        {"role": "assistant", "content": IMAGE},
        {"role": "tool", "name": "look", "content": f"{IMAGE} and {IMAGE}", "images": described([other, lost])},
        {"role": "assistant", "content": "b"},
    ]
    row = sample_row(
        prompt,
        0,
        "b",
        Verdict(1.0, Outcome.OK),
        prompt_tokens=5,
        response_tokens=3,
        finish_reason="stop",
        turns=2,
        messages=conversation,
        group=0,
    )
    folder = run / "samples" / "step-000003"
    write_samples(folder / "rank-0.parquet", 3, [row])
    copies = {image_digest(other): thumbnail(other), image_digest(b"broken"): b"broken"}
    write_images(images_path(folder / "rank-0.parquet"), copies)
    (folder / "pictures-1.parquet").write_bytes(b"damaged")
    pq.write_table(pa.table({"digest": [image_digest(lost)], "image": ["text"]}), folder / "pictures-2.parquet")
    pq.write_table(pa.table({"other": [1]}), folder / "pictures-3.parquet")
    group = api_of(run).answer("group", {"step": "3", "prompt": "drawn:train:0"})
    (sample,) = group["rows"]
    assert [image["where"] for image in group["messages"][0]["images"]] == ["drawn:train:0"]
    assert [image["where"] for image in sample["said"][1]["images"]] == ["samples/step-000003"] * 2
    assert "images" not in sample["said"][0]
    api = api_of(run)
    assert size_of(decoded(asked(api, "drawn:train:0", prompt_image)["src"])) == (84, 56)
    assert size_of(decoded(asked(api, "samples/step-000003", other)["src"])) == (256, 171)
    assert asked(api, "samples/step-000003", lost) == {"problem": "samples/step-000003 has no copy of it"}
    assert "problem" in asked(api, "samples/step-000003/../..", lost)
    written = write_report([RunData(run)], tmp_path / "out")
    assert written.images == {"run": (5, 7)}
    line = json.loads(json.dumps(tracked_samples(run / "samples", 3)[0].messages))[2]["content"]
    assert line == "[image 600 x 400] and [image 84 x 56]"


def test_a_conversation_shows_only_what_its_environment_did(run: Path) -> None:
    """Not the row's own image, which no message has."""
    prompt = Prompt("drawn:train:0", ({"role": "user", "content": IMAGE},), "", "", "", "", images=(drawing(0),))
    conversation = [{"role": "user", "content": "Ready?"}, {"role": "assistant", "content": "b"}]
    facts: Any = {"prompt_tokens": 5, "response_tokens": 3, "finish_reason": "stop", "ended": "done"}
    row = sample_row(prompt, 0, "b", Verdict(1.0, Outcome.OK), messages=conversation, group=0, **facts)
    write_samples(run / "samples" / "step-000003" / "rank-0.parquet", 3, [row])
    group = api_of(run).answer("group", {"step": "3", "prompt": "drawn:train:0"})
    assert group["messages"] == [{"role": "user", "content": "Ready?"}]
    assert tracked_samples(run / "samples", 3)[0].messages[0]["content"] == "Ready?"


def test_a_list_names_the_images_and_not_what_a_model_wrote(run: Path) -> None:
    rows = api_of(run).answer("samples", {"prompt_id": "drawn:train:1"})["rows"]
    assert {row["prompt"] for row in rows} == {"[image 600 x 400]\nWhat is drawn? And [image 84 x 56]?"}
    assert {row["response"] for row in rows} == {"<image> 0", "<image> 1"}
    assert [len(row["images"]) for row in rows] == [2] * 4


def test_view_answers_with_a_thumbnail_or_the_reason(run: Path) -> None:
    api = api_of(run)
    assert size_of(decoded(asked(api, "drawn:train:0", drawing(0))["src"])) == (84, 56)
    large = noise(1, (600, 400))
    assert size_of(decoded(asked(api, "drawn:train:1", large)["src"])) == (256, 171)
    assert size_of(decoded(asked(api, "drawn:train:1", large, large="1")["src"])) == (600, 400)
    assert size_of(decoded(asked(api, "drawn:test:0", drawing(9))["src"])) == (84, 56)
    assert "truncated" in asked(api, "drawn:train:3", noise(3)[:300])["problem"]
    assert asked(api, "drawn:train:0", drawing(5)) == {"problem": f"no longer in {run.parent / 'data'}"}
    assert "problem" in api.answer("image", {})
    with pytest.raises(RlcliError, match="no run 3"):
        api.answer("image", {"run": "3"})


def test_what_was_shown_is_kept_but_not_for_ever(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_images, "CACHED", 1)
    api = api_of(run)
    first = asked(api, "drawn:train:0", drawing(0))
    shutil.rmtree(run.parent / "data")
    assert asked(api, "drawn:train:0", drawing(0)) == first
    assert "no such file" in asked(api, "drawn:train:1", drawing(2))["problem"]
    write_data(run.parent / "data", ROWS)
    assert "src" in asked(api, "drawn:train:1", drawing(2))
    shutil.rmtree(run.parent / "data")
    assert "problem" in asked(api, "drawn:train:0", drawing(0))


def test_a_report_has_each_image_once(run: Path, tmp_path: Path) -> None:
    written = write_report([RunData(run)], tmp_path / "out")
    assert written.images == {"run": (4, 5)}
    html = written.path.read_text()
    album, piece = data_of(html, "data")["pictures"][0], data_of(html, "0/pictures/0")
    assert (
        piece.keys() == album["pieces"].keys() == {image_digest(image) for image in ROWS[0] + ROWS[1] + (drawing(9),)}
    )
    assert {max(size_of(decoded(src))) for src in piece.values()} == {84, 256}
    assert (album["unshown"], album["problems"]) == (1, {})
    assert "truncated" in album["reasons"][0]
    assert with_unpacked(html).count(b"data:image/") == 4


def test_no_original_bytes_are_in_a_report(tmp_path: Path) -> None:
    secret = b"<script>window.broken=1</script>"
    data = write_data(tmp_path / "data", [(drawing(0) + secret,), (secret,)])
    written = write_report([RunData(write_image_run(tmp_path / "run", data))], tmp_path / "out")
    html = with_unpacked(written.path.read_text())
    assert secret not in html
    for at in range(3):
        assert base64.b64encode(secret[at:])[:-4] not in html
    assert b"none of PNG, JPEG" in html


@pytest.mark.long
def test_images_leave_room_for_samples_and_stop_at_the_limit(tmp_path: Path) -> None:
    rows = [(noise(number, (256, 256)),) for number in range(90)]
    run = write_image_run(tmp_path / "run", write_data(tmp_path / "data", rows), steps=1)
    written = write_report([RunData(run)], tmp_path / "out", 2 * MB)
    shown, total = written.images["run"]
    assert 5 < shown < total == 90
    assert written.bytes <= 2 * MB
    album = data_of(written.path.read_text(), "data")["pictures"][0]
    assert album["reasons"] == [page_images.NO_ROOM]
    assert len(album["pieces"]) + album["unshown"] == 90


def test_images_are_in_pieces_beside_those_of_samples(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_report, "ONE_FILE", 1000)
    monkeypatch.setattr(page_images, "PIECE", 100)
    written = write_report([RunData(run)], tmp_path / "out")
    names = sorted(path.name for path in (written.path.parent / "data" / "0" / "pictures").iterdir())
    assert names == ["0.js", "1.js", "2.js", "3.js"]
    data = data_of(written.path.read_text(), "data")
    assert data["steps"][0]["pictures"] == sorted(data["pictures"][0]["pieces"].values()) == [0, 1, 2, 3]


def test_a_report_without_the_data_gives_the_reason_once(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "data")
    written = write_report([RunData(run)], tmp_path / "out")
    assert written.images == {"run": (0, 5)}
    album = data_of(written.path.read_text(), "data")["pictures"][0]
    assert album == {
        "pieces": {},
        "unshown": 5,
        "problems": {},
        "reasons": [f"no such file or folder: {tmp_path / 'data'}"],
    }


def test_runs_without_images_have_none_of_it(tmp_path: Path) -> None:
    run = write_image_run(tmp_path / "run", write_data(tmp_path / "data", [(), ()]))
    written = write_report([RunData(run)], tmp_path / "out")
    assert written.images == {}
    assert "images" not in json.dumps(data_of(written.path.read_text(), "0/samples/1"))


def test_hostile_columns_of_samples_break_nothing(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = write_image_run(tmp_path / "run", write_data(tmp_path / "data", [(drawing(0),)]), steps=1)
    file = run / "samples" / "step-000001" / "rank-0.parquet"
    table = pq.read_table(file)
    hostile = [[{"digest": "<b>", "width": -3, "height": 2**62}, None], None]
    at = table.column_names.index("images")
    for value in (pa.array(hostile, table.schema.field("images").type), pa.array(["text", "x"])):
        pq.write_table(table.set_column(at, "images", value), file)
        api = api_of(run)
        first = api.answer("samples", {})["rows"][0]
        assert first["prompt"].startswith(("[image]", "<image>"))
        api.answer("group", {"step": "1", "prompt": "drawn:train:0"})
        assert write_report([RunData(run)], tmp_path / "out").images == {}


def test_a_transparent_or_turned_image_is_shown_as_the_model_sees_it(tmp_path: Path) -> None:
    clear = encoded(Image.new("RGBA", (20, 10), (0, 0, 0, 0)))
    run = write_image_run(tmp_path / "run", write_data(tmp_path / "data", [(clear,)]), steps=1)
    shown = Image.open(io.BytesIO(decoded(asked(api_of(run), "drawn:train:0", clear)["src"])))
    assert (shown.mode, shown.getpixel((0, 0))) == ("RGB", (255, 255, 255))
