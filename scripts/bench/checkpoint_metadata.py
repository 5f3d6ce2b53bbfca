"""Reads the `.metadata` of a checkpoint by torch's reader, which runs what the file names, and by ours: CPU time.

    python scripts/bench/checkpoint_metadata.py --layers 30

The checkpoint has the tensors of a model and its optimizer, of one element each. The figures are the least of all
rounds, in turn. load: the whole checkpoint, as `load_state` does and did: `.metadata` is read once by our reader, and
was read twice by torch's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

WEIGHTS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        figures = measured(Path(folder) / "policy", given.layers, given.rounds)
    print(f"{figures['tensors']:.0f} tensors, .metadata of {figures['bytes']:,.0f} bytes")
    for what in ("read", "load"):
        print(f"{what}: torch's {figures[f'{what}/torch']:.1f} ms, ours {figures[f'{what}/ours']:.1f} ms")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


def measured(folder: Path, layers: int, rounds: int) -> dict[str, float]:
    import torch
    import torch.distributed.checkpoint as dcp

    from rlcli.model.io.checkpoint_files import METADATA, TensorReader, load_tensors, read_metadata

    names = [f"lm.model.layers.{layer}.{name}.weight" for layer in range(layers) for name in WEIGHTS]
    names += ["lm.model.embed_tokens.weight", "lm.model.norm.weight"]
    state = {f"policy.model.{name}": torch.zeros(1) for name in names}
    for key in ("exp_avg", "exp_avg_sq", "step"):
        state |= {f"policy.optimizer.{name}.{key}": torch.zeros(1) for name in names}
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)

    def load_by_torch() -> None:
        reader = dcp.FileSystemReader(folder)
        reader.read_metadata()
        dcp.load(state, storage_reader=reader, no_dist=True)

    ways: dict[str, Callable[[], object]] = {
        "read/torch": lambda: dcp.FileSystemReader(folder).read_metadata(),
        "read/ours": lambda: read_metadata(folder),
        "load/torch": load_by_torch,
        "load/ours": lambda: load_tensors(state, TensorReader(folder)),
    }
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for way, run in ways.items():
            started = time.process_time()
            run()
            least[way] = min(least[way], (time.process_time() - started) * 1e3)
    return {"tensors": len(state), "bytes": (folder / METADATA).stat().st_size, **least}


if __name__ == "__main__":
    main()
