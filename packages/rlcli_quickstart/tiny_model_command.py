"""`rlcli tiny-model`: a tiny model for trials and tests, random or warmed up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import completion, console
from rlcli.cli.options import JsonObject, ModelOut
from rlcli.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlcli_quickstart.warm_start import ModelSizes


def tiny_model(
    out: ModelOut,
    warm: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA",
            help="Train it first on the solutions in this output of rlcli prep arithmetic, for a minute.",
            autocompletion=completion.datasets,
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(max=8192, help="Hidden size; 32 or more per head, in multiples of 16.")] = 128,
    layers: Annotated[int, typer.Option(max=128, help="Number of layers.")] = 2,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.")] = 2,
    experts: Annotated[
        int, typer.Option(min=0, max=1024, help="Experts of each layer, of which two are used; 0: none.")
    ] = 0,
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="Of another family: qwen3_5, qwen3_5_moe, qwen3_next, deepseek_v3, glm4_moe_lite, gpt_oss.",
            show_default="qwen2, or qwen3_moe with --experts",
        ),
    ] = "",
    tools: Annotated[bool, typer.Option("--tools", help="A chat template with tools, for environments.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1, help="Seed of the random weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that has other files.")] = False,
    as_json: JsonObject = False,
) -> None:
    """Make a tiny Qwen2 model with random weights, a character-level tokenizer and a chat template.

    With --experts it is a Qwen3-MoE; --kind makes a model of another family, with 8
    experts unless --experts says how many. With --tools every environment can be tried on it.

    With --warm it has learned to work sums digit by digit, but mostly guesses: a few
    steps of reinforcement learning then raise its reward.

    Examples:

      rlcli tiny-model --out tiny
      rlcli tiny-model --out tiny --hidden 256 --layers 4 --seed 1
      rlcli tiny-model --out tiny --experts 8
      rlcli tiny-model --out tiny --kind qwen3_5 --layers 4
      rlcli tiny-model --out tiny --kind deepseek_v3
      rlcli tiny-model --out tiny --tools
      rlcli tiny-model --out tiny --warm data/arithmetic
    """
    if warm and tools:
        raise ConfigError("--tools: the solutions of --warm call none", "leave one of the two out")
    from rlcli.model.io.tiny_model import make_tiny_model

    sizes: ModelSizes = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "experts": experts,
        "kind": kind,
    }
    facts: dict[str, object] = {}
    trained = (lambda: _warmed_up(warm, seed, sizes, facts)) if warm else None
    path = make_tiny_model(out, **sizes, seed=seed, force=force, trained=trained, tools=tools)
    origin = f"warmed up on {warm} in {facts['seconds']:.0f} s" if warm else "random weights"
    if as_json:
        console.emit_json({"path": path, "hidden": hidden, "layers": layers, "seed": seed, **facts})
    else:
        name = kind or ("Qwen3-MoE" if experts else "Qwen2")
        name += f", {experts} experts" if experts else ""
        console.plain(f"{path}: {name}, {layers} layers of {hidden}, {origin} (seed {seed})")


def _warmed_up(data: Path, seed: int, sizes: ModelSizes, facts: dict[str, object]) -> PreTrainedModel:
    """The warmed-up model; its training time and loss are added to `facts`."""
    from rlcli_quickstart.sum_lessons import Sums
    from rlcli_quickstart.warm_start import warmed_up

    started = time.monotonic()
    with console.progress() as update:
        model, _, loss = warmed_up(
            Sums(data, harmony=sizes["kind"] == "gpt_oss"),
            seed,
            on_progress=lambda done, steps: update("warming up", done, steps),
            sizes=sizes,
        )
    facts |= {"warm": data, "seconds": round(time.monotonic() - started, 1), "loss": round(loss, 4)}
    return model
