"""The workload of all contestants of `step.py`: a model, prompts, and the length of each response."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # scoring processes load this file alone, for `reward`
    from _step_prompts import BenchPrompt

TINY = {"tiny-1m": (128, 4, 4, 2), "tiny-10m": (384, 5, 6, 2)}
"""hidden, layers, heads, kv_heads of models of about 1 and 10 million parameters, float32."""

SHAPES = {  # of Qwen2.5, random weights
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
}
VOCABULARY, KV_HEADS = 151936, 2

MARKERS = 2
"""Tokens that the tiny models' chat template adds to a question."""

UNEQUAL, EQUAL = "unequal", "equal"
"""Ground truths: the samples of a group get different rewards, or equal ones."""


@dataclass(frozen=True)
class Workload:
    """The samples that every contestant generates and trains on."""

    model: str
    """Folder of the model."""
    prompt_tokens: int
    """Tokens of each prompt, the chat template's included."""
    max_tokens: int
    """The longest response."""
    micro: int
    """The most tokens that one worker forwards at once."""
    lengths: tuple[tuple[int, ...], ...]
    """`[prompts][samples]`, tokens of each response."""
    dtype: str = "float32"
    """Compute dtype: float32, or bfloat16 with master weights in float32."""
    prompts: tuple[BenchPrompt, ...] = ()
    """The prompts; without them, texts of letters, each a token of the tiny models' tokenizer."""

    @property
    def questions(self) -> list[str]:
        """The text of each prompt."""
        return [prompt.question for prompt in self.prompts] or [
            _letters(number, self.prompt_tokens - MARKERS) for number in range(len(self.lengths))
        ]

    @property
    def samples(self) -> int:
        return len(self.lengths[0])

    @property
    def response_tokens(self) -> int:
        return sum(map(sum, self.lengths))

    @property
    def tokens(self) -> int:
        return self.response_tokens + len(self.lengths) * self.samples * self.prompt_tokens


def draw_lengths(prompts: int, samples: int, max_tokens: int, ragged: bool) -> tuple[tuple[int, ...], ...]:
    """All `max_tokens`, or ragged as those of reasoning models: log-normal, half of them below three tenths of the
    limit, and a few per cent truncated."""
    import numpy as np

    if not ragged:
        return ((max_tokens,) * samples,) * prompts
    sampled = np.random.default_rng(0).lognormal(np.log(0.3 * max_tokens), 0.7, (prompts, samples))
    return tuple(tuple(row) for row in sampled.clip(2, max_tokens).astype(int).tolist())


def make_model(name: str, folder: Path) -> str:
    """The folder of the model `name`: generated for a name of TINY or SHAPES, else `name` itself."""
    from rlcli.model.io.tiny_model import make_tiny_model

    if name in TINY:
        hidden, layers, heads, kv_heads = TINY[name]
        return str(make_tiny_model(folder, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads))
    if name not in SHAPES:
        return name
    import torch
    from transformers import AutoConfig, Qwen2ForCausalLM

    model_folder = make_tiny_model(folder)  # for its tokenizer
    config = AutoConfig.from_pretrained(model_folder)
    config.update(SHAPES[name] | {"vocab_size": VOCABULARY, "num_key_value_heads": KV_HEADS, "layer_types": None})
    config.max_position_embeddings, config.dtype = 32768, "bfloat16"
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(model_folder)
    return str(model_folder)


def write_prompts(work: Workload, folder: Path, equal_share: float) -> None:
    """train.parquet: the prompts twice, first with groups of unequal rewards alone, then with `equal_share` of them
    equal; unshuffled, steps take the two in turn."""
    from rlcli.prep.split_writer import write_splits
    from rlcli.types import Prompt

    questions = work.questions

    def row(number: int) -> Prompt:
        index = number % len(questions)
        equal = number >= len(questions) and index < equal_share * len(questions)
        message = {"role": "user", "content": questions[index]}
        return Prompt(f"bench:train:{number}", (message,), "bench", "bench", "bench", EQUAL if equal else UNEQUAL)

    write_splits(folder, {"train": [row(number) for number in range(2 * len(questions))]}, {})


def _letters(seed: int, length: int) -> str:
    import numpy as np

    return bytes(np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, length).tolist()).decode()


def reward(request: Any) -> Any:
    """The verifier: 1 for rows of equal rewards, else a number that is unique within the group."""
    import hashlib
    from array import array

    from rlcli.types import Outcome, Verdict

    if request.ground_truth == EQUAL:
        return Verdict(score=1.0, outcome=Outcome.OK)
    digest = hashlib.blake2b(array("i", request.completion_ids).tobytes(), digest_size=4).digest()
    return Verdict(score=int.from_bytes(digest, "little") / 2**32, outcome=Outcome.WRONG)
