"""Conformance test of every tracker. In the test of a new one: `conforms("my_tracker", folder, CONFIG)`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcli.data.sample_files import sample_row, write_samples
from rlcli.runs.folder import RunFolder
from rlcli.runs.tracking import open_trackers
from rlcli.runs.tracking.plots import reward_curve_png
from rlcli.types import Outcome, Prompt, Verdict

STEPS = [(1, {"reward/mean": 0.5, "eval/pass@1": 0.25}), (2, {"reward/mean": 0.75, "eval/pass@1": math.nan})]
RESUMED = [(3, {"reward/mean": 1.0})]
QUESTION = {"role": "user", "content": "What is *6* <b>·</b> 7?"}
TALK = [QUESTION, {"role": "assistant", "content": "# Let me see"}, {"role": "tool", "content": "42"}]


def write_step(folder: RunFolder, step: int, scores: Sequence[float] = (1.0, 0.0)) -> None:
    """Samples of a step and of its evaluation, as the workers write them; every other one is a conversation."""
    prompt = Prompt(f"sums:train:{step}", (QUESTION,), "sums", "math", "gsm8k", "42")
    verdicts = [Verdict(score, Outcome.OK if score else Outcome.WRONG, "42") for score in scores]
    rows = [
        sample_row(
            *(prompt, number, f"It is {42 - number}.", verdict),
            prompt_tokens=9,
            response_tokens=5,
            finish_reason="stop",
            messages=[*TALK, {"role": "assistant", "content": f"It is {42 - number}."}] if number % 2 else [],
        )
        for number, verdict in enumerate(verdicts)
    ]
    for room in (folder.samples, folder.evaluations):
        write_samples(room / f"step-{step:06d}" / "rank-0.parquet", step, rows)


def log_steps(
    name: str,
    folder: RunFolder,
    config: Mapping[str, Any],
    steps: list[tuple[int, dict[str, float]]],
    resumed_at: int | None = None,
    failed: bool = False,
) -> None:
    """Log `steps` to one tracker, with samples of the first and of those with an evaluation, and an image at the end;
    it must report no problem."""
    notes: list[str] = []
    trackers = open_trackers([name], folder, "arith", config, notes.append, resumed_at)
    for step, metrics in steps:
        write_step(folder, step)
        trackers.log(step, metrics)
    image = folder.path / "reward.png"
    reward_curve_png(image, *zip(*[(step, metrics["reward/mean"]) for step, metrics in steps], strict=True), {})
    trackers.image("reward", image)
    trackers.close(failed)
    assert notes == [], (folder.logs / f"tracker-{name}.log").read_text()


def conforms(
    name: str,
    folder: RunFolder,
    config: Mapping[str, Any],
    failed: bool = False,
    before_resume: Callable[[], None] = lambda: None,
) -> str:
    """Log two steps, one with a NaN, then a third in a resumed run, which must be the same run in the tracker. failed:
    the resumed run fails. Returns the run's id in the tracker."""
    log_steps(name, folder, config, STEPS)
    before_resume()
    first = json.loads((folder.path / "trackers.json").read_text())[name]
    log_steps(name, folder, config, RESUMED, resumed_at=2, failed=failed)
    assert json.loads((folder.path / "trackers.json").read_text()) == {name: first}
    message: str = first
    return message
