"""`rlcli runs samples`: saved samples of a run in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any

import typer

from rlcli.cli import console
from rlcli.cli.options import Json, OfEvaluations, OnlySteps, RunName
from rlcli.errors import ConfigError, DataError
from rlcli.types import Outcome

SHORT = 600
"""Characters of each text that are shown without --full."""


def samples(
    run: RunName,
    steps: OnlySteps = None,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="Only those that are not right, whatever the outcome.")
    ] = False,
    outcomes: Annotated[
        list[str] | None, typer.Option("--outcome", help="Only this outcome, such as no_answer; repeatable.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only scores of at least this.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only scores of at most this.")] = None,
    prompt: Annotated[str, typer.Option(metavar="ID", help="Only of this prompt, through all steps.")] = "",
    text: Annotated[str, typer.Option(help="Only those with this text in prompt, response or another message.")] = "",
    evaluations: OfEvaluations = False,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many, of the newest steps.")] = 5,
    full: Annotated[bool, typer.Option("--full", help=f"Whole texts, not their first {SHORT} characters.")] = False,
    json: Json = False,
) -> None:
    """Show saved samples of a run, the newest first; text that the policy did not generate is dimmed.

    One sample of each group of a step comes first, then a second one of each, and so on; with --prompt, all of one
    group in order.

    Examples:

      rlcli runs samples grpo-1

      rlcli runs samples grpo-1 --wrong --step 40 --limit 20

      rlcli runs samples grpo-1 --prompt rlcli/arithmetic:train:7 --full

      rlcli runs samples grpo-1 --outcome no_answer --text "####" --json
    """
    from rlcli.evaluation.rescoring import steps_of
    from rlcli.evaluation.sample_browser import Filter, one_of_each_group, wanted_samples
    from rlcli.launch.resume import find_record

    unknown = sorted(set(outcomes or ()) - {str(outcome) for outcome in Outcome})
    if unknown:
        raise ConfigError(f"--outcome {unknown[0]} is not known", f"give one of {', '.join(Outcome)}")
    folder = find_record(run)
    samples_folder = folder / ("evaluations" if evaluations else "samples")
    available = steps_of(samples_folder)
    if not available:
        raise DataError(f"{samples_folder} has no samples", "they are saved with tracking.save_samples = true")
    if missing := sorted(set(steps or ()) - set(available)):
        raise DataError(
            f"{samples_folder} has no samples of step {missing[0]}", f"it has steps {available[0]} to {available[-1]}"
        )
    wanted = Filter(tuple(outcomes or ()), wrong, min_reward, max_reward, prompt, text)
    rows = wanted_samples(samples_folder, steps or available, wanted, console.note)
    selected = list(islice(rows if prompt else one_of_each_group(rows), limit))
    if json:
        console.emit_json([_as_dict(row) for row in selected])
        return
    if not selected:
        console.note(f"no sample of {samples_folder} is like that")
    print_samples(selected, None if full else SHORT)


def print_samples(rows: Sequence[Mapping[str, Any]], max_characters: int | None) -> None:
    """Print samples, each text with its first `max_characters` characters; None: all."""
    from rich.text import Text

    from rlcli.runs.tracking.run_console import SampleText
    from rlcli.runs.tracking.text.message_text import shortened, worded_messages_of
    from rlcli.support.redact import printable

    terminal = console.stdout()
    for row in rows:
        terminal.print(Text(printable(_headline(row)), style="bold"), soft_wrap=True)
        if row.get("answer") is not None or row.get("ground_truth"):
            facts = {"answer": row.get("answer"), "ground truth": row.get("ground_truth") or None}
            answer = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
            terminal.print(Text(shortened(answer, max_characters or len(answer)), style="dim"), soft_wrap=True)
        sample = SampleText.of(row)
        # Also a system message, and examples.
        sample = sample._replace(messages=sample.messages or worded_messages_of(row))
        names = ("", "") if sample.messages else ("user: ", "assistant: ")
        for number, (text, generated) in enumerate(sample.parts()):
            label = names[number] if not sample.messages else ""
            labelled = label + text
            terminal.print(
                Text(shortened(labelled, max_characters or len(labelled)), style="" if generated else "dim"),
                soft_wrap=True,
            )
        terminal.print()


def _headline(row: Mapping[str, Any]) -> str:
    advantage = row.get("advantage")
    facts = [
        f"── step {row['step']}",
        str(row["prompt_id"]),
        "greedy" if row["sample"] == -1 else f"sample {row['sample']}",
        f"score {row['score']:g}" if row["score"] is not None else "no score",
        str(row["outcome"]),
        f"advantage {advantage:+.3g}" if advantage is not None else "",
        f"{row['response_tokens']} tokens" if row["response_tokens"] is not None else "",
        f"{row['turns']} turns" if (row["turns"] or 1) > 1 else "",
        str(row["ended"] or row["finish_reason"] or ""),
        f"left out: {row['left_out']}" if row["left_out"] else "",
        str(row["detail"] or ""),
    ]
    return " · ".join(fact for fact in facts if fact)


def _as_dict(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for JSON: messages as a list, and the parts of the score as an object."""
    from rlcli.runs.tracking.text.message_text import messages_of

    return {**row, "messages": list(messages_of(row)), "parts": dict(row["parts"] or ())}
