"""Images of prompts in terminals and in JSON: by size and digest, never their bytes, and never left out silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcli.cli.main import main
from rlcli.images.image_descriptions import described
from tests.image_runs import drawing, noise, write_data, write_image_run

SHOWN = "[image 84 x 56]"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [(drawing(0),), (noise(1), drawing(2)), ()]
    data = write_data(Path("data"), rows)
    return write_image_run(Path("runs/first"), data, held_out=write_data(Path("data"), rows, "test"))


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main([*words]) == code
    shown = capsys.readouterr().out
    assert "PNG" not in shown
    assert "\\x" not in shown
    return shown


def parsed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    return json.loads(printed(capsys, *words, "--json", code=code))


def test_samples_of_a_run_name_their_images(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "runs", "samples", "first", "--prompt", "drawn:train:1")
    assert f"user: {SHOWN}\nWhat is drawn? And {SHOWN}?" in shown
    assert "assistant: <image> 0" in shown
    assert SHOWN in printed(capsys, "runs", "samples", "first", "--evaluations")
    assert SHOWN in printed(capsys, "runs", "show", "first")
    rows = parsed(capsys, "runs", "samples", "first", "--prompt", "drawn:train:1")
    assert rows[0]["images"] == described([noise(1), drawing(2)])
    assert rows[0]["messages"][1]["content"].count("<image>") == 2
    assert parsed(capsys, "runs", "samples", "first", "--prompt", "drawn:train:2")[0]["images"] is None
    assert parsed(capsys, "runs", "show", "first")["samples"][0]["images"] == described([drawing(0)])


def test_a_report_says_how_many_images_are_not_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "images" not in printed(capsys, "report", "first", "--out", "out")
    assert parsed(capsys, "report", "first", "--out", "out")["pictures"] == {"first": {"shown": 3, "of": 3}}
    Path("data").rename("moved")
    assert "first: 0 of 3 images; the pages say why" in printed(capsys, "report", "first", "--out", "out")


def test_compared_prompts_name_their_images(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rlcli.data.prompts.prompt_table import read_prompts
    from rlcli.data.sample_files import sample_row, write_samples
    from rlcli.types import Outcome, Verdict

    other = write_image_run(Path("runs/other"), Path("data"), held_out=Path("data"))
    counts: dict[str, Any] = {"prompt_tokens": 5, "response_tokens": 3, "finish_reason": "stop"}
    verdict = Verdict(1.0, Outcome.OK, "1")
    rows = [
        sample_row(prompt, sample, "x", verdict, **counts)
        for prompt in read_prompts("data", "test")
        for sample in range(2)
    ]
    write_samples(other / "evaluations" / "step-000002" / "rank-0.parquet", 2, rows)
    changed = parsed(capsys, "runs", "compare", "first", "other")["changed"]
    assert f"{SHOWN}\nWhat is drawn?" in [prompt["prompt"] for prompt in changed]


def test_a_prepared_file_shows_sizes_of_images(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "prep", "show", "data/train.parquet")
    assert SHOWN in shown
    first = parsed(capsys, "prep", "show", "data/train.parquet")["first"]
    assert first["images"] == [{**described([drawing(0)])[0], "bytes": len(drawing(0))}]


@pytest.mark.long
def test_prep_shows_an_example_with_its_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("prep", "shapes", "--out", "made", "--count", "40", "--test-count", "8")
    assert "  user: [image 84 x 84]" in printed(capsys, *words)
    example = parsed(capsys, *words)["example"]
    assert [(image["width"], image["height"], len(image["digest"])) for image in example["images"]] == [(84, 84, 32)]
    assert example["messages"][0]["content"].startswith("<image>")


ACCEPTS_ALL = """
def verify(request):
    return 1.0

def gold(request):
    return request.ground_truth
"""


@pytest.mark.long
def test_an_audit_shows_the_images_of_unexpected_rows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("all.py").write_text(ACCEPTS_ALL)
    words = ("verifiers", "audit", "all.py:verify", "--data", "data", "--mutations", "3")
    shown = printed(capsys, *words, "--html", "audit.html", code=1)
    assert f"row 1 {SHOWN} {SHOWN}, " in shown
    html = Path("audit.html").read_text()
    assert "img-src data:" in html
    assert f'alt="{SHOWN}"' in html
    assert html.count("<img ") == html.count('<img src="data:image/')
    surprises = parsed(capsys, *words, code=1)["surprises"]
    assert {len(surprise["images"]) for surprise in surprises} == {0, 1, 2}
    assert next(surprise for surprise in surprises if surprise["row"] == 0)["images"] == described([drawing(0)])


@pytest.mark.long
def test_an_audit_names_broken_images(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(Path("data"), [(b"<script>window.broken = 1</script>",)])
    Path("all.py").write_text(ACCEPTS_ALL)
    printed(
        capsys, "verifiers", "audit", "all.py:verify", "--data", "data", "--html", "audit.html", "--limit", "1", code=1
    )
    html = Path("audit.html").read_text()
    assert "[image] not shown: the image is none of PNG" in html
    assert "<script" not in html


def test_a_served_model_gets_no_data_with_images(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--endpoint", "http://127.0.0.1:9/v1", "--data", "data"]) == 2
    assert "the data has images, and --endpoint sends text alone" in capsys.readouterr().err


def test_an_environment_gets_the_images_of_its_row(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("echo.py").write_text("""
class Echo:
    def reset(self, row, seed):
        return row["messages"]
    def step(self, message):
        return [], 0.0, True
""")
    assert main(["env", "show", "echo.py:Echo", "--data", "data", "--row", "1"]) == 0
    stdout = capsys.readouterr().out
    assert stdout.count(SHOWN) == 2
    assert "base64" not in stdout


@pytest.mark.parametrize("words", [["chat"], ["env", "try", "guess_number", "--model"]])
def test_a_model_that_sees_is_not_asked_here(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from rlcli.model.io.tiny_vision import save_vision_model, vision_model

    save_vision_model(vision_model("qwen3_vl", layers=1), tmp_path / "vlm")
    assert main([*words, str(tmp_path / "vlm")]) == 2
    assert "takes images, and is asked in runs and evaluations alone" in capsys.readouterr().err
