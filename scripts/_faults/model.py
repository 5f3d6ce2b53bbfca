"""The model and the data of the runs: tiny, and sure enough of its tokens that a wrong temperature shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

SHARPER = 3.0
"""What the last norm's weight is multiplied by: a random model would draw all tokens alike."""
PROMPTS = 64


def make_model_and_data(work: Path) -> None:
    from safetensors.torch import load_file, save_file

    from rlcli.data.converters import converter_named
    from rlcli.data.prepare import prepare
    from rlcli.data.schema import write_prompts
    from rlcli.model.tiny import make_tiny_model
    from rlcli.types import ConvertOptions

    make_tiny_model(work / "model")
    weights = work / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] *= SHARPER
    save_file(tensors, weights, metadata={"format": "pt"})
    options = ConvertOptions(count=PROMPTS, test_count=8)
    for split, prompts in prepare(converter_named("arithmetic"), options).splits.items():
        write_prompts(work / "data" / f"{split}.parquet", prompts)
        system = {"role": "system", "content": "Be brief."}
        with_system = [replace(prompt, messages=(system, *prompt.messages)) for prompt in prompts]
        write_prompts(work / "data-with-system" / f"{split}.parquet", with_system)
