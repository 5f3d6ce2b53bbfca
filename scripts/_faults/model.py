"""The models and the data of the runs.

Faults are planted in a tiny model that is sure enough of its tokens that a wrong temperature shows. Runs without a
fault train the warmed-up model of `rlcli quickstart` on its sums, with their verifier.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from catalog import MODELS

SHARPER = 3.0
"""Factor of the last norm's weight: a random model would sample all tokens with equal probability."""
LARGER = 5.0
PROMPTS = 64


def make_quickstart(work: Path) -> None:
    """`work`/sums, and `work`/warm, a link to the warmed-up model, which the cache keeps: 40 s the first time."""
    from rlcli_quickstart.sum_lessons import Sums
    from rlcli_quickstart.warm_start import warm_start

    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.support.files import cache_folder
    from rlcli.types import ConvertOptions

    for split, prompts in prepare(converter_named("arithmetic"), ConvertOptions(seed=0)).splits.items():
        write_prompts(work / "sums" / f"{split}.parquet", prompts)
    (work / "warm").symlink_to(warm_start(cache_folder(), Sums(work / "sums"), seed=0).path)


def _sharpen(model: Path, larger: float = 1.0, offset: float = 0.0) -> None:
    """larger: what all matrices but the embeddings are multiplied by, so that attention is not even. offset: what the
    model adds to the weight of a norm."""
    from safetensors.torch import load_file, save_file

    weights = model / "model.safetensors"
    tensors = load_file(weights)
    norm = tensors["model.norm.weight"]
    norm.copy_((norm + offset) * SHARPER - offset)
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and ".layers." in name:
            tensor *= larger
    save_file(tensors, weights, metadata={"format": "pt"})


def make_model_and_data(work: Path) -> None:
    from rlcli.data.prompts.parquet_schema import write_prompts
    from rlcli.model.io.tiny_model import make_tiny_model
    from rlcli.prep.pipeline import converter_named, prepare
    from rlcli.types import ConvertOptions

    make_tiny_model(work / "model")
    _sharpen(work / "model")
    for kind in MODELS.values():
        if kind == "qwen3_5":
            make_tiny_model(work / kind, kind=kind)
            _sharpen(work / kind, offset=1.0)  # its norms multiply by 1 + the weight
        else:
            make_tiny_model(work / kind, kind=kind, hidden=64, heads=2, kv_heads=1, experts=4)
            _sharpen(work / kind, LARGER)
    options = ConvertOptions(count=PROMPTS, test_count=8)
    for split, prompts in prepare(converter_named("arithmetic"), options).splits.items():
        write_prompts(work / "data" / f"{split}.parquet", prompts)
        system = {"role": "system", "content": "Be brief."}
        with_system = [replace(prompt, messages=(system, *prompt.messages)) for prompt in prompts]
        write_prompts(work / "data-with-system" / f"{split}.parquet", with_system)
