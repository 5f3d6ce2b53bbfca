"""Refuses a model whose files have a separate head although its config ties the head to the embedding.

Merging an adapter on embedding or head leaves such files. Training, engine and export would all drop that head, so that
no check between them could detect it; transformers and newer releases of vLLM use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.errors import ModelError
from rlcli.model.io.bin_file import mapped_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
"""Ends of the names of the two; vision-language models have prefixes."""
ROWS = 4096
"""Rows that are compared at once: large vocabularies take gigabytes."""


def check_tied_head(path: str, config: PreTrainedConfig, files: Sequence[Path]) -> None:
    """Raise `ModelError` if `files`, of the model at `path`, hold a head that is not the embedding, although `config`
    ties them. Reads both if there is a head at all."""
    if not config.tie_word_embeddings:
        return
    with ExitStack() as stack:
        head, embedding = (_found(files, ending, stack) for ending in (HEAD, EMBEDDING))
        if head is None or embedding is None or _are_equal(head, embedding):
            return
    raise ModelError(
        f"{path}: its files have a {HEAD} that is not its embedding, and config.json says tie_word_embeddings = true",
        'set "tie_word_embeddings": false in config.json to use that head, or take it out of the files',
    )


def _found(files: Sequence[Path], ending: str, stack: ExitStack) -> Any:
    """The tensor whose name has this ending, or a slice that can be read in parts; None if there is none."""
    for file in files:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            opened: Any = stack.enter_context(safe_open(file, framework="pt"))
            for name in opened.keys():  # noqa: SIM118
                if _ends(name, ending):
                    return opened.get_slice(name)
        else:
            for name, tensor in mapped_tensors(file):
                if _ends(name, ending):
                    return tensor
    return None


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _are_equal(head: Any, embedding: Any) -> bool:
    """True if two tensors, or slices of files, `[vocabulary, hidden]`, have equal values."""
    import torch

    sizes = [tuple(x.shape) if isinstance(x, torch.Tensor) else tuple(x.get_shape()) for x in (head, embedding)]
    if sizes[0] != sizes[1]:
        return False
    parts = (slice(start, start + ROWS) for start in range(0, sizes[0][0], ROWS))
    return all(torch.equal(head[part].float(), embedding[part].float()) for part in parts)
