"""Writes run folders in the format of a run, without a run: small, with known values, as hostile as asked."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlcli.config.load import dump_toml, resolve
from rlcli.data.sample_files import schema, write_table
from rlcli.data.step_files import advantages_schema, tokens_schema

BEGAN = 1_790_000_000.0
STEP_S = 2.0
NEWER = ("group", "messages", "turns", "ended", "turn_rewards", "left_out")
"""Columns of samples that an older rlcli did not write."""


def unpacked(block: str) -> bytes:
    """The JSON of a block of a page that was compressed by gzip, in base64."""
    return gzip.decompress(base64.b64decode(block))


@dataclass
class Settings:
    """Content of a written run.

    steps, prompts, samples: how many; prompts are per step, of `dataset` in all, so that they come again. messages: of
    each sample, (prompt, response) → list; texts: (step, prompt, sample) → response, for chosen ones. alive: the run
    has no end. older: as rlcli wrote it before samples had messages, groups, advantages and tokens.
    """

    steps: int = 6
    prompts: int = 3
    samples: int = 4
    dataset: int = 6
    seed: int = 0
    sets: Sequence[str] = ()
    texts: Mapping[tuple[int, int, int], str] = field(default_factory=dict)
    question: str = "What is {a}+{b}?"
    prompt_id: str = "sums/{n}"
    tools: bool = False
    alive: bool = False
    older: bool = False
    warning: str = ""


def write_run(folder: Path, settings: Settings | None = None, **changes: Any) -> Path:
    """Write a run that learns sums; `changes` are fields of `Settings`. Returns the folder."""
    run = settings or Settings(**changes)
    folder.mkdir(parents=True)
    for name in ("samples", "evaluations", "checkpoints", "logs"):
        (folder / name).mkdir()
    sets = [f"train.steps={run.steps}", f"train.seed={run.seed}", *run.sets]
    flags = {"model.path": "tiny", "data.path": "data/sums", "evaluation.data": "data/sums/test.parquet"}
    (folder / "config.toml").write_text(dump_toml(resolve("grpo", flags, sets)))
    environment = {
        "started": "2026-01-02T03:04:05Z",
        "python": "3.11.9",
        "packages": {"rlcli": "0.1.0", "torch": "2.13.0"},
    }
    (folder / "environment.json").write_text(
        json.dumps(environment | {"cpus": 2, "gpus": [], "command": ["rlcli", "train"]})
    )
    (folder / ".lock").touch()
    add_events(folder, {"event": "started", "step": 0, "of": run.steps})
    write_evaluation(folder, run, 0)
    for step in range(1, run.steps + 1):
        write_step(folder, run, step)
    if run.warning:
        add_events(folder, {"event": "warning", "step": run.steps, "name": "hostile", "text": run.warning})
    if not run.alive:
        add_events(folder, {"event": "finished", "step": run.steps})
    return folder


def write_step(folder: Path, run: Settings, step: int) -> None:
    """Everything that a run records of one step; every third step evaluates."""
    rows = [row for group in range(run.prompts) for row in group_rows(run, step, group)]
    room = folder / "samples" / f"step-{step:06d}"
    shard_schema = pa.schema([field for field in schema() if field.name not in NEWER]) if run.older else schema()
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    for rank, half in enumerate(halves):
        write_table(room / f"rank-{rank}.parquet", pa.Table.from_pylist(half, schema=shard_schema))
    if not run.older:
        _write(room / "advantages.parquet", [advantage_row(row, rows) for row in rows], advantages_schema())
        _write(room / "tokens-0.parquet", [token_row(row) for row in rows[:2]], tokens_schema())
        _append(folder / "timeline.jsonl", timeline_line(step))
    if step % 3 == 0:
        write_evaluation(folder, run, step)
    _append(folder / "metrics.jsonl", metrics_line(rows, step))


def learned(step: int, steps: int) -> float:
    """The share of right answers at a step."""
    return 0.15 + 0.8 * step / max(steps, 1)


def group_rows(run: Settings, step: int, group: int) -> list[dict[str, Any]]:
    """The samples of the prompt at `group` of a step."""
    number = ((step - 1) * run.prompts + group) % run.dataset
    a, b = number + 2, 3 * number + 1
    question = run.question.format(a=a, b=b)
    right = round(learned(step, run.steps) * run.samples)
    rows = []
    for sample in range(run.samples):
        good = sample < right
        answer = a + b if good else a + b + 1 + sample
        text = run.texts.get((step, group, sample), f"{a} plus {b} is {answer}. The answer is #### {answer}")
        rows.append(sample_row(run, step, run.prompt_id.format(n=number), sample, question, text, str(a + b), good))
    return [row | {"group": group} for row in rows]


def sample_row(
    run: Settings, step: int, prompt_id: str, sample: int, question: str, text: str, truth: str, good: bool
) -> dict[str, Any]:
    """One row of samples; a sample with three or more in a group that is wrong was cut off at the limit."""
    cut = not good and sample == run.samples - 1
    tokens = max(1, len(text) // 4)
    return {
        "step": step,
        "prompt_id": prompt_id,
        "group": 0,
        "sample": sample,
        "prompt": question,
        "response": text,
        "ground_truth": truth,
        "answer": text.rpartition(" ")[2],
        "score": float(good),
        "outcome": "ok" if good else "wrong",
        "detail": "" if good else f"expected {truth}",
        "parts": {"exact": float(good), "format": 1.0},
        "verify_s": 0.001,
        "prompt_tokens": len(question) // 4,
        "response_tokens": tokens,
        "finish_reason": "length" if cut else "stop",
        "version": step - 1,
        "newest_version": step - 1,
        "turns": 2 if run.tools else 1,
        "mean_log_prob": -0.5,
        "min_log_prob": -3.0,
        "perplexity": math.exp(0.5),
        "left_out": "truncated" if cut else None,
        "ended": "answered" if run.tools else None,
        "messages": json.dumps(messages_of(run, question, text), ensure_ascii=False),
        "turn_rewards": [0.0, float(good)] if run.tools else None,
    }


def messages_of(run: Settings, question: str, text: str) -> list[dict[str, Any]]:
    """The conversation; with tools, one call before the last response."""
    messages = [{"role": "system", "content": "Add the numbers."}, {"role": "user", "content": question}]
    if run.tools:
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
        messages += [
            {"role": "assistant", "content": "I compute it.", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": "2"},
        ]
    return [*messages, {"role": "assistant", "content": text}]


def advantage_row(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """GRPO's advantage without the division by the deviation."""
    scores = [sample["score"] for sample in rows if sample["prompt_id"] == row["prompt_id"]]
    left_out = row["left_out"]
    advantage = None if left_out else row["score"] - sum(scores) / len(scores)
    key = {name: row[name] for name in ("step", "prompt_id", "group", "sample")}
    return {**key, "saved_step": row["step"], "advantage": advantage, "reward": row["score"], "left_out": left_out}


def token_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of four characters: the prompt's are not sampled, the response's have all figures."""
    cut = 4 if len(row["response"]) < 4000 else 4000
    texts = [(row["prompt"], False), (row["response"], True)]
    pieces = [(text[at : at + cut], sampled) for text, sampled in texts for at in range(0, len(text), cut)]
    count = len(pieces)
    figure = [0.1 * (index % 7) for index in range(count)]
    return {
        **{name: row[name] for name in ("step", "prompt_id", "group", "sample")},
        "saved_step": row["step"],
        "ids": list(range(count)),
        "text": [text for text, _ in pieces],
        "drawn": [sampled for _, sampled in pieces],
        "engine_log_prob": [-value if sampled else None for value, (_, sampled) in zip(figure, pieces, strict=True)],
        "trainer_log_prob": [
            -value * 1.01 if sampled else None for value, (_, sampled) in zip(figure, pieces, strict=True)
        ],
        "entropy": [value / 2 if sampled else None for value, (_, sampled) in zip(figure, pieces, strict=True)],
        "advantage": [row["score"] - 0.5 if sampled else None for _, sampled in pieces],
        "version": [
            row["version"] + (index > count * 0.8) if sampled else None for index, (_, sampled) in enumerate(pieces)
        ],
    }


def timeline_line(step: int) -> dict[str, Any]:
    """A step of STEP_S seconds with a controller, two workers and an engine."""
    lanes = [
        ("controller", [["generate", 0.0, 1.0], ["plan", 1.0, 1.1], ["update", 1.1, 1.7], ["sync", 1.7, 1.9]]),
        ("worker 0", [["generate", 0.05, 0.95], ["verify", 0.95, 1.0], ["update", 1.12, 1.68], ["sync", 1.72, 1.88]]),
        ("worker 1", [["generate", 0.05, 0.6], ["update", 1.12, 1.5], ["sync", 1.72, 1.88]]),
        ("engine 0", [["prefill", 0.06, 0.2], ["decode", 0.2, 0.93]]),
    ]
    return {
        "step": step,
        "start": BEGAN + step * STEP_S,
        "lanes": [{"name": name, "spans": spans} for name, spans in lanes],
    }


def metrics_line(rows: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
    """The most important metrics of the rows, and invented ones for the rest."""
    reward = sum(row["score"] for row in rows) / len(rows)
    tokens = [row["response_tokens"] for row in rows]
    return {
        "step": step,
        "reward/mean": reward,
        "reward/std": 0.4,
        "reward/equal_groups": 0.25,
        "outcome/ok": reward,
        "outcome/wrong": 1 - reward,
        "response_tokens/mean": sum(tokens) / len(tokens),
        "response_tokens/max": max(tokens),
        "response_tokens/truncated": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "rollout/generated": len(rows),
        "update/policy_loss": 0.1 / step,
        "update/entropy": 2.0 - step / 10,
        "update/grad_norm": 0.5,
        "update/lr": 1e-6,
        "update/clip_high": 0.01,
        "mismatch/kl": 1e-4,
        "log_prob_check/mean_abs_diff": 1e-6,
        "time/generate_s": 1.0,
        "time/plan_s": 0.1,
        "time/update_s": 0.6,
        "time/sync_s": 0.2,
        "time/bookkeeping_s": 0.1,
        "time/step_s": STEP_S,
        "throughput/tokens_per_s": 1000.0 + step,
    }


def write_evaluation(folder: Path, run: Settings, step: int) -> None:
    """The report and the greedy samples of an evaluation on five prompts."""
    mean = learned(step, run.steps) - 0.1
    estimate = {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}
    report = {
        "prompts": 5,
        "samples": 5,
        "pass": {"pass@1": estimate},
        "mean": {"mean@1": estimate},
        "outcomes": {"ok": mean},
    }
    report["headline"] = f"pass@1 {mean:.1%} on 5 prompts"
    (folder / "evaluations" / f"step-{step:06d}.json").write_text(json.dumps(report))
    rows = []
    for number in range(5):
        good = number < round(5 * mean)
        text = f"#### {number * 2 if good else 99}"
        rows.append(
            sample_row(run, step, f"test/{number}", 0, f"What is {number}+{number}?", text, str(number * 2), good)
        )
    room = folder / "evaluations" / f"step-{step:06d}"
    write_table(room / "rank-0.parquet", pa.Table.from_pylist(rows, schema=schema()))
    add_events(folder, {"event": "evaluated", "step": step, "headline": report["headline"]})


def add_events(folder: Path, *events: Mapping[str, Any]) -> None:
    """Append events with made-up times."""
    for event in events:
        _append(folder / "events.jsonl", {"time": BEGAN + STEP_S * float(event.get("step", 0)), **event})


def _write(path: Path, rows: Sequence[Mapping[str, Any]], schema: Any) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
