"""Where `rollout.speculate` gains and where it loses.

    .venv/bin/python scripts/bench/speculate.py [--model tiny-1m] [--drafts 5] [--repeats 5] [--json speculate.json]

Two engines as a worker builds them, without drafts and with, in one process of one thread, generate the same requests
in turn:

    repeating       greedy responses of a random model, which end up in loops: most drafts are right
    drafted wrong   sampled responses to a periodic prompt: tokens have been seen before, and others follow
    not repeating   sampled responses to random prompts: hardly anything to draft from

CPU seconds of the process; a ratio is the median of the quotients, turn by turn: above 1 drafts lose. The tokens of
both engines are compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ |= {"TORCH_COMPILE_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}

from _common import in_workers_heap, interleaved, ratio, write_json
from _step_work import make_model
from rich.console import Console
from rich.table import Table

PROMPT_TOKENS, PERIOD = 64, 8
TEXTS = {"repeating": (True, True), "drafted wrong": (True, False), "not repeating": (False, False)}
"""Whether the prompt is periodic, and whether responses are greedy."""


def engine(model: str, tokens: int, concurrent: int, drafts: int) -> Any:
    from rlcli.rollout.engine import EngineSpec
    from rlcli.rollout.vllm.vllm_engine import VllmEngine

    sizes = {"max_length": PROMPT_TOKENS + tokens, "max_concurrent": concurrent, "kv_cache_bytes": 256 << 20}
    rest = {"tensor_parallel": 1, "lora_rank": 0, "weights_follow": False, "gpu_memory_utilization": 0.3}
    names = {"enforce_eager": True, "stop_token_ids": (), "group_id": f"bench{drafts}"}
    return VllmEngine(EngineSpec(model, "float32", "cpu", speculate=drafts, **sizes, **rest, **names))


def generating(
    engine: Any, text: str, concurrent: int, tokens: int
) -> tuple[Callable[[], float], dict[int, list[int]]]:
    """A function that generates `concurrent` responses of `tokens` tokens and returns its CPU seconds, and the tokens
    of its last call."""
    import numpy as np

    from rlcli.rollout.engine import GenerationRequest, Sampling, finished

    periodic, greedy = TEXTS[text]
    random, params = np.random.default_rng(0), engine._params
    ids = [np.resize(random.integers(5, 200, PERIOD if periodic else PROMPT_TOKENS), PROMPT_TOKENS) for _ in range(8)]
    requests = [GenerationRequest(i, ids[i % 8].astype(np.int32), i, greedy=greedy) for i in range(concurrent)]
    last: dict[int, list[int]] = {}

    def to_the_end(request: GenerationRequest) -> Any:
        made = params(request)
        made.ignore_eos, made.stop_token_ids = True, []
        return made

    def run() -> float:
        engine._params = to_the_end
        began = time.process_time()
        last.update({one.key: one.tokens.tolist() for one in finished(engine, requests, Sampling(1.0, tokens))})
        took = time.process_time() - began
        engine._params = params
        assert all(len(one) == tokens for one in last.values())
        return took

    return run, last


def measure(engines: dict[str, Any], text: str, concurrent: int, tokens: int, repeats: int) -> dict[str, Any]:
    runs = {name: generating(one, text, concurrent, tokens) for name, one in engines.items()}
    before = engines["drafts"].speculated()
    seconds = interleaved({name: run for name, (run, _) in runs.items()}, repeats=repeats)
    drafted, accepted = (now - then for now, then in zip(engines["drafts"].speculated(), before, strict=True))
    made = concurrent * tokens * (repeats + 1)
    return {
        "text": text,
        "at_once": concurrent,
        "seconds": seconds,
        "tokens_per_s": {name: concurrent * tokens / median(each) for name, each in seconds.items()},
        "ratio": ratio(seconds["drafts"], seconds["none"]),
        "drafted_per_token": drafted / made,
        "accepted_share": accepted / drafted if drafted else 0.0,
        "same_tokens": sum(runs["none"][1][key] == one for key, one in runs["drafts"][1].items()) / concurrent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-1m", help="tiny-1m, tiny-10m, or a folder")
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--at-once", default="1,8,64", help="responses that are generated at once")
    parser.add_argument("--tokens", type=int, default=128, help="length of the responses")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    in_workers_heap()

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    at_once = [int(count) for count in options.at_once.split(",")]
    table = Table("text", "at once", "tokens/s", "with drafts", "CPU s, ÷ without", "drafted/token", "accepted", "same")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = make_model(options.model, Path(folder) / "model")
        ways = {"none": 0, "drafts": options.drafts}
        engines = {name: engine(model, options.tokens, max(at_once), drafts) for name, drafts in ways.items()}
        rows = []
        for text, count in ((text, count) for text in TEXTS for count in at_once):
            rows.append(measure(engines, text, count, options.tokens, options.repeats))
            write_json(options.json, {"model": options.model, "drafts": options.drafts, "rows": rows})
    for row in rows:
        speed, shares = row["tokens_per_s"], (row["drafted_per_token"], row["accepted_share"], row["same_tokens"])
        rest = [f"{row['ratio']:.2f}", f"{shares[0]:.2f}", f"{shares[1]:.0%}", f"{shares[2]:.0%}"]
        table.add_row(row["text"], str(row["at_once"]), f"{speed['none']:.0f}", f"{speed['drafts']:.0f}", *rest)
    Console().print(table)
    os._exit(0)  # vLLM's engines in one process do not all end by themselves


if __name__ == "__main__":
    main()
