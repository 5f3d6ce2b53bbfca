"""Checks that tokenised conversations agree with the chat templates of real model families, boundary by boundary.

    python scripts/proofs/templates.py [--folder FOLDER] [--all]

The templates are the *.jinja files of FOLDER, or those that the wheel of TRL holds (downloaded with pip, not
installed). The tokenizer is one made here: a byte-level BPE with merges, and the families' control tokens. Exit code 1
if a boundary is broken that is not in KNOWN.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlcli.environments.template_contract import Agreement, Boundary, check
from rlcli.errors import ModelError

STOPS = {
    "qwen": "<|im_end|> <|endoftext|>",
    "llama3": "<|eot_id|> <|eom_id|> <|end_of_text|>",
    "glm": "<|endoftext|> <|user|> <|observation|>",
    "gptoss": "<|return|> <|call|>",
    "gemma4": "<turn|> <eos>",
    "diffusion_gemma": "<turn|> <eos>",
    "gemma": "<end_of_turn> <eos>",
    "phi": "<|end|> <|endoftext|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "lfm": "<|im_end|>",
    "nemotron": "<|im_end|>",
    "muse": "<|eot|>",
}
"""Prefix of a family's names → tokens that end a response, its end of sequence last."""
OTHERS = """
    <|im_start|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think> <|begin_of_text|> <bos>
    [gMASK] <sop> <|start_header_id|> <|end_header_id|> <|python_tag|> <|system|> <|assistant|> <|start|> <|end|>
    <|message|> <|channel|> <|constrain|> <arg_key> </arg_key> <arg_value> </arg_value> <|vision_start|>
    <|vision_end|> <|image_pad|> <|video_pad|> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>
    <｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>
    <｜tool▁sep｜> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> <tool_response|> <|"|> <|think|>
    <start_of_turn> <|turn> <|tool_response> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜>
""".split()  # noqa: SIM905  (a list of these is three times as long)
KNOWN = {"deepseek_r1_distill", "deepseekv3"}
"""Broken in truth: a second tool's result is rendered by whether the conversation had one before."""


def main() -> int:
    options = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or downloaded(Path(scratch))
        by_family = {path.stem: boundaries(path) for path in families(folder, options.all)}
    table = Table("family", *(str(each) for each in Agreement), "where it is broken, or unsupported", box=None)
    for name, each in by_family.items():
        counts = Counter(boundary.agreement for boundary in each)
        where = [boundary.name for boundary in each if boundary.agreement in (Agreement.BROKEN, Agreement.NONE)]
        table.add_row(name, *(str(counts[kind] or "") for kind in Agreement), ", ".join(where))
    Console(width=200).print(table)
    broken = {name for name, each in by_family.items() if any(b.agreement is Agreement.BROKEN for b in each)}
    return 1 if broken - KNOWN else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of *.jinja files, named after their families")
    parser.add_argument("--all", action="store_true", help="TRL's own variants for training, too")
    return parser.parse_args()


def downloaded(scratch: Path) -> Path:
    pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "trl", "--dest", str(scratch)]
    subprocess.run(pip, check=True)
    (wheel,) = scratch.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(scratch)
    return scratch / "trl" / "chat_templates"


def families(folder: Path, every: bool) -> Iterator[Path]:
    """Templates of text models: a message's content is a string there."""
    for path in sorted(folder.glob("*.jinja")):
        is_text = "vl" not in path.stem and not path.stem.startswith(("idefics", "llava"))
        if is_text and path.stem.startswith(tuple(STOPS)) and (every or not path.stem.endswith("_training")):
            yield path


def boundaries(path: Path) -> list[Boundary]:
    stops = next(stops for name, stops in STOPS.items() if path.stem.startswith(name)).split()
    tokenizer = tokenizer_of(path.read_text(encoding="utf-8"), eos=stops[0])
    try:
        return check(tokenizer, tokenizer.convert_tokens_to_ids(stops))
    except ModelError as error:
        return [Boundary(str(error), Agreement.NONE)]


def tokenizer_of(template: str, eos: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([template, *map(str, STOPS)], trainer)
    texts = dict.fromkeys([*OTHERS, *(text for each in STOPS.values() for text in each.split())])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    bos = "<|begin_of_text|>" if eos == "<|eot_id|>" else "<bos>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, chat_template=template)


if __name__ == "__main__":
    sys.exit(main())
