"""Token ids of large datasets, cached between runs below ~/.cache/rlcli/prompts and memory-mapped.

An entry is a folder named by a hash of all that determines its content: the content of the data files, the selected
rows, the verifier's expression, the tokenizer, the chat template and its variables, the limits, and the versions of the
tokenization libraries. It is renamed into place when complete, and has a checksum of each of its files: a damaged one
is made again. If nothing can be cached (no home, no space, a read-only disk), prompts are tokenized at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlcli.data.prompts.prompt_table import JoinedPrompts, PromptTable, taken
from rlcli.data.prompts.tokenized_prompts import Measured, TokenizedPrompts
from rlcli.images.decoding import decoded_size
from rlcli.images.image_rule import ImageRule
from rlcli.support.files import cache_folder, closed_folder, described
from rlcli.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 2
"""Raise it when a code change produces other tokens, other fingerprints or other facts from the same input."""
LEAST_ROWS = 10_000
"""Fewer rows take about a second."""
MOST_BYTES, MOST_AGE_S, HALF_WRITTEN_S = 20 << 30, 60 * 86400.0, 86400.0
"""When a new entry is written, the least recently used entries beyond these are removed."""
ENTRY = "entry.json"
ARRAYS = ("kept", "flat", "offsets", "control", "response_flat", "response_offsets")
OnProgress = Callable[[int, int], None]


def tokenized(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    on_progress: OnProgress = lambda done, total: None,
    *,
    response: str = "",
    max_response_tokens: int = 0,
    rule: ImageRule | None = None,
    measured: Measured = decoded_size,
    least: int = LEAST_ROWS,
) -> TokenizedPrompts:
    """Like `TokenizedPrompts.tokenize`, from the cache if possible. least: minimum number of rows to cache."""
    limits = (max_prompt_tokens, response, max_response_tokens if response else 0)
    content = content_of(prompts) if len(prompts) >= least else ""
    key = _key(content, prompts, tokenizer, limits) if content else ""
    try:
        entry = cache_folder() / "prompts" / key if key else None
    except RuntimeError:  # there is no home folder
        entry = None
    if entry is not None and (cached := _load(entry, prompts)) is not None:
        on_progress(len(prompts), len(prompts))
        return cached
    fresh = TokenizedPrompts.tokenize(
        prompts,
        tokenizer,
        max_prompt_tokens,
        on_progress,
        response=response,
        max_response_tokens=max_response_tokens,
        rule=rule,
        measured=measured,
    )
    if entry is None or content_of(prompts) != content:  # a file was replaced meanwhile
        return fresh
    fresh = replace(fresh, mark=fresh.fingerprint())
    with suppress(OSError):
        _store(entry, fresh)
        _prune(entry.parent)
    return _load(entry, prompts) or fresh


def content_of(prompts: Sequence[Prompt]) -> str:
    """Hexadecimal hash of the rows and of the whole content of their files; empty if the rows are not from unchanged
    files, or have images: those may be other files, and the tokens depend on more than the tokenizer."""
    if isinstance(prompts, JoinedPrompts):
        parts = [content_of(part) for part in prompts.parts]
        return _hashed(*parts) if all(parts) else ""
    if not isinstance(prompts, PromptTable) or prompts.has_images or not prompts.is_current():
        return ""
    try:
        with prompts.origin.file.open("rb") as file:
            content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError:
        return ""
    rows = hashlib.blake2b(prompts.places.tobytes(), digest_size=16).hexdigest()
    origin = prompts.origin
    facts = (prompts.first, origin.split, str(origin.expression), *([origin.label] if origin.label else []))
    return _hashed(content, rows, repr(facts)) if prompts.is_current() else ""


def _key(
    content: str, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, limits: tuple[int, str, int]
) -> str:
    """Empty for a tokenizer that cannot be identified: one that is Python code."""
    import tokenizers
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ""
    versions = (FORMAT, transformers.__version__, tokenizers.__version__)
    kind = (type(tokenizer).__name__, tokenizer.special_tokens_map, tokenizer.eos_token_id)
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    return _hashed(content, backend.to_str(), template, repr(kind), repr(limits), repr(versions))


def _load(entry: Path, prompts: Sequence[Prompt]) -> TokenizedPrompts | None:
    """The content of an entry, memory-mapped; None if it does not exist, or is damaged and was removed."""
    if not entry.is_dir():
        return None
    try:
        note = json.loads((entry / ENTRY).read_bytes())
        if any(described(entry / name) != file for name, file in note["files"].items()):
            raise ValueError("the content differs from what was written")
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in note["arrays"]}
        with suppress(OSError):
            os.utime(entry)  # used now
        return TokenizedPrompts(taken(prompts, arrays["kept"]), **arrays, **note["values"])
    except (OSError, ValueError, LookupError, TypeError):
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _store(entry: Path, prompts: TokenizedPrompts) -> None:
    closed_folder(entry.parent)
    temporary = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}."))
    try:
        arrays = {name: array for name in ARRAYS if (array := getattr(prompts, name)).size}
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array)
        note = {
            "arrays": list(arrays),
            "values": {name: getattr(prompts, name) for name in ("too_long", "too_long_responses", "mark")},
            "files": {f"{name}.npy": described(temporary / f"{name}.npy") for name in arrays},
        }
        (temporary / ENTRY).write_text(json.dumps(note) + "\n", encoding="utf-8")
        temporary.rename(entry)  # fails if another process has written the same entry meanwhile: that one is used
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _prune(folder: Path, now: float | None = None) -> None:
    """Remove entries that are too old or too many, and incomplete ones left by a killed process."""
    now = time.time() if now is None else now
    total = 0
    entries = [(path.stat().st_mtime, path) for path in folder.iterdir() if path.is_dir()]
    for used, path in sorted(entries, reverse=True):
        half_written = path.name.startswith(".")
        total += 0 if half_written else sum(file.stat().st_size for file in path.iterdir())
        if now - used > (HALF_WRITTEN_S if half_written else MOST_AGE_S) or total > MOST_BYTES:
            shutil.rmtree(path, ignore_errors=True)


def _hashed(*texts: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return digest.hexdigest()
