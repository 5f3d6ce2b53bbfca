"""What a run leaves on the disk, in bytes."""

from __future__ import annotations

from rlcli.planner.memory import checkpoint_bytes
from rlcli.planner.setting import Setting

TOKEN_BYTES, SAMPLE_BYTES = 2.0, 300.0
"""Of a step's samples as compressed parquet: text, by the token, and what stands beside it."""


def disk(setting: Setting) -> dict[str, float]:
    """What → bytes at most: the checkpoints that are kept (with the one that is being written before the oldest goes),
    the samples of all steps with full-length responses, and one export of the model."""
    config = setting.config
    rules, steps = config.checkpoint, config.train.steps
    made = steps // rules.every if rules.every else 0
    made += 1 if not rules.every or steps % rules.every else 0
    kept = rules.keep + rules.keep_best + (steps // rules.keep_every if rules.keep_every else 0)
    found = {"checkpoints": min(made, kept + 1) * checkpoint_bytes(setting)}
    if config.tracking.save_samples and not config.data.response:
        rollout = config.rollout
        a_step = rollout.prompts_per_step * rollout.samples_per_prompt
        found["samples"] = steps * a_step * (setting.sample_tokens * TOKEN_BYTES + SAMPLE_BYTES)
    exported = setting.trained_parameters() * 4 if config.lora.rank else setting.policy.parameters * setting.bytes_each
    return found | {"an export": exported}
