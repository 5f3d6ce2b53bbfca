"""`rlcli prep`: turns a dataset into the parquet files that training and evaluation read."""

from __future__ import annotations

import shlex
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli import completion, console
from rlcli.cli.command_group import Group
from rlcli.cli.next_commands import after_prep, print_next
from rlcli.cli.prep.filter import filter_prompts
from rlcli.cli.prep.show_data import describe_all, show_one
from rlcli.errors import ConfigError
from rlcli.types import ConvertOptions

if TYPE_CHECKING:
    from typer._click.core import Context
    from typer._click.shell_completion import CompletionItem

    from rlcli.prep.pipeline import Plan, Prepared
    from rlcli.types import Converter, Prompt

FORMATS = ("verl", "trl")
FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".gz")
of_source = partial(typer.Option, rich_help_panel="The source")
of_rows = partial(typer.Option, rich_help_panel="Which rows")
of_output = partial(typer.Option, rich_help_panel="The output")


class Prep(Group):
    """Treats any argument that is not a subcommand as the name of a dataset."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        first, second = [*args, "", ""][:2]
        if first in ("", "-h", "--help") or (first in self.commands and first != "NAME"):
            return super().parse_args(ctx, args)
        # The literal `rlcli prep NAME --help` is not about a dataset called NAME.
        args = args if first == "NAME" and second.startswith("-") else ["NAME", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        """Complete datasets as well as subcommands."""
        from typer._click.shell_completion import CompletionItem

        commands = [item for item in super().shell_complete(ctx, incomplete) if item.value != "NAME"]
        return commands + [CompletionItem(name) for name in completion.converters(incomplete)]


app = typer.Typer(
    cls=Prep,
    no_args_is_help=True,
    help="""Make train.parquet and test.parquet from a dataset.

Examples:

  rlcli prep list                                  all datasets

  rlcli prep gsm8k

  rlcli prep gsm8k --help                          all options
""",
)
app.command("list")(describe_all)
app.command("show")(show_one)
app.command("filter")(filter_prompts)

DatasetName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The dataset; rlcli prep list shows all.", autocompletion=completion.converters
    ),
]
OutFolder = Annotated[Path | None, of_output(help="Folder to write to (default: data/NAME).")]
Format = Annotated[str, of_output("--format", help="verl: for rlcli and verl. trl: flat.")]
Source = Annotated[str | None, of_source(help="Hub id, or local folder or file.")]
Subset = Annotated[str | None, of_source(help="A named part of the source.")]
Columns = Annotated[list[str] | None, of_source(metavar="OURS=THEIRS,…", help="Which columns of the source to read.")]
Verifier = Annotated[
    str | None, of_source(help="Verifier of every row; of jsonl and hf, unset: named when training (--verifier).")
]
DataSource = Annotated[str | None, of_source(help="The dataset's name in every row.")]
Ability = Annotated[str | None, of_source(help="The ability in every row.")]
Instruction = Annotated[str | None, of_source(help="Text that is added to each question.")]
Task = Annotated[str | None, of_source(help="Task of a generator.")]
Difficulty = Annotated[int | None, of_source(help="Difficulty of generated problems.")]
Seed = Annotated[int | None, of_source(help="Seed of generated problems.")]
Count = Annotated[int | None, of_source(help="Generated rows of train.")]
TestCount = Annotated[int | None, of_source(help="Generated rows of test.")]
Kinds = Annotated[str | None, of_source(metavar="KIND,…", help="Kinds of generated questions.")]
Cells = Annotated[int | None, of_source(help="Cells on a side of a generated image.")]
Cell = Annotated[int | None, of_source(help="Pixels on a side of such a cell.")]
Split = Annotated[str | None, of_rows(help="Only this one: train or test.")]
MinPromptChars = Annotated[int | None, of_rows(min=1)]
MaxPromptChars = Annotated[int | None, of_rows(min=1)]
MaxPromptTokens = Annotated[int | None, of_rows(min=1, help="As --tokenizer counts, with those of images.")]
Tokenizer = Annotated[str | None, of_rows(help="A model's folder or hub id.")]
Dedup = Annotated[bool, of_rows("--dedup", help="Keep the first of equal prompts.")]
Decontaminate = Annotated[
    list[str] | None,
    of_rows(metavar="FILE,…", help="Leave out train rows that are in these evaluation sets (parquet); repeatable."),
]
Ngram = Annotated[int | None, of_rows(min=1, help="Words in a row that are compared (13).")]
NgramShare = Annotated[
    float | None,
    of_rows(
        min=0.001,
        max=1.0,
        help="Leave a row out if it has this share of an evaluation prompt's n-grams, or more (0.5).",
    ),
]
TestSize = Annotated[
    str | None,
    of_rows(metavar="N|SHARE", help="Hold out this many rows of train (200), or this share (0.1), as the test split."),
]
TestSeed = Annotated[int, of_rows(metavar="SEED", help="Chooses them.")]
Shuffle = Annotated[int | None, of_rows(metavar="SEED", help="Shuffle each split.")]
Limit = Annotated[int | None, of_rows(min=1, help="At most N rows a split.")]
NoCheck = Annotated[bool, of_rows("--no-check", help="Do not verify each row's own answer.")]
SkipBad = Annotated[bool, of_rows("--skip-bad", help="Leave out and count malformed rows instead of stopping.")]
JsonOutput = Annotated[bool, of_output("--json", help="Print one JSON object.")]


@app.command("NAME")
def prep(
    name: DatasetName,
    out: OutFolder = None,
    output_format: Format = "verl",
    source: Source = None,
    subset: Subset = None,
    columns: Columns = None,
    verifier: Verifier = None,
    data_source: DataSource = None,
    ability: Ability = None,
    instruction: Instruction = None,
    task: Task = None,
    difficulty: Difficulty = None,
    seed: Seed = None,
    count: Count = None,
    test_count: TestCount = None,
    kinds: Kinds = None,
    cells: Cells = None,
    cell: Cell = None,
    split: Split = None,
    min_prompt_chars: MinPromptChars = None,
    max_prompt_chars: MaxPromptChars = None,
    max_prompt_tokens: MaxPromptTokens = None,
    tokenizer: Tokenizer = None,
    dedup: Dedup = False,
    decontaminate: Decontaminate = None,
    ngram: Ngram = None,
    ngram_share: NgramShare = None,
    test_size: TestSize = None,
    test_seed: TestSeed = 0,
    shuffle: Shuffle = None,
    limit: Limit = None,
    no_check: NoCheck = False,
    skip_bad: SkipBad = False,
    as_json: JsonOutput = False,
) -> None:
    """Make train.parquet and test.parquet from a dataset.

    Examples:

      rlcli prep gsm8k --source ~/downloads/gsm8k --out data/gsm8k

      rlcli prep arithmetic --difficulty 2 --seed 1

      rlcli prep jsonl --source mine.jsonl --columns prompt=question --verifier math --test-size 0.1 --out data/mine

      rlcli prep math --dedup --decontaminate data/math500 --shuffle 0 --limit 4096
    """
    from rlcli.prep.decontaminate import NGRAM, SHARE
    from rlcli.prep.pipeline import Plan

    options = ConvertOptions(
        source=source,
        subset=subset,
        columns=_columns(columns or []),
        task=task,
        difficulty=difficulty,
        seed=seed,
        count=count,
        test_count=test_count,
        kinds=kinds,
        cells=cells,
        cell=cell,
        verifier=verifier,
        data_source=data_source,
        ability=ability,
        instruction=instruction,
    )
    plan = Plan(
        split=split,
        min_chars=min_prompt_chars,
        max_chars=max_prompt_chars,
        max_tokens=max_prompt_tokens,
        tokenizer=tokenizer,
        dedup=dedup,
        against=tuple(path for paths in decontaminate or [] for path in paths.split(",") if path),
        ngram=ngram or NGRAM,
        share=ngram_share or SHARE,
        shuffle=shuffle,
        limit=limit,
        check=not no_check,
        skip_bad=skip_bad,
        test_size=None if test_size is None else _test_size(test_size),
        test_seed=test_seed,
    )
    _refuse(plan, ngram is not None or ngram_share is not None, output_format)
    _make(name, out or Path("data") / name, options, plan, output_format, as_json)


def _columns(texts: list[str]) -> dict[str, str]:
    """The column mapping of `--columns`.

    >>> _columns(["prompt=question,ground_truth=answer"])
    {'prompt': 'question', 'ground_truth': 'answer'}
    """
    columns = {}
    for pair in (pair for pairs in texts for pair in pairs.split(",")):
        ours, equals, theirs = pair.partition("=")
        if not (ours.strip() and equals and theirs.strip()):
            raise ConfigError(f"--columns: '{pair}' is not OURS=THEIRS", "write for instance: prompt=question")
        columns[ours.strip()] = theirs.strip()
    return columns


def _test_size(text: str) -> float:
    """A number of rows, 1 or more, or a share of them, below 1.

    >>> _test_size("200"), _test_size("0.1")
    (200.0, 0.1)
    """
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not (0 < size < 1 or (size >= 1 and size.is_integer())):
        raise ConfigError(f"--test-size = {text} is no number of rows", "give a number, as 200, or a share, as 0.1")
    return size


def _refuse(plan: Plan, ngrams_given: bool, output_format: str) -> None:
    """Refuse options that do not fit together."""
    if output_format not in FORMATS:
        raise ConfigError(f"--format = {output_format} is not known", f"give one of {', '.join(FORMATS)}")
    if (plan.max_tokens is None) != (plan.tokenizer is None):
        raise ConfigError(
            "--max-prompt-tokens and --tokenizer need each other",
            "give both: --tokenizer is a model's folder or hub id",
        )
    if plan.min_chars and plan.max_chars and plan.min_chars > plan.max_chars:
        raise ConfigError(
            f"--min-prompt-chars = {plan.min_chars} is more than --max-prompt-chars = {plan.max_chars}", "swap them"
        )
    if ngrams_given and not plan.against:
        raise ConfigError(
            "--ngram and --ngram-share need --decontaminate", "give it an evaluation set, or leave them out"
        )
    if plan.test_seed and plan.test_size is None:
        raise ConfigError(f"--test-seed = {plan.test_seed} needs --test-size", "give it, or leave --test-seed out")
    if plan.against and plan.split not in (None, "train"):
        raise ConfigError(
            f"--decontaminate takes rows out of train, and --split = {plan.split}", "leave one of them out"
        )


def _make(name: str, out: Path, options: ConvertOptions, plan: Plan, output_format: str, as_json: bool) -> None:
    from rlcli.data.prompts.provenance import provenance
    from rlcli.images.image_descriptions import described
    from rlcli.prep.pipeline import CONVERTERS, converter_named, counts, prepare
    from rlcli.prep.split_writer import write_splits
    from rlcli.support.hub import offline_unless_reachable

    converter = converter_named(name)
    _refuse_unread(name, converter, options)
    if options.verifier is not None:
        _refuse_verifier(options.verifier)
    if _asks_the_hub(converter, options.source):
        offline_unless_reachable(console.note)
    with console.progress() as on_progress:
        prepared = prepare(converter, options, plan, on_progress)
    arguments = _given(options) | _given(plan) | {"format": output_format}
    record = provenance(name, CONVERTERS.origin(name), prepared.origins, arguments, counts(prepared.steps))
    written = write_splits(out, prepared.splits, record, output_format)
    older = sorted(path.name for path in out.glob("*.parquet") if path.stem not in written)
    example = next(iter(prepared.splits.values()))[0]
    if as_json:
        shown = {"messages": example.messages, "ground_truth": example.ground_truth, "verifier": example.verifier}
        shown |= {"images": described(example.images)} if example.images else {}
        splits = {split: {"path": path, "rows": len(prepared.splits[split])} for split, path in written.items()}
        steps = [
            count | {"examples": step.examples}
            for count, step in zip(counts(prepared.steps), prepared.steps, strict=True)
        ]
        console.emit_json(
            {"name": name, "out": out, "splits": splits, "steps": steps, "older": older, "example": shown}
        )
        return
    for split, path in written.items():
        console.plain(f"{split}: {len(prepared.splits[split])} rows in {path}")
    _report(prepared)
    if older:
        console.plain(f"left as before in {out}: {', '.join(older)}")
    _show(example)
    print_next(after_prep(out, example.verifier, trains="train" in written))


def _asks_the_hub(converter: Converter, source: str | None) -> bool:
    """True if rows may come from the hub: they are not generated, not local and not a file name."""
    if "source" not in converter.options or (source and Path(source).expanduser().exists()):
        return False
    name = source or converter.source
    return "/" in name and Path(name).suffix not in FILES


def _refuse_unread(name: str, converter: Converter, options: ConvertOptions) -> None:
    for field in _given(options):
        if field not in converter.options:
            reads = ", ".join(map(flag, converter.options)) or "none"
            raise ConfigError(f"{flag(field)}: {name} does not read it", f"its options are: {reads}")


def _refuse_verifier(verifier: str) -> None:
    """Refuse a verifier that no row may name, with options that no row may set, and unknown names."""
    from rlcli.rewards.expression import parse
    from rlcli.rewards.verifier_registry import check_row_may_name, target

    for term in parse(verifier).terms:
        target(term.ref)
        try:
            check_row_may_name(term)
        except ConfigError as error:
            raise ConfigError(
                f"--verifier = {verifier}: rows may name installed verifiers only, with the options that these allow, "
                f"and {error.message}",
                f"leave it out here, or name one that rows may name; when training: --verifier {shlex.quote(verifier)}",
            ) from error


def _given(settings: ConvertOptions | Plan) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    default = type(settings)()
    return {
        field.name: value
        for field in fields(settings)
        if (value := getattr(settings, field.name)) != getattr(default, field.name)
    }


def _report(prepared: Prepared) -> None:
    """Print the rows that each step left out, and its note."""
    for step in prepared.steps:
        for why, count in step.removed.items():
            if count:
                console.plain(f"  {step.name}: {count} left out, {why}")
        for example in step.examples:
            console.plain(f"    {example}")
        if step.note:
            console.plain(f"  {step.name}: {step.note}")


def _show(example: Prompt) -> None:
    from rlcli.images.image_descriptions import described, worded_messages
    from rlcli.support.redact import printable

    console.plain("example:")
    for message in worded_messages(example.messages, described(example.images)):
        console.plain(f"  {message['role']}: " + printable(message["content"]).replace("\n", "\n    "))
    truth = printable(example.ground_truth)
    shown = truth if len(truth) <= 200 else truth[:200] + "…"
    if example.verifier:
        console.plain(f"  ground truth: {shown} (verifier {example.verifier})")
        return
    console.plain(f"  ground truth: {shown or 'none; name its column, if there is one: --columns answer=THEIRS'}")
    console.plain("the rows name no verifier: name it when training, --verifier NAME or --verifier FILE.py:FUNCTION")


def flag(option: str) -> str:
    """The flag of an option.

    >>> flag("test_count")
    '--test-count'
    """
    return "--" + option.replace("_", "-")
