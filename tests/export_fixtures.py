"""Checkpoints of runs that never were: models loaded, moved and saved by the workers' own functions, on one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlcli.cli.main import main
from rlcli.config.load import Resolved, dump_toml, resolve
from rlcli.export.exported_weights import Stored
from rlcli.model.io.loading import load_policy, load_value
from rlcli.model.io.model_state import save_state, trained_state
from rlcli.model.lora import LoraSpec
from rlcli.model.optim import build_optimizer
from rlcli.model.packed import pack
from rlcli.runs.checkpoint import Checkpoints
from tests.model_fixtures import padded_log_probs, save_tiny, tiny_lm

CPU = torch.device("cpu")
LORA = ("lora.rank=4", "lora.alpha=8")
PROBE = [7, 3, 50, 12, 99, 4, 61, 8]


def save_run(
    run: Path,
    base: Path,
    *settings: str,
    step: int = 3,
    moved_by: float = 0.02,
    critic: Path | None = None,
    recipe: str = "grpo",
    dtype: torch.dtype = torch.float32,
    swap: bool = False,
    resolved: Resolved | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """A run folder with a checkpoint of `base`, its weights moved at random; that checkpoint. Needs a process group.

    swap: two tensors of one shape have changed places in the files. resolved: the configuration, in place of
    `settings`. state: more of the trainer's state.
    """
    resolved = resolved or resolve(recipe, {"model.path": str(base)}, list(settings))
    lora = resolved.config.lora
    load_options: dict[str, Any] = {"dtype": dtype, "device": CPU, "mesh": init_device_mesh("cpu", (1,))}
    torch.manual_seed(step)
    spec = LoraSpec(lora.rank, lora.alpha, lora.targets) if lora.rank else None
    models = {"policy": load_policy(str(base), lora=spec, **load_options)}
    if critic is not None:
        load = load_policy if resolved.config.algorithm.advantage == "prime" else load_value
        models["critic"] = load(str(critic), **load_options)
    for model in models.values():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * moved_by)
    with torch.no_grad():
        log_probs = models["policy"](pack([(np.array(PROBE), 1)], CPU)).log_probs.tolist()
    if swap:
        parameters = dict(models["policy"].named_parameters())
        first, second = (parameters[f"lm.model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
        with torch.no_grad():
            first_copy = first.clone()
            first.copy_(second)
            second.copy_(first_copy)
    checkpoints = Checkpoints(run / "checkpoints", keep=9)
    folder = checkpoints.begin(step) / "policy"
    trained = {
        name: (model, build_optimizer(model, lr=1.0, betas=(0.9, 0.9), weight_decay=0.0))
        for name, model in models.items()
    }
    written = save_state(trained_state(trained), {}, folder, group())
    return checkpoints.commit(
        step,
        {"step": step, "dtype": str(dtype).removeprefix("torch."), "probe": {"tokens": PROBE, "log_probs": log_probs}}
        | dict(state or {}),
        dump_toml(resolved),
        {f"policy/{name}": facts for name, facts in written.items()},
        {},
    )


def stored(model: Any, folder: Path) -> Stored:
    """The model's parameters as a checkpoint holds them. Collective: every rank calls it."""
    save_state({f"policy.model.{name}": p.detach() for name, p in model.named_parameters()}, {}, folder, group())
    return Stored(folder, "policy.model.lm.")


def group() -> Any:
    return dist.group.WORLD


def save_evaluation(run: Path, step: int, mean: float) -> None:
    folder = run / "evaluations"
    folder.mkdir(exist_ok=True)
    estimate = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
    report = {"prompts": 64, "pass": {"pass@1": estimate}, "mean": {"mean@1": estimate}}
    (folder / f"step-{step:06d}.json").write_text(json.dumps(report))


def with_predicting_layer(folder: Path) -> Path:
    """The model in `folder`, with tensors of a layer that predicts several tokens in its file."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    layer = {"mtp.fc.weight": torch.randn(8, 16), "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 8, 4)}
    save_file(load_file(file) | layer, file, metadata={"format": "pt"})
    return folder


def save_runs(root: Path) -> Path:
    """Runs of one checkpoint or more each below `root`, named for what they are."""
    base = save_tiny(root / "base")
    untied = save_tiny(root / "untied-base", tie_word_embeddings=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_run(root / "full", base, step=2)
    save_run(root / "full", base, step=5)
    save_run(root / "untied", untied)
    mixture = save_tiny(root / "mixture-base", "qwen3_moe")
    save_run(root / "mixture", mixture)
    save_run(root / "mixture-lora", mixture, *LORA, "lora.targets=all-linear,experts")
    for kind in ("mixtral", "glm4_moe", "deepseek_v3", "gpt_oss"):
        save_run(root / kind, save_tiny(root / f"{kind}-base", kind), dtype=torch.bfloat16)
    hybrid = with_predicting_layer(save_tiny(root / "hybrid-base", "qwen3_5_text"))
    save_run(root / "hybrid", hybrid)
    save_run(root / "hybrid-lora", hybrid, *LORA)
    save_run(root / "lora", base, *LORA)
    save_run(root / "half", base, dtype=torch.bfloat16)
    save_run(root / "unmoved", base, moved_by=0.0)
    published = save_tiny(root / "published-base")
    tiny_lm().bfloat16().save_pretrained(published)
    save_run(root / "unmoved-half", published, moved_by=0.0, dtype=torch.bfloat16)
    save_run(root / "lora-half", published, *LORA, moved_by=1e-5, dtype=torch.bfloat16)
    save_run(root / "swapped", base, swap=True)
    save_run(root / "ppo", base, recipe="ppo", critic=base)
    save_run(root / "prime", base, recipe="prime", critic=base)
    dist.destroy_process_group()
    for step, mean in ((0, 0.2), (2, 0.7), (5, 0.6)):
        save_evaluation(root / "full", step, mean)
    return root


def export(*words: object, expect: int = 0) -> None:
    assert main(["export", *map(str, words)]) == expect


def stored_log_probs(run: Path) -> list[float]:
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    log_probs: list[float] = state["probe"]["log_probs"]
    return log_probs


def log_probs(folder: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        values: list[float] = padded_log_probs(lm, [(np.array(PROBE), 1)])[0].tolist()
    return values


def nothing_beside(output_path: Path) -> None:
    assert not [entry for entry in output_path.parent.iterdir() if entry.name.startswith(f".{output_path.name}")]
