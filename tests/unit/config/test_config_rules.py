"""Rules between keys: what does not fit together is refused, with the figures and the mend, before anything starts."""

from __future__ import annotations

import pytest

from rlcli.config.load import resolve
from rlcli.errors import ConfigError

WRONG = [
    ("grpo", ["algorithm.kl_target=0.1"], "algorithm.kl_coef = 0 loads no reference"),
    ("grpo", ["rollout.top_p=0.9", "algorithm.correction=none"], "leaves the ratios biased; give top_p = 1 or"),
    ("dapo", ["algorithm.correction=none"], "oversample = 3.0 trains on samples of an earlier policy"),
    ("rft", ["dynamic_sampling.keep=unequal", "rollout.samples_per_prompt=1"], "compares the samples of a group"),
    ("prime", ["dynamic_sampling.low=0.9"], "low = 0.9 is more than dynamic_sampling.high = 0.8"),
    ("dapo", ["rollout.max_response_tokens=512"], "overlong_buffer = 1024 is longer than a response"),
    ("grpo", ["data.response=text"], "start from the recipe sft"),
    ("sft", ["rollout.temperature=0.7"], "temperature = 0.7: the likelihood of given responses"),
    ("vapo", ["train.steps=50", "critic.warmup_steps=50"], "critic.warmup_steps = 50 leaves none of train.steps = 50"),
    ("grpo", ["rollout.prompts_per_step=1000000"], "= 8000000 samples in a step are more than 1000000"),
    ("grpo", ["train.minibatches=5"], "32 / 5 = 6.4 is not whole; give a divisor of 32"),
    ("grpo", ["evaluation.samples=4"], "gives the same response 4 times"),
    ("grpo", ["rollout.tensor_parallel=2", "cluster.workers=3"], "3 / 2 = 1.5 is not whole; give a divisor of 3"),
    (
        "grpo",
        ["parallel.replicate=2", "cluster.workers=3"],
        "cluster.workers = 3 is no multiple of parallel.replicate = 2; give",
    ),
    (
        "grpo",
        ["parallel.replicate=2", "parallel.context=4", "cluster.workers=12"],
        "parallel.replicate × parallel.context = 2 × 4 = 8; give 8 or 16",
    ),
    (
        "grpo",
        ["parallel.expert=4", "parallel.replicate=2", "cluster.workers=12"],
        "parallel.expert = 4 does not divide the 6 workers of a copy of the model; give 3 or 6",
    ),
    (
        "grpo",
        ["parallel.expert=2", "cluster.workers=2", "model.compile=true"],
        "layers whose experts are divided (parallel.expert = 2) are not compiled; give false",
    ),
    (
        "opd",
        ["parallel.context=2", "cluster.workers=2", "teacher.path=t", "teacher.workers=3"],
        "teacher.workers = 3 is no multiple of parallel.context = 2; give 2 or 4",
    ),
    (
        "ppo",
        ["parallel.context=2", "cluster.workers=2", "critic.workers=1"],
        "critic.workers = 1 is no multiple of parallel.context = 2; give 2",
    ),
    (
        "grpo",
        ["rollout.workers=3", "rollout.tensor_parallel=2", "cluster.workers=2"],
        "rollout.workers / rollout.tensor_parallel = 3 / 2 = 1.5 is not whole; give a divisor of 3",
    ),
    ("sft", ["rollout.workers=1"], "rollout.workers = 1: nothing is sampled if responses are given"),
    (
        "grpo",
        ["async.staleness=1", "rollout.oversample=2"],
        "oversample = 2.0: with async.staleness = 1 no response is",
    ),
    (
        "grpo",
        ["async.staleness=1", "environment.name=python a.py"],
        "a program, whose conversation cannot continue",
    ),
    (
        "grpo",
        ["environment.name=python a.py", 'environment.variables=["MY_KEY", "OPENAI_API_KEY"]'],
        "environment.variables: a command gets OPENAI_API_KEY of its session, not this one; leave it out",
    ),
    (
        "grpo",
        ["environment.name=python a.py", 'environment.variables=["MY_KEY=sk-1"]'],
        "must be a list of names of environment variables",
    ),
    (
        "grpo",
        ["async.staleness=1", "async.on_update=keep"],
        "on_update = keep: engines that share the trainer's devices",
    ),
    ("grpo", ["rollout.engine=server", "rollout.servers=[]"], "rollout.servers is an empty list; give a URL"),
    ("sft", ["async.staleness=1"], "async.staleness = 1: nothing is sampled if responses are given"),
    (
        "grpo",
        ["async.staleness=1", "rollout.workers=1", "algorithm.correction=none"],
        "async.staleness = 1 trains on samples of an earlier policy, and algorithm.correction = none",
    ),
    (
        "grpo",
        ["rollout.quantization=fp8", "algorithm.correction=none"],
        "rollout.quantization = fp8 samples from a distribution other than the trained one",
    ),
    ("sft", ["rollout.quantization=fp8"], "rollout.quantization = fp8: nothing is sampled if responses are given"),
    (
        "grpo",
        ["rollout.oversample=1.25", "algorithm.correction=none"],
        "oversample = 1.25 trains on samples with tokens from several policies",
    ),
    ("grpo", ["rollout.oversample=2", "train.deterministic=true"], "give oversample = 1 or deterministic = false"),
    ("grpo", ["rollout.speculate=5", "train.deterministic=true"], "give speculate = 0 or deterministic = false"),
    ("grpo", ["rollout.replay_routes=true", "rollout.tensor_parallel=2"], "give tensor_parallel = 1 or replay_routes"),
    ("grpo", ["rollout.replay_routes=true", "model.compile=true"], "give compile = false or replay_routes = false"),
    ("grpo", ["rollout.sleep=cache", "rollout.engine=server"], "engine = server cannot release its KV cache alone"),
    ("grpo", ["rollout.sync=delta"], "rollout.sync = delta: engines that share the trainer's devices"),
    ("grpo", ["rollout.sync=delta", "rollout.workers=1", "lora.rank=8"], "sync = delta: lora.rank = 8 changes all"),
    ("grpo", ["rollout.sync=ahead", "rollout.workers=1"], "with async.staleness = 0 no engine generates when"),
    ("sft", ["rollout.oversample=2"], "rollout.oversample = 2.0: nothing is sampled if responses are given"),
    ("grpo", ["train.tokens_per_microbatch=2000"], "rollout.max_response_tokens = 2048"),
    (
        "grpo",
        ["train.offload=all", "rollout.workers=1"],
        "offload = all makes room for an engine on the same GPUs, but",
    ),
    ("grpo", ["train.optimizer=muon", "lora.rank=8"], "lora.rank = 8 trains two factors of each"),
    ("grpo", ["data.sampling=thompson"], "groups whose rewards are all equal; give dynamic_sampling.keep = unequal"),
    ("sft", ["data.sampling=difficulty"], "data.sampling = difficulty: no prompt has a pass rate if responses are"),
    ("sft", ["data.retire=2"], "data.retire = 2: no prompt has a pass rate if responses are given"),
    ("sft", ["train.offload=optimizer"], "none is used (data.response); give none"),
    ("grpo", ["train.warmup_steps=200"], "train.warmup_steps = 200 is more than train.steps = 100"),
]


@pytest.mark.parametrize(("recipe", "sets", "says"), WRONG, ids=[says for _, _, says in WRONG])
def test_what_does_not_fit_together_is_refused(recipe: str, sets: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(recipe, {}, sets)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        ("rft", ["rollout.samples_per_prompt=1"]),
        ("ppo", ["rollout.samples_per_prompt=1"]),
        ("grpo", ["rollout.top_p=0.9"]),
        ("dapo", ["rollout.oversample=1.25"]),
        ("grpo", ["rollout.quantization=fp8"]),
        ("grpo", ["train.offload=all", "model.gradient_checkpointing=offload"]),
        ("sft", ["train.offload=all", "evaluation.data=somewhere"]),
        ("dapo", ["algorithm.correction=none", "dynamic_sampling.oversample=1"]),
        ("grpo", ["async.staleness=1", "rollout.workers=2", "rollout.tensor_parallel=2", "cluster.workers=3"]),
        ("grpo", ["async.staleness=3"]),
        ("grpo", ["async.staleness=1", "rollout.workers=1", "rollout.sync=delta_ahead"]),
        ("grpo", ["async.staleness=2", "async.on_update=keep", "async.engine_steps=64", "rollout.workers=1"]),
        ("grpo", ["async.staleness=1", "async.engine_steps=0", "rollout.workers=1", "environment.name=python a.py"]),
        ("grpo", ["environment.name=python a.py", 'environment.variables=["MY_KEY"]', "environment.ground_truth=true"]),
        ("grpo", ["environment.name=guess_number", 'environment.variables=["OPENAI_API_KEY"]']),
    ],
)
def test_what_fits_is_accepted(recipe: str, sets: list[str]) -> None:
    resolve(recipe, {}, sets)
