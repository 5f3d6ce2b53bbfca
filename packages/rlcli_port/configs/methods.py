"""Training method of a configuration of verl or TRL, by the names of its programs and classes."""

from __future__ import annotations

import re
from collections.abc import Iterable

METHODS = {
    "grpo": r"grpo\w*|gspo\w*|asyncgrpo",
    "rloo": r"rloo\w*",
    "sft": r"(?:fsdp_)?sft\w*",
    "dpo": r"dpo\w*",
    "distillation": r"gkd\w*|gold|minillm|distillation|distil\w*|sdft|sdpo|opd",
}
"""Our name → what a class (without Config, Trainer), a subcommand of `trl` or a file is called, in lower case."""
OTHERS = {
    "KTO": r"kto\w*|bco\w*",
    "ORPO": r"orpo\w*",
    "CPO": r"cpo\w*|simpo\w*",
    "PPO with a value model": r"ppo\w*",
    "online DPO": r"onlinedpo\w*|online_dpo\w*|xpo\w*|nashmd|nash_md",
    "a reward model": r"reward\w*|prm\w*|reward_modeling",
    "SSD": r"ssd\w*",
    "TPO": r"tpo\w*",
    "PAPO": r"papo\w*",
}
"""Methods of TRL that have no counterpart here."""
_NO_METHOD = (
    "lora",
    "model",
    "script",
    "training",
    "peft",
    "bitsandbytes",
    "quantization",
    "generation",
    "deepspeedplugin",
)
_ENDING = re.compile(r"(config|trainer|arguments)$")


def method_of(name: str) -> str:
    """Our name of a method, or the name of one without a counterpart; empty for what names none.

    >>> method_of("GRPOConfig"), method_of("rloo_vlm.py"), method_of("KTOTrainer"), method_of("LoraConfig")
    ('grpo', 'rloo', 'KTO', '')
    """
    stem = _ENDING.sub("", re.sub(r"\.py$", "", name.rpartition("/")[2]).lower())
    if stem in _NO_METHOD:
        return ""
    for method, pattern in {**METHODS, **OTHERS}.items():
        if re.fullmatch(pattern, stem):
            return method
    words = re.split(r"[^a-z0-9]+", stem)
    return next((method for method, pattern in METHODS.items() for word in words if re.fullmatch(pattern, word)), "")


def method_of_any(names: Iterable[str]) -> str:
    """The method that the first of these names has that names one."""
    return next((method for name in names if (method := method_of(name))), "")
