"""The chat template that `model.chat_template` names, for models that come without one: a built-in one, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import ConfigError
from rlcli.support.reading import TEMPLATE_BYTES, UnfitFile, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILT_IN = {
    "chatml": "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "plain": "{% for message in messages %}"
    "{{ message['content'] }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
    "{% endfor %}",
}
"""Name → template. chatml: the markers of Qwen and many others. plain: the messages' text alone, which the model
continues."""


def template_text(choice: str) -> str:
    """The text of the template that `choice` names. Raises `ConfigError` for a file that cannot be read."""
    if choice in BUILT_IN:
        return BUILT_IN[choice]
    names = ", ".join(BUILT_IN)
    try:
        text = read_text(Path(choice).expanduser(), TEMPLATE_BYTES, links=True)
    except (OSError, UnicodeDecodeError, UnfitFile) as error:
        why = error.strerror if isinstance(error, OSError) else getattr(error, "why", "it is not UTF-8")
        raise ConfigError(
            f"model.chat_template = '{choice}' cannot be read: {why}", f"give a Jinja file, or one of {names}"
        ) from error
    if not text.strip():
        raise ConfigError(f"model.chat_template = '{choice}' is empty", f"write it, or give one of {names}")
    return text


def choose_template(tokenizer: PreTrainedTokenizerBase, choice: str) -> None:
    """Give the tokenizer the template that `choice` names in place of its own; empty: it keeps its own.

    A built-in template begins with the beginning-of-text token if the tokenizer puts one before a text by itself.
    """
    if not choice:
        return
    text = template_text(choice)
    begin = tokenizer.bos_token_id
    if choice in BUILT_IN and begin is not None and tokenizer("a")["input_ids"][:1] == [begin]:
        text = "{{ bos_token }}" + text
    tokenizer.chat_template = text


def located(choice: str) -> str:
    """The choice with a file's path made absolute."""
    return choice if not choice or choice in BUILT_IN else str(Path(choice).expanduser().resolve())


def is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if its template renders the messages' text alone."""
    return BUILT_IN["plain"] in str(tokenizer.chat_template)
