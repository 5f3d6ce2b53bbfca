"""Datasets with images, and folders of runs on them, as training leaves them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlcli.config.load import dump_toml, resolve
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.data.prompts.prompt_table import read_prompts
from rlcli.data.sample_files import sample_row, write_samples
from rlcli.runs.folder import RunFolder
from rlcli.types import IMAGE, Outcome, Prompt, Verdict

SIZES = {"prompt_tokens": 5, "response_tokens": 3, "finish_reason": "stop"}
"""Token counts and finish reason of every sample."""


def drawing(number: int, size: tuple[int, int] = (84, 56)) -> bytes:
    """A PNG of two colours. size: width and height."""
    from PIL import Image

    image = Image.new("RGB", size, (number * 37 % 256, number * 91 % 256, 120))
    image.paste((250, 250, 250), (2, 2, 12, 12))
    return encoded(image)


def noise(number: int, size: tuple[int, int] = (84, 56), form: str = "PNG") -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    return encoded(Image.fromarray(pixels), form)


def encoded(image: object, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)  # type: ignore[attr-defined]
    return buffer.getvalue()


def write_data(folder: Path, images: Sequence[Sequence[bytes]], split: str = "train") -> Path:
    """Rows of a file, each with its images before and within the question."""
    rows = [
        row(
            data_source="drawn",
            messages=[
                {"role": "system", "content": "Look."},
                {
                    "role": "user",
                    "content": f"{IMAGE * bool(row_images)}\nWhat is drawn?{f' And {IMAGE}?' * (len(row_images) - 1)}",
                },
            ],
            verifier="exact",
            ground_truth=str(number),
            images=row_images,
        )
        for number, row_images in enumerate(images)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / f"{split}.parquet", rows)
    return folder


def write_image_run(folder: Path, data: Path, steps: int = 2, held_out: Path | None = None) -> Path:
    """A finished run whose steps have two samples of each row of the data; the response repeats the marker."""
    flags = {"train.steps": steps, "data.path": str(data), "evaluation.data": str(held_out) if held_out else ""}
    with RunFolder.create(folder) as run:
        run.write_config(dump_toml(resolve("grpo", flags)))
        run.event("started", step=0, of=steps)
        for step in range(1, steps + 1):
            run.append_metrics({"step": step, "reward/mean": 0.5})
            _write(run.samples, step, read_prompts(data, "train"))
        if held_out:
            run.write_evaluation(steps, {"headline": "pass@1 50%"})
            _write(run.evaluations, steps, read_prompts(held_out, "test"))
        run.event("finished", step=steps)
    return folder


def _write(room: Path, step: int, prompts: Sequence[Prompt]) -> None:
    rows = [
        sample_row(prompt, sample, f"{IMAGE} {sample}", _verdict(sample), group=group, **SIZES)  # type: ignore[arg-type]
        for group, prompt in enumerate(prompts)
        for sample in range(2)
    ]
    write_samples(room / f"step-{step:06d}" / "rank-0.parquet", step, rows)


def _verdict(sample: int) -> Verdict:
    return Verdict(score=float(sample), outcome=Outcome.OK if sample else Outcome.WRONG, answer=str(sample))
