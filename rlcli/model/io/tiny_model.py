"""Makes a tiny model with random weights, a Qwen2 or of another family: for trials, tests and the quickstart."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen2Tokenizer, Qwen3MoeConfig
from transformers.utils import logging

from rlcli.errors import ConfigError, ModelError
from rlcli.model.io.model_config import add_engine_keys
from rlcli.model.io.tiny_families import CHOSEN, family_config
from rlcli.model.io.tiny_template import HARMONY_MARKERS, HARMONY_TEMPLATE, TOOL_MARKERS, TOOL_TEMPLATE
from rlcli.support.files import by_umask

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ROLES = ("system", "user", "assistant")
MARKERS = tuple(f"<|{role}|>" for role in ROLES)
MAX_POSITIONS = 4096
STEPS = (1e-3, 1e-1)
"""The smallest and the largest step by which a new head of linear attention forgets (softplus of dt_bias): with
transformers' own, most forget all within two tokens. Those of arXiv 2312.00752, section 3.6."""
MADE_HERE = "rlcli-tiny.json"
"""Marks a folder that `make_tiny_model` filled; training checkpoints do not carry it over."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role: ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def make_tiny_model(
    target: str | Path,
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int = 0,
    kind: str = "",
    seed: int = 0,
    force: bool = False,
    trained: Callable[[], Any] | None = None,
    tools: bool = False,
) -> Path:
    """Save a random model and its character-level tokenizer in Hugging Face format to the folder `target`, which is
    returned.

    Tied embeddings (of the other kinds those of Qwen3.5 alone), float32, feed-forward width 4 × hidden, 4096 positions.
    experts: of each layer, each of width hidden; a token passes through two of them. kind: one of
    `tiny_families.KINDS`; empty: Qwen2, or Qwen3 with experts if there are some. The same arguments give the same
    weights, and no global random state is touched. trained: gives a model of these sizes to save instead, once all is
    checked. tools: with a chat template for tools, whose markers are three further tokens.
    Raises `ConfigError` for sizes that do not fit together, and `ModelError` when `target` holds files that this
    function did not make (unless `force`: then its files replace those of the same name) or cannot be written.
    """
    harmony = kind == "gpt_oss"
    if harmony and tools:
        raise ConfigError("--tools: no tiny gpt_oss calls tools", "leave one of the two out")
    tokenizer = tiny_tokenizer(tools=tools, harmony=harmony)
    config = tiny_config(
        hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, experts=experts, kind=kind, tokenizer=tokenizer
    )
    target = Path(target)
    _refuse_foreign(target, force)
    model = trained() if trained else _random(config, seed)
    record: dict[str, Any] = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "seed": seed}
    record |= {"experts": experts} if experts else {}
    record |= {"kind": kind} if kind else {}
    record |= {"tools": tools} if tools else {}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as staging:
            save_model(model, Path(staging), tokenizer)
            (Path(staging) / MADE_HERE).write_text(json.dumps(record) + "\n")
            target.mkdir(exist_ok=True)
            for file in sorted(Path(staging).iterdir()):
                os.replace(file, target / file.name)
    except OSError as error:
        raise ModelError(
            f"--out: cannot write {target}: {error.strerror or error}", "give a writable folder"
        ) from error
    return target


def _random(config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return new_model(config)


def new_model(config: Any) -> Any:
    """A model with random weights of torch's generator."""
    lm = AutoModelForCausalLM.from_config(config)
    shortest, longest = map(math.log, STEPS)
    with torch.no_grad():
        for name, bias in lm.named_parameters():
            if name.endswith("linear_attn.dt_bias"):
                steps = torch.empty_like(bias).uniform_(shortest, longest).exp()
                bias.copy_(steps + (-torch.expm1(-steps)).log())  # the inverse of softplus
    return lm


def save_model(model: Any, folder: Path, tokenizer: Any = None) -> None:
    """Save `model` with its tokenizer (None: the tiny one), chat template and generation config to an existing
    folder."""
    logging.disable_progress_bar()  # not useful for one small file
    model.save_pretrained(folder)
    add_engine_keys(folder)
    (tiny_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
    by_umask(folder)


def tiny_config(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    experts: int = 0,
    kind: str = "",
    tokenizer: Any = None,
) -> PreTrainedConfig:
    """The configuration of a tiny model for a tokenizer (None: the tiny one), or a `ConfigError` that names the wrong
    size or kind."""
    values = _common(hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, experts=experts, tokenizer=tokenizer)
    return family_config(kind, values, experts) if kind else _qwen(values, experts)


def _common(
    *, hidden: int, layers: int, heads: int, kv_heads: int, experts: int, tokenizer: Any = None
) -> dict[str, Any]:
    """Settings common to all families. Raises `ConfigError` for a wrong size."""
    sizes = {"--hidden": hidden, "--layers": layers, "--heads": heads, "--kv-heads": kv_heads}
    for flag, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{flag} = {size} is less than 1", f"give {flag} 1 or more")
    if experts and experts < CHOSEN:
        raise ConfigError(f"--experts = {experts} is less than {CHOSEN}", f"give {CHOSEN} or more, or 0 for none")
    if heads % kv_heads:
        raise ConfigError(f"--kv-heads = {kv_heads} does not divide --heads = {heads}", "give a divisor")
    # vLLM's CPU attention takes heads of 32 and more, in multiples of 16.
    if hidden % (16 * heads) or hidden < 32 * heads:
        raise ConfigError(
            f"--hidden = {hidden} over {heads} heads gives {hidden / heads:g} per head, which must be a multiple of 16 "
            "and 32 or more",
            f"give --hidden {max(2, -(-hidden // (16 * heads))) * 16 * heads}",
        )
    tokens = tokenizer.get_vocab() if tokenizer is not None else _vocabulary()
    return {
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokens[EOS],
        "pad_token_id": tokens[PAD],
        "dtype": "float32",
    }


def _qwen(common: Mapping[str, Any], experts: int) -> Qwen2Config | Qwen3MoeConfig:
    if not experts:
        return Qwen2Config(**common)
    hidden, heads = common["hidden_size"], common["num_attention_heads"]
    return Qwen3MoeConfig(
        **common,
        num_experts=experts,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=hidden,
        norm_topk_prob=True,
        head_dim=hidden // heads,
    )


def tiny_tokenizer(*, tools: bool = False, harmony: bool = False) -> Qwen2Tokenizer:
    """One token a byte, so one per ASCII character and none unknown; each chat marker is one token. tools: the chat
    template has tools. harmony: it is as GPT-OSS's."""
    markers = (*MARKERS, *(TOOL_MARKERS if tools else HARMONY_MARKERS if harmony else ()))
    return Qwen2Tokenizer(
        vocab=_vocabulary(markers),
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=list(markers),
        chat_template=TOOL_TEMPLATE if tools else HARMONY_TEMPLATE if harmony else CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _vocabulary(markers: Sequence[str] = MARKERS) -> dict[str, int]:
    # transformers reads every tokenizer of a qwen2 model as a byte-level BPE, whatever class it was saved as; without
    # merges that is a character-level one. It drops symbols that it lacks, so all 256 bytes are included.
    return {token: i for i, token in enumerate((PAD, EOS, UNK, *markers, *sorted(ByteLevel.alphabet())))}


def _refuse_foreign(target: Path, force: bool) -> None:
    if target.is_dir():
        if not force and any(target.iterdir()) and not (target / MADE_HERE).is_file():
            raise ModelError(
                f"--out: {target} is not empty and was not made by rlcli tiny-model",
                "give another folder, or --force to write into it",
            )
    elif target.exists():
        raise ModelError(f"--out: {target} is a file", "give a folder")
