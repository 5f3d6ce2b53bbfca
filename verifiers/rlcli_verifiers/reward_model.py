"""A reward model: a sequence classifier with one label, which scores responses on CPUs (docs/judges.md)."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from rlcli.errors import ModelError
from rlcli.types import Outcome, Verdict, VerifyRequest
from rlcli_verifiers.quoting import harmless

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROW_OPTIONS = None


class _Loaded(NamedTuple):
    model: PreTrainedModel
    """A sequence classifier with one label, in float32."""
    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer."""


def verify(
    request: VerifyRequest,
    *,
    path: str,
    transform: Literal["none", "sigmoid"] = "none",
    max_tokens: int = 4096,
    deadline_s: float = 120.0,
) -> Verdict:
    """The logit of a sequence classifier with one label for the conversation; OK if it is above 0.

    path: folder or hub id of the model, with its own tokenizer and chat template, by which prompt and response are
    tokenised again; without a template, they are joined by an empty line. transform: the reward is the logit itself, or
    its sigmoid. max_tokens: of a longer conversation, the end is scored. deadline_s: CPU seconds of one response.

    It runs on one CPU core for each response, in float32; all scoring processes of a machine share one copy of the
    weights. The score of a response does not depend on others that are scored at the same time.
    """
    import torch

    loaded = _loaded(path)
    ids = ids_of(loaded.tokenizer, request)[-max_tokens:]
    with torch.inference_mode():
        logit = float(loaded.model(input_ids=torch.tensor([ids])).logits[0, 0])
    return verdict_of(logit, len(ids), transform)


def verdict_of(logit: float, tokens: int, transform: str) -> Verdict:
    """The verdict by a logit. Raises `ValueError` for one that is not finite."""
    if not math.isfinite(logit):
        raise ValueError(f"the reward model gives {logit}")
    score = 1.0 / (1.0 + math.exp(-logit)) if transform == "sigmoid" else logit
    return Verdict(score, Outcome.OK if logit > 0 else Outcome.WRONG, detail=f"logit {logit:.6g} of {tokens} tokens")


def preload(*, path: str = "", **others: object) -> None:
    """Load the model once, before the scoring processes are forked. Raises `ModelError` for one that is none."""
    if path:
        _loaded(path)


@cache
def _loaded(path: str) -> _Loaded:
    import torch
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # threads would not survive the fork
    tokenizer = tokenizer_of(path, "path")
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise _not_loaded(path, "path", error) from error
    if info["missing_keys"]:
        raise ModelError(
            f"the option path: {path} has no weights for {sorted(info['missing_keys'])[0]}",
            "give a model that was trained as a reward model",
        )
    return _Loaded(model.eval(), tokenizer)


@cache
def tokenizer_of(path: str, option: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a reward model. Raises `ModelError` unless it is a classifier with one label."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        if config.num_labels != 1:
            raise ModelError(
                f"the option {option}: {path} has {config.num_labels} labels",
                "give a reward model: a sequence classifier with one label",
            )
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _not_loaded(path, option, error) from error


def _not_loaded(path: str, option: str, error: Exception) -> ModelError:
    why = " ".join(str(error).split())[:300]
    return ModelError(f"the option {option}: {path} cannot be loaded: {why}", "give a folder or hub id")


def ids_of(tokenizer: PreTrainedTokenizerBase, request: VerifyRequest) -> list[int]:
    """Tokenise the whole conversation by the reward model's template, with control tokens of the response escaped."""
    response = harmless(request.completion)
    if tokenizer.chat_template is None:
        texts = [*(message["content"] for message in request.prompt), response]
        return list(tokenizer("\n\n".join(texts))["input_ids"])
    chat = [*map(dict, request.prompt), {"role": "assistant", "content": response}]
    return list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"])
