"""From parquet to prompts, and from prompts to token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlcli.data.schema import unpack_extra_info
from rlcli.errors import ConfigError, DataError, ModelError
from rlcli.scoring.registry import of_row
from rlcli.scoring.spec import Composition, parse
from rlcli.types import Message, Prompt

REQUIRED = ("data_source", "prompt", "reward_model")
TOKENIZE_AT_ONCE = 512


def read_prompts(path: str | Path, split: str, verifier: str = "auto") -> list[Prompt]:
    """The rows of a parquet file, or of `<split>.parquet` in a folder. Files made for verl serve as well.

    verifier: an expression (see `scoring.spec`), in which "auto" stands for what each row names (`reward_model.style`);
    without it the rows are not asked. A prompt's verifier is the expression that this comes to.
    A prompt's id is `data_source:split:row`, with rows counted from 0.
    Raises `DataError` that names the file, the column or the row, and the mend; `ConfigError` for an expression that
    cannot be read.
    """
    expression = parse(verifier).located()
    file = _find(Path(path), split)
    rows = _read(file)
    of_style = cache(lambda style: str(of_row(expression, style)))
    return [_prompt(file, number, row, split, expression, of_style) for number, row in enumerate(rows)]


def _find(path: Path, split: str) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise DataError(f"data: no such file or folder: {path}", f"make it with: rlcli prep NAME --out {path}")
    file = path / f"{split}.parquet"
    if not file.is_file():
        there = ", ".join(sorted(other.name for other in path.glob("*.parquet"))) or "no parquet file"
        raise DataError(
            f"data: {path} has no {split}.parquet (it has {there})",
            f"give a parquet file, or make the folder with: rlcli prep NAME --out {path}",
        )
    return file


def _read(file: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    mend = "make the file with: rlcli prep NAME (rlcli prep list shows the names)"
    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        columns: list[str] = parquet.schema_arrow.names
        missing = [name for name in REQUIRED if name not in columns]
        if missing:
            raise DataError(f"data: {file} has no column '{missing[0]}' (it has {', '.join(columns)})", mend)
        wanted = [name for name in (*REQUIRED, "ability", "extra_info") if name in columns]
        rows: list[dict[str, Any]] = parquet.read(columns=wanted).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data: {file} cannot be read as parquet: {str(error).rstrip('. '):.200}", mend) from error
    if not rows:
        raise DataError(f"data: {file} has no rows", mend)
    return rows


def _prompt(
    file: Path,
    number: int,
    row: Mapping[str, Any],
    split: str,
    expression: Composition,
    of_style: Callable[[str], str],
) -> Prompt:
    def bad(what: str, mend: str = "mend that row, or make the file again with: rlcli prep NAME") -> DataError:
        return DataError(f"data: {file}, row {number} (the first is 0): {what}", mend)

    messages = row["prompt"]
    if not _is_chat(messages):
        raise bad(f"'prompt' must be a list of messages with role and content as text, and is {messages!r:.120}")
    reward = row["reward_model"]
    if not isinstance(reward, dict) or not isinstance(reward.get("ground_truth"), str):
        raise bad(f"'reward_model' must hold 'ground_truth' as text, and is {reward!r:.120}")
    source, ability, extra = row["data_source"], row.get("ability") or "", row.get("extra_info")
    if not isinstance(source, str) or not isinstance(ability, str):
        raise bad(f"'data_source' and 'ability' must be text, and are {source!r:.60} and {ability!r:.60}")
    if extra is not None and not isinstance(extra, dict):
        raise bad(f"'extra_info' must be a struct, and is {extra!r:.120}")
    if expression.names_rows_own:
        style = reward.get("style")
        if not isinstance(style, str) or _is_verls(style):
            raise bad(
                f"'reward_model.style' is {style!r}, which names no verifier",
                "give one with: --verifier NAME (rlcli verifiers list shows the names)",
            )
        try:
            verifier = of_style(style)
        except ConfigError as error:
            raise bad(f"'reward_model.style' is '{style}': {error.message}", error.mend) from None
    else:
        verifier = str(expression)
    return Prompt(
        id=f"{source}:{split}:{number}",
        messages=tuple({"role": message["role"], "content": message["content"]} for message in messages),
        data_source=source,
        ability=ability,
        verifier=verifier,
        ground_truth=reward["ground_truth"],
        extra_info=unpack_extra_info(extra),
    )


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        )
    )


def _is_verls(style: str) -> bool:
    """verl writes how the reward is had (by a rule, by a model), not who gives it."""
    return style in ("", "rule", "model") or style.startswith("rule-")


@dataclass(frozen=True, eq=False)
class TokenizedPrompts:
    """Prompts and their token ids, with the chat template applied and the assistant's turn opened.

    prompts: those that fit. too_long: how many rows did not and were left out; too_long_responses: how many of these
    had a prompt that fits and a response that does not. flat: int32[sum of lengths], all token ids in a row. offsets:
    int64[len(prompts) + 1]; prompt i is flat[offsets[i]:offsets[i + 1]]. response_flat, response_offsets: the same of
    the responses to imitate; empty where none were asked for.
    """

    prompts: tuple[Prompt, ...]
    too_long: int
    flat: np.ndarray
    offsets: np.ndarray
    too_long_responses: int = 0
    response_flat: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    response_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    @classmethod
    def tokenize(
        cls,
        prompts: Sequence[Prompt],
        tokenizer: Any,
        max_prompt_tokens: int,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        response: str = "",
        max_response_tokens: int = 0,
    ) -> TokenizedPrompts:
        """Apply the tokenizer's chat template to each prompt, once; `on_progress(done, all)` is called now and then.

        response: the field of `extra_info` that holds the text to imitate, at most `max_response_tokens` long with its
        end; empty: no responses. A response is the text as it stands, tokenized apart from its prompt as a sampled one
        is, and the tokenizer's end of sequence, where the engine stops. This is what the chat template makes of the
        whole conversation, except that ChatML (Qwen) writes a newline after the end, which a model never has to say;
        Llama's trims the text; Qwen3's puts an empty <think> block before a text that has none; and with the base
        models of Qwen the end is <|endoftext|>, where the template closes the turn with <|im_end|>.

        Raises `ModelError` where there is no chat template, it refuses a prompt, or the tokenizer has no end of
        sequence; `DataError` where a row has no response or no row is short enough.
        """
        _check(tokenizer, with_end=bool(response))
        assert not response or max_response_tokens > 0, "responses without a limit of their length"
        ids: list[np.ndarray] = []
        answers: list[np.ndarray] = []
        for start in range(0, len(prompts), TOKENIZE_AT_ONCE):
            some = prompts[start : start + TOKENIZE_AT_ONCE]
            ids += _encode(tokenizer, [_render(tokenizer, prompt) for prompt in some])
            if response:
                answers += _encode(tokenizer, [_response(prompt, response) for prompt in some], tokenizer.eos_token_id)
            if on_progress:
                on_progress(len(ids), len(prompts))
        fitting = _within(ids, range(len(ids)), max_prompt_tokens, "prompts", "data.max_prompt_tokens")
        kept = fitting
        if response:
            kept = _within(answers, fitting, max_response_tokens, "responses", "rollout.max_response_tokens")
        flat, offsets = _in_a_row([ids[i] for i in kept])
        response_flat, response_offsets = _in_a_row([answers[i] for i in kept] if response else [])
        return cls(
            prompts=tuple(prompts[i] for i in kept),
            too_long=len(ids) - len(kept),
            flat=flat,
            offsets=offsets,
            too_long_responses=len(fitting) - len(kept),
            response_flat=response_flat,
            response_offsets=response_offsets,
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def fingerprint(self) -> str:
        """Hexadecimal; another where any prompt, its place, its tokens or what it is verified by is another."""
        found = hashlib.blake2b(digest_size=16)
        for array in (self.flat, self.offsets, self.response_flat, self.response_offsets):
            found.update(array.tobytes())
        for prompt in self.prompts:
            found.update(repr(prompt).encode(errors="surrogatepass"))
        return found.hexdigest()

    def tokens(self, i: int) -> np.ndarray:
        """The token ids of prompt i: int32[length(i)], a view."""
        return self.flat[self.offsets[i] : self.offsets[i + 1]]

    def length(self, i: int) -> int:
        return int(self.offsets[i + 1] - self.offsets[i])

    def responses(self, i: int) -> np.ndarray:
        """The token ids of the response to imitate for prompt i, its end included: int32[1 or more], a view."""
        assert len(self.response_offsets) == len(self) + 1, "tokenized without responses"
        return self.response_flat[self.response_offsets[i] : self.response_offsets[i + 1]]


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or hub id. Raises `ModelError`, also where it has no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    # The hub's client and the tokenizers raise what their layers raise; to the user all mean the same.
    except Exception as error:
        raise ModelError(
            f"'{path}' has no tokenizer to load: {error!s:.200}", "give a model's folder or hub id"
        ) from error
    _check(tokenizer, with_end=False)
    return tokenizer


def prompt_lengths(
    prompts: Sequence[Prompt], tokenizer: Any, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[int]:
    """The tokens of each prompt, with the chat template applied and the assistant's turn opened."""
    lengths: list[int] = []
    for start in range(0, len(prompts), TOKENIZE_AT_ONCE):
        texts = [_render(tokenizer, prompt) for prompt in prompts[start : start + TOKENIZE_AT_ONCE]]
        lengths += map(len, _encode(tokenizer, texts))
        on_progress(len(lengths), len(prompts))
    return lengths


def _check(tokenizer: Any, with_end: bool) -> None:
    name = tokenizer.name_or_path or "the model"
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {name} has no chat template",
            "use an instruct model, or put a chat_template.jinja into the model's folder",
        )
    if with_end and tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {name} has no end-of-sequence token to end a response with",
            "name its eos_token in the model's tokenizer_config.json",
        )


def _encode(tokenizer: Any, texts: list[str], *end: int) -> list[np.ndarray]:
    """int32 token ids of each text, then `end`."""
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return [np.asarray([*tokens, *end], dtype=np.int32) for tokens in encoded]


def _within(rows: Sequence[np.ndarray], among: Iterable[int], limit: int, what: str, key: str) -> list[int]:
    """Those indexes of `among` whose rows are `limit` tokens or shorter; a `DataError` where none is."""
    lengths = {i: len(rows[i]) for i in among}
    kept = [i for i, length in lengths.items() if length <= limit]
    if not kept:
        shortest = min(lengths.values(), default=0)
        raise DataError(
            f"data: all {len(lengths)} {what} are longer than {key} = {limit} (the shortest has {shortest} tokens)",
            f"give --set {key}={shortest} or more",
        )
    return kept


def _in_a_row(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All tokens, and int64 offsets of the rows in them."""
    flat = np.concatenate(rows) if rows else np.zeros(0, np.int32)
    return flat, np.cumsum([0, *map(len, rows)], dtype=np.int64)


def _response(prompt: Prompt, name: str) -> str:
    text = prompt.extra_info.get(name)
    if not isinstance(text, str) or not text.strip():
        there = ", ".join(sorted(prompt.extra_info)) or "nothing"
        what = (
            f"holds {text!r:.60}, which is no text" if name in prompt.extra_info else f"is not there (it has {there})"
        )
        raise DataError(
            f"data: {prompt.id}: extra_info.{name}, the response to imitate, {what}",
            "name a field of text with data.response; rlcli prep gsm8k and rlcli prep arithmetic make one, response",
        )
    return text


def _render(tokenizer: Any, prompt: Prompt) -> str:
    import jinja2

    messages: list[Message] = list(prompt.messages)
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template of {tokenizer.name_or_path or 'the model'} is broken: {error}",
            "mend or copy again its chat_template.jinja",
        ) from error
    except jinja2.TemplateError as error:
        raise ModelError(
            f"the chat template of {tokenizer.name_or_path or 'the model'} refuses prompt {prompt.id}: {error}",
            "give the prompt roles that the template knows, or use another model",
        ) from error
    return text
