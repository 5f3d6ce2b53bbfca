"""`rlcli rescore`: scores the saved samples of a run again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli import completion, console
from rlcli.cli.options import Deadline, JsonReport, OfEvaluations, OnlySteps, Processes, RunName, Sandbox
from rlcli.errors import ConfigError, DataError, RlcliError

if TYPE_CHECKING:
    from rlcli.config.schema import RunConfig
    from rlcli.evaluation.rescoring import Rescored, Stored
    from rlcli.rewards.expression import Composition
    from rlcli.types import Prompt, Verdict

NewVerifier = Annotated[
    str,
    typer.Option(
        help="Name, file.py:function, expression, or auto: what each row names.",
        autocompletion=completion.verifiers,
    ),
]
Limit = Annotated[int, typer.Option(min=0, help="The first N samples of each step only; 0: all.")]
ScoresFile = Annotated[Path | None, typer.Option(help="Write each sample's old and new score (JSON Lines; .gz too).")]
KeepInRun = Annotated[
    bool, typer.Option("--keep", help="Write the same into the run, for rlcli runs signals and rlcli report.")
]
WRITTEN = ("prompt_id", "group", "sample", "prompt", "response", "ground_truth")
"""Columns of a sample that are written with its scores."""


def rescore(
    run: RunName,
    verifier: NewVerifier,
    steps: OnlySteps = None,
    evaluations: OfEvaluations = False,
    limit: Limit = 0,
    out: ScoresFile = None,
    keep: KeepInRun = False,
    processes: Processes = None,
    deadline: Deadline = 5.0,
    sandbox: Sandbox = "",
    as_json: JsonReport = False,
) -> None:
    """Score the saved samples of a run again with another verifier, and compare old and new scores by step.

    Ground truths are those of the run's data; for prompts that it no longer
    has, what was saved of them. Nothing is written into the run, except with --keep.

    Examples:

      rlcli rescore runs/gsm8k --verifier "math + 0.1 * format"

      rlcli rescore gsm8k --verifier last_word.py:verify --step 40 --out rescored.jsonl
    """
    from rlcli.config.changes import read_run_config
    from rlcli.evaluation.rescoring import rescore, try_verifier
    from rlcli.launch.resume import find_run
    from rlcli.rewards.expression import parse
    from rlcli.rewards.response_files import writing
    from rlcli.rollout.model_servers.local_servers import scoring_here

    folder = find_run(run)
    composition = parse(verifier).located()
    if keep and (evaluations or out):
        raise ConfigError("--keep is for the training's samples, and names the file itself", "leave out the other flag")
    if out and folder in out.expanduser().resolve().parents:
        raise ConfigError(f"--out {out} lies in the folder of the run", "give another file")
    target = _scores_file(folder, verifier) if keep else out
    samples = _samples(folder / ("evaluations" if evaluations else "samples"), set(steps or ()), limit)
    config = read_run_config(folder).config
    prompts, note = _prompts(config, folder, str(composition), evaluations)
    thinking, template_note = _thinking(config, folder)
    expressions = _expressions(composition, samples, prompts, note)
    with scoring_here(expressions, processes, deadline, sandbox, console.note) as (pool, _):
        try_verifier(samples, prompts, str(composition), pool, thinking=thinking)
        with writing(str(target)) if target else nullcontext() as write, console.progress() as on_progress:
            result = rescore(
                samples,
                prompts,
                str(composition),
                pool,
                thinking=thinking,
                on_verdict=lambda stored, verdict: write(_fields(stored, verdict)) if write else None,
                on_progress=on_progress,
            )
    notes = [text for text in (note, template_note) if text]
    if as_json:
        console.emit_json({"run": folder, "verifier": str(composition), **_as_dict(result), "notes": notes})
    else:
        _print(result, notes)


def _scores_file(folder: Path, verifier: str) -> Path:
    """The file of the run for the scores of a verifier."""
    from rlcli.evaluation.rescoring import RESCORED

    name = re.sub(r"[^\w.+-]+", "-", verifier).strip("-.")[-80:] or "verifier"
    return folder / RESCORED / f"{name}.jsonl"


def _samples(folder: Path, steps: set[int], limit: int) -> list[Stored]:
    """The samples of these steps in a folder. steps: empty for all. limit: the first of each step only; 0: all."""
    from rlcli.evaluation.rescoring import steps_of, stored_samples

    existing = steps_of(folder)
    if missing := sorted(steps - set(existing)):
        raise DataError(f"{folder} has no samples of step {missing[0]}", f"it has {_range(existing)}")
    samples = [
        sample for step in sorted(steps) or existing for sample in stored_samples(folder, [step])[: limit or None]
    ]
    if not samples:
        raise DataError(f"{folder} has no samples", "they are saved with tracking.save_samples = true")
    return samples


def _fields(stored: Stored, verdict: Verdict) -> dict[str, Any]:
    new = {"score": verdict.score, "outcome": str(verdict.outcome), "answer": verdict.answer, "detail": verdict.detail}
    fields = {name: stored.fields[name] for name in WRITTEN}
    old = {f"old_{name}": stored.fields[name] for name in ("score", "outcome")}
    return {"step": stored.step, **fields, **old, **new, "parts": dict(verdict.parts)}


def _prompts(config: RunConfig, folder: Path, verifier: str, evaluations: bool) -> tuple[dict[str, Prompt], str]:
    """The run's prompts by id, and a note if its data cannot be read."""
    from rlcli.data.prompts.image_columns import IMAGES
    from rlcli.data.prompts.prompt_table import JoinedPrompts, PromptTable, read_sets
    from rlcli.evaluation.evaluation_folder import dataset_names

    started = _started_in(folder)
    paths = [str(started / Path(path).expanduser()) for path in _paths(config, evaluations)]
    split = "test" if evaluations else "train"
    try:
        names = dataset_names(paths, "--eval-data") if evaluations else dataset_names(paths, "--data", "train")
        rows = read_sets(paths, names, split, verifier)
        rows = rows.without(IMAGES) if isinstance(rows, PromptTable | JoinedPrompts) else rows  # megabytes each
        return {prompt.id: prompt for prompt in rows}, ""
    except RlcliError as error:
        return {}, f"{error.message}; rows are scored by what the samples hold of them"


def _paths(config: RunConfig, evaluations: bool) -> tuple[str, ...]:
    return config.evaluation.paths if evaluations else config.data.paths


def _started_in(folder: Path) -> Path:
    from rlcli.runs.software_record import directory_of, environment_of

    return Path(directory_of(environment_of(folder)) or Path.cwd())


def _expressions(
    composition: Composition, samples: Sequence[Stored], prompts: Mapping[str, Prompt], note: str
) -> list[str]:
    """The verifiers of these samples. note: the reason if there are no prompts."""
    from rlcli.launch.verifier_trial import refuse_comparisons

    ids = dict.fromkeys(sample.fields["prompt_id"] for sample in samples)
    if composition.names_rows_own and (missing := [key for key in ids if key not in prompts]):
        why = f" ({note})" if note else ""
        raise DataError(
            f"--verifier {composition}: the run's data has no row {missing[0]}{why}", "name another verifier"
        )
    expressions = sorted({prompts[key].verifier for key in ids if key in prompts}) or [str(composition)]
    refuse_comparisons(expressions, "rlcli rescore")
    return expressions


def _thinking(config: RunConfig, folder: Path) -> tuple[bool, str]:
    """True if the run's prompts opened a <think>, and a note if its chat template is gone."""
    from rlcli.data.prompts import chat_template
    from rlcli.data.prompts.tokenized_prompts import load_tokenizer
    from rlcli.runs.software_record import environment_of, recorded_day

    start = _started_in(folder)
    model, template = start / config.model.path, start / config.model.chat_template
    try:
        tokenizer = load_tokenizer(
            str(model) if model.is_dir() else config.model.path,
            str(template) if template.is_file() else config.model.chat_template,
        )
        day = recorded_day(environment_of(folder)) if chat_template.asks_for_date(tokenizer) else None
        chat_template.fix(tokenizer, config.data.chat_template_kwargs, day)
        return chat_template.opens_thinking(tokenizer), ""
    except RlcliError as error:
        return False, f"{error.message}; responses are read as if no prompt opened a <think>"


def _as_dict(result: Rescored) -> dict[str, Any]:
    return {
        **result.overall.as_dict(),
        "outcomes": result.outcomes,
        "usage": result.usage,
        "several_turns": result.several_turns,
        "unknown_prompts": result.unknown,
        "examples": result.examples,
        "steps": {step: agreement.as_dict() for step, agreement in sorted(result.steps.items())},
    }


def _print(result: Rescored, notes: list[str]) -> None:
    columns = ("samples", "unverified", "old", "new", "agreement", "correlation")
    steps = [(str(step), agreement.as_dict()) for step, agreement in sorted(result.steps.items())]
    rows = [
        (name, *(_cell(agreement[column]) for column in columns))
        for name, agreement in [*steps, ("all", result.overall.as_dict())]
    ]
    console.show(console.table(["step", *columns], rows))
    for name, total in result.usage.items():
        console.plain(f"{name}: {total:,.10g}")
    if result.several_turns:
        console.plain(f"left out: {result.several_turns} samples of several turns: their text is not one response")
    if result.unknown and not notes:
        console.plain(f"{result.unknown} samples are of prompts that the data no longer has")
    for note in [*notes, *(f"no verdict: {example}" for example in result.examples)]:
        console.note(f"warning: {note}")


def _cell(value: float | int | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _range(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"
