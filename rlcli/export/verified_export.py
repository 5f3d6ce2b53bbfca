"""Write an export and verify that it is the trained model: weights changed, and log-probs equal the trainer's."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlcli.config.schema import RunConfig
from rlcli.data.prompts import chat_template
from rlcli.data.prompts.tokenized_prompts import load_tokenizer
from rlcli.errors import CheckpointError, RlcliError, RunFailed
from rlcli.export.checkpoint_source import Origin
from rlcli.export.export_types import EXACT, ROUNDED, Change, Export, LogProbs, Options, manifest_digest
from rlcli.export.exported_weights import Stored, write_lora, write_merged, write_model, write_tokenizer, write_value
from rlcli.model.io.loading import read_model, read_policy, read_value
from rlcli.model.io.model_config import auto_class, read_config
from rlcli.model.lora import LoraSpec
from rlcli.model.tensor_names import PREDICTING, kept_dtype, stored
from rlcli.model.value_model import HEAD, read_value_config
from rlcli.runs.checkpoint import Checkpoint

MODEL, ADAPTER, VALUE, PROCESS = "model", "adapter", "value model", "process reward model"


def write(origin: Origin, options: Options, folder: Path, path: str) -> Export:
    """Write what `options` ask for to the new `folder`. path: its final path, for the report."""
    config = origin.resolved.config
    base, tokenizer = origin.base, origin.base
    lora = LoraSpec(config.lora.rank, config.lora.alpha, config.lora.targets) if config.lora.rank else None
    if options.merge and (lora is None or options.critic):
        raise RlcliError("--merge: no adapter to merge, all weights were trained", "leave it out")
    adapter = lora is not None and not (options.merge or options.critic)
    dtype = options.dtype or ("float32" if adapter else origin.computed_in)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    kind = MODEL
    computed_in: torch.dtype = getattr(torch, origin.computed_in)
    if options.critic:
        base, stored = config.critic.path or base, critic_of(origin.checkpoint)
        if not stored.shapes:
            raise RlcliError(f"--critic: {origin.name} has no critic", "leave it out to export the policy")
        kind = VALUE if f"{HEAD}.weight" in stored.shapes else PROCESS
        write_stored = write_value if kind == VALUE else write_model
        write_stored(stored, base, tokenizer, torch_dtype, folder, computed_in=computed_in)
    elif lora is not None:
        kind = ADAPTER if adapter else MODEL
        target = folder if adapter else folder / ".adapter"
        write_lora(policy_of(origin.checkpoint), lora, base, torch_dtype if adapter else torch.float32, target)
        if options.merge:
            write_merged(target, base, torch_dtype, folder, stops_of(config, base))
            shutil.rmtree(target)
    else:
        stops = stops_of(config, base)
        write_model(policy_of(origin.checkpoint), base, tokenizer, torch_dtype, folder, stops, computed_in=computed_in)
    if config.model.chat_template:
        write_tokenizer(tokenizer, folder, config.model.chat_template)
    return Export(path, kind, origin.checkpoint.step, dtype, base, manifest_digest(origin.checkpoint.path))


def stops_of(config: RunConfig, base: str) -> list[int]:
    """Every id that ended a response in the run, ascending."""
    # With the run's variables: a template may fail without them. The day does not affect end-of-turn tokens.
    tokenizer = load_tokenizer(base, config.model.chat_template)
    chat_template.fix(tokenizer, config.data.chat_template_kwargs, None)
    return list(chat_template.stop_tokens(tokenizer, base, config.rollout.stop_token_ids))


def prove(origin: Origin, written: Export, folder: Path) -> Export:
    """`written` with the results of its checks. RunFailed if weights are not finite or equal the base's, or if the
    log-probs differ from the trainer's."""
    # An adapter is kept and merged in float32.
    adapted = origin.resolved.config.lora.rank > 0 and written.kind in (MODEL, ADAPTER)
    rounded_to: torch.dtype = torch.float32 if adapted else getattr(torch, origin.computed_in)
    change = _change(written, folder, rounded_to)
    if not math.isfinite(change.largest):
        raise RunFailed(
            f"the weights at step {written.step} are not finite; nothing was written",
            "export an earlier checkpoint: --step N",
        )
    if not change.moved:
        problem = "adapter adds nothing to" if written.kind == ADAPTER else "weights equal"
        keeps_less = written.dtype != "float32" and rounded_to == torch.float32
        raise RunFailed(
            f"the exported {problem} the base model's: none of {change.tensors} tensors differs in {written.dtype} "
            f"from {written.base} at step {written.step}; nothing was written",
            "check update/grad_norm and train.lr in the run's metrics"
            + ("; --dtype float32 keeps smaller changes" if keeps_less else "")
            + "; --no-check exports anyway",
        )
    # The checkpoint holds no log-probs of a critic to compare with.
    compared = written.kind in (MODEL, ADAPTER)
    return replace(written, change=change, log_probs=_log_probs(origin, written, folder) if compared else None)


def _change(written: Export, folder: Path, rounded_to: torch.dtype) -> Change:
    if written.kind == ADAPTER:
        return _change_of_adapter(folder)
    if written.kind == VALUE:
        return _change_of_model(folder, read_value(written.base, read_value_config(written.base)), rounded_to)
    return _change_of_model(folder, read_policy(written.base, read_config(written.base), None), rounded_to)


def _log_probs(origin: Origin, written: Export, folder: Path) -> LogProbs:
    with origin.checkpoint.restoring() as state:
        probe = state.get("probe") or {}
        trained = [float(value) for value in probe.get("log_probs", [])]
        tokens = [int(token) for token in probe.get("tokens", [])]
    if not trained or len(tokens) != len(trained) + 1:
        raise CheckpointError(
            f"{origin.checkpoint.path} holds no log-probs of a probe to compare with",
            "export without the check: --no-check",
        )
    with origin.checkpoint.restoring():  # a token that is none
        exported = _log_probs_of_folder(folder, written.base if written.kind == ADAPTER else "", tokens)
    differences = [abs(ours - theirs) for ours, theirs in zip(exported, trained, strict=True)]
    mean = math.fsum(differences) / len(differences) if all(map(math.isfinite, differences)) else math.inf
    bound = EXACT if (written.dtype, origin.computed_in) == ("float32", "float32") else ROUNDED
    result = LogProbs(len(trained), mean, bound)
    if mean > bound:
        raise RunFailed(
            f"the exported model does not give the trainer's log-probs: they differ by {mean:.3g} in "
            f"the mean of {len(trained)} tokens, more than {bound:g}; nothing was written",
            f"check that {written.base} is unchanged since the run started",
        )
    return result


def policy_of(checkpoint: Checkpoint) -> Stored:
    return Stored(checkpoint.path / "policy", "policy.model.lm.")


def critic_of(checkpoint: Checkpoint) -> Stored:
    """The critic's tensors, from separate workers or the policy's; empty if there is no critic."""
    critic_folder = checkpoint.path / "critic"
    return Stored(critic_folder if critic_folder.is_dir() else checkpoint.path / "policy", "critic.model.lm.")


def _change_of_model(folder: Path, base: Mapping[str, Tensor], rounded_to: torch.dtype) -> Change:
    """Change of the weights in `folder` from `base`, rounded as these are: to `rounded_to`, then to the folder's
    dtype."""
    kind = read_config(str(folder)).model_type
    base = dict(part for name, tensor in base.items() for part in stored(name, tensor, kind))
    trained = ((name, tensor) for name, tensor in _tensors(folder) if not name.startswith(PREDICTING))
    return _summed(
        tensor.float() - base[name].to(kept_dtype(name, rounded_to)).to(tensor.dtype).float()
        for name, tensor in trained
    )


def _change_of_adapter(folder: Path) -> Change:
    """The change that the adapter in `folder` makes to its base: scale · B · A of each layer, and of each expert."""
    from peft import LoraConfig

    from rlcli.model.mixture.expert_adapters import by_expert

    config = LoraConfig.from_pretrained(str(folder))
    scale = config.lora_alpha / config.r
    factors = dict(_tensors(folder))
    layers = [name.removesuffix("lora_A.weight") for name in factors if name.endswith("lora_A.weight")]
    factor_pairs = (
        (factors[f"{layer}lora_A.weight"].float(), factors[f"{layer}lora_B.weight"].float()) for layer in layers
    )
    pairs = (by_expert(down, up, config.r) for down, up in factor_pairs)
    return _summed(scale * up @ down for down, up in pairs)


def _log_probs_of_folder(folder: Path, base: str, tokens: Sequence[int]) -> list[float]:
    """log π of each of `tokens` except the first, computed only with transformers in float32. base: the base model of
    the adapter in `folder`; empty if the folder holds a whole model."""
    source = base or str(folder)
    config = read_config(source)
    lm: Any = read_model(auto_class(config), source, config, dtype=torch.float32)
    if base:
        from peft import PeftModel

        lm = PeftModel.from_pretrained(lm, str(folder))
    ids = torch.tensor(tokens, dtype=torch.int64)[None]
    with torch.no_grad():
        log_probs = lm.eval()(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    gathered: list[float] = log_probs[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return gathered


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def _summed(differences: Iterator[Tensor]) -> Change:
    tensors = moved = elements = 0
    largest = total = 0.0
    for difference in differences:
        size = difference.abs_()
        tensors += 1
        elements += size.numel()
        moved += bool(size.any())
        # Python's max() would lose a NaN.
        largest = float(torch.tensor([largest, float(size.max())]).max())
        total += float(size.sum(dtype=torch.float64))
    return Change(tensors, moved, largest, total / max(elements, 1))
