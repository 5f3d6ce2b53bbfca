"""Pictures from files to a step's batch: seconds and the process's memory, and what all of them decoded would take.

    .venv/bin/python scripts/bench/pictures.py [--pictures 1000] [--side 1024] [--format PNG] [--json pictures.json]

Pictures are smooth gradients with noise, as large as photographs when encoded, in a temporary folder (`TMPDIR` names
another). `prep` makes a parquet file of them, as `rlcli prep jsonl` does. Then another process does what a run's driver
does before its first step: it reads the file and checks every row, and tokenizes the prompts for a tiny Qwen2.5-VL,
which decodes each picture once; and what a worker does with the prompts of one step: decode, resize, and put into a
shard. Memory is the largest that the process had more than before, sampled every 5 ms: anonymous, that is its own, and
resident, which counts mapped files as well, whose pages the system takes back when it needs them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _common import write_json
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
STEP = 32
"""Prompts of a step, the default of `rollout.prompts_per_step`."""
EVERY_S = 0.005
Figures = dict[str, float]


def make(folder: Path, pictures: int, side: int, kind: str) -> int:
    """Write the pictures and a file of rows; the bytes of the encoded pictures."""
    import numpy as np
    from PIL import Image

    slope = np.linspace(0, 200, side)[:, None, None] * np.array([1.0, 0.6, 0.3]) * np.ones((side, side, 1))
    size, rows = 0, []
    for number in range(pictures):
        noise = np.random.default_rng(number).normal(30 + number % 20, 6, (side, side, 3))
        held = io.BytesIO()
        Image.fromarray(np.clip(slope + noise, 0, 255).astype(np.uint8)).save(held, kind)
        name = f"{number}.{kind.lower()}"
        (folder / name).write_bytes(held.getvalue())
        size += len(held.getvalue())
        rows.append({"prompt": f"Which number has picture {number}?", "ground_truth": str(number), "images": [name]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return size


def prep(folder: Path) -> dict[str, Figures]:
    from rlcli.prep.pipeline import Plan, converter_named, prepare
    from rlcli.prep.split_writer import write_splits
    from rlcli.types import ConvertOptions

    columns = {name: name for name in ("prompt", "ground_truth", "images")}
    options = ConvertOptions(source=str(folder / "rows.jsonl"), columns=columns, verifier="exact")
    found: dict[str, Figures] = {}
    with measured(found, "prep"):
        made = prepare(converter_named("jsonl"), options, Plan(check=False))
        write_splits(folder / "data", made.splits, {})
    return found


def start(folder: Path) -> dict[str, Figures]:
    import pyarrow.parquet  # noqa: F401  # imports are no part of what is measured
    from transformers import AutoConfig, AutoTokenizer

    from rlcli.data.prompts.prompt_table import read_prompts
    from rlcli.data.prompts.token_cache import tokenized
    from rlcli.data.sample_shard import ShardBuilder
    from rlcli.data.trajectories import Trajectory
    from rlcli.images.decoding import decode
    from rlcli.images.families import rule_of

    model = folder / "model"
    tokenizer, rule = AutoTokenizer.from_pretrained(model), rule_of(str(model), AutoConfig.from_pretrained(model))
    assert rule is not None
    found: dict[str, Figures] = {}
    with measured(found, "read and check"):
        rows = read_prompts(folder / "data", "train")
    with measured(found, "tokenize"):
        prompts = tokenized(rows, tokenizer, 1 << 20, rule=rule)
        prompts.fingerprint()
    with measured(found, "a step's pictures"):
        builder = ShardBuilder()
        for number in range(min(STEP, len(prompts))):
            shown = [rule.prepared(decode(image)) for image in prompts.prompts[number].images]
            builder.add(Trajectory.of_prompt(prompts.tokens(number), shown))
        builder.build()
    return found


@contextmanager
def measured(found: dict[str, Figures], name: str) -> Iterator[None]:
    """Add the seconds, and the most memory beyond that of before, to `found`."""
    before, most, over = memory(), memory(), threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            for kind, size in memory().items():
                most[kind] = max(most[kind], size)

    watcher, began = threading.Thread(target=watch), time.perf_counter()
    watcher.start()
    try:
        yield
    finally:
        seconds = time.perf_counter() - began
        over.set()
        watcher.join()
    found[name] = {"seconds": seconds, **{kind: most[kind] - before[kind] for kind in before}}


def memory() -> dict[str, int]:
    """Bytes of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "anonymous": int(status["RssAnon"].split()[0]) << 10,
        "resident": int(status["VmRSS"].split()[0]) << 10,
    }


def bench(pictures: int, side: int, kind: str, say: Any) -> dict[str, Any]:
    from rlcli.model.io.tiny_vision import save_vision_model, vision_model

    with tempfile.TemporaryDirectory(prefix="rlcli-bench-") as temporary:
        folder = Path(temporary)
        say(f"make {pictures:,} pictures of {side} × {side}")
        size = make(folder, pictures, side, kind)
        save_vision_model(vision_model(), folder / "model")
        stages: dict[str, Figures] = {}
        for part in ("prep", "start"):
            say(f"measure {part}")
            command = [sys.executable, __file__, "--part", part, str(folder)]
            environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            stages |= json.loads(done.stdout.splitlines()[-1])
    facts = {"pictures": pictures, "side": side, "format": kind, "encoded": size}
    return facts | {"decoded": 3 * side * side * pictures, "stages": stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--side", type=int, default=1024, help="pixels")
    parser.add_argument("--format", default="PNG", choices=("PNG", "JPEG"))
    parser.add_argument("--json", default="", help="also write the figures to this file")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        part, folder = arguments.part
        print(json.dumps((prep if part == "prep" else start)(Path(folder))))
        return
    console = Console(stderr=True)
    found = bench(arguments.pictures, arguments.side, arguments.format, console.print)
    table = Table("stage", "seconds", "anonymous MiB", "resident MiB")
    for name, one in found["stages"].items():
        table.add_row(name, f"{one['seconds']:.1f}", f"{one['anonymous'] / MIB:.0f}", f"{one['resident'] / MIB:.0f}")
    console.print(table)
    console.print(f"encoded: {found['encoded'] / MIB:.0f} MiB; decoded all would be {found['decoded'] / MIB:.0f} MiB")
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
