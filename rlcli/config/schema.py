"""Every configuration key of a run, with its bounds. Unknown keys are refused (`extra="forbid"`).

Rules between keys are in `rlcli.config.rules`; rules that need the dataset or the machine are in
`rlcli.launch.preflight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, WithJsonSchema

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
Checkpointing = Annotated[
    bool | Literal["offload"], WithJsonSchema({"type": "boolean", "rule": "true, false or offload"})
]


class Section(BaseModel):
    """Base of the sections of a configuration: immutable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Model(Section):
    path: str = Field(default="", description="Folder or hub id of the model to train.")
    chat_template: str = Field(
        default="",
        description="For a base model, or in place of the model's own: a Jinja file, chatml, or plain (the text of the "
        "messages alone, which the model continues); checkpoints and exports keep it.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Compute precision of training and rollout; auto: bfloat16 on GPUs, float32 on CPUs, but bfloat16 "
        "there too for a model of 100 million parameters or more if a short measurement shows that this machine "
        "multiplies 1.5 times as fast in it (not with LoRA, nor in a running cluster). A resumed run keeps what auto "
        "stood for. Master weights are float32; in 16 bits they start with noise that rounding removes, so that small "
        "updates show. float16 brings engine and trainer closer than bfloat16; its gradients are scaled up, as far as "
        "they do not overflow.",
    )
    head_dtype: Literal["auto", "float32"] = Field(
        default="auto",
        description="Precision of the last layer's product, which gives the logits, in training and rollout; auto: as "
        "dtype. With bfloat16 elsewhere, float32 brings engine and trainer closer.",
    )
    gradient_checkpointing: Checkpointing = Field(
        default=False,
        description="Recompute activations in the backward pass to save memory; offload: on GPUs, also keep the "
        "layer inputs needed for that in host memory.",
    )
    compile: bool = Field(
        default=False,
        description="Compile the layers with torch, on GPUs: slower start, faster updates.",
    )
    freeze: tuple[Literal["vision", "encoder", "projector"], ...] = Field(
        default=(),
        description="Parts of a vision-language model that do not train. vision: the vision encoder with its "
        "projector, as freeze_vision_tower of verl; encoder: the vision encoder without it; projector: the layers "
        "from the encoder's width to the decoder's.",
    )


class WeightedPath(Section):
    """One of several datasets."""

    path: Annotated[str, Field(min_length=1)]
    """A parquet file, or a folder with train.parquet."""
    weight: PositiveFloat | None = None
    """Weight relative to the other datasets; None: no dataset has one."""


class Data(Section):
    path: str | tuple[str | WeightedPath, ...] = Field(
        default="",
        description="A parquet file, a folder with train.parquet, or a list of them, with or without weights; "
        "without weights they form one dataset.",
        json_schema_extra={"rule": 'a path, or a list of paths or of {path = "…", weight = a number > 0}'},
    )
    mix: Literal["prompts", "tokens"] = Field(
        default="prompts",
        description="Unit of the weights in data.path: shares of the drawn prompts, or of the tokens of prompts and "
        "responses.",
    )
    max_prompt_tokens: Positive = Field(default=1024, description="Longer prompts are left out and counted.")
    chat_template_kwargs: dict[str, str | bool | int | float] = Field(
        default_factory=dict,
        json_schema_extra={"rule": "a table of texts, numbers, true and false"},
        description="Variables of the model's chat template: chat_template_kwargs.NAME, such as enable_thinking "
        "= false or date_string; variables that the template does not read are reported.",
    )
    shuffle: bool = Field(default=True, description="Draw prompts in a new random order each epoch (seeded).")
    sampling: Literal["uniform", "thompson", "difficulty"] = Field(
        default="uniform",
        description="Which prompts to draw. uniform: each once an epoch; thompson: those whose pass rate, drawn from "
        "its posterior, is nearest to one half; difficulty: at random, by the expected variance of the reward.",
    )
    retire: NonNegativeInt = Field(
        default=0,
        description="Groups in a row with right samples only after which a prompt is drawn no more; 0: no limit.",
    )
    response: str = Field(
        default="",
        description="Field of extra_info with the response to imitate (supervised training, no rollouts); "
        "unset: responses are sampled.",
    )

    @property
    def sets(self) -> tuple[WeightedPath, ...]:
        """The datasets; empty if no path is given."""
        entries = (self.path,) if isinstance(self.path, str) else self.path
        return tuple(WeightedPath(path=entry) if isinstance(entry, str) else entry for entry in entries if entry)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the datasets."""
        return tuple(dataset.path for dataset in self.sets)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the datasets; empty if they have none."""
        return tuple(dataset.weight for dataset in self.sets if dataset.weight is not None)


class Rollout(Section):
    engine: str = Field(
        default="vllm",
        description="What generates responses: vllm, transformers (without vLLM, slower), server (inference servers, "
        "rollout.servers) or an installed plugin.",
    )
    servers: Annotated[int, Field(ge=1, le=64)] | str | tuple[str, ...] = Field(
        default=1,
        json_schema_extra={"rule": "a whole number from 1 to 64, a URL or a list of URLs"},
        description="With rollout.engine = server: URLs of vLLM or SGLang servers, or how many vLLM servers each "
        "engine's worker starts.",
    )
    servers_folder: str = Field(
        default="",
        description="Folder that engines and servers both see, through which weights go to the servers; unset: the "
        "memory of this machine (/dev/shm).",
    )
    prompts_per_step: Positive = Field(default=32, description="Prompts (groups) per step.")
    samples_per_prompt: Positive = Field(default=8, description="Responses generated for each prompt.")
    max_response_tokens: Positive = Field(default=1024, description="Maximum response length.")
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = Field(
        default=1.0, description="Sampling temperature, also used for log-probs."
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="Sample from the most likely tokens with this total probability; 1: all."
    )
    workers: NonNegativeInt = Field(
        default=0, description="Separate workers for the engines; 0: each of cluster.workers hosts one."
    )
    tensor_parallel: Positive = Field(default=1, description="Workers that share one engine.")
    max_concurrent: Positive = Field(default=256, description="Responses that one engine generates concurrently.")
    oversample: Annotated[float, Field(ge=1.0, le=4.0)] = Field(
        default=1.0,
        description="Prompts started in a step, as a multiple of those needed; the step ends when enough are "
        "finished, and unfinished responses continue in the next step.",
    )
    stop_token_ids: tuple[NonNegativeInt, ...] = Field(
        default=(),
        description="Token ids that end a response, in addition to the tokenizer's EOS, those of the generation "
        "config and the chat template's end-of-turn token.",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.5, description="Share of a GPU's memory that vLLM may use while generating."
    )
    kv_cache_mb: Positive | None = Field(
        default=None,
        description="KV cache of one engine in MiB; unset: given by gpu_memory_utilization on GPUs, by the "
        "workload and the memory on CPUs.",
    )
    enforce_eager: bool = Field(default=False, description="Disable CUDA graphs in vLLM (CPUs never use them).")
    speculate: Annotated[int, Field(ge=0, le=32)] = Field(
        default=0,
        description="Tokens drafted for each response in each of vLLM's steps, copied from what followed the same "
        "tokens before, and verified without changing the distribution: faster on repetitive text with few responses "
        "at once; 0: none.",
    )
    sleep: Literal["auto", "all", "cache", "none"] = Field(
        default="auto",
        description="GPU memory that an engine releases while the trainer on the same GPUs computes: all of it, the KV "
        "cache alone (the weights stay), or none. auto: the least with which the run fits.",
    )
    replay_routes: bool = Field(
        default=False,
        description="Train each token through the experts that the engine chose for it, with weights from the "
        "trainer's own router: for mixtures of experts whose engine and trainer choose differently.",
    )
    sync: Literal["full", "ahead", "delta", "delta_ahead"] = Field(
        default="full",
        description="What a weight sync sends to separate engines (rollout.workers): all weights, or delta: the values "
        "that have changed, bit by bit. ahead: while they still generate (async.staleness of 1 or more), into a copy "
        "from which they load. All but full keep copies of the weights in host memory.",
    )
    quantization: Literal["", "fp8"] = Field(
        default="",
        description="fp8: compute the engine's linear layers in 8-bit floating point, on GPUs that support it (Ada, "
        "Hopper and newer): faster, but less close to the trainer. Experts need enforce_eager beside it.",
    )
    log_prob_check: Literal["stop", "warn", "off"] = Field(
        default="stop",
        description="What happens when engine and trainer compute different log-probs at equal weights, by more than "
        "rounding explains: the run stops, it warns and continues, or nothing is compared.",
    )

    @property
    def server_urls(self) -> tuple[str, ...]:
        """URLs of the servers; empty if the run starts them."""
        urls = (self.servers,) if isinstance(self.servers, str) else self.servers
        return urls if isinstance(urls, tuple) else ()


class Environment(Section):
    name: str = Field(
        default="",
        description="What answers the policy between its turns: an installed environment (rlcli env list), "
        "module:Class or path/to/file.py:Class, or a function, or a list of functions, as tools; auto: the installed "
        "one that the row names (extra_info.environment); a command, such as 'python agent.py': a program that asks "
        "the policy through OPENAI_BASE_URL; unset: single-turn.",
    )
    options: dict[str, str | bool | int | float] = Field(
        default_factory=dict,
        json_schema_extra={"rule": "a table of texts, numbers, true and false"},
        description="Arguments of the environment's constructor: options.NAME.",
    )
    python: str = Field(
        default="",
        description="Python interpreter that environments run in, with the packages that they need; unset: this one.",
    )
    processes: Annotated[int, Field(ge=1, le=256)] | None = Field(
        default=None,
        description="Processes that host the environments of one engine; of a command: how many of it run at once. "
        "Unset: 1, of a command 32.",
    )
    deadline_s: PositiveFloat = Field(
        default=60.0,
        description="Seconds after which a call of an environment fails, or a command that asks for no turn; its "
        "process is ended.",
    )
    memory_mb: NonNegativeInt = Field(default=0, description="Memory limit of one of these processes; 0: none.")
    variables: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = Field(
        default=(),
        description="Names of environment variables that environments get in addition: of a command, to the few that "
        "every program needs; of the others, those that are called like a secret. Their values are not recorded.",
        json_schema_extra={"rule": "a list of names of environment variables"},
    )
    ground_truth: bool = Field(
        default=False,
        description="Give a command the row's ground truth too (RLCLI_ROW), and what extra_info has of the answer; "
        "classes and functions always get the whole row.",
    )
    max_failure_rate: Fraction = Field(
        default=0.05,
        description="The run stops when the environments of a larger share of a step's samples fail twice.",
    )
    turns: Positive = Field(default=8, description="Maximum turns of the policy in a conversation.")
    turn_tokens: Positive | None = Field(
        default=None, description="Maximum tokens of one turn; unset: rollout.max_response_tokens, that of all of them."
    )
    context_tokens: Positive = Field(
        default=1024,
        description="Room for what the environment writes after the prompt: the longest conversation has "
        "data.max_prompt_tokens, this and rollout.max_response_tokens together.",
    )
    past: Literal["keep", "per_cycle"] = Field(
        default="keep",
        description="The policy's earlier turns once a user's message follows. keep: as generated. per_cycle: as "
        "the chat template writes them then, without their reasoning as a rule; the sample becomes several sequences.",
    )
    tool_calls: Positive | None = Field(
        default=None, description="Maximum calls of tools in a conversation; unset: no limit."
    )
    reply_chars: Annotated[int, Field(ge=2)] = Field(
        default=4096, description="Maximum characters of a message of the environment; its middle is cut out."
    )
    seconds: PositiveFloat | None = Field(
        default=None, description="Seconds after which a conversation ends with its current turn; unset: no limit."
    )
    rows: NonNegativeInt = Field(
        default=1024, description="Number of different tasks (seeds of reset) if no data.path is given."
    )
    eval_rows: NonNegativeInt = Field(
        default=0, description="Further tasks of that kind to evaluate on, if no evaluation.data is given."
    )

    @property
    def is_command(self) -> bool:
        """True if `name` is a program's command line: it has a space, or a path that is no Python file."""
        if re.search(r"\.py:[\w.]+$", self.name):
            return False
        return bool(re.search(r"\s", self.name)) or ("/" in self.name and not self.name.endswith(".py"))


class Async(Section):
    staleness: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0,
        description="By how many updates the policy that began a sample may be older than the one that trains on it: "
        "as many steps' samples are generated ahead, through weight updates; 0: none, with the newest weights.",
    )
    on_update: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="KV cache of in-flight requests after a weight update: recompute it, or keep that of the old "
        "weights, which is faster.",
    )
    engine_steps: NonNegativeInt | None = Field(
        default=None,
        description="Steps of the engines during the training of one step, counted so that a run is reproducible; 0: "
        "until all started responses are complete. Unset: as many as there is time for; with "
        "train.deterministic 0.",
    )
    too_old: Literal["drop", "keep"] | None = Field(
        default=None,
        description="Groups that are older than async.staleness allows: drop and count them, or keep them, corrected. "
        "Unset: drop, but keep with rollout.oversample.",
    )


class DynamicSampling(Section):
    keep: Literal["all", "unequal", "accuracy"] = Field(
        default="all",
        description="Groups to train on: all; unequal: rewards differ; accuracy: mean score between low and high. "
        "Other groups are replaced by new ones.",
    )
    low: float = Field(default=0.2, description="Lowest mean score of a group (keep = accuracy).")
    high: float = Field(default=0.8, description="Highest mean score of a group (keep = accuracy).")
    max_batches: Positive = Field(default=10, description="Maximum rounds of generation in a step.")
    oversample: Annotated[float, Field(ge=1.0, le=16.0)] = Field(
        default=1.0,
        description="Prompts generated at once, as a multiple of what is missing; surplus good groups are kept for "
        "the next step.",
    )


class Shaping(Section):
    overlong_buffer: NonNegativeInt = Field(
        default=0, description="Tokens before rollout.max_response_tokens over which a penalty rises (DAPO); 0: none."
    )
    overlong_penalty: NonNegativeFloat = Field(
        default=1.0, description="Overlong penalty at rollout.max_response_tokens."
    )
    length_weight: NonNegativeFloat = Field(
        default=0.0, description="Weight of the reward for short responses within a group (Kimi k1.5)."
    )
    format_weight: NonNegativeFloat = Field(
        default=0.0, description="Weight of the verdict part named format, added to the score."
    )


class Algorithm(Section):
    code: str = Field(default="", description="A Python file that registers your own algorithms.")
    advantage: str = Field(default="grpo", description="How advantages are computed from rewards.")
    scale: Literal["group", "batch", "none"] = Field(
        default="group", description="What grpo divides by: the standard deviation of the group or of the batch."
    )
    gamma: Fraction = Field(default=1.0, description="Discount factor of rewards (gae, reinforce_pp).")
    lam: Fraction = Field(default=1.0, description="λ of generalised advantage estimation (gae).")
    loss: str = Field(default="ppo", description="The policy loss.")
    clip_low: Fraction | None = Field(
        default=None, description="Lower clip of the ratio: 1 − clip_low; unset: the loss's default."
    )
    clip_high: NonNegativeFloat | None = Field(
        default=None, description="Upper clip of the ratio: 1 + clip_high; unset: the loss's default."
    )
    dual_clip: Annotated[float, Field(gt=1.0)] | None = Field(
        default=None, description="Bound of the loss for negative advantages (dual-clip PPO); unset: none."
    )
    select: str = Field(default="all", description="Which samples of a step to train on.")
    aggregation: str = Field(default="token-mean", description="How token losses are reduced to one number.")
    options: dict[str, float] = Field(
        default_factory=dict,
        description="Further numeric parameters of the chosen functions: options.NAME; see their docstrings.",
    )
    kl_coef: NonNegativeFloat = Field(
        default=0.0, description="β, the weight of the KL to the reference model; 0 loads no reference."
    )
    kl_estimator: str = Field(default="k3", description="Estimator of the KL to the reference model.")
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="Where the KL is applied: as a loss term, or subtracted from each token's reward."
    )
    kl_target: PositiveFloat | None = Field(
        default=None, description="Target KL per token: kl_coef adapts to reach it; unset: kl_coef is fixed."
    )
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="Weight of the entropy bonus.")
    entropy_target: PositiveFloat | None = Field(
        default=None, description="Target entropy: entropy_coef adapts to reach it; unset: entropy_coef is fixed."
    )
    nll_coef: NonNegativeFloat = Field(
        default=0.0, description="Weight of the negative log-likelihood of correct responses (VAPO)."
    )
    correction: str = Field(
        default="token_tis",
        description="How the difference between engine and trainer is corrected; join several with *, as in "
        "token_tis * off_policy_mask.",
    )
    mismatch_warning: PositiveFloat = Field(
        default=0.05, description="KL of engine to trainer above which a warning is logged."
    )


class Critic(Section):
    path: str = Field(
        default="",
        description="Folder or hub id of the value model (gae, vapo) or process reward model (prime); "
        "unset: starts from the policy's model.",
    )
    lr: PositiveFloat = Field(default=1e-5, description="Peak learning rate of the critic.")
    warmup_steps: NonNegativeInt = Field(default=0, description="First steps, in which only the critic is trained.")
    clip: PositiveFloat | None = Field(
        default=0.5, description="Largest change of a value from its old one in the loss; unset: no bound."
    )
    workers: NonNegativeInt = Field(
        default=0, description="Separate workers for a value model; 0: it shares the policy's workers."
    )


class TeacherOf(Section):
    """One of several teachers."""

    path: Annotated[str, Field(min_length=1)]
    """Folder or hub id of the model, or the URL of a server."""
    sources: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """The `data_source` of the rows that it teaches; empty: all others."""

    @property
    def is_served(self) -> bool:
        """True if `path` is the URL of a server that scores for it."""
        return self.path.startswith(("http://", "https://"))


class Teacher(Section):
    path: str | tuple[str | TeacherOf, ...] = Field(
        default="",
        description="Folder or hub id of the model to distil from, the URL of a server of vLLM that serves it, or a "
        "list of them by the data_source of the rows that they teach; one without sources teaches the other rows.",
        json_schema_extra={"rule": 'a path, a URL, or a list of {path = "…", sources = ["…"]}'},
    )
    top_k: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0,
        description="How many of the teacher's likeliest tokens the loss compares at each position (opd_forward, "
        "opd_reverse); 0: only the sampled token is compared (advantage opd).",
    )
    workers: NonNegativeInt = Field(
        default=0, description="Separate workers for the teachers; 0: they share the policy's workers."
    )

    @property
    def models(self) -> tuple[TeacherOf, ...]:
        """The teachers; empty if there are none."""
        entries = (self.path,) if isinstance(self.path, str) else self.path
        return tuple(TeacherOf(path=entry) if isinstance(entry, str) else entry for entry in entries if entry)

    @property
    def held(self) -> tuple[TeacherOf, ...]:
        """The teachers that the run's own workers hold."""
        return tuple(teacher for teacher in self.models if not teacher.is_served)

    def number_of(self, data_source: str) -> int | None:
        """The one of `models` that teaches the rows of `data_source`; None if none does."""
        matching = (number for number, teacher in enumerate(self.models) if data_source in teacher.sources)
        others = (number for number, teacher in enumerate(self.models) if not teacher.sources)
        return next(matching, next(others, None))

    def placed(self, convert: Callable[[str], str]) -> Mapping[str, Any]:
        """Values of this section with each path replaced by `place(path)`."""
        if isinstance(self.path, str):
            return {"path": convert(self.path)} if self.path else {}
        return {"path": tuple(teacher.model_copy(update={"path": convert(teacher.path)}) for teacher in self.models)}


class Train(Section):
    steps: Positive = Field(
        default=100, description="Number of training steps; with train.epochs it is computed from the data's rows."
    )
    epochs: PositiveFloat | None = Field(
        default=None,
        description="Passes over the data, in place of train.steps, which is then epochs × prompts / "
        "rollout.prompts_per_step, rounded up; unset: train.steps counts.",
    )
    seed: Seed = Field(default=0, description="Seed of prompt order, sampling and initialisation.")
    minibatches: Positive = Field(default=1, description="Optimizer updates in one pass over a step's samples.")
    passes: Positive = Field(default=1, description="Passes over a step's samples.")
    tokens_per_microbatch: Positive = Field(
        default=8192,
        description="Maximum tokens per forward pass of a worker; on CPUs, unless set on the command line, lowered to "
        "what memory allows.",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="adamw, or muon: hidden matrices by Muon (arXiv 2502.16982); embeddings, head, routers, norms and "
        "biases by AdamW.",
    )
    lr: PositiveFloat = Field(default=1e-6, description="Peak learning rate.")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999),
        json_schema_extra={"rule": "two numbers ≥ 0 and < 1"},
        description="AdamW β1 and β2.",
    )
    muon_momentum: Beta = Field(
        default=0.95, json_schema_extra={"rule": "a number ≥ 0 and < 1"}, description="Muon's momentum (Nesterov's)."
    )
    muon_step_size: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description="Muon's step of an A × B matrix, as adjust_lr_fn of torch.optim.Muon: match_rms_adamw, lr · 0.2 "
        "√max(A, B), for learning rates of AdamW; or original, lr · √max(1, A / B).",
    )
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="Weight decay of matrices, apart from the gradient."
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="Steps over which the learning rate rises from 0.")
    warmup_fraction: Fraction | None = Field(
        default=None,
        description="The same as a share of the run's steps, rounded up; unset: train.warmup_steps counts.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rate schedule after warm-up."
    )
    min_lr_fraction: Fraction = Field(default=0.0, description="Final value of linear and cosine, as a share of lr.")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="Gradients are clipped to this global norm.")
    truncated: Literal["keep", "mask", "zero_reward"] = Field(
        default="keep",
        description="Responses cut off at rollout.max_response_tokens: keep trains on them as scored, mask excludes "
        "them from the loss and from their group's statistics, zero_reward sets their reward to 0.",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        default="none",
        description="What the trainer moves to host memory while the engine generates on the same GPUs: the "
        "optimizer states, or all weights as well.",
    )
    deterministic: bool = Field(
        default=False,
        description="Bitwise equal results in every run with the same seed, layout and machine: one thread per worker "
        "on CPUs, deterministic kernels on GPUs.",
    )


class Lora(Section):
    rank: Annotated[int, Field(ge=0, le=512)] = Field(
        default=0, description="Rank of the adapter; 0 trains all weights."
    )
    alpha: PositiveFloat = Field(default=32.0, description="Scale of the adapter (alpha / rank).")
    targets: str = Field(
        default="all-linear",
        description="Comma-separated module names that get an adapter, or all-linear (of a mixture of experts: in "
        "attention); and experts for each expert.",
    )

    @property
    def on_experts(self) -> bool:
        return self.rank > 0 and "experts" in (name.strip() for name in self.targets.split(","))


class VerifierSection(Section):
    name: str = Field(
        default="auto",
        description="Verifiers for every row, with weights and options: math + 0.1 * format(strict=true), or "
        "path/to/file.py:function; auto: the verifier named by the row (reward_model.style; in verl's files its "
        "data_source), as in auto + 0.1 * format.",
    )
    deadline_s: PositiveFloat = Field(
        default=5.0,
        description="CPU seconds after which a verification is killed, retried once, then counted as wrong; after 10 "
        "times as long by the clock, at least 30 s, it is left out.",
    )
    processes: Annotated[int, Field(ge=0, le=256)] = Field(
        default=0, description="Scoring processes per machine; 0: its CPU cores, on GPUs minus two per worker."
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
        "works here), the URL of a SandboxFusion endpoint, or unsafe (limits only).",
    )


class Cluster(Section):
    workers: Positive = Field(default=1, description="Worker processes, one per device, in one process group.")
    address: str = Field(
        default="",
        description="Address of a running Ray cluster whose machines share the model and run folders; "
        "unset: RAY_ADDRESS, else a local cluster for this run.",
    )
    wait_s: NonNegativeFloat = Field(
        default=0.0,
        description="Seconds to wait for a running cluster to answer, and for machines to join if it has too few "
        "devices.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Where workers run; auto: GPUs if there are any. cuda is the name of AMD's too (ROCm).",
        json_schema_extra={
            "rule": "one of auto, cpu, cuda; for others a process group, attention kernels and an engine are missing"
        },
    )


class Parallel(Section):
    replicate: Positive = Field(
        default=1,
        description="Copies of the trained models, each sharded over workers / replicate workers (HSDP): less traffic "
        "between them, more memory.",
    )
    context: Positive = Field(
        default=1,
        description="Workers that divide each micro-batch's tokens among themselves, for sequences whose activations "
        "do not fit one device (Ulysses): at most the number of attention heads.",
    )
    expert: Positive = Field(
        default=1,
        description="Workers that divide the experts of each layer among themselves: each computes its own for "
        "the tokens of all of them, and gathers no other.",
    )


class Checkpoint(Section):
    every: NonNegativeInt = Field(default=50, description="Steps between checkpoints; 0: only at the end.")
    keep: Positive = Field(default=2, description="Number of newest checkpoints to keep.")
    keep_best: NonNegativeInt = Field(
        default=0, description="Additional checkpoints to keep: those with the best evaluation (checkpoint.best_by)."
    )
    best_by: Annotated[str, Field(pattern=r"^(pass|maj|mean)@[1-9][0-9]*$")] = Field(
        default="mean@1",
        json_schema_extra={"rule": "a measure of evaluations: mean@1, pass@1, pass@K or maj@K"},
        description="The measure of evaluations by which a checkpoint is the best, for checkpoint.keep_best and "
        "rlcli export --step best. mean@1 is the mean score; it is pass@1 where scores are 0 and 1.",
    )
    keep_every: NonNegativeInt = Field(default=0, description="Also keep the checkpoints of every N-th step; 0: none.")


class FaultTolerance(Section):
    max_restarts: NonNegativeInt = Field(
        default=3,
        description="Maximum number of automatic restarts, after a process or machine failure, without a newer "
        "checkpoint in between.",
    )
    stall_s: Annotated[float, Field(ge=1.0)] = Field(
        default=1800.0,
        description="Seconds without progress after which a worker's stack is dumped and the worker fails.",
    )
    on_bad_update: Literal["skip", "rollback", "stop"] = Field(
        default="skip",
        description="Reaction to a gradient that is not finite or above bad_grad_norm: skip the update, roll back to "
        "the last checkpoint and use other prompts, or stop. The batch is saved.",
    )
    bad_grad_norm: PositiveFloat | None = Field(
        default=None, description="Gradient norm, before clipping, above which an update is bad; unset: no bound."
    )


class Evaluation(Section):
    data: str | tuple[str, ...] = Field(
        default="",
        description="A parquet file, a folder with test.parquet, or a list of them; unset: no evaluation.",
        json_schema_extra={"rule": "a path, or a list of paths"},
    )
    every: NonNegativeInt = Field(
        default=0, description="Steps between evaluations; 0: only before the first step and after the last."
    )
    samples: Annotated[int, Field(ge=1, le=10_000)] = Field(default=1, description="Responses per prompt.")
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = Field(
        default=0.0, description="Sampling temperature; 0 is greedy."
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="Sample from the most likely tokens with this total probability; 1: all."
    )
    max_prompts: NonNegativeInt = Field(default=0, description="Evaluate only the first N rows of each set; 0: all.")

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the datasets; empty if nothing is evaluated."""
        return (self.data,) * bool(self.data) if isinstance(self.data, str) else self.data


class Tracking(Section):
    trackers: tuple[str, ...] = Field(
        default=(),
        description="Trackers in addition to metrics.jsonl: wandb, tensorboard, mlflow, swanlab, trackio, or a plugin.",
    )
    project: str = Field(default="rlcli", description="Project name in the tracker.")
    save_samples: bool = Field(default=True, description="Write every step's samples to parquet in the run folder.")
    token_samples: int = Field(
        default=8,
        ge=0,
        le=4096,
        description="Samples a step whose tokens are also written, with log-probs, entropy and advantage of each; "
        "0: none. Needs tracking.save_samples.",
    )


class Run(Section):
    shared: bool = Field(
        default=False,
        description="Let the modes of a new folder of a run or an evaluation follow the umask; false: only this user "
        "may enter it.",
    )


class RunConfig(Section):
    """One run, fully resolved and immutable."""

    # `async` is a Python keyword: the field is `async_`, and `async` is its alias.
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    model: Model = Model()
    """The trained model: path, chat template, precision and memory."""
    data: Data = Data()
    """Training prompts and their order."""
    rollout: Rollout = Rollout()
    """Generation: engine, batch size and sampling parameters."""
    environment: Environment = Environment()
    """Environment, tools or agent program of conversations."""
    async_: Async = Field(default=Async(), alias="async")
    """Generation for later steps while the trainer updates."""
    dynamic_sampling: DynamicSampling = DynamicSampling()
    """Groups to train on, by their scores."""
    shaping: Shaping = Shaping()
    """Rewards added to the verifier's score."""
    algorithm: Algorithm = Algorithm()
    """Advantage, loss, KL term, aggregation and correction."""
    critic: Critic = Critic()
    """Value model or process reward model."""
    teacher: Teacher = Teacher()
    """Models to distil from."""
    train: Train = Train()
    """Steps, batches and optimizer."""
    lora: Lora = Lora()
    """LoRA adapter."""
    verifier: VerifierSection = VerifierSection()
    """Verifiers and their processes."""
    cluster: Cluster = Cluster()
    """Workers, devices and the Ray cluster."""
    parallel: Parallel = Parallel()
    """Sharding, context and expert parallelism."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints to write and to keep."""
    fault_tolerance: FaultTolerance = FaultTolerance()
    """Restarts, stalls and bad updates."""
    evaluation: Evaluation = Evaluation()
    """Evaluation data and sampling parameters."""
    tracking: Tracking = Tracking()
    """Trackers and recorded samples."""
    run: Run = Run()
    """Permissions of the run folder."""

    def changed(self, **sections: Mapping[str, Any]) -> RunConfig:
        """The same with other values, not validated: `changed(train={"tokens_per_microbatch": 4096})`."""
        changed = {name: getattr(self, name).model_copy(update=dict(values)) for name, values in sections.items()}
        return self.model_copy(update=changed)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample: prompt, response, and what an environment may add."""
        added = self.environment.context_tokens if self.environment.name else 0
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens + added

    def longest_sample(self, longest_prompt: int | None) -> int:
        """Tokens of the longest sample with prompts of at most `longest_prompt` tokens; None: as long as allowed."""
        allowed = self.data.max_prompt_tokens
        return self.max_length - allowed + min(allowed if longest_prompt is None else longest_prompt, allowed)

    @property
    def longest(self) -> str:
        """The keys whose sum `max_length` is, for messages."""
        added = " + environment.context_tokens" if self.environment.name else ""
        return f"data.max_prompt_tokens + rollout.max_response_tokens{added}"

    @property
    def evaluates(self) -> bool:
        """True if there is something to evaluate on."""
        return bool(self.evaluation.data or (self.environment.name and self.environment.eval_rows))

    @property
    def engine_steps(self) -> int | None:
        """Engine steps during the training of one step; None: not counted."""
        unset = 0 if self.train.deterministic else None
        return unset if self.async_.engine_steps is None else self.async_.engine_steps

    @property
    def counts_steps(self) -> bool:
        """True if weights are updated after counted steps of the engines."""
        return self.engine_steps is not None

    @property
    def copies_weights(self) -> bool:
        """True if the workers of separate engines keep a copy of the weights, from which the engines load."""
        return self.rollout.workers > 0 and self.rollout.sync != "full"

    @property
    def in_flight(self) -> bool:
        """True if responses in flight continue through weight updates; engines on the trainer's devices are paused."""
        return self.async_.staleness > 0 and (not self.rollout.workers or self.engine_steps != 0)

    @property
    def groups_at_once(self) -> int:
        """Groups that the engines may generate at the same time."""
        started = math.ceil(round(self.rollout.prompts_per_step * self.rollout.oversample, 6))
        return started * (1 + self.async_.staleness * self.in_flight)

    @property
    def engine_workers(self) -> int:
        """Workers that host an engine."""
        return self.rollout.workers or self.cluster.workers

    @property
    def all_workers(self) -> int:
        """Workers of all pools."""
        return self.cluster.workers + self.critic.workers + self.teacher.workers + self.rollout.workers
