"""Harmony, the chat format of GPT-OSS: a response is several messages, each in a channel.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

Its markers are special tokens: decoded without them, nothing would separate reasoning from answer.
"""

from __future__ import annotations

import re
from collections.abc import Container

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
REASONING = "analysis"
"""The channel of the model's reasoning."""
_MARKER = re.compile(r"(<\|(?:start|channel|message|end|return|call|constrain|endoftext)\|>)")
_THINK = re.compile(r"</?think>")


def speaks(vocabulary: Container[str]) -> bool:
    """True if a tokenizer with these tokens has the format's markers."""
    return all(marker in vocabulary for marker in MARKERS)


def plain(text: str) -> str:
    """A response, decoded with its special tokens, as other models write it: reasoning in `<think>`, which stays open
    if its message does, and all other messages as text. Text without any channel stays as it is. Linear in its length.

    >>> plain("<|channel|>analysis<|message|>6 · 7<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>")
    '<think>6 · 7</think>42'
    >>> plain("<|channel|>analysis<|message|>6 ·"), plain("42<|return|>")
    ('<think>6 ·', '42')
    """
    pieces = _MARKER.split(text)
    if "<|message|>" not in pieces:
        return "" if "<|channel|>" in pieces else _MARKER.sub("", text)
    parts, channel, previous = list[str](), "", ""
    is_open = False
    for piece in pieces:
        if _MARKER.fullmatch(piece):
            if piece == "<|message|>":
                is_open = True
                parts += ["<think>"] if channel == REASONING else []
            elif is_open and piece not in ("<|channel|>", "<|constrain|>"):
                parts += ["</think>"] if channel == REASONING else []
                is_open, channel = False, ""
            previous = piece
        elif is_open:
            parts.append(_THINK.sub("", piece) if channel == REASONING else piece)
        elif previous == "<|channel|>":
            channel = piece.split(maxsplit=1)[0] if piece.strip() else ""
    return "".join(parts)
