"""The metrics of a run: every name in metrics.jsonl, and what it is. The reference page of metrics is made of this.

Capitals stand for something: `reward/part/NAME` is one metric for each part of a reward.
"""

from __future__ import annotations

METRICS: dict[tuple[str, ...], str] = {
    ("step",): "the step, from 1",
    ("reward/mean", "reward/std"): "over the samples of the step that count; `null` if none does",
    ("reward/equal_groups",): "share of zero-variance groups: prompts whose samples all got the same reward",
    ("reward/truncated",): "mean over the samples truncated at `rollout.max_response_tokens`; missing if none was",
    ("reward/shaped",): "mean including `shaping`",
    ("reward/generated",): (
        "mean score of all samples generated for this step, including those that dynamic sampling drops"
    ),
    ("reward/part/NAME",): (
        "mean of a named part of the reward, over the samples that have it: the unweighted score of each term of a "
        "sum, else the parts that the verifier names"
    ),
    ("outcome/ok", "outcome/wrong", "outcome/no_answer"): "share of samples with that verdict",
    ("outcome/timeout",): (
        "share of verifications that hit the wall-clock limit twice; not trained on. With `verify/overran` above "
        "one half, the run stops; above 5% it warns"
    ),
    ("verify/overran",): (
        "share of verifications that used up `verifier.deadline_s` of CPU time twice; such a sample scores 0. Above"
        " 5% the run warns"
    ),
    ("outcome/crash",): (
        "share of verifications in which the verifier failed, including unreadable gold answers; above "
        "`verifier.max_crash_rate` the run stops"
    ),
    ("outcome/environment",): (
        "share of samples whose environment failed twice; above `environment.max_failure_rate` the run stops"
    ),
    ("outcome/unparsed",): (
        "share of samples whose judge replied something that is no verdict; not trained on. Above one half the run "
        "stops; with the two above, it warns above 5%"
    ),
    ("usage/NAME",): (
        "what verifiers report as spent, summed over the step's samples and not part of a reward: a judge's "
        "`calls`, `cached`, `prompt_tokens`, `completion_tokens` and `cost`"
    ),
    ("log/NAME",): (
        "mean of what a reward function in TRL's convention logs with `log_metric(NAME, …)`; not part of a reward"
    ),
    ("samples/left_out",): "samples left out of the loss and of all reward statistics: the sum of those below",
    ("samples/left_out/timeout", "samples/left_out/crash", "samples/left_out/unparsed"): (
        "of these, those whose verification failed: not a wrong answer"
    ),
    ("samples/left_out/truncated",): (
        "of these, those truncated at `rollout.max_response_tokens`, with `train.truncated = mask`"
    ),
    ("samples/left_out/environment",): "of these, conversations whose environment failed twice: not a reward of 0",
    ("samples/left_out/baseline",): (
        "of these, those of a prompt whose greedy baseline could not be verified (`algorithm.advantage = remax`)"
    ),
    ("samples/left_out/alone",): (
        "of these, those left alone in their group, if samples of a group are compared with each other"
    ),
    ("response_tokens/mean", "response_tokens/max"): (
        "tokens that the policy generated in each sample, including the end token"
    ),
    ("response_tokens/truncated",): "share truncated at `rollout.max_response_tokens`",
    ("prompt_tokens/mean",): "length of the prompts, including the chat template",
    ("turns/mean", "turns/max"): "turns of the policy in a conversation; with an environment",
    ("context_tokens/mean",): (
        "tokens after the prompt that the policy did not generate, such as tool output; with an environment"
    ),
    ("tool_calls/mean", "tool_calls/failed"): (
        "calls of tools in a conversation, and those that could not be read or failed"
    ),
    ("branches/mean",): "sequences of one sample, if any has several (agents, `environment.past`)",
    ("ended/NAME",): (
        "share of conversations that ended because the environment was `done`, at a limit (`turns`, `turn_tokens`, "
        "`response_tokens`, `tokens`, `tool_calls`, `seconds`), or `failed` with their environment"
    ),
    ("rollout/several_versions",): "share of samples with tokens of more than one policy version; if there are any",
    ("rollout/rounds", "rollout/generated"): (
        "rounds of generation for this step (with `async.staleness` slices of it), and samples generated"
    ),
    ("rollout/dropped_groups",): "groups that `dynamic_sampling.keep` dropped",
    ("prompts/seen", "prompts/retired"): (
        "share of the prompts that were sampled so far, and that are retired (prompt selection)"
    ),
    ("rollout/carried_over_groups",): "complete groups that wait for a later step",
    ("rollout/in_flight_groups",): "groups of later steps that were being generated when the step took its samples",
    ("rollout/too_old_groups",): (
        "groups dropped because they were older than `async.staleness` allows (`async.too_old`)"
    ),
    ("rollout/stale",): "samples of this step that an earlier policy generated or started",
    ("rollout/aborted",): "responses that the step interrupted (`rollout.oversample`); they continue in the next step",
    ("rollout/resumed",): "samples of this step that an earlier step had interrupted",
    ("rollout/replay_diverged",): (
        "interrupted conversations that were restarted, because their environment answered something else in the replay"
    ),
    ("rollout/drafted", "rollout/drafts_accepted"): (
        "with `rollout.speculate`: tokens that were drafted, and the share of them that was kept"
    ),
    ("rollout/staleness", "rollout/staleness_max"): "age of the samples' oldest token in updates, mean and maximum",
    ("rollout/age/AGE",): "share of the response tokens that are AGE updates old",
    ("source/SET/prompts",): "with several paths in `data.path`: prompts of that dataset in the step",
    ("source/SET/reward", "source/SET/pass@1"): "`reward/mean` and `outcome/ok` of that dataset",
    ("source/SET/outcome/NAME", "source/SET/response_tokens", "source/SET/truncated"): (
        "verdicts, mean length and cut-off responses of that dataset, as above"
    ),
    ("update/policy_loss",): "mean over the trained tokens, including rollout correction",
    ("update/clip_low", "update/clip_high"): "share of trained tokens whose gradient the lower or upper clip zeroed",
    ("update/ratio_abs_dev",): "mean |ρ − 1|",
    ("update/kl",): "KL to the reference, estimated; only with a reference model",
    ("update/kl_start",): "the same in the step's first update only; 0 if the reference is the policy",
    ("update/teacher_kl",): "mean log π − log ν of the trained tokens, ν the teacher; only with `teacher.path`",
    ("update/teacher_agreement",): "share of the trained tokens that are the teacher's likeliest",
    ("update/kl_coef", "update/entropy_coef"): "the coefficients at this step",
    ("update/entropy",): "mean entropy of the policy over the trained tokens, nats",
    ("update/grad_norm",): "global gradient norm before clipping, mean over the step's updates",
    ("update/gradient_scale",): (
        "scale of the gradients; only with `model.dtype = float16`. Halved on overflow, doubled after 200 updates "
        "without one"
    ),
    ("update/busiest_expert",): (
        "tokens of the busiest expert ÷ those of its layer's mean expert, in the worst layer; 1 is balanced, near "
        "experts ÷ chosen experts the router has collapsed"
    ),
    ("update/unused_experts",): "share of all experts that no token of an update passed through",
    ("update/routes_known",): "with `rollout.replay_routes`: share of the choices of experts that were the engine's",
    ("update/routes_differ",): "share of those that the trainer's router would not have made",
    ("update/loss_scale",): (
        "gradient of the loss along the advantages in the first update ÷ its expected value: 1 except for clipping;"
        " missing for losses that do not follow the advantages (DPO, SFT)"
    ),
    ("update/lr",): "learning rate",
    ("update/count", "update/skipped"): (
        "optimizer updates done, and skipped because no sample had a gradient or the gradient was bad "
        "(`fault_tolerance.on_bad_update`)"
    ),
    ("mismatch/kl",): (
        "estimate of KL(engine ‖ trainer) over the sampled tokens, before the first update; above "
        "`algorithm.mismatch_warning` the run warns (mismatch)"
    ),
    ("mismatch/k3",): "the same by an estimate that is never negative and less noisy",
    ("mismatch/ess",): (
        "effective sample size of the ratios trainer ÷ engine, as a share of the tokens: 1 if they agree"
    ),
    ("mismatch/outliers",): "share of tokens whose ratio lies outside [0.5, 2]",
    ("mismatch/corrected",): "share of tokens whose weight `algorithm.correction` capped or set to 0",
    ("critic/loss", "critic/lr", "critic/grad_norm"): (
        "of the value model (mean over tokens) or the process reward model (mean over responses)"
    ),
    ("critic/skipped",): "skipped updates of the critic, as in `update/skipped`",
    ("critic/clipped",): "share of tokens whose value moved further than `critic.clip`",
    ("critic/returns",): "mean return",
    ("critic/explained_variance",): (
        "share of the returns' variance that the values explain: 1 is perfect, 0 is no better than their mean"
    ),
    ("critic/accuracy",): "share of responses whose verdict the process reward model predicts",
    ("log_prob_check/tokens",): (
        "tokens that the log-prob check compared in this step; the statistics below are missing until 8 samples "
        "were compared"
    ),
    ("log_prob_check/mean_abs_diff",): "mean |Δ| over the last steps, nats",
    ("log_prob_check/noise",): "Σ |Δ| ÷ Σ (1 − p)",
    ("log_prob_check/noise_of_trainer",): "the same of the trainer alone, if its layers round once more",
    ("log_prob_check/mean",): "mean of d over the last steps",
    ("log_prob_check/slope",): "slope of d on the log-prob",
    ("log_prob_check/position",): "`noise` beyond half of the mean length, less that before",
    ("log_prob_check/worst_sample",): "a bounded `noise` of the sample of this step that differs most",
    ("log_prob_check/max_abs_diff",): "largest |Δ| of this step; in bfloat16 a correct run reaches 1",
    ("log_prob_check/margin",): "the largest statistic as a share of its bound: above 1 the check fails",
    ("log_prob_check/nonfinite",): "1 if one of these log-probs is NaN or infinite",
    ("log_prob_check/k3",): "estimate of the KL between engine and trainer at equal weights",
    ("sync/checked_tensors",): "tensors that each engine holds exactly as they were sent (checks)",
    ("sync/unchecked_tensors",): (
        "tensors that could not be compared: the engine quantises them, or its loader changes their values"
    ),
    ("sync/changed_tensors",): "tensors whose sent values differ from the last sync",
    ("sync/changed_share",): (
        "with `rollout.sync = delta`: share of the values that differ from the last sync in any bit; else 1"
    ),
    ("sync/bytes",): "size of the weights (or the LoRA adapter) that each engine received",
    ("plan/imbalance",): "work of the slowest worker of each micro-batch ÷ the mean (packing)",
    ("plan/microbatches",): "forward passes per worker",
    ("plan/skipped_samples",): (
        "samples with an advantage of exactly 0 and no KL term: they count in the denominator and are not forwarded"
    ),
    ("throughput/rollout_tokens_per_s",): "response tokens ÷ seconds of generation",
    ("throughput/update_tokens_per_s",): "tokens forwarded in the update ÷ its seconds",
    ("throughput/tokens_per_s",): "all tokens of the step ÷ its seconds",
    ("throughput/sync_gb_per_s",): "`sync/bytes` ÷ seconds, in 10⁹ bytes a second",
    ("time/generate_s", "time/plan_s", "time/load_s", "time/update_s", "time/sync_s"): (
        "seconds by phase; verification runs concurrently with generation"
    ),
    ("time/critic_s", "time/advantages_s"): (
        "the same, for values or process rewards, and for advantages that need tokens"
    ),
    ("time/old_log_probs_s", "time/reference_s", "time/teacher_s"): "the same, if they are needed",
    ("time/wait_for_rollout_s",): "with `async.staleness`: after training, until the engines are free for new weights",
    ("time/verify_wait_s",): (
        "part of `time/generate_s` spent waiting for verdicts after generation; with `async.staleness`, during "
        "training too"
    ),
    ("time/idle_s",): "part of `time/generate_s` in which a worker waits for the slowest, on average",
    ("time/trainer_idle_s",): "the trainer waits for samples: `time/generate_s` and `time/wait_for_rollout_s`",
    ("time/engine_idle_s",): "the engines generate nothing",
    ("engine/servers", "engine/lost", "engine/moved"): (
        "with `rollout.engine = server`: servers that are ready, servers lost since the last step, and responses "
        "moved to others"
    ),
    ("time/transfer_s",): "part of `time/sync_s` in which the weights went to the engine, with checksums",
    ("time/check_s",): "part of `time/sync_s` in which the engine's weights were compared with what was sent",
    ("time/bookkeeping_s",): "time outside the phases: metrics, records, trackers, terminal output",
    ("time/step_s",): "the whole step: phases and bookkeeping",
    ("time/checkpoint_s", "time/evaluate_s"): "not in `time/step_s`: the copy of a checkpoint, and the evaluation",
    (
        "memory/generate_gb",
        "memory/release_gb",
        "memory/load_gb",
        "memory/old_log_probs_gb",
        "memory/reference_gb",
        "memory/teacher_gb",
        "memory/critic_gb",
        "memory/advantages_gb",
        "memory/update_gb",
        "memory/sync_gb",
    ): (
        "memory by phase of the step: the peak of a worker, GiB; `release` is the engine going to sleep, "
        "`advantages` only if advantages need tokens or tokens are selected"
    ),
    ("memory/checkpoint_gb",): "the same, for the checkpoint before this step",
    ("memory/build_gb",): "the same, for loading the models and starting the engine",
    ("memory/base_gb",): "memory of a worker before any weight: the libraries on CPUs, the CUDA context on GPUs",
    ("memory/shm_gb",): "in use in `/dev/shm` of a worker's machine, Ray's object store included",
    ("memory/host_gb",): "on GPUs: peak host memory of a worker's process, including shared and pinned pages",
    ("memory/fragmented_gb",): "on GPUs: the peak of torch's cache beyond what was allocated",
    ("eval/pass@K", "eval/pass@K/low", "eval/pass@K/high"): (
        "evaluation at this step: unbiased chance that one of K samples is correct, with its 95% interval over prompts"
    ),
    ("eval/maj@K", "eval/maj@K/low", "eval/maj@K/high"): "the same for the answer that most of K samples give; K ≥ 2",
    ("eval/mean@K", "eval/mean@K/low", "eval/mean@K/high"): "the same for the mean score of all samples",
    ("eval/prompts", "eval/samples"): (
        "prompts and samples of that evaluation; rows with equal prompt and ground truth are one prompt"
    ),
    ("eval/rows", "eval/left_out"): "rows that were evaluated, and rows that were left out",
    ("eval/response_tokens/p50", "eval/response_tokens/p95"): "median and 95th percentile of its responses' lengths",
    ("eval/SET/NAME",): "with several paths in `evaluation.data`: each of these numbers for one dataset",
    (
        "eval/outcome/NAME",
        "eval/response_tokens/mean",
        "eval/response_tokens/max",
        "eval/response_tokens/truncated",
    ): "of that evaluation, as above",
}
"""Names → what they are. Names in one row share a description. Keys of the configuration stand in backticks."""

METRIC_NAMES = frozenset(name for names in METRICS for name in names)
