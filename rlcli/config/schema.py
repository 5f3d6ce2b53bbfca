"""Every key of a run, each read by code. `extra="forbid"`: a key that is not here is refused.

Bounds of a single key stand on its field; rules between keys in `rlcli.config.rules`, and rules that need the
dataset or the machine are checked where those are known (`rlcli.trainer.preflight`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
Checkpointing = Annotated[
    bool | Literal["offload"], WithJsonSchema({"type": "boolean", "rule": "true, false or offload"})
]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Model(Section):
    path: str = Field(default="", description="Folder or hub id of the model to train.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Compute precision of training and rollout; auto: bfloat16 on GPUs, float32 on CPUs. "
        "Master weights are float32.",
    )
    gradient_checkpointing: Checkpointing = Field(
        default=False,
        description="Recompute activations in the backward pass to save memory; offload: on GPUs keep what is needed "
        "for that, the inputs of the layers, in host memory as well.",
    )
    compile: bool = Field(
        default=False,
        description="Compile the layers with torch, on GPUs: a longer start, for shorter updates.",
    )


class WeightedPath(Section):
    """One of several datasets. weight: relative to those of the others; None: of none of them."""

    path: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(gt=0.0)] | None = None


class Data(Section):
    path: str | tuple[str | WeightedPath, ...] = Field(
        default="",
        description="A parquet file, or a folder with train.parquet; or a list of them, with weights or without: "
        "without, they are one dataset.",
        json_schema_extra={"rule": 'a path, or a list of paths or of {path = "…", weight = a number > 0}'},
    )
    mix: Literal["prompts", "tokens"] = Field(
        default="prompts",
        description="What the weights of data.path are shares of: the prompts that are drawn, or the tokens of prompts "
        "and responses.",
    )
    max_prompt_tokens: Positive = Field(default=1024, description="Longer prompts are left out, and counted.")
    chat_template_kwargs: dict[str, str | bool | int | float] = Field(
        default_factory=dict,
        json_schema_extra={"rule": "a table of texts, numbers, true and false"},
        description="Variables of the model's chat template: chat_template_kwargs.NAME, such as enable_thinking "
        "= false, or date_string; one that the template does not read is named.",
    )
    shuffle: bool = Field(default=True, description="Draw prompts in a new random order each epoch (seeded).")
    response: str = Field(
        default="",
        description="Field of extra_info that holds the response to imitate: supervised training, without rollouts; "
        "unset: responses are sampled.",
    )

    @property
    def sets(self) -> tuple[WeightedPath, ...]:
        """The datasets; none where no path is given."""
        given = (self.path,) if isinstance(self.path, str) else self.path
        return tuple(WeightedPath(path=one) if isinstance(one, str) else one for one in given if one)

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the datasets."""
        return tuple(one.path for one in self.sets)

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the datasets; empty where they have none."""
        return tuple(one.weight for one in self.sets if one.weight is not None)


class Rollout(Section):
    prompts_per_step: Positive = Field(default=32, description="Prompts (groups) drawn in one step.")
    samples_per_prompt: Positive = Field(default=8, description="Responses generated for each prompt.")
    max_response_tokens: Positive = Field(default=1024, description="Longest response.")
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = Field(
        default=1.0, description="Sampling temperature; log-probs are taken at it."
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="Sample from the likeliest tokens that hold this probability; 1: from all."
    )
    workers: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Workers of their own for the engines; 0: each of cluster.workers hosts one."
    )
    tensor_parallel: Positive = Field(default=1, description="Workers that share one vLLM engine.")
    max_concurrent: Positive = Field(default=256, description="Responses that one engine generates at once.")
    oversample: Annotated[float, Field(ge=1.0, le=4.0)] = Field(
        default=1.0,
        description="Prompts begun in a step, as a multiple of those that it needs: it ends when enough are finished, "
        "and what is broken off goes on in the next step.",
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(),
        description="Tokens that end a response besides the tokenizer's end of sequence, the generation config's and "
        "the one by which the chat template closes a turn.",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.5, description="Share of a GPU's memory that vLLM may take while it generates."
    )
    kv_cache_mb: Positive | None = Field(
        default=None,
        description="KV cache of one engine in MiB; unset: by gpu_memory_utilization on GPUs, sized to the "
        "workload on CPUs.",
    )
    enforce_eager: bool = Field(default=False, description="No CUDA graphs in vLLM (they are never used on CPUs).")
    quantization: Literal["", "fp8"] = Field(
        default="",
        description="fp8: the engine computes its linear layers in 8-bit floating point, on GPUs that do (Ada, Hopper "
        "and newer): faster, and further from the trainer.",
    )
    canary_tolerance: Annotated[float, Field(gt=0.0)] | None = Field(
        default=None,
        description="Largest allowed |engine − trainer| log-prob on the probe after a weight sync; "
        "unset: 0.001 in float32, 0.3 in bfloat16, 1 with rollout.quantization = fp8.",
    )


class Async(Section):
    staleness: Annotated[int, Field(ge=0, le=1)] = Field(
        default=0,
        description="1: a step's samples are generated while the step before is trained on, with the weights of one "
        "update less; 0: with the newest.",
    )


class DynamicSampling(Section):
    keep: Literal["all", "unequal", "accuracy"] = Field(
        default="all",
        description="Groups that are trained on: all; unequal, whose rewards differ; accuracy, whose mean score lies "
        "between low and high. Others are replaced by new ones.",
    )
    low: float = Field(default=0.2, description="Least mean score of a group (keep = accuracy).")
    high: float = Field(default=0.8, description="Largest mean score of a group (keep = accuracy).")
    max_batches: Positive = Field(default=10, description="Most rounds of generation in a step; then it stops.")
    oversample: Annotated[float, Field(ge=1.0, le=16.0)] = Field(
        default=1.0,
        description="Prompts generated at a time, as a multiple of what is missing; good groups that are left over "
        "wait for the next step.",
    )


class Shaping(Section):
    overlong_buffer: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Tokens below rollout.max_response_tokens in which a penalty rises (DAPO); 0: none."
    )
    overlong_penalty: Annotated[float, Field(ge=0.0)] = Field(
        default=1.0, description="That penalty at rollout.max_response_tokens."
    )
    length_weight: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0, description="Weight of the reward for short responses within a group (Kimi k1.5)."
    )
    format_weight: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0, description="Weight of the verdict's part named format, added to the score."
    )


class Algorithm(Section):
    code: str = Field(default="", description="A Python file that registers algorithms of your own.")
    advantage: str = Field(default="grpo", description="How rewards become advantages.")
    scale: Literal["group", "batch", "none"] = Field(
        default="group", description="What grpo divides by: the standard deviation of the group or of the batch."
    )
    gamma: Fraction = Field(default=1.0, description="Discount of later rewards (gae, reinforce_pp).")
    lam: Fraction = Field(default=1.0, description="λ of generalised advantage estimation (gae).")
    loss: str = Field(default="ppo", description="The policy loss.")
    clip_low: Fraction | None = Field(
        default=None, description="Lower clip of the ratio: 1 − clip_low; unset: the loss's own."
    )
    clip_high: Annotated[float, Field(ge=0.0)] | None = Field(
        default=None, description="Upper clip of the ratio: 1 + clip_high; unset: the loss's own."
    )
    dual_clip: Annotated[float, Field(gt=1.0)] | None = Field(
        default=None, description="Bound of the loss where the advantage is negative (dual-clip PPO); unset: none."
    )
    select: str = Field(default="all", description="Which samples of a step are trained on.")
    aggregation: str = Field(default="token-mean", description="How token losses become one number.")
    options: dict[str, float] = Field(
        default_factory=dict,
        description="Further numbers that the chosen functions take: options.NAME, as their docstrings tell.",
    )
    kl_coef: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0, description="β, the weight of the KL to the reference model; 0 loads no reference."
    )
    kl_estimator: str = Field(default="k3", description="How that KL is estimated.")
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="Where that KL goes: a term of the loss, or taken from the reward of each token."
    )
    kl_target: Annotated[float, Field(gt=0.0)] | None = Field(
        default=None, description="KL a token that kl_coef is steered to; unset: kl_coef stays."
    )
    entropy_coef: Annotated[float, Field(ge=0.0)] = Field(default=0.0, description="Weight of the entropy bonus.")
    entropy_target: Annotated[float, Field(gt=0.0)] | None = Field(
        default=None, description="Entropy that entropy_coef is steered to; unset: entropy_coef stays."
    )
    nll_coef: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0, description="Weight of the negative log-likelihood of right responses (VAPO)."
    )
    correction: str = Field(
        default="token_tis",
        description="How the difference between engine and trainer is corrected; several are joined by *, as in "
        "token_tis * off_policy_mask.",
    )
    mismatch_alarm: Annotated[float, Field(gt=0.0)] = Field(
        default=0.05, description="KL of engine to trainer above which the run warns."
    )


class Critic(Section):
    path: str = Field(
        default="",
        description="Folder or hub id of the value model (gae, vapo) or process reward model (prime); "
        "unset: it starts from the policy's.",
    )
    lr: Annotated[float, Field(gt=0.0)] = Field(default=1e-5, description="Its peak learning rate.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="First steps in which it alone is trained."
    )
    clip: Annotated[float, Field(gt=0.0)] | None = Field(
        default=0.5, description="Most that a value may move away from its old one in the loss; unset: no bound."
    )
    workers: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Workers of its own for a value model; 0: it shares the policy's."
    )


class Train(Section):
    steps: Positive = Field(default=100, description="Steps of the run.")
    seed: Seed = Field(default=0, description="Seed of prompt order, sampling and initialisation.")
    minibatches: Positive = Field(default=1, description="Optimizer updates in one pass over a step's samples.")
    passes: Positive = Field(default=1, description="How often a step's samples are trained on.")
    tokens_per_microbatch: Positive = Field(default=8192, description="Most tokens that one worker forwards at once.")
    lr: Annotated[float, Field(gt=0.0)] = Field(default=1e-6, description="Peak learning rate (AdamW).")
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(default=0.9, description="AdamW β1.")
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(default=0.999, description="AdamW β2.")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(default=0.0, description="AdamW weight decay.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps over which the learning rate rises from 0."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rate after warm-up."
    )
    min_lr_fraction: Fraction = Field(default=0.0, description="Where linear and cosine end, as a share of lr.")
    max_grad_norm: Annotated[float, Field(gt=0.0)] = Field(
        default=1.0, description="Gradients are clipped to this global norm."
    )
    truncated: Literal["keep", "mask", "zero_reward"] = Field(
        default="keep",
        description="Responses cut off at rollout.max_response_tokens: keep trains on them as they are scored, mask "
        "leaves them out of the loss and of their group's statistics, zero_reward sets their reward to 0.",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        default="none",
        description="What of the trainer moves to host memory while the engine generates on the same GPUs: the "
        "optimizer's states, or all weights as well.",
    )
    deterministic: bool = Field(
        default=False,
        description="The same bits on every run of the same seed, on the same layout and machine: one thread a worker "
        "on CPUs, deterministic kernels on GPUs.",
    )


class Lora(Section):
    rank: Annotated[int, Field(ge=0, le=512)] = Field(
        default=0, description="Rank of the adapter; 0 trains all weights."
    )
    alpha: Annotated[float, Field(gt=0.0)] = Field(default=32.0, description="Scale of the adapter (alpha / rank).")
    targets: str = Field(
        default="all-linear", description="Comma-separated module names that get an adapter, or all-linear."
    )


class VerifierSection(Section):
    name: str = Field(
        default="auto",
        description="Verifiers of every row, with weights and options: math + 0.1 * format(strict=true), also "
        "path/to/file.py:function; auto: what the row names (reward_model.style), as in auto + 0.1 * format.",
    )
    deadline_s: Annotated[float, Field(gt=0.0)] = Field(
        default=5.0,
        description="CPU seconds after which a verification is killed and tried once more, then wrong; by the clock it "
        "has 10 times as long, at least 30 s, and is then left out.",
    )
    processes: Annotated[int, Field(ge=0, le=256)] = Field(
        default=0, description="Scoring processes on each machine; 0: its CPU cores, on GPUs less two for each worker."
    )
    max_crash_rate: Fraction = Field(
        default=0.01,
        description="The run stops when a larger share of a step's verifications crash (or more than half are killed "
        "at a deadline).",
    )
    sandbox: Annotated[str, Field(pattern=r"^(auto|bwrap|landlock|unsafe|https?://\S+)$")] = Field(
        default="auto",
        json_schema_extra={"rule": "auto, bwrap, landlock, unsafe or the URL of a SandboxFusion endpoint"},
        description="Where verifiers run programs: bwrap, landlock, auto (RLCLI_SANDBOX, else the first of these that "
        "works here), the URL of a SandboxFusion endpoint, or unsafe (limits alone).",
    )


class Cluster(Section):
    workers: Positive = Field(default=1, description="Worker processes, one a device; they form one process group.")
    address: str = Field(
        default="",
        description="Address of a running Ray cluster, whose machines share the model's and the run's folder; "
        "unset: RAY_ADDRESS, else a local one for this run.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where workers run; auto: GPUs where there are any."
    )


class Checkpoint(Section):
    every: Annotated[int, Field(ge=0)] = Field(default=50, description="Steps between checkpoints; 0: only at the end.")
    keep: Positive = Field(default=2, description="Checkpoints kept, the newest first.")
    keep_best: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Checkpoints kept besides: those with the best pass@1 in an evaluation of their step."
    )
    keep_every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Checkpoints kept besides: those of every N-th step; 0: none."
    )


class FaultTolerance(Section):
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        default=3,
        description="Most automatic restarts, after a process or machine has failed, without a newer checkpoint in "
        "between.",
    )
    stall_s: Annotated[float, Field(ge=1.0)] = Field(
        default=1800.0,
        description="Seconds without progress of a worker, after which its stack is dumped and it fails.",
    )
    on_bad_update: Literal["skip", "rollback", "stop"] = Field(
        default="skip",
        description="What follows a gradient that is not finite or above bad_grad_norm: leave out that update, go back "
        "to the last checkpoint with other prompts, or stop. The batch is saved.",
    )
    bad_grad_norm: Annotated[float, Field(gt=0.0)] | None = Field(
        default=None, description="Gradient norm, before clipping, above which an update is bad; unset: no bound."
    )


class Evaluation(Section):
    data: str | tuple[str, ...] = Field(
        default="",
        description="A parquet file, or a folder with test.parquet, or a list of them; unset: no evaluation.",
        json_schema_extra={"rule": "a path, or a list of paths"},
    )
    every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps between evaluations; 0: only before the first step and after the last."
    )
    samples: Annotated[int, Field(ge=1, le=10_000)] = Field(default=1, description="Responses per prompt.")
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = Field(
        default=0.0, description="Sampling temperature; 0 is greedy."
    )
    max_prompts: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Evaluate the first N prompts of each set only; 0: all."
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the datasets; none where nothing is evaluated."""
        return (self.data,) * bool(self.data) if isinstance(self.data, str) else self.data


class Tracking(Section):
    trackers: tuple[Literal["wandb", "tensorboard", "mlflow", "swanlab", "trackio"], ...] = Field(
        default=(), description="Trackers beside metrics.jsonl."
    )
    project: str = Field(default="rlcli", description="Project name in the tracker.")
    save_samples: bool = Field(default=True, description="Write every step's samples to parquet in the run folder.")


class RunConfig(Section):
    """One run, wholly resolved and immutable."""

    # `async` is a keyword of Python's: that section's field is `async_`, and its name everywhere else is its alias.
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    model: Model = Model()
    data: Data = Data()
    rollout: Rollout = Rollout()
    async_: Async = Field(default=Async(), alias="async")
    dynamic_sampling: DynamicSampling = DynamicSampling()
    shaping: Shaping = Shaping()
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()
    train: Train = Train()
    lora: Lora = Lora()
    verifier: VerifierSection = VerifierSection()
    cluster: Cluster = Cluster()
    checkpoint: Checkpoint = Checkpoint()
    fault_tolerance: FaultTolerance = FaultTolerance()
    evaluation: Evaluation = Evaluation()
    tracking: Tracking = Tracking()

    @property
    def engine_workers(self) -> int:
        """Workers that host an engine."""
        return self.rollout.workers or self.cluster.workers

    @property
    def all_workers(self) -> int:
        """Of every pool."""
        return self.cluster.workers + self.critic.workers + self.rollout.workers

    @model_validator(mode="after")
    def _rules_between_keys(self) -> RunConfig:
        from rlcli.config.rules import broken

        messages = broken(self)
        if messages:
            raise ValueError("; ".join(messages))
        return self
