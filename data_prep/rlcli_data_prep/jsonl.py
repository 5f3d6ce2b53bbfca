"""Convert any local file of rows, by a mapping of its columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcli.errors import ConfigError, DataError
from rlcli.images.row_images import marked
from rlcli.types import Converter, ConvertOptions, Prompt, RawRow
from rlcli_data_prep.chats import HOLDERS, chat, ends_with_answer, without_answer
from rlcli_data_prep.choices import Choices, letter_of, read_choices, with_choices
from rlcli_data_prep.columns import column_value, has_column, is_json
from rlcli_data_prep.ground_truths import CHOICE, answer_kind, ground_truth, is_index, joins_answers
from rlcli_data_prep.images import images_of
from rlcli_data_prep.sources import ENDINGS, read_splits, text_of

OPTIONS = {
    "columns": "our names for its columns, e.g. prompt=question,answer=target (prompt=prompt, or else messages; and "
    "answer=answer, or else ground_truth); a.b.c is a field in a struct; ground_truth also means the answer, images "
    "the images, choices those of a question; any other name goes into extra_info, response for a worked answer; its "
    "other columns are kept there under their own names",
    "verifier": "what scores the rows: a name or an expression (none: named when training, --verifier)",
    "instruction": "text to append to each question, such as the answer format that the verifier reads (none)",
    "data_source": "the rows' name in metrics (the source's own)",
    "ability": "the rows' kind of task (general)",
}


def read(options: ConvertOptions) -> dict[str, Iterator[RawRow]]:
    """The files' rows; a file whose name gives no split is for training. Raises `ConfigError`."""
    check(options)
    if not Path(str(options.source)).expanduser().exists():
        raise DataError(f"--source: no such file or folder: {options.source}", "for a hub dataset, use: rlcli prep hf")
    return read_splits(options, "")


def prompt(row: Mapping[str, Any], options: ConvertOptions) -> Prompt:
    """The question (text or a chat), the ground truth (see `ground_truths`; empty if there is neither a column for it
    nor a verifier), and images if `columns` names them.

    A chat that ends with the assistant's answer is cut before it; the answer becomes `response`, if the row has none.
    `extra_info` has the other columns of `columns`, under our name, and those of the source, under its own: a reward
    function that was written for the source finds them.
    """
    return prompt_of(row, options, Path(str(options.source)).name.split(".")[0] or "local")


def prompt_of(row: Mapping[str, Any], options: ConvertOptions, source_name: str) -> Prompt:
    """As `prompt`. source_name: the data source of rows that name none."""
    columns = dict(options.columns)
    kind = answer_kind(options.verifier or "")
    question = columns.pop("prompt", "") or _question_of(row)
    messages, answer_turn = without_answer(chat(column_value(row, question, "prompt"), question), question)
    choices = _choices(row, columns.pop("choices", "")) if kind == CHOICE else None
    if choices:
        messages = with_choices(messages, choices)
    if options.instruction:
        last = messages[-1]
        messages = (*messages[:-1], {**last, "content": f"{last['content']}\n\n{options.instruction}"})
    images: tuple[bytes, ...] = ()
    image_column = columns.pop("images", "")
    if image_column:
        images = images_of({image_column: column_value(row, image_column, "images")}, options, image_column)
        messages = marked(messages, len(images))
    # `answer` or `ground_truth` names the answer; with both, `answer` is one more column for extra_info.
    answer = columns.pop("ground_truth", "") or columns.pop("answer", "")
    column = answer or _answer_of(row)
    # Without a verifier that reads an answer there may be none: a reward function reads the columns that it needs.
    has_answer = answer or options.verifier or has_column(row, column)
    truth = ground_truth(column_value(row, column, "answer"), column, kind, row) if has_answer else ""
    if choices and "truth=" not in str(options.verifier):  # else it is an index
        if truth not in choices.labels and is_index(column_value(row, column, "answer"), column):
            raise DataError(
                f"'{column}' holds the number {truth}, which may be an index of the choices or the text of one",
                "if choices are counted from 0, use --verifier 'multiple_choice(truth=index0)', from 1: truth=index1; "
                "else give the letter or the text",
            )
        truth = letter_of(truth, choices)
    extra_info = _kept(row, {question, image_column}) | {name: _json(row, column) for name, column in columns.items()}
    if answer_turn:
        extra_info.setdefault("response", answer_turn)
    if choices:
        extra_info["choices"] = choices.texts
    return Prompt(
        id="",
        messages=messages,
        data_source=options.data_source or _text_of_verl(row, "data_source") or source_name,
        ability=options.ability or _text_of_verl(row, "ability") or "general",
        verifier=options.verifier or "",
        ground_truth=truth,
        extra_info=extra_info,
        images=images,
    )


def note(row: Mapping[str, Any], options: ConvertOptions) -> str:
    """A description of changes to the row that its author may not expect; empty if there are none."""
    notes = []
    question = options.columns.get("prompt", "") or _question_of(row)
    if has_column(row, question) and ends_with_answer(column_value(row, question, "prompt")):
        notes.append(
            "ended with the assistant's answer, which was taken out of the prompt (extra_info response keeps it)"
        )
    column = options.columns.get("ground_truth", "") or options.columns.get("answer", "") or _answer_of(row)
    kind = answer_kind(options.verifier or "")
    if has_column(row, column) and joins_answers(column_value(row, column, "answer"), column, kind):
        notes.append(
            "hold several answers, of which a response must give all (keep one, if they are forms of one answer)"
        )
    return ", and ".join(notes)


def check(options: ConvertOptions) -> None:
    """Raise `ConfigError` if the source is not given: it cannot be guessed."""
    if not options.source:
        raise ConfigError("--source is not given", "for example: --source rows.jsonl")


def _question_of(row: Mapping[str, Any]) -> str:
    """The column of the prompt, if none is named."""
    return next((name for name in ("prompt", *HOLDERS) if name in row), "prompt")


def _answer_of(row: Mapping[str, Any]) -> str:
    """The column of the answer, if none is named."""
    if "answer" in row or "ground_truth" in row:
        return "answer" if "answer" in row else "ground_truth"
    return "reward_model.ground_truth" if _is_verls(row) else "answer"


def _is_verls(row: Mapping[str, Any]) -> bool:
    """True if the row has the columns of verl's files."""
    reward = row.get("reward_model")
    return isinstance(reward, Mapping) and "ground_truth" in reward


def _text_of_verl(row: Mapping[str, Any], column: str) -> str:
    """The text in a column of verl's files; empty for rows of others."""
    value = row.get(column)
    return text_of(value, column) if _is_verls(row) and isinstance(value, str) and value.strip() else ""


def _choices(row: Mapping[str, Any], column: str) -> Choices | None:
    """The choices in the column that is named for them, else in one that is called so, if there is one."""
    column = column or next((name for name in ("choices", "options") if row.get(name) is not None), "")
    return read_choices(column_value(row, column, "choices"), column) if column else None


def _kept(row: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
    """The columns of the source but those in `read`, without values that JSON has none for, such as bytes or times. Of
    verl's rows, the fields of `extra_info`, as verl passes them to a reward function."""
    columns = {str(name): value for name, value in row.items() if name not in read and is_json(value)}
    fields = columns.pop("extra_info", {}) if _is_verls(row) and isinstance(row.get("extra_info"), dict) else {}
    return {**columns, **fields}


def _json(row: Mapping[str, Any], column: str) -> Any:
    value = column_value(row, column, "OURS")
    if not is_json(value):
        raise DataError(f"'{column}' holds no JSON value: {value!r:.80}", "leave it out, or fix that row")
    return value


CONVERTER = Converter(
    name="jsonl",
    summary=f"Any local file or folder ({', '.join(ENDINGS)}), by a mapping of its columns",
    source="--source",
    verifier="--verifier",
    read=read,
    prompt=prompt,
    note=note,
    options={"source": "the file, or a folder of train and test files; required", **OPTIONS},
)
