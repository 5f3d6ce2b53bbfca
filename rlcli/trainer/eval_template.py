"""Is the chat template that prompts go through the one that the model knows?"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from rlcli.errors import ModelError
from rlcli.types import Prompt


def check_template(tokenizer: Any, prompt: Prompt) -> list[str]:
    """What a reader should know of the tokenizer's chat template, tried on one prompt.

    Raises `ModelError` where the template drops the prompt's text.
    """
    name, messages = tokenizer.name_or_path or "the model", list(prompt.messages)
    opened = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if messages[-1]["content"].strip() not in opened:
        raise ModelError(
            f"the chat template of {name} leaves out the text of prompt {prompt.id}",
            "put the model's own chat_template.jinja into its folder",
        )
    if opened == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False):
        return [f"the chat template of {name} opens no assistant turn: the model may go on with the user's"]
    return []


def trained_with(model: str, adapter: str) -> list[str]:
    """A note where the model was trained with another chat template than it is now evaluated with.

    model: the folder evaluated, or the base of `adapter`, whose own tokenizer is not used. What a run trained with is
    known where the folder lies in the run's.
    """
    now, folder = _template(model), Path(adapter or model)
    if now is None or not folder.is_dir():
        return []
    if adapter and (own := _template(adapter)) is not None and own != now:
        return [f"the tokenizer in {adapter} has another chat template than {model}, which is used"]
    run, base = _run_of(folder)
    then = _template(base) if base else None
    if then is None or then == now:
        return []
    return [
        f"the run {run} was trained with the chat template of {base}, and that of {model} is another: "
        "the model sees prompts that look different"
    ]


def _run_of(folder: Path) -> tuple[str, str]:
    """The run in whose folder this one lies, and the model that it began from; both empty where there is none."""
    for parent in folder.resolve().parents[:3]:
        try:
            settings = tomllib.loads((parent / "config.toml").read_text(encoding="utf-8"))
            return parent.name, str(settings["model"]["path"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return "", ""


def _template(path: str) -> str | None:
    """The chat template of a folder's tokenizer; None where the folder is not there or has none."""
    from transformers import AutoTokenizer

    if not (Path(path) / "tokenizer_config.json").is_file():
        return None
    try:
        found = AutoTokenizer.from_pretrained(path).chat_template
    except Exception:  # whatever its layers raise: this is for a note
        return None
    return found if isinstance(found, str) else None
