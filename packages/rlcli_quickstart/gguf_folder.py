"""Converts a GGUF file to a Hugging Face folder in bfloat16: `python -m rlcli_quickstart.gguf_folder FILE OUT`.

Runs in a separate process, whose PYTHONPATH has the package `gguf`.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of `file` to the new folder `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    quantised = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    config = quantised.config
    # The end token that the tokenizer reads from the file depends on the version of transformers; the id does not.
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
