"""The reference of test_layouts.py: the same updates in plain torch, in float64, in one process.

Each sequence goes through the transformers model separately, without packing, sharing or sharding; losses are written
out from their formulas, and torch.optim.AdamW steps. Nothing of rlcli is called but what makes the models' files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

STEPS = 3
"""Updates of a run."""
LR, BETAS, DECAY, TEMPERATURE = 2e-4, (0.9, 0.99), 0.1, 0.8
CLIP, CAP, VALUE_CLIP = 0.2, 2.0, 0.5
VOCABULARY = 262
WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


@dataclass(frozen=True)
class Sample:
    """A prompt and a response with synthetic figures."""

    tokens: np.ndarray
    """Prompt and response: [T]."""
    prompt: int
    """Number of prompt tokens."""
    advantage: float
    """Synthetic, exact in float32."""
    returns: np.ndarray
    """Synthetic returns of the response tokens: [response]."""
    engine: np.ndarray
    """Synthetic log-probs of the engine: [response]."""

    @property
    def drawn(self) -> int:
        return len(self.tokens) - self.prompt


@dataclass(frozen=True)
class Feature:
    """Options of a run, added to the plain update."""

    kind: str = "policy"
    """Model: policy or critic."""
    samples: int = 1
    """Samples per prompt."""
    prompts: int = 9
    """Number of prompts."""
    budget: int = 4096
    """Tokens of a micro-batch."""
    max_norm: float = 1e6
    """Bound of gradient clipping."""
    recomputed: bool = False
    """Gradient checkpointing."""
    rank: int = 0
    """LoRA rank; 0: all weights are trained."""
    kl: float = 0.0
    """Coefficient of the KL penalty."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""

    @property
    def alpha(self) -> float:
        return 2.0 * self.rank

    def rows(self) -> list[Sample]:
        random = np.random.default_rng(7)
        samples = []
        for _ in range(self.prompts):
            prompt = random.integers(6, VOCABULARY, random.integers(3, 8))
            for _ in range(self.samples):
                length = int(random.integers(1, 17))
                tokens = np.concatenate([prompt, random.integers(6, VOCABULARY, length)]).astype(np.int32)
                returns, engine = random.integers(-16, 16, length) / 16, random.integers(-112, -80, length) / 16
                samples.append(Sample(tokens, len(prompt), random.integers(-8, 9) / 8, returns, engine))
        return samples


ALL: dict[str, Any] = {"samples": 3, "prompts": 3, "budget": 40, "max_norm": 0.1, "recomputed": True}
FEATURES: dict[str, Feature] = {
    "idle ranks": Feature(prompts=3, budget=24),
    "policy": Feature(**ALL, kl=0.1, entropy=0.01),
    "adapter": Feature(**ALL, kl=0.1, entropy=0.01, rank=4),
    "critic": Feature(**ALL, kind="critic"),
}


@dataclass
class UpdateRecord:
    """Results of all updates of a feature."""

    losses: list[float] = field(default_factory=list)
    """Loss of each update."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm of each update, before clipping."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Gradients of each update by name, after clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Trained weights after the last update."""


class Exact(TorchFunctionMode):
    """Within it whatever asks for float32 gets float64: norms, rotary embeddings, routers, values. Products of groups,
    which torch has not in float64, are computed group by group."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch._grouped_mm and args[0].dtype == torch.float64:
            return _grouped(*args[:2], (kwargs or {})["offs"])
        exact = {name: _exact(value) for name, value in (kwargs or {}).items()}
        return func(*map(_exact, args), **exact)


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[N, B]: rows [N, A] up to each of `ends` [E] by its matrix of [E, A, B]."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes), matrices, strict=True)])


def _exact(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def make_models(folder: Path, experts: bool) -> None:
    """`policy` and `critic` in `folder`: random weights, larger than usual ones, which would hide differences."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()

    sizes = {**WIDTHS, "vocab_size": VOCABULARY, "num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": True}
    kind, extra_options = ("qwen3_moe", EXPERTS) if experts else ("qwen2", {})
    config = AutoConfig.for_model(kind, **sizes, **extra_options, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    for name, auto_class in (("policy", AutoModelForCausalLM), ("critic", AutoModelForSequenceClassification)):
        torch.manual_seed(0)
        config.num_labels = 1
        lm = auto_class.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        lm.save_pretrained(folder / name)


class Plain:
    """The model of a feature, in float64. adapter: first values of its factors, by name, as the product draws them."""

    def __init__(self, folder: Path, feature: Feature, adapter: Mapping[str, Tensor]) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        kind = AutoModelForCausalLM if feature.kind == "policy" else AutoModelForSequenceClassification
        load_options = {"dtype": torch.float64, "attn_implementation": "eager"}
        if json.loads((folder / feature.kind / "config.json").read_text()).get("num_experts"):
            load_options["experts_implementation"] = "eager"
        lm = kind.from_pretrained(folder / feature.kind, **load_options)
        self.feature, self.base = feature, lm.base_model
        self.prefix = f"{lm.base_model_prefix}."
        self.frozen = {name: parameter.detach() for name, parameter in lm.named_parameters()}
        trained = {name: tensor.detach().double().clone() for name, tensor in adapter.items()} or self.frozen
        self.trained = {name: tensor.clone().requires_grad_() for name, tensor in trained.items()}
        decaying = [tensor for tensor in self.trained.values() if tensor.ndim > 1]
        rest = [tensor for tensor in self.trained.values() if tensor.ndim <= 1]
        groups = [{"params": decaying, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, foreach=False)

    def weights(self, adapted: bool = True) -> dict[str, Tensor]:
        """By their names in the files."""
        if not self.feature.rank:
            return self.trained if adapted else self.frozen
        merged = dict(self.frozen)
        for name, down in self.trained.items():
            layer, has_down, _ = name.partition(".lora_A.")
            if has_down and adapted:
                up = self.trained[name.replace(".lora_A.", ".lora_B.")]
                merged[f"{layer}.weight"] = (
                    merged[f"{layer}.weight"] + self.feature.alpha / self.feature.rank * up @ down
                )
        return merged

    def outputs(self, row: Sample, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """For a policy the log-probs and entropies of the sampled tokens, for a critic their values twice: [drawn]."""
        inner = {
            name.removeprefix(self.prefix): weight for name, weight in weights.items() if name.startswith(self.prefix)
        }
        ids = torch.tensor(row.tokens, dtype=torch.int64)
        states = functional_call(self.base, inner, (ids[None],), {"use_cache": False}).last_hidden_state[0]
        states = states[row.prompt - 1 : -1]
        if self.feature.kind == "critic":
            values = states @ weights["score.weight"][0]
            return values, values
        log_p = (states @ inner["embed_tokens.weight"].T / TEMPERATURE).log_softmax(-1)
        return log_p.gather(-1, ids[row.prompt :, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def loss(self, row: Sample, old: Tensor, reference: Tensor) -> Tensor:
        """The sum over the sampled tokens of a row: PPO's clipped loss with truncated importance sampling, the k3
        estimate of KL and the entropy bonus; or PPO's clipped value loss. old, reference: [drawn]."""
        feature, (output, entropy) = self.feature, self.outputs(row, self.weights())
        if feature.kind == "critic":
            returns = torch.tensor(row.returns)
            near = torch.minimum(torch.maximum(output, old - VALUE_CLIP), old + VALUE_CLIP)
            return torch.maximum((output - returns) ** 2, (near - returns) ** 2).sum() / 2
        ratio = (output - old).exp()
        surrogate = torch.minimum(row.advantage * ratio, row.advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
        weight = (old - torch.tensor(row.engine)).exp().clamp(max=CAP)
        log_ratio = reference - output
        kl = log_ratio.exp() - log_ratio - 1
        return (-surrogate * weight + feature.kl * kl - feature.entropy * entropy).sum()

    def update(self, rows: list[Sample], old: list[Tensor], reference: list[Tensor], record: UpdateRecord) -> None:
        token_count = sum(row.drawn for row in rows)
        loss = sum((self.loss(*each) for each in zip(rows, old, reference, strict=True)), torch.zeros(())) / token_count
        self.optimizer.zero_grad()
        loss.backward()
        gradients = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in self.trained.items()
        }
        norm = float(torch.cat([tensor.flatten() for tensor in gradients.values()]).norm())
        for tensor in gradients.values():
            tensor.mul_(min(1.0, self.feature.max_norm / (norm + 1e-6)))
        record.losses.append(loss.item())
        record.norms.append(norm)
        record.gradients.append({name: tensor.clone() for name, tensor in gradients.items()})
        self.optimizer.step()


def plain(folder: Path, feature: Feature, adapter: Mapping[str, Tensor]) -> UpdateRecord:
    """All updates of a feature. Its trained tensors have the names of `adapter`, or those of the model's parameters."""
    rows, record = feature.rows(), UpdateRecord()
    model = Plain(folder, feature, adapter)  # its rotary frequencies are float32 numbers, as the product's are
    with Exact():
        with torch.no_grad():
            old = [model.outputs(row, model.weights())[0] for row in rows]
            reference = [model.outputs(row, model.weights(adapted=False))[0] for row in rows]
        for _ in range(STEPS):
            model.update(rows, old, reference, record)
    record.weights = {name: tensor.detach() for name, tensor in model.trained.items()}
    return record
