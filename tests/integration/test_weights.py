"""An engine that generates with anything but the trained weights stops the run at the first sync in which it does: in
bfloat16 and at a learning rate that moves no log-prob by more than bfloat16 rounds; a sound run is let through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT
from test_catalog import ADAPTED

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

SETS = {
    "together": "model.dtype=bfloat16 train.lr=1e-6",
    "apart": "model.dtype=bfloat16 train.lr=1e-6 rollout.workers=1 async.staleness=1",
    "adapter": "model.dtype=bfloat16",
    "sliced": "train.lr=1e-6 rollout.tensor_parallel=2 cluster.workers=2",
}
HARMS = {
    "together": ("stale", "one", "head", "prefixes"),
    "apart": ("stale", "head", "prefixes", "gone"),  # the last: none can follow it
    # vLLM 0.32 caches an adapter's prefixes under the path that it was read from. The last one is never put right.
    "adapter": ("stale", "base"),
    "sliced": ("stale", "one", "head", "prefixes"),
}
PREFIXES = "still has prefixes cached that earlier weights computed"


LAYOUTS = [name if name == "together" else pytest.param(name, marks=pytest.mark.exhaustive) for name in SETS]
"""Of engines apart, test_weight_copies.py shows the same with copies; of adapters, test_catalog.py a stale one."""


@pytest.fixture(scope="module", params=LAYOUTS)
def runs(request: Any, tiny: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By what went wrong in it, each run of a layout."""
    layout = request.param
    recipe = ADAPTED[0] if layout == "adapter" else "grpo"
    names = [recipe, *(f"{recipe}:{harm}" for harm in HARMS[layout])]
    workers = "2" if layout == "sliced" else "1"
    root = tmp_path_factory.mktemp("weights") / layout
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("catalog.py")), tiny, sums, root, workers, *names],
        env=os.environ | ENVIRONMENT | {"CATALOG_SETS": SETS[layout]},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {"layout": layout} | {row["recipe"].partition(":")[2]: row for row in rows}


def test_a_sound_run_is_checked_and_let_through(runs: dict[str, Any]) -> None:
    assert not runs[""]["failed"]
    assert len(runs[""]["steps"]) == 2
    for step in runs[""]["steps"]:
        assert step["sync/checked_tensors"] > 25
        assert step["sync/unchecked_tensors"] == 0
        assert step["update/grad_norm"] > 0


def test_every_fault_ends_the_run_at_its_first_sync(runs: dict[str, Any]) -> None:
    for harm in HARMS[runs["layout"]]:
        failed = runs[harm]["failed"]
        if harm == "gone":
            assert "worker 0 died in receive_broadcast" in failed
            continue
        assert failed.startswith("after the weight sync the engine of worker "), (harm, failed)
        assert (PREFIXES in failed) == (harm == "prefixes"), failed
        if harm == "one":
            assert "that the trainer sent: model.layers.1.self_attn.k_proj.weight " in failed
        if harm == "base":
            assert "that the trainer sent: model.layers.1.input_layernorm.weight differs (" in failed
        if harm == "head":  # of ranks that share it, the packed part and the embedding's of one rank are not the same
            assert "that the trainer sent: model.embed_tokens.weight " in failed
        assert runs[harm]["steps"] == [], "at the latest the sync after the first update was not sound"
