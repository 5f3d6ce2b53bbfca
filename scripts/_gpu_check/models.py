"""Generates models of real shapes with random weights, and a tokenizer for their whole vocabulary."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from _gpu_check.check import Check

SHAPES: dict[str, dict[str, int]] = {  # of Qwen2.5, from the config.json of the models of these names
    "0.5b": {
        **{"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
        **{"intermediate_size": 4864, "vocab_size": 151936},
    },
    "1.5b": {
        **{"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2},
        **{"intermediate_size": 8960, "vocab_size": 151936},
    },
}
REHEARSAL_SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {
        **{"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"intermediate_size": 512, "vocab_size": 2048},
    },
    "1.5b": {
        **{"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2},
        **{"intermediate_size": 768, "vocab_size": 2048},
    },
}
POSITIONS = 32768


def make(check: Check, name: str) -> str:
    """The folder of the model `name`, which the first part that needs it generates."""
    shape = (REHEARSAL_SHAPES if check.rehearse else SHAPES)[name]
    folder = check.models / (f"{name}-rehearsed" if check.rehearse else name)
    if check.models.parent == Path(tempfile.gettempdir()):  # by default: another user may have made it
        from rlcli.support.files import private_folder

        private_folder(check.models)
    if not folder.exists():
        check.progress(f"making a model of the {name} shape with random weights", 20)
        check.models.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=check.models, prefix=f".{name}."))
        try:
            save(partial / "model", shape, check.device)
            (partial / "model").rename(folder)
        except OSError:
            if not folder.exists():  # else another part was faster
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return str(folder)


def save(folder: Path, shape: dict[str, int], device: str) -> None:
    """A Qwen2 of that shape in bfloat16 (float32 on CPUs) with tied embeddings, as the small models of Qwen2.5."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlcli.model.io.tiny_model import EOS, PAD, tiny_tokenizer

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tokens = tiny_tokenizer().get_vocab()
    config = Qwen2Config(
        **shape,
        max_position_embeddings=POSITIONS,
        rope_theta=1e6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokens[EOS],
        pad_token_id=tokens[PAD],
        dtype=str(dtype).removeprefix("torch."),
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    model.to(dtype).save_pretrained(folder)
    tokenizer(shape["vocab_size"]).save_pretrained(folder)


def tokenizer(size: int) -> Any:
    """The tiny tokenizer, a token a byte, and words of letters up to `size` tokens: no text is tokenised into those,
    but all that a random model draws can be decoded."""
    import string

    from transformers import Qwen2Tokenizer

    from rlcli.model.io.tiny_model import CHAT_TEMPLATE, EOS, MARKERS, PAD, UNK, tiny_tokenizer

    vocabulary = dict(sorted(tiny_tokenizer().get_vocab().items(), key=lambda pair: pair[1]))
    words = (letters for n in (3, 4) for letters in map("".join, itertools.product(string.ascii_letters, repeat=n)))
    for word in itertools.islice(words, size - len(vocabulary)):
        vocabulary[word] = len(vocabulary)
    assert len(vocabulary) == size, "words differ from the tokens that were there"
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=list(MARKERS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
