"""The faults: what each is, the run that it is planted in, and the check that has to find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import in_controller
import in_model
import in_workers

PAIR, LORA, HALF, APART = "pair", "lora", "bfloat16", "apart"
"""Layouts of workers: two that train and generate; the same with an adapter; in bfloat16; a separate engine."""
HYBRID, LATENT, SUNK = "hybrid", "latent", "sunk"
"""Layouts of a model with layers of linear attention, of one with latent attention, and of one with sinks."""
SOUND = "sound"
"""The layout of runs without a fault: two workers, and the quickstart's model, data and verifier."""
REAL, REAL_FLOAT32 = "real", "real-float32"
"""Layouts of `--model`: one worker, in bfloat16 and in float32."""

LAYOUTS: dict[str, tuple[str, ...]] = {
    PAIR: (),
    LORA: ("lora.rank=4", "model.dtype=bfloat16"),  # in float32 the adapter goes with the weights, added to them
    HALF: ("model.dtype=bfloat16",),
    APART: ("cluster.workers=1", "rollout.workers=1"),
    HYBRID: (),
    LATENT: (),
    SUNK: (),
}
MODELS = {HYBRID: "qwen3_5", LATENT: "deepseek_v3", SUNK: "gpt_oss"}
"""Layouts whose model is of another family (`rlcli tiny-model --kind`)."""
REAL_LAYOUTS: dict[str, tuple[str, ...]] = {
    # Half of the responses are cut off: rewarded, they raise a warning that is true.
    REAL: ("model.dtype=bfloat16", "train.truncated=zero_reward"),
    REAL_FLOAT32: ("model.dtype=float32", "train.truncated=zero_reward"),
}
LATE = ("async.staleness=1", "async.engine_steps=0")


@dataclass(frozen=True)
class Fault:
    """A fault that is planted in a run, and the check that must report it."""

    name: str
    """Name on the command line."""
    description: str
    """One line for the list of faults."""
    check: str
    """Name of the check that must report it, as in docs/checks.md."""
    worker: Callable[[Any], None] | None = None
    """Plants it in a worker; None: not there."""
    controller: Callable[[Any], None] | None = None
    """Plants it in the trainer of the controller; None: not there."""
    model: Callable[[Path], None] | None = None
    """Plants it in the folder of the model; None: not there."""
    last_rank: bool = False
    """Plant it in the last rank alone."""
    layout: str = PAIR
    """Layout of the run, a key of LAYOUTS or REAL_LAYOUTS, or SOUND."""
    settings: tuple[str, ...] = ()
    """Arguments of `--set`."""
    in_ci: bool = False
    """Run it in CI."""


def _worker(name: str, description: str, check: str, plant: Callable[[Any], None], **fields: Any) -> Fault:
    return Fault(name, description, check, worker=plant, **fields)


def _controller(name: str, description: str, check: str, plant: Callable[[Any], None], **fields: Any) -> Fault:
    return Fault(name, description, check, controller=plant, **fields)


NOTHING = "after the first sync the engine loads nothing"
SLOW = ("train.lr=1e-6",)
CHECK = "log_prob_check"
FAULTS = [
    _worker("sync-nothing", NOTHING, "weights", in_workers.load_nothing, settings=SLOW, in_ci=True),
    _worker("sync-nothing-bfloat16", NOTHING, "weights", in_workers.load_nothing, settings=SLOW, layout=HALF),
    _worker("sync-nothing-apart", NOTHING, "weights", in_workers.load_nothing, settings=SLOW, layout=APART),
    _worker("sync-nothing-late", NOTHING, "weights", in_workers.load_nothing, settings=(*SLOW, *LATE), layout=APART),
    _worker(
        "sync-nothing-one-rank",
        f"{NOTHING}, on one rank",
        "weights",
        in_workers.load_nothing,
        last_rank=True,
        settings=SLOW,
    ),
    _worker("sync-adapter", "the engine keeps its first adapter", "weights", in_workers.load_no_adapter, layout=LORA),
    _worker("sync-one-tensor", "one tensor is not loaded", "weights", in_workers.leave_one_tensor, settings=SLOW),
    _worker("sync-swapped", "two tensors are in each other's place", "weights", in_workers.swap_two_tensors),
    _worker("sync-head", "the tied head's packed copy stays", "weights", in_workers.leave_the_head, settings=SLOW),
    _worker(
        "sync-head-bfloat16", "the same in bfloat16", "weights", in_workers.leave_the_head, settings=SLOW, layout=HALF
    ),
    _worker("prefix-cache", "the prefix cache outlives the weights", "weights", in_workers.keep_prefix_cache),
    _worker(
        "temperature",
        "log-probs at temperature 1 of samples drawn at 0.6",
        CHECK,
        in_workers.temperature_of_one,
        settings=("rollout.temperature=0.6",),
        in_ci=True,
    ),
    _worker("shifted", "engine log-probs shifted by one token", CHECK, in_workers.shift_log_probs),
    _worker("logits-scaled", "the trainer's logits are scaled by 1.02", CHECK, in_workers.scale_logits, in_ci=True),
    _worker(
        "mask", "the mask begins at the prompt's last token", "signature", in_workers.mask_begins_early, in_ci=True
    ),
    _worker("unreduced", "gradients are not summed over ranks", "reduction", in_workers.reduce_nothing, in_ci=True),
    _controller("other-rows", "a rank trains on another's rows", "coverage", in_controller.rows_of_rank_0, in_ci=True),
    _worker("own-tokens", "the loss is divided by each rank's tokens", "denominator", in_workers.divide_by_own_tokens),
    _worker("loss-scale", "the loss is multiplied by the ranks", "loss_scale", in_workers.multiply_the_loss),
    _worker(
        "sign-on-one-rank",
        "advantages of the wrong sign on one rank",
        "advantages",
        in_workers.flip_advantages,
        last_rank=True,
        in_ci=True,
    ),
    _worker(
        "sign-in-the-loss",
        "the same, where the loss reads them",
        "loss_scale",
        in_workers.flip_token_advantages,
        last_rank=True,
    ),
    _worker("no-step", "the optimizer does not step", "optimizer step", in_workers.never_step, in_ci=True),
    _controller("lr-0", "a learning rate of 0", "optimizer step", in_controller.learning_rate_of_zero),
    _worker("seeds", "one seed for all prompts", "seeds", in_workers.one_seed_a_sample, in_ci=True),
    _worker("seeds-over-steps", "the same seeds at each step", "seeds", in_workers.same_seeds_each_step),
    _controller("cursor", "the data cursor stands still", "cursor", in_controller.cursor_stands_still, in_ci=True),
    _controller("groups", "groups mixed up", "signature", in_controller.groups_mixed_up),
    _controller("rewards", "rewards of another sample", "signature", in_controller.rewards_of_others, in_ci=True),
    _controller("rows", "tokens of another sample", "signature", in_controller.rows_of_others),
    _worker("verdicts", "verdicts on another response", "verdict", in_workers.verdicts_of_others, in_ci=True),
    _worker("constant", "a verifier that rewards everything", "constant_reward", in_workers.reward_everything),
    _worker(
        "timeouts", "half of the verifications time out", "verifier_failures", in_workers.time_out_half, in_ci=True
    ),
    _worker(
        "reference",
        "the reference is the policy",
        "reference_is_policy",
        in_workers.reference_is_policy,
        settings=("algorithm.kl_coef=0.01",),
        in_ci=True,
    ),
    Fault(
        "system-dropped", "a template that drops the system message", "template", model=in_model.drop_system_messages
    ),
    _worker(
        "state-leak",
        "states leak from one sample into the next",
        CHECK,
        in_workers.leak_states,
        layout=HYBRID,
    ),
    Fault("double-bos", "prompts that begin with two begin tokens", "template", model=in_model.begin_twice),
    _worker("endless", "the end token never ends a response", "no_response_ends", in_workers.never_end),
    _worker("truncated", "truncated responses are rewarded", "truncated_rewarded", in_workers.reward_truncated),
    _worker(
        "latent-scale",
        "latent attention is scaled without the rotated part",
        CHECK,
        in_workers.scale_by_the_part_not_rotated,
        layout=LATENT,
    ),
    _worker("sink-dropped", "the trainer attends without sinks", CHECK, in_workers.drop_sinks, layout=SUNK),
    _worker("sync-sinks", "sinks and experts stay as first loaded", "weights", in_workers.leave_sinks, layout=SUNK),
]
ROTARY = "the rotary base is off by 1%"
REAL_FAULTS = [
    _worker("real-head", "the tied head's packed copy stays", "weights", in_workers.leave_the_head, layout=REAL),
    _worker("real-scaled", "logits scaled by 1.02", CHECK, in_workers.scale_logits, layout=REAL),
    _worker("real-8-bit", "one layer computes with 8 bits", CHECK, in_workers.round_one_layer, layout=REAL),
    _worker(
        "real-positions",
        "positions shifted by one in 1% of the samples",
        CHECK,
        in_workers.shift_positions_of_a_percent,
        layout=REAL_FLOAT32,
        settings=("rollout.prompts_per_step=16",),  # 1% of half as many would be one sample in three steps
    ),
    _worker("real-rotary", "the rotary base is doubled", CHECK, in_workers.rotary_base_doubled, layout=REAL),
    # In bfloat16 this moves log-probs by less than rounding does; shifted positions, a sample's by about twice as much.
    _worker("real-rotary-1", ROTARY, CHECK, in_workers.rotary_base_off_by_a_percent, layout=REAL_FLOAT32),
]
"""Faults planted in runs of the model that `--model` gives."""
