"""`rlcli tiny-model`: a tiny random model for trials and tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rlcli.cli.options import JsonObject


def tiny_model(
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    hidden: Annotated[int, typer.Option(max=8192, help="Hidden size; 32 or more per head, in multiples of 16.")] = 128,
    layers: Annotated[int, typer.Option(max=128, help="Number of layers.")] = 2,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.")] = 2,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1, help="Seed of the random weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that has other files.")] = False,
    as_json: JsonObject = False,
) -> None:
    """Make a tiny Qwen2 model with random weights, a character-level tokenizer and a chat template.

    Examples:

      rlcli tiny-model --out tiny
      rlcli tiny-model --out tiny --hidden 256 --layers 4 --seed 1
    """
    from rlcli.model.io.tiny import make_tiny_model

    made = make_tiny_model(out, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, seed=seed, force=force)
    if as_json:
        typer.echo(json.dumps({"path": str(made), "hidden": hidden, "layers": layers, "seed": seed}))
    else:
        typer.echo(f"{made}: Qwen2, {layers} layers of {hidden}, random weights (seed {seed})")
