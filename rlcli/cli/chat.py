"""`rlcli chat`: talk to a model in the terminal."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import completion, console
from rlcli.cli.options import JsonResult, MaxTokens, Seed
from rlcli.errors import ConfigError, RlcliError

if TYPE_CHECKING:
    from rlcli.rollout.local_chat import Chat, Reply

NEW, LEAVE = "/new", "/exit"
HELP = f"{NEW} begins a new conversation, {LEAVE} or Ctrl-D leaves, Ctrl-C ends an answer"


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL",
            help="A run, by folder or name; a checkpoint; a model's folder or hub id.",
            autocompletion=completion.models,
        ),
    ],
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    temperature: Annotated[float, typer.Option(min=0.0, max=10.0, help="0: the likeliest token each time.")] = 0.7,
    max_tokens: MaxTokens = 1024,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Ask this one question, print the answer.")] = None,
    seed: Seed = 0,
    as_json: JsonResult = False,
) -> None:
    """Talk to a model, or to the newest checkpoint of a run, on transformers in this process.

    Each line is a message; questions may come from a pipe, too. With --json only one
    question is asked, with --prompt.

    Examples:

      rlcli chat grpo-1

      rlcli chat Qwen/Qwen2.5-0.5B-Instruct --system "Answer briefly." --temperature 0

      rlcli chat runs/grpo-1/checkpoints/step-000040 --prompt "2+2=" --json
    """
    from rlcli.support.extras import require

    if as_json and prompt is None:
        raise ConfigError("--json prints one answer", "give the question with --prompt")
    if prompt is not None and not prompt.strip():
        raise ConfigError("--prompt is empty", "give a question")
    require("torch", "transformers", "accelerate")
    from rlcli.rollout.engine import Sampling
    from rlcli.rollout.local_chat import Chat

    source = model_source(model)
    conversation = Chat.load(source, Sampling(temperature, max_tokens), seed=seed, system=system)
    try:
        if prompt is not None:
            _ask_once(conversation, prompt, as_json)
        else:
            _converse(conversation, system)
    finally:
        conversation.engine.close()


def model_source(name: str) -> str:
    """The model to load for a run, a checkpoint, a model's folder or a hub id: for a run, an export of its newest
    checkpoint. Raises `RlcliError`."""
    from rlcli.export.checkpoint_source import is_run
    from rlcli.export.export_folder import model_folder
    from rlcli.launch.resume import RUNS
    from rlcli.model.io.model_config import check_place
    from rlcli.runs.checkpoint import is_checkpoint
    from rlcli.support.hub import offline_unless_reachable

    path = Path(name).expanduser()
    if not path.exists() and len(path.parts) == 1 and (RUNS / path).is_dir():
        path = RUNS / path
    if _is_record(path):
        raise ConfigError(f"{path} is a run without a checkpoint", "name a model, or a run that has saved one")
    folder = model_folder(str(path) if path.exists() else name, console.note)
    if (Path(folder) / "adapter_config.json").is_file():
        if is_run(path) or is_checkpoint(path):
            return _merged(path)
        raise ConfigError(
            f"{name} is a LoRA adapter, and rlcli chat loads whole models",
            "merge it first: rlcli export RUN --merge --out my-model",
        )
    if not Path(folder).is_dir():
        offline_unless_reachable(console.note)
    check_place(folder)
    return folder


def _is_record(path: Path) -> bool:
    """True if a folder has records of a run, but neither a checkpoint nor a model."""
    from rlcli.runs.folder import EVENTS, METRICS

    recorded = any((path / name).is_file() for name in (EVENTS, METRICS))
    return recorded and not (path / "checkpoints").is_dir() and not (path / "config.json").is_file()


def _merged(source: Path) -> str:
    """A temporary folder with the newest checkpoint of a run that trains a LoRA adapter, or a checkpoint, merged into
    its base's weights."""
    from rlcli.export.checkpoint_source import find_origin
    from rlcli.export.export_folder import export
    from rlcli.export.export_types import Options

    temporary = tempfile.mkdtemp(prefix="rlcli-chat-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    origin, merged = find_origin(source, "", console.note), Path(temporary) / "merged"
    console.note(f"merging the adapter of {origin.name} into its base for this command")
    options = Options(merge=True, check=False)
    export(origin, merged, options, force=False, on_phase=lambda phase: None, on_note=console.note)
    return str(merged)


def _ask_once(chat: Chat, question: str, as_json: bool) -> None:
    began = time.monotonic()
    reply = chat.ask(question, (lambda text: None) if as_json else _write)
    if as_json:
        rate = reply.tokens / max(time.monotonic() - began, 1e-9)
        figures = {"tokens": reply.tokens, "finish_reason": reply.finish_reason, "tokens_per_s": round(rate, 1)}
        console.emit_json({"prompt": question, "response": reply.text, **figures})
        return
    print()
    _report_cut(reply)


def _converse(chat: Chat, system: str) -> None:
    """Answer questions from standard input until it ends."""
    if sys.stdin.isatty():
        console.note(HELP)
    while (line := _read_line()) is not None:
        question = line.strip()
        if question == LEAVE:
            return
        if question == NEW:
            chat.restart(system)
            console.note("a new conversation")
            continue
        if not question:
            continue
        try:
            reply = chat.ask(question, _write)
        except RlcliError as error:
            if not sys.stdin.isatty():
                raise
            console.note(str(error))
            continue
        print()
        _report_cut(reply)


def _read_line() -> str | None:
    if sys.stdin.isatty():
        console.stdout().print("you> ", style="cyan", end="")
    line = sys.stdin.readline()
    return line or None


def _write(text: str) -> None:
    """Write a piece of the answer. A model's output must not control the terminal."""
    from rlcli.support.redact import printable

    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _report_cut(reply: Reply) -> None:
    if reply.finish_reason != "stop":
        why = "interrupted" if reply.finish_reason is None else "cut off at the limit of tokens"
        console.note(f"({why} after {reply.tokens} tokens)")
