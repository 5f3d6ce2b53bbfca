"""Loading the prompts of a large dataset: seconds and the driver's memory, at the first start and at the second.

    .venv/bin/python scripts/bench/prompts.py [--rows 1000000] [--json prompts.json]

Rows are short sums with two messages and an extra_info, in a parquet file in a temporary folder, with a cache of its
own and the tiny tokenizer. Each start is a process of its own. It reads the rows, checks them, tokenizes them or maps
what is cached, and takes the fingerprint, which is all that a run does with them before its first step. Memory is what
the process has more than before: anonymous, that is its own, and resident, which counts mapped files as well; "a row"
is anonymous memory less the text of the rows, by row. Where /proc does not tell, it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import write_json
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
BATCH = 50_000


def make(path: Path, rows: int) -> int:
    """Write the dataset; the bytes of its text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rlcli.data.prompts.parquet_schema import row, rows_table

    text, writer = 0, None
    for start in range(0, rows, BATCH):
        some = [
            row(
                data_source="sums",
                messages=[
                    {"role": "system", "content": "Add the two numbers and give the sum."},
                    {"role": "user", "content": f"What is {i}+{7 * i % 1009}?"},
                ],
                verifier="gsm8k",
                ground_truth=str(i + 7 * i % 1009),
                extra_info={"split": "train", "index": i},
            )
            for i in range(start, min(start + BATCH, rows))
        ]
        table: pa.Table = rows_table(some)
        text += sum(map(_text, some))
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None, "no rows"
    writer.close()
    return text


def _text(row: dict[str, Any]) -> int:
    words = [row["data_source"], row["ability"], *row["reward_model"].values(), row["extra_info"]["split"]]
    return sum(map(len, words)) + sum(len(message["role"]) + len(message["content"]) for message in row["prompt"])


def start(path: Path, tokenizer_folder: Path) -> dict[str, Any]:
    """One start, in this process: what it took."""
    import pyarrow.parquet  # noqa: F401  # imports are no part of what is measured
    from transformers import AutoTokenizer

    from rlcli.data.prompts.prompt_table import read_prompts
    from rlcli.data.prompts.token_cache import tokenized

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer("warm")
    before, began = memory(), time.perf_counter()
    rows = read_prompts(path, "train")
    read_s = time.perf_counter() - began
    prompts = tokenized(rows, tokenizer, 128)
    mark = prompts.fingerprint()
    seconds = time.perf_counter() - began
    del rows
    after = memory()
    grown = {name: after[name] - before[name] for name in after}
    return {"seconds": seconds, "read_s": read_s, "mark": mark, "prompts": len(prompts), **grown}


def memory() -> dict[str, int]:
    """Bytes of this process, once what is free has been given back."""
    import gc

    import pyarrow as pa

    gc.collect()
    pa.default_memory_pool().release_unused()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "anonymous": int(status["RssAnon"].split()[0]) << 10,
        "resident": int(status["VmRSS"].split()[0]) << 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", default="", help="also write the figures to this file")
    parser.add_argument("--start", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps(start(*arguments.start)))
        return
    from rlcli.model.io.tiny_model import tiny_tokenizer

    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="rlcli-bench-") as folder:
        data, model = Path(folder) / "train.parquet", Path(folder) / "model"
        console.print(f"write {arguments.rows:,} rows")
        text = make(data, arguments.rows)
        tiny_tokenizer().save_pretrained(model)
        found = {}
        for name in ("first", "second"):
            console.print(f"the {name} start")
            command = [sys.executable, __file__, "--start", str(data), str(model)]
            environment = os.environ | {"XDG_CACHE_HOME": str(Path(folder) / "cache")}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[name] = json.loads(done.stdout)
        kept = sum(file.stat().st_size for file in (Path(folder) / "cache").rglob("*") if file.is_file())
    assert found["first"]["mark"] == found["second"]["mark"], "the second start has other prompts"
    table = Table("start", "seconds", "of these reading", "anonymous MiB", "resident MiB", "bytes a row beyond text")
    for name, one in found.items():
        one["bytes_a_row"] = (one["anonymous"] - text) / arguments.rows
        table.add_row(
            name,
            f"{one['seconds']:.1f}",
            f"{one['read_s']:.1f}",
            f"{one['anonymous'] / MIB:.0f}",
            f"{one['resident'] / MIB:.0f}",
            f"{one['bytes_a_row']:.0f}",
        )
    console.print(table)
    console.print(f"{text / arguments.rows:.0f} bytes of text a row; cache: {kept / MIB:.0f} MiB")
    facts = {"rows": arguments.rows, "text_bytes": text, "cache_bytes": kept}
    write_json(arguments.json, facts | {"starts": found})


if __name__ == "__main__":
    main()
