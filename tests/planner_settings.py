"""A model, and settings of it, for the planner to plan."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

from rlcli_planner.known_devices import parse_gpus
from rlcli_planner.machine.machine_rates import Rates
from rlcli_planner.model_shape import ModelShape, read_shape
from rlcli_planner.phase_memory import phases
from rlcli_planner.plan_input import RunPlanInput, setting_of

from rlcli.config.load import resolve

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}


RATES = Rates(
    widths=(128, 512, 2048),
    training=(80e9, 130e9, 150e9),
    forward=(90e9, 140e9, 160e9),
    rows=(1, 32, 512),
    products=((5e9, 60e9, 100e9), (8e9, 100e9, 150e9), (10e9, 120e9, 170e9)),
    read_rate=20e9,
    update_rate=500e6,
    operation_s=5e-6,
    draw_s=5e-9,
    softmax_s=3e-9,
    python_s=50e-6,
    quiet=True,
    measured=1.8e9,
)
"""Rates of a fictitious machine with two cores."""


@functools.cache
def qwen_7b() -> ModelShape:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN_7B))
        return read_shape(folder)


def setting(shape: ModelShape, gpus: str, *sets: str, recipe: str = "grpo") -> RunPlanInput:
    device, count = parse_gpus(gpus)
    kind = "cpu" if device.is_cpu else "cuda"
    flags = {"model.path": "m", "cluster.workers": count, "cluster.device": kind}
    cache = (64 << 20) if device.is_cpu else None
    return setting_of(resolve(recipe, flags, sets).config, device, kv_cache_bytes=cache, read=lambda *_: shape)


def totals(setting: RunPlanInput) -> dict[str, float]:
    return {phase.name: phase.total for phase in phases(setting)}
