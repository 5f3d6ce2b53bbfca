"""The prompts of the step benchmark: exact lengths, whatever the tokenizer and the template do to a text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.chat_templates import bpe_tokenizer_with, tokenizer_with

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
sys.path.insert(0, str(Path(__file__).parents[3] / "scripts" / "bench"))

from _gpu_check import models
from _step_prompts import prompts_for

PLAIN = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n\n{% endfor %}assistant\n"
STRIPPED = "{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}<|im_start|>assistant\n"
TOKENIZERS = {
    "characters": lambda: tokenizer_with(PLAIN),
    "words": lambda: bpe_tokenizer_with(STRIPPED),
    "words that no text is encoded into": lambda: models.tokenizer(2048),
    "merges across words": lambda: bpe_tokenizer_with(PLAIN, by_words=False),
}


@pytest.mark.parametrize("tokens", [48, 49, 300])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_prompt_has_exactly_the_wanted_number_of_tokens(kind: str, tokens: int) -> None:
    tokenizer = TOKENIZERS[kind]()
    prompts = prompts_for(tokenizer, 8, tokens)
    assert len({prompt.question for prompt in prompts}) == 8
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt.question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tuple(ids) == prompt.ids
        assert len(ids) == tokens


def test_a_prompt_shorter_than_the_template_is_refused_in_one_line() -> None:
    with pytest.raises(SystemExit, match="no prompt of 5 tokens: the chat template alone has"):
        prompts_for(tokenizer_with(PLAIN), 1, 5)
