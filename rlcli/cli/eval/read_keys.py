"""Checks the keys of an evaluation: `--set` refuses keys that an evaluation does not read."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.errors import ConfigError

SERVED = (
    *("model.path", "data.chat_template_kwargs", "evaluation.samples", "evaluation.temperature", "evaluation.top_p"),
    *("evaluation.max_prompts", "rollout.max_response_tokens", "rollout.max_concurrent", "rollout.stop_token_ids"),
    *("train.seed", "verifier", "run.shared"),
    # Refused for a served model, with their own reasons.
    *("cluster.workers", "environment"),
)
"""Keys, and sections of which all keys are read, if an endpoint is evaluated."""

LOCAL = (
    *SERVED,
    *(
        "model.chat_template",
        "model.dtype",
        "model.head_dtype",
        "data.max_prompt_tokens",
        "train.deterministic",
        "cluster",
    ),
    *("rollout.engine", "rollout.servers", "rollout.servers_folder", "rollout.workers", "rollout.tensor_parallel"),
    *("rollout.gpu_memory_utilization", "rollout.kv_cache_mb", "rollout.enforce_eager", "rollout.speculate"),
    *("rollout.quantization", "rollout.sleep", "fault_tolerance.stall_s"),
)
"""The same, if a model is loaded here."""

INSTEAD = {
    "rollout.top_p": "evaluation.top_p",
    "rollout.temperature": "evaluation.temperature",
    "rollout.samples_per_prompt": "evaluation.samples",
}
"""Keys of training rollouts, and those of evaluations."""


def refuse_unread(command: str, sets: Sequence[str] | None, *, served: bool) -> None:
    """Raise `ConfigError` for a key that the command does not read. sets: the arguments of `--set`, whose keys exist.
    served: an endpoint is evaluated."""
    from rlcli.config.keys import RENAMED

    read = SERVED if served else LOCAL
    for text in sets or ():
        name = text.partition("=")[0].strip()
        name = RENAMED.get(name, name)
        if any(name == key or name.startswith(f"{key}.") for key in read):
            continue
        subject = f"{command} of an endpoint" if served and name.startswith(tuple(LOCAL)) else command
        instead = INSTEAD.get(name)
        raise ConfigError(
            f"{subject} does not read {name} (--set)",
            f"give --set {instead}=…, the same for evaluations" if instead else "leave it out",
        )


def refuse_omitted(names: Sequence[str] | None, endpoint: str | None) -> None:
    """Raise `ConfigError` for names of `--omit` that are no sampling values, and for a model that is loaded here."""
    if not names:
        return
    if not endpoint:
        raise ConfigError(f"--omit {names[0]}: only an endpoint is sent sampling values", "leave it out")
    from rlcli.rollout.openai_client import SAMPLING

    for name in names:
        if name not in SAMPLING:
            raise ConfigError(f"--omit {name}: no such sampling value", f"give one of: {', '.join(SAMPLING)}")
