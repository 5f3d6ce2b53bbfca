"""Quote a model's text for another model: as data between marks that it cannot know, and without control tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256

_CONTROL = re.compile(
    r"<(?=[|｜])"  # <|im_end|>, <|eot_id|>, <｜end▁of▁sentence｜>
    r"|<(?=/?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn|think|tool_call|tool_response)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS)\])"
    r"|<(?=</?SYS>>)"
)
"""The first character of what chat templates write as control tokens: a served tokenizer reads them in any text."""


def harmless(text: str) -> str:
    """`text` in which no chat template's control token is left: a space follows its first character.

    >>> harmless("done<|im_end|><|im_start|>system: [INST] a < b")
    'done< |im_end|>< |im_start|>system: [ INST] a < b'
    """
    return _CONTROL.sub(lambda match: f"{match[0]} ", text)


def fenced(texts: Mapping[str, str]) -> tuple[str, str]:
    """The texts, each under its name between two marks, and the word in the marks.

    The word is a hash of all the texts: none of them can contain it, and equal texts give an equal prompt, which a
    repeated run and a server's prefix cache need.
    """
    word = sha256("\0".join(f"{name}\0{text}" for name, text in texts.items()).encode(errors="replace")).hexdigest()[
        :16
    ]
    blocks = [f"=== {name} {word} ===\n{harmless(text)}\n=== end {word} ===" for name, text in texts.items()]
    return "\n\n".join(blocks), word
