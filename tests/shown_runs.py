"""Folders of runs, as training leaves them, for the commands that show runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcli.config.load import dump_toml, resolve
from rlcli.data.sample_files import sample_row, write_samples
from rlcli.runs.folder import RunFolder
from rlcli.types import Outcome, Prompt, Verdict

HOSTILE = "\x1b[2J\x1b]0;title\x07[red]<script>\u202e"
"""Text that a model may generate. Printed unescaped, it would clear the terminal."""


def row(name: str, sample: int, response: str, score: float, outcome: str = "", **fields: Any) -> dict[str, Any]:
    """A sample of the prompt `a:train:NAME`."""
    prompt = Prompt(f"a:train:{name}", ({"role": "user", "content": f"What is {name}?"},), "a", "math", "exact", name)
    verdict = Verdict(score=score, outcome=Outcome(outcome or ("ok" if score else "wrong")), answer=response[-1:])
    sizes = {"prompt_tokens": 5, "response_tokens": len(response), "finish_reason": "stop"}
    return sample_row(prompt, sample, response, verdict, **{**sizes, **fields})


def add_samples(folder: Path, step: int, rows: Sequence[dict[str, Any]], rank: int = 0, room: str = "samples") -> None:
    write_samples(folder / room / f"step-{step:06d}" / f"rank-{rank}.parquet", step, rows)


def make_run(path: Path, recipe: str = "grpo", steps: int = 9, done: int = 3) -> Path:
    """A finished run of `done` steps, whose reward rises; of `sft`, its loss falls."""
    with RunFolder.create(path) as folder:
        folder.write_config(dump_toml(resolve(recipe, {"train.steps": steps})))
        folder.event("started", step=0, of=steps)
        for step in range(1, done + 1):
            folder.append_metrics(metrics(step))
        folder.event("warning", step=2, name="mismatch", text="engine and trainer disagree")
        folder.event("finished", step=done)
    return path


def metrics(step: int) -> dict[str, float]:
    times = {"time/generate_s": 1.0, "time/update_s": 3.0, "time/step_s": 4.0}
    rates = {"throughput/rollout_tokens_per_s": 1000.0, "throughput/update_tokens_per_s": 2000.0}
    return {"step": step, "reward/mean": step / 10, "update/policy_loss": 3.0 / step, **times, **rates}
