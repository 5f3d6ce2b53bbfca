"""Load prompts from parquet files and turn them into token ids."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlcli.data.prompts.chat_template import control_tokens, in_parts, render
from rlcli.data.prompts.parallel_map import spread
from rlcli.data.prompts.prompt_table import JoinedPrompts, PromptTable, taken
from rlcli.data.prompts.template_choice import choose_template
from rlcli.errors import DataError, ModelError
from rlcli.images.decoding import decode, decoded_size, size_of
from rlcli.images.image_rule import ImageRule
from rlcli.images.row_images import BadImage
from rlcli.support.reading import check_model_folder
from rlcli.types import Prompt

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64
    from transformers import PreTrainedTokenizerBase

TOKENIZE_AT_ONCE, IMAGE_ROWS_AT_ONCE = 512, 16
"""Prompts that are tokenized together, and prompts that may have images, megabytes each."""
MANY, CHUNK = 50_000, 4096
"""From this many prompts on, separate processes tokenize them, in chunks of this size."""
Measured = Callable[[bytes], tuple[int, int]]
"""Width and height of an encoded image; raises `BadImage`."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of token ids; row i is `flat[offsets[i]:offsets[i + 1]]`."""

    flat: Int32[np.ndarray, " T"]
    """Token ids of all rows, concatenated."""
    offsets: Int64[np.ndarray, " rows+1"]
    """Start of each row in `flat`, and the total."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, int(offsets[-1])), offsets)

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, concatenated."""
        if not parts:
            return cls.of([])
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate([part.flat for part in parts]), np.concatenate([[0], np.cumsum(lengths)]))

    @property
    def lengths(self) -> Int64[np.ndarray, " rows"]:
        """Tokens of each row."""
        lengths: np.ndarray = np.diff(self.offsets)
        return lengths

    def row(self, i: int) -> Int32[np.ndarray, " n"]:
        """Token ids of row `i`, a view."""
        return self.flat[self.offsets[i] : self.offsets[i + 1]]

    def take(self, rows: Int64[np.ndarray, " n"]) -> Ragged:
        """The rows at these indexes, which are ascending."""
        lengths = self.lengths
        if len(rows) == len(lengths):
            return self
        mask: np.ndarray = np.zeros(len(lengths), bool)
        mask[rows] = True
        return Ragged(self.flat[np.repeat(mask, lengths)], np.concatenate([[0], np.cumsum(lengths[rows])]))


@dataclass(frozen=True, eq=False)
class TokenizedPrompts:
    """P prompts and their token ids, with the chat template applied and the assistant's turn opened."""

    prompts: Sequence[Prompt]
    """Prompts that fit."""
    too_long: int
    """Rows that were left out because they are too long."""
    flat: Int32[np.ndarray, " T"]
    """Token ids of all prompts, concatenated; prompt i is `flat[offsets[i]:offsets[i + 1]]`."""
    offsets: Int64[np.ndarray, " P+1"]
    """Start of each prompt in `flat`, and the total."""
    too_long_responses: int = 0
    """Rows of `too_long` whose prompt fits and whose response does not."""
    control: Int64[np.ndarray, " n"] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Indexes, ascending, of the prompts whose text has a control token of the tokenizer, such as `<|im_end|>`: it is
    tokenized as the control token, as by transformers and by vLLM's server."""
    response_flat: Int32[np.ndarray, " R"] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Token ids of the responses to imitate, concatenated; empty if none were requested."""
    response_offsets: Int64[np.ndarray, " P+1"] = field(default_factory=lambda: np.zeros(1, np.int64))
    """Start of each response in `response_flat`, and the total."""
    kept: Int64[np.ndarray, " P"] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Indexes of the prompts in the rows that were passed to `tokenize`."""
    mark: str = ""
    """The fingerprint, if it is known already."""
    bad_images: int = 0
    """Rows that were left out because of an image that cannot be decoded."""
    rule: ImageRule | None = None
    """Image preprocessing of the model, if it takes images."""

    @classmethod
    def tokenize(
        cls,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        response: str = "",
        max_response_tokens: int = 0,
        rule: ImageRule | None = None,
        measured: Measured = decoded_size,
    ) -> TokenizedPrompts:
        """Apply the tokenizer's chat template to each prompt, once, on all cores for many prompts;
        `on_progress(done, all)` is called now and then.

        response: the field of `extra_info` that holds the text to imitate, at most `max_response_tokens` long including
        its end; empty: no responses. A response is the unchanged text, tokenized separately from its prompt as a
        sampled one is, and the tokenizer's end of sequence, where the engine stops. The chat template makes the same of
        the whole conversation, except that ChatML (Qwen) writes a newline after the end, which a model never has to
        write; Llama's trims the text; Qwen3's puts an empty <think> block before a text that has none; and with the
        base models of Qwen the end is <|endoftext|>, while the template closes the turn with <|im_end|>.

        rule: image preprocessing of the model, if it takes images: each has as many tokens as its size gives. measured:
        gives that size; by default each is decoded once, to know that it can be, and with `size_of` only its header is
        read.

        Raises `ModelError` if there is no chat template, it refuses a prompt, or the tokenizer has no end of
        sequence; `DataError` if a row has no response, no row is short enough or none can be shown.
        """
        _check(tokenizer, with_end=bool(response))
        assert not response or max_response_tokens > 0, "responses need a limit of their length"
        ids, answers, control = _encoded(prompts, tokenizer, response, on_progress, rule, measured)
        shown = np.flatnonzero(ids.lengths)
        if not len(shown):
            raise DataError(f"data: none of {len(prompts)} rows has images that can be shown: {_first_bad(prompts)}")
        fitting = _within(ids.lengths, shown, max_prompt_tokens, "prompts", "data.max_prompt_tokens")
        selected = fitting
        if response:
            limit = max_response_tokens
            selected = _within(answers.lengths, fitting, limit, "responses", "rollout.max_response_tokens")
            answers = answers.take(selected)
        ids = ids.take(selected)
        return cls(
            prompts=taken(prompts, selected),
            too_long=len(shown) - len(selected),
            flat=ids.flat,
            offsets=ids.offsets,
            too_long_responses=len(fitting) - len(selected),
            control=np.flatnonzero(np.isin(selected, control)),
            response_flat=answers.flat,
            response_offsets=answers.offsets,
            kept=selected,
            bad_images=len(prompts) - len(shown),
            rule=rule,
        )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def left_out(self) -> dict[str, int]:
        """Reason → number of rows that were left out for it."""
        return {
            "pictures that cannot be shown": self.bad_images,
            "longer than data.max_prompt_tokens": self.too_long - self.too_long_responses,
            "a response longer than rollout.max_response_tokens": self.too_long_responses,
        }

    def fingerprint(self) -> str:
        """Hexadecimal; it changes if any prompt, its place, its tokens or its verifier changes."""
        if self.mark:
            return self.mark
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.flat, self.offsets, self.response_flat, self.response_offsets):
            digest.update(np.ascontiguousarray(array).data)
        chunk = CHUNK if self.rule is None else IMAGE_ROWS_AT_ONCE
        many = _are_many(self.prompts)
        for text in spread(_written, _chunks(self.prompts, chunk)) if many else map(_text, self.prompts):
            digest.update(text)
        return digest.hexdigest()

    def tokens(self, i: int) -> Int32[np.ndarray, " n"]:
        """The token ids of prompt `i`, a view."""
        return self.flat[self.offsets[i] : self.offsets[i + 1]]

    def words(self, i: int) -> Int32[np.ndarray, " n"]:
        """As `tokens`, without image tokens."""
        tokens = self.tokens(i)
        return tokens[~np.isin(tokens, self.rule.never)] if self.rule is not None else tokens

    @property
    def image_tokens(self) -> int:
        """Number of image tokens of all prompts together."""
        return 0 if self.rule is None else int((self.flat == self.rule.token).sum())

    def longest(self) -> int:
        """The index of the longest prompt, the first in case of a tie."""
        return int(np.diff(self.offsets).argmax())

    def responses(self, i: int) -> Int32[np.ndarray, " n"]:
        """The token ids of the response to imitate for prompt `i`, its end included, so at least one: a view."""
        assert len(self.response_offsets) == len(self) + 1, "tokenized without responses"
        return self.response_flat[self.response_offsets[i] : self.response_offsets[i + 1]]


def load_tokenizer(path: str, template: str = "") -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id. template: as `model.chat_template`. Raises `ModelError`, also if it has no
    chat template, and `ConfigError` for a template that cannot be read."""
    from transformers import AutoTokenizer

    check_model_folder(Path(path))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # The hub's client and the tokenizers raise many types; to the user all mean the same.
    except Exception as error:
        raise ModelError(
            f"'{path}' has no tokenizer to load: {error!s:.200}", "give a model's folder or hub id"
        ) from error
    choose_template(tokenizer, template)
    _check(tokenizer, with_end=False)
    return tokenizer


def prompt_lengths(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    rule: ImageRule | None = None,
) -> list[int]:
    """The tokens of each prompt, with the chat template applied and the assistant's turn opened. rule: image
    preprocessing of the model, if it takes images: of these only the headers are read. 0 for a prompt whose images
    cannot be shown."""
    ids, *_ = _encoded(prompts, tokenizer, "", on_progress, rule, size_of)
    lengths: list[int] = ids.lengths.tolist()
    return lengths


def _check(tokenizer: PreTrainedTokenizerBase, with_end: bool) -> None:
    name = tokenizer.name_or_path or "the model"
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {name} has no chat template",
            "use an instruct model, or give one: --set model.chat_template=chatml (or plain, or a file)",
        )
    if with_end and tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {name} has no end-of-sequence token to end a response with",
            "name its eos_token in the model's tokenizer_config.json",
        )


def _encoded(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    response: str,
    on_progress: Callable[[int, int], None],
    rule: ImageRule | None = None,
    measured: Measured = decoded_size,
) -> tuple[Ragged, Ragged, Int64[np.ndarray, " n"]]:
    """The token ids of all prompts (none for one whose images cannot be decoded or whose text spells an image token),
    those of the responses if they are requested, and the rows of prompts with a control token in their text."""
    if isinstance(prompts, PromptTable | JoinedPrompts) and not response:
        prompts = prompts.without("extra_info")  # maybe megabytes per row, not read here
    many = _are_many(prompts)
    encode = partial(_encode_some, tokenizer, response, rule, measured, control_tokens(tokenizer))
    chunks = _chunks(prompts, IMAGE_ROWS_AT_ONCE if rule is not None else CHUNK if many else TOKENIZE_AT_ONCE)
    encoded: list[tuple[Ragged, Ragged]] = []
    control: list[int] = []
    done = 0
    for ids, answers, rows in spread(encode, chunks) if many else map(encode, chunks):
        encoded.append((ids, answers))
        control += [done + row for row in rows]
        done += len(ids.lengths)
        on_progress(done, len(prompts))
    joined = Ragged.joined([ids for ids, _ in encoded]), Ragged.joined([answers for _, answers in encoded])
    return *joined, np.asarray(control, np.int64)


def _encode_some(
    tokenizer: PreTrainedTokenizerBase,
    response: str,
    rule: ImageRule | None,
    measured: Measured,
    control: re.Pattern[str] | None,
    prompts: Sequence[Prompt],
) -> tuple[Ragged, Ragged, list[int]]:
    batch = list(prompts)
    shown = [prompt.messages if rule is None else in_parts(prompt) for prompt in batch]
    texts = [
        render(tokenizer, messages, what=f"prompt {prompt.id}") for prompt, messages in zip(batch, shown, strict=True)
    ]
    ids = _encode(tokenizer, texts)
    if rule is not None:
        spelled = [str(tokenizer.convert_ids_to_tokens(token)) for token in rule.never]
        ids = Ragged.of(
            [
                [] if _spells(prompt, spelled) else _seen(rule, measured, prompt, ids.row(row))
                for row, prompt in enumerate(batch)
            ]
        )
    answers = [_response(prompt, response) for prompt in batch] if response else []
    encoded = _encode(tokenizer, answers, tokenizer.eos_token_id) if response else Ragged.of([])
    return ids, encoded, [row for row, prompt in enumerate(batch) if control_token_in(prompt, control)]


def control_token_in(prompt: Prompt, control: re.Pattern[str] | None) -> str:
    """The first control token in the prompt's text; empty if it has none. control: matches them."""
    matches = (control.search(message["content"]) for message in prompt.messages) if control else ()
    return next((match[0] for match in matches if match), "")


def _spells(prompt: Prompt, tokens: Sequence[str]) -> bool:
    """Return whether the prompt's text has one of these image tokens."""
    return any(token in message["content"] for message in prompt.messages for token in tokens)


def _seen(rule: ImageRule, measured: Measured, prompt: Prompt, ids: Int32[np.ndarray, " n"]) -> Sequence[int]:
    """Expand each image placeholder to one token per patch; empty if an image cannot be decoded."""
    tokens: list[int] = ids.tolist()
    if not prompt.images:
        return tokens
    if (markers := int((ids == rule.token).sum())) != len(prompt.images):
        raise ModelError(
            f"the chat template writes {markers} placeholders for the {len(prompt.images)} images of {prompt.id}",
            "put the model's own chat_template.jinja into its folder",
        )
    try:
        sizes = [rule.fitted(*measured(image)) for image in prompt.images]
    except BadImage:
        return []
    return rule.expanded(tokens, sizes)


def _first_bad(prompts: Sequence[Prompt]) -> str:
    for prompt in prompts:
        for image in prompt.images:
            try:
                decode(image)
            except BadImage as error:
                return f"{prompt.id}: {error}"
    return "their texts have tokens that stand for images"


def _written(prompts: Sequence[Prompt]) -> bytes:
    return b"".join(map(_text, prompts))


def _text(prompt: Prompt) -> bytes:
    """The entry of a prompt in the fingerprint."""
    return prompt.content()


def _are_many(prompts: Sequence[Prompt]) -> bool:
    """Return whether separate processes, which take seconds to start, are faster."""
    return len(prompts) >= MANY and len(os.sched_getaffinity(0)) > 1


def _chunks(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *end: int) -> Ragged:
    """The token ids of each text, then `end`."""
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return Ragged.of([[*tokens, *end] for tokens in encoded] if end else encoded)


def _within(
    lengths: Int64[np.ndarray, " rows"], candidates: Int64[np.ndarray, " n"], limit: int, plural: str, key: str
) -> Int64[np.ndarray, " m"]:
    """The row indexes of `candidates` whose rows are at most `limit` tokens long; `DataError` if there are none."""
    fitting: np.ndarray = candidates[lengths[candidates] <= limit]
    if not len(fitting):
        shortest = int(lengths[candidates].min()) if len(candidates) else 0
        raise DataError(
            f"data: all {len(candidates)} {plural} are longer than {key} = {limit} (the shortest has {shortest} "
            "tokens)",
            f"give --set {key}={shortest} or more",
        )
    return fitting


def _response(prompt: Prompt, name: str) -> str:
    text = prompt.extra_info.get(name)
    if not isinstance(text, str) or not text.strip():
        field_names = ", ".join(sorted(prompt.extra_info)) or "nothing"
        is_present = name in prompt.extra_info
        problem = f"holds {text!r:.60}, which is not text" if is_present else f"is missing (it has {field_names})"
        raise DataError(
            f"data: {prompt.id}: extra_info.{name}, the response to imitate, {problem}",
            "name a field of text with data.response; rlcli prep gsm8k and rlcli prep arithmetic write one: response",
        )
    return text
