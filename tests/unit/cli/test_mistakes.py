"""Error messages for mistakes of a user, and the plan's entries for less common settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcli.config.load import resolve
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.errors import ConfigError
from rlcli.launch.preflight import prepare
from rlcli.launch.run_plan import derived_plan
from rlcli.model.io.tiny_model import make_tiny_model


def test_a_base_that_is_missing_is_told_with_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[recipe]\nbase = "absent.toml"\n')
    with pytest.raises(ConfigError, match=r"mine\.toml: its base .*absent\.toml cannot be read"):
        resolve(str(tmp_path / "mine.toml"))


def test_a_wrong_option_points_to_an_explanation_that_there_is() -> None:
    with pytest.raises(ConfigError, match=r"recipes explain algorithm\.options$"):
        resolve("grpo", {}, ["algorithm.options.foo=abc"])


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rollout.top_p", "0.5", r"rollout\.top_p = 0\.5: nothing is sampled .*; give 1$"),
        (
            "algorithm.correction",
            "token_tis",
            r"algorithm\.correction = token_tis: no engine .*; give none$",
        ),
    ],
)
def test_given_responses_refuse_what_is_for_sampled_ones(key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve("sft", {}, [f"{key}={value}"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--continue resumes the run in --out, and none is given; give --out"),
        (["--out", "there", "--force"], "--continue resumes the run in --out; leave --force out"),
        (["--out", "there", "--resume", "other"], "--continue resumes the run in --out; leave --resume out"),
    ],
)
def test_continue_needs_a_folder_and_nothing_that_decides_for_it(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlcli.cli.main import main

    assert main(["train", "grpo", "--continue", "--dry-run", *words]) == 2
    assert says in capsys.readouterr().err


def test_changes_are_accepted_of_a_run_that_is_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    from rlcli.cli.main import main

    assert main(["train", "grpo", "--accept-changes", "--dry-run"]) == 2
    assert "--accept-changes is for a run that is resumed; leave it out, or name the run" in capsys.readouterr().err


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("plan")
    make_tiny_model(folder / "model")
    messages = [{"role": "user", "content": "1+1="}]
    rows = [row(data_source="toy", messages=messages, verifier="gsm8k", ground_truth="2")]
    write_rows(folder / "train.parquet", rows * 4)
    return [f"model.path={folder / 'model'}", f"data.path={folder}", "cluster.device=cpu"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "sets", "label", "says"),
    [
        ("dpo", [], "samples an update", "8 / 1 minibatches = 8"),
        ("rft", [], "samples an update", "at most 32 / 1 minibatches = 32"),
        ("grpo", ["cluster.workers=2", "parallel.context=2"], "workers", "2 on cpu, replicate 1 × shard 1 × context 2"),
        ("grpo", ["cluster.workers=2", "parallel.context=2"], "micro-batch", " tokens, divided over 2 workers"),
        ("prime", [], "dynamic sampling", "groups whose mean score is 0.2 to 0.8"),
        ("grpo", ["dynamic_sampling.keep=unequal"], "dynamic sampling", "groups whose rewards differ"),
        ("remax", [], "samples an engine", "and one greedy response a prompt"),
        ("vapo", ["critic.warmup_steps=3"], "value model", "the first 3 steps train only it"),
        ("vapo", ["critic.warmup_steps=3"], "added to the objective", "log-likelihood of right responses × 0.1"),
        ("grpo", ["algorithm.entropy_target=0.2"], "added to the objective", "entropy up to 0.2"),
        ("grpo", ["algorithm.kl_coef=0.1", "algorithm.kl_target=2"], "reference model", "with a target KL of 2"),
        ("grpo", ["shaping.format_weight=0.1"], "added to the score", "format × 0.1"),
        (
            "grpo",
            ["train.deterministic=true"],
            "deterministic",
            "the same bits on any number of cores, at the speed of",
        ),
        ("grpo", ["train.deterministic=true"], "workers", "1 on cpu, 1 threads each"),
        ("grpo", ["rollout.workers=1"], "workers", "1 on cpu, and 1 that generate, "),
        (
            "grpo",
            ["rollout.workers=1", "async.staleness=1", "async.engine_steps=0"],
            "generated ahead",
            "by a policy at most 1 update old; corrected by token_tis; an update waits until all responses are ",
        ),
        (
            "grpo",
            ["async.staleness=2"],
            "generated ahead",
            "2 updates old; corrected by token_tis; weights change when",
        ),
        (
            "grpo",
            ["rollout.workers=1", "async.staleness=2", "async.engine_steps=9", "async.on_update=keep"],
            "generated ahead",
            "change after 9 steps of the engines while responses are generated, whose keys and values are kept",
        ),
        ("grpo", ["rollout.top_p=0.9"], "sampling", "temperature 1, top-p 0.9"),
        ("grpo", ["train.offload=all"], "offload", "none: on CPUs everything is in host memory"),
        ("grpo", ["model.gradient_checkpointing=offload"], "activations", "only the input of each layer is kept"),
        ("grpo", ["verifier.name=auto + 0.1 * format"], "verifiers", "gsm8k + 0.1 * format; "),
    ],
)
def test_the_plan_tells_what_is_trained(recipe: str, sets: list[str], label: str, says: str, paths: list[str]) -> None:
    sizes = ["rollout.prompts_per_step=4", "rollout.max_response_tokens=16", "data.max_prompt_tokens=16"]
    plan = dict(derived_plan(prepare(resolve(recipe, {}, [*paths, *sizes, *sets]).config)))
    assert says in plan[label]


def programs(paths: list[str], folder: Path) -> list[str]:
    """The same model with rows of tests."""
    tests = json.dumps({"inputs": ["3\n"], "outputs": ["6\n"]})
    messages = [{"role": "user", "content": "1+1="}]
    write_rows(folder / "t.parquet", [row(data_source="t", messages=messages, verifier="code", ground_truth=tests)])
    return [*paths, f"data.path={folder / 't.parquet'}"]


@pytest.mark.long
def test_the_plan_tells_where_programs_run(paths: list[str], tmp_path: Path) -> None:
    sizes = ["rollout.prompts_per_step=1", "rollout.max_response_tokens=16", "data.max_prompt_tokens=16"]
    sets = [*programs(paths, tmp_path), *sizes, "verifier.sandbox=unsafe"]
    assert (
        "can read this user's files" in dict(derived_plan(prepare(resolve("grpo", {}, sets).config)))["programs run in"]
    )


@pytest.mark.long
def test_workers_receive_the_sandbox_that_the_driver_found(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCLI_SANDBOX", "unsafe")
    sizes = ["rollout.max_response_tokens=16", "data.max_prompt_tokens=16", "rollout.prompts_per_step=1"]
    prepared = prepare(resolve("grpo", {}, [*programs(paths, tmp_path), *sizes]).config)
    assert (prepared.sandbox, prepared.config.verifier.sandbox) == ("unsafe", "unsafe")
    prepared = prepare(resolve("grpo", {}, [*paths, *sizes]).config)
    assert (prepared.sandbox, prepared.config.verifier.sandbox) == ("", "auto")
