"""How far apart are the log-probs of a pack, of transformers alone and of vLLM for models that see pictures?

    .venv/bin/python scripts/bench/picture_kinds.py [--kinds internvl qwen2_5_vl qwen3_vl] [--json picture_kinds.json]

Tiny models with random weights, in float32, on CPUs. Prompts with one picture, two or none, four samples each:

    packed          the trainer's log-probs of a pack, against transformers' of each row by itself
    from files      vLLM's, of what it drew, against the trainer's; both have read the model's files
    synced          the same after all weights have changed and have been sent
    inverted        vLLM's against the trainer's if that is shown the pictures in inverted colours
    unchecked       tensors of the sync that could not be compared

Each is the largest difference of all tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ |= {"TORCH_COMPILE_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import torch
import torch.distributed as dist
from _common import write_json
from PIL import Image
from rich.console import Console
from rich.table import Table

from rlcli.images.families import KINDS, rule_of
from rlcli.images.image_rule import ImageRule
from rlcli.model.io.tiny_vision import save_vision_model, vision_model
from rlcli.model.packed_batch import pack
from rlcli.model.policy import PolicyModel
from rlcli.model.weight_check.checksum import Checksums
from rlcli.rollout.engine import EngineSpec, GenerationRequest, Sampling, finished
from rlcli.rollout.vllm.vllm_engine import VllmEngine

SIZES = ((84, 56), (41, 30), (100, 200), (61, 60))
"""Width and height."""
SAMPLES, TOKENS = 4, 32
ENGINES: list[VllmEngine] = []
"""One that is collected takes the process group of the next with it."""
COLUMNS = ("packed", "from files", "synced", "inverted", "unchecked")

Row = tuple[np.ndarray, int, tuple[np.ndarray, ...]]
"""Tokens, how many of them are the prompt, and its pictures."""


def prompts_for(rule: ImageRule) -> list[Row]:
    draws = np.random.default_rng(0)
    noise = [draws.integers(0, 256, (height, width, 3)).astype(np.uint8) for width, height in SIZES]
    one, two, three, four = (rule.prepared(Image.fromarray(pixels)) for pixels in noise)
    rows = []
    for shown in ((one,), (two,), (three,), (one, four), ()):
        ids = [20, 21, *(token for number in range(len(shown)) for token in (rule.token, 30 + number))]
        tokens = np.array(rule.expanded(ids, [(one.shape[1], one.shape[0]) for one in shown]), np.int32)
        rows.append((tokens, len(tokens), shown))
    return rows


def by_pack(policy: PolicyModel, rule: ImageRule, rows: Sequence[Row]) -> torch.Tensor:
    pictures = [shown for *_, shown in rows]
    batch = pack([(ids, prompt) for ids, prompt, _ in rows], torch.device("cpu"), pictures=pictures, rule=rule)
    found = policy(batch)
    return found.log_probs  # type: ignore[no-any-return,union-attr]


def by_transformers(lm: Any, rule: ImageRule, rows: Sequence[Row]) -> torch.Tensor:
    found = []
    for tokens, prompt, pictures in rows:
        lm.base_model.rope_deltas = None  # of models with three positions
        shown = {name: torch.tensor(values) for name, values in rule.inputs(pictures).items()} if pictures else {}
        if "image_grid_thw" in shown:
            shown["mm_token_type_ids"] = torch.tensor(tokens == rule.token).int()[None]
        ids = torch.tensor(tokens).long()[None]
        logits = lm(input_ids=ids, **shown).logits[0].index_fill(1, torch.tensor(rule.never), -1e9)
        found.append(logits.log_softmax(-1)[prompt - 1 : -1].gather(-1, ids[0, prompt:, None])[:, 0])
    return torch.cat(found)


def drawn(engine: VllmEngine, prompts: Sequence[Row]) -> tuple[list[Row], torch.Tensor]:
    """Four samples of each prompt, and vLLM's log-probs of them."""
    asked = [(number, row) for number, row in enumerate(prompt for prompt in prompts for _ in range(SAMPLES))]
    requests = [GenerationRequest(number, row[0], seed=number, pictures=row[2]) for number, row in asked]
    found = {one.key: one for one in finished(engine, requests, Sampling(1.0, TOKENS))}
    rows = [(np.concatenate([row[0], found[number].tokens]), row[1], row[2]) for number, row in asked]
    return rows, torch.tensor(np.concatenate([found[number].log_probs for number, _ in asked]))


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@torch.no_grad()
def measured(kind: str, folder: Path) -> dict[str, float]:
    lm = vision_model(kind).eval()
    for name, weight in lm.named_parameters():
        if "merger" in name or "projector" in name:
            weight.mul_(4)  # random towers say too little
    save_vision_model(lm, folder)
    rule = rule_of(str(folder), lm.config)
    assert rule is not None
    spec = EngineSpec(
        model=str(folder),
        dtype="float32",
        device="cpu",
        max_length=1024,
        max_concurrent=64,
        tensor_parallel=1,
        lora_rank=0,
        weights_follow=True,
        kv_cache_bytes=64 << 20,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        stop_token_ids=(),
        group_id=f"bench-{kind}",
        images=rule,
        pictures=2,
    )
    engine, prompts = VllmEngine(spec), prompts_for(rule)
    ENGINES.append(engine)
    rows, theirs = drawn(engine, prompts)
    alone = by_transformers(lm, rule, rows)  # before its attention is replaced
    policy = PolicyModel(lm, dtype=torch.float32, source=str(folder)).eval()
    own = by_pack(policy, rule, rows)
    found = {"packed": apart(own, alone), "from files": apart(own, theirs)}
    torch.manual_seed(0)
    for weight in lm.parameters():
        weight.add_(torch.randn_like(weight) * 0.02)
    sums = Checksums()
    engine.load_weights(sums.of(policy.stream_weights()))
    verified = engine.verify(sums.sent())
    assert not verified.differences, verified.differences
    rows, theirs = drawn(engine, prompts)
    inverted = [(ids, prompt, tuple(255 - one for one in shown)) for ids, prompt, shown in rows]
    found["synced"] = apart(by_pack(policy, rule, rows), theirs)
    found["inverted"] = apart(by_pack(policy, rule, inverted), theirs)
    return found | {"unchecked": verified.unchecked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    table = Table("model_type", *COLUMNS)
    with tempfile.TemporaryDirectory() as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        found = {kind: measured(kind, Path(name) / kind) for kind in args.kinds}
    for kind, values in found.items():
        table.add_row(kind, *(f"{values[column]:.2g}" for column in COLUMNS))
    Console().print(table)
    write_json(args.json, found)
    os._exit(0)  # vLLM's engines in one process do not all end by themselves


if __name__ == "__main__":
    main()
