"""The extra checks of `--dry-run`: each weight, each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from rlcli.data.prompts.prompt_table import JoinedPrompts, PromptTable
from rlcli.errors import DataError
from rlcli.launch.planner import planner
from rlcli.launch.prepared_run import Prepared
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.trial import Answers, asks_server, check_answers
from rlcli.types import Prompt


def try_out(prepared: Prepared, on_note: Callable[[str], None], *, verifies: bool = True) -> None:
    """Raise an `RlcliError` for what would fail, or could not be learned from, after the start of the run. verifies:
    whether verifiers may run."""
    from rlcli.model.io.model_checks import check_lora, check_weights

    config = prepared.config
    if advice := planner().advice(prepared):
        on_note(advice)
    if config.lora.rank:
        check_lora(config.model.path, config.lora.targets)
    models = (config.model.path, config.critic.path, *(teacher.path for teacher in config.teacher.held))
    for path in dict.fromkeys(filter(None, models)):
        check_weights(path, on_note)
    sets = [prepared.prompts.prompts, *([prepared.held_out.prompts] if prepared.held_out else [])]
    answer_sets = [check_not_empty(rows, on_note) for rows in sets]
    if prepared.facts.verifiers and verifies and not config.data.response:
        with ScoringPool(1, config.verifier.deadline_s, sandbox=prepared.sandbox) as pool:
            for answers in answer_sets:
                # `check_verifiers` has tried the other verifiers; an empty answer may be further down.
                first = {verifier: rows for verifier, rows in answers.first.items() if asks_server(verifier)}
                check_answers(Answers(first, answers.empty), pool, on_note)


def check_not_empty(rows: Iterable[Prompt], on_note: Callable[[str], None]) -> Answers:
    """Raise `DataError` for a prompt without text; note answers without text. `check_answers` refuses answers that the
    row's verifier cannot score."""
    answers, without = Answers(), list[str]()
    for row, prompt in enumerate(rows):
        if not any(message["content"].strip() for message in prompt.messages):
            raise DataError(f"data: the prompt of {_named(rows, row, prompt)} is empty", "write it, or leave it out")
        if not prompt.ground_truth.strip():
            without.append(prompt.id)
        answers.add(prompt, row, partial(_named, rows, row, prompt))
    if without:
        on_note(f"{len(without)} rows have an empty ground truth, {without[0]} the first")
    return answers


def _named(rows: Iterable[Prompt], row: int, prompt: Prompt) -> str:
    """A row with its file, if that is known."""
    if isinstance(rows, JoinedPrompts):
        part = int(rows.starts.searchsorted(row, side="right")) - 1
        return _named(rows.parts[part], row - int(rows.starts[part]), prompt)
    if isinstance(rows, PromptTable):
        return f"row {prompt.id} of {rows.origin.file}"
    return f"row {prompt.id}"
