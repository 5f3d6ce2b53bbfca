"""Configurations of verl and TRL as recipes: what is mapped, what is reported, and what bad input gives."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcli_port.configs import convert, trl_keys, verl_keys
from rlcli_port.configs.config_files import read as read_file
from rlcli_port.configs.convert import Imported, import_file
from rlcli_port.configs.counterparts import counterparts
from rlcli_port.configs.parsed_python import arithmetic
from rlcli_port.configs.shell_words import overrides

from rlcli.cli.main import main
from rlcli.config.keys import keys
from rlcli.config.load import resolve
from rlcli.errors import ConfigError

FOREIGN = Path(__file__).parents[2] / "foreign_configs"
FILES = ["verl_grpo.sh", "verl_dapo.sh", "verl_ppo.yaml", "trl_grpo.yaml", "trl_gspo.py"]


def written(folder: Path, name: str, text: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def values(imported: Imported, folder: Path) -> dict[str, Any]:
    """Every key of the recipe, resolved."""
    return resolve(str(written(folder, "imported.toml", imported.toml))).values()


def sources(imported: Imported, kind: str) -> set[str]:
    return {line.source for line in imported.lines if line.kind == kind}


@pytest.mark.parametrize("name", FILES)
def test_the_written_recipe_resolves_and_says_where_each_value_is_from(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.toml"
    assert main(["config", "import", str(FOREIGN / name), "--out", str(recipe)]) == 0
    report = capsys.readouterr().out
    assert "in the recipe:" in report
    assert f"wrote {recipe}; try it: rlcli train {recipe} --dry-run" in report
    assert main(["recipes", "show", str(recipe), "--resolved"]) == 0
    imported = import_file(FOREIGN / name)
    assert recipe.read_text() == imported.toml
    settings = dict(imported.settings)
    if (fraction := settings.pop("train.warmup_fraction", None)) is not None:
        settings["train.warmup_steps"] = fraction * settings["train.steps"]  # whole in these files
    assert (
        values(imported, tmp_path).items()
        >= {key: value for key, value in settings.items() if not isinstance(value, list)}.items()
    )
    assert "MARK" not in os.environ


@pytest.mark.parametrize("name", FILES)
def test_what_is_imported_is_what_an_unknown_key_is_told(name: str) -> None:
    mapped: dict[str, set[str]] = {}
    for line in import_file(FOREIGN / name).lines:
        if line.kind == "mapped" and not line.key.startswith(("algorithm.options.", "data.chat_template_kwargs.")):
            mapped.setdefault(line.source, set()).add(line.key)
    others = {source: ours for source, ours in mapped.items() if source not in ours}  # some have the same name
    unknown = {source: ours for source, ours in others.items() if not ours & set(counterparts(source))}
    assert len(mapped) > 10
    assert unknown == {}


def test_all_that_is_suggested_for_a_name_of_verl_or_trl_exists() -> None:
    theirs = {**trl_keys.COMPUTED, **verl_keys.COMPUTED}
    assert {ours for some in theirs.values() for ours in some} <= keys().keys()
    assert not theirs.keys() & {*trl_keys.DIRECT, *verl_keys.DIRECT}


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("train.learning_rate", "train.lr"),
        ("learning_rate", "train.lr"),
        ("train.beta", "algorithm.kl_coef"),
        ("rollout.num_generations", "rollout.samples_per_prompt"),
        ("rollout.n", "rollout.samples_per_prompt"),
        ("rollout.max_completion_length", "rollout.max_response_tokens"),
        ("data.max_response_length", "rollout.max_response_tokens"),
        ("train.num_train_epochs", "train.epochs"),
        ("trainer.total_epochs", "train.epochs"),
        ("actor_rollout_ref.actor.optim.lr", "train.lr"),
        ("algorithm.adv_estimator", "algorithm.advantage"),
        ("train.stepz", "train.steps"),  # none of theirs
        ("train.temperature", "rollout.temperature"),
    ],
)
def test_names_of_verl_and_trl_are_known_to_did_you_mean(name: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"no key is called '{name}' \(--set\); did you mean {ours}"):
        resolve("grpo", {}, [f"{name}=1"])


def test_a_verl_script_of_grpo(tmp_path: Path) -> None:
    imported = import_file(FOREIGN / "verl_grpo.sh")
    expected = {
        "model.path": "Qwen/Qwen2-7B-Instruct",
        "data.path": [str(Path.home() / f"data/{name}/train.parquet") for name in ("gsm8k", "math")],
        "evaluation.data": "data/gsm8k/test.parquet",
        "rollout.prompts_per_step": 1024,
        "rollout.samples_per_prompt": 5,
        "rollout.tensor_parallel": 2,
        "train.minibatches": 4,
        "train.tokens_per_microbatch": 40 * (512 + 1024),
        "train.weight_decay": 0.01,  # verl's default
        "algorithm.advantage": "grpo",
        "algorithm.dual_clip": 3.0,  # verl's default
        "algorithm.kl_coef": 0.001,
        "algorithm.kl_estimator": "k3",
        "algorithm.kl_in": "loss",
        "algorithm.correction": "none",
        "cluster.workers": 8,
        "tracking.trackers": ["wandb"],
    }
    assert {key: values(imported, tmp_path)[key] for key in expected} == expected
    assert sources(imported, "unresolved") == set()
    assert sources(imported, "missing") == {"data.truncation"}
    assert values(imported, tmp_path)["train.epochs"] == 15
    assert "actor_rollout_ref.model.use_remove_padding" in sources(imported, "same")


def test_a_verl_recipe_of_dapo_with_variables_and_sums(tmp_path: Path) -> None:
    imported = import_file(FOREIGN / "verl_dapo.sh")
    expected = {
        "data.max_prompt_tokens": 2048,
        "rollout.max_response_tokens": 20480,
        "rollout.prompts_per_step": 512,
        "train.minibatches": 16,
        "train.tokens_per_microbatch": 22528,
        "train.steps": 400,
        "train.warmup_steps": 10,
        "dynamic_sampling.keep": "unequal",
        "dynamic_sampling.oversample": 3.0,
        "dynamic_sampling.max_batches": 10,
        "shaping.overlong_buffer": 4096,
        "algorithm.clip_high": 0.28,
        "algorithm.dual_clip": 10.0,
        "algorithm.correction": "token_tis",  # oversampling asks for one
        "evaluation.samples": 32,
        "evaluation.top_p": 0.7,
        "cluster.workers": 128,  # ${NNODES:-16} × verl's default of 8
    }
    assert {key: values(imported, tmp_path)[key] for key in expected} == expected
    assert values(imported, tmp_path)["model.path"] == str(Path.home() / "models/Qwen2.5-32B")
    assert sources(imported, "unresolved") == set()
    assert "actor_rollout_ref.actor.ulysses_sequence_parallel_size" in sources(imported, "missing")


def test_a_yaml_of_ppo_with_adaptive_kl_and_bypass(tmp_path: Path) -> None:
    imported = import_file(FOREIGN / "verl_ppo.yaml")
    expected = {
        "algorithm.advantage": "gae",
        "algorithm.lam": 0.95,
        "algorithm.kl_in": "reward",
        "algorithm.kl_estimator": "k1",
        "algorithm.kl_target": 0.1,
        "algorithm.options.kl_horizon": 5000.0,
        "algorithm.correction": "bypass * token_mask",
        "algorithm.options.correction_low": 0.5,  # 0.25_2.0 bounds μ / π
        "algorithm.options.correction_high": 4.0,
        "algorithm.aggregation": "seq-mean-token-mean",
        "train.betas": [0.9, 0.95],
        "lora.targets": "q_proj,v_proj",
        "verifier.name": "rewards/gsm8k.py:score",
        "checkpoint.every": 0,
    }
    assert {key: values(imported, tmp_path)[key] for key in expected} == expected


def test_a_yaml_of_trl_counts_updates_and_processes(tmp_path: Path) -> None:
    imported = import_file(FOREIGN / "trl_grpo.yaml", processes=8)
    expected = {
        "rollout.prompts_per_step": 8 * 8 * 8 // 16,  # a process's batch × processes × steps_per_generation
        "rollout.samples_per_prompt": 16,
        "train.minibatches": 2,  # steps_per_generation / gradient_accumulation_steps
        "train.passes": 2,
        "train.steps": 250,  # four updates in each
        "train.warmup_steps": 25,  # train.warmup_fraction = 0.1
        "train.schedule": "cosine",
        "train.truncated": "mask",
        "checkpoint.every": 25,
        "cluster.workers": 8,
        "algorithm.scale": "none",
        "algorithm.kl_estimator": "k3_unbiased",
        "algorithm.correction": "sequence_icepop * off_policy_mask",
        "algorithm.options.correction_high": 3.0,
        "algorithm.options.off_policy_threshold": 0.5,
        "algorithm.aggregation": "token-mean",
        "algorithm.clip_high": 0.28,
        "lora.rank": 32,
    }
    assert {key: values(imported, tmp_path)[key] for key in expected} == expected
    assert sources(imported, "missing") == {"top_k", "lora_target_modules"}
    (data,) = [line for line in imported.lines if line.source == "dataset_name"]
    assert data.note.startswith("rlcli prep hf --source trl-lib/DeepMath-103K --columns prompt=…,answer=…")


def test_a_python_file_of_trl_runs_with_stubs(tmp_path: Path) -> None:
    imported = import_file(FOREIGN / "trl_gspo.py")
    expected = {
        "model.path": "Qwen/Qwen3-4B",
        "algorithm.loss": "gspo",
        "algorithm.clip_low": 3e-4,
        "algorithm.clip_high": 4e-4,
        "algorithm.correction": "token_tis",
        "rollout.prompts_per_step": 4,  # BATCH × 2 × BATCH / 8
        "lora.targets": "q_proj,k_proj",
        "train.schedule": "constant",
        "train.seed": 0,  # an expression of the environment, which is empty there
        "verifier.name": "math",  # trl.rewards.accuracy_reward
    }
    assert {key: values(imported, tmp_path)[key] for key in expected} == expected
    assert sources(imported, "unresolved") == {"train_dataset"}


@pytest.mark.long
def test_an_imported_recipe_is_tried_with_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rlcli.data.prompts.parquet_schema import row, write_rows

    recipe, data, model = tmp_path / "mine.toml", tmp_path / "train.parquet", tmp_path / "tiny"
    message = [{"role": "user", "content": "1 + 1 ="}]
    write_rows(data, [row(data_source="sums", messages=message, verifier="math", ground_truth="2")] * 8)
    assert main(["tiny-model", "--out", str(model)]) == 0
    assert main(["config", "import", str(FOREIGN / "verl_ppo.yaml"), "--out", str(recipe)]) == 0
    small = ["rollout.prompts_per_step=8", "data.max_prompt_tokens=32", "rollout.max_response_tokens=32"]
    small += ["critic.path=", "verifier.name=math", "lora.targets=all-linear", "evaluation.data="]
    sets = [word for text in small for word in ("--set", text)]
    assert main(["train", str(recipe), "--model", str(model), "--data", str(data), *sets, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "bypass * token_mask" in plan


def test_json_holds_all_that_the_report_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "import", str(FOREIGN / "trl_gspo.py"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["framework"] == "trl"
    assert report["version"] == "1.16.0"
    assert report["recipe"]["algorithm.loss"] == "gspo"
    assert [line["source"] for line in report["unresolved"]] == ["train_dataset"]
    assert report["warnings"] == []
    assert report["method"] == "grpo"
    assert any(line["key"] == "algorithm.loss" and line["source"] == "loss_type" for line in report["mapped"])
    assert report["toml"].startswith("[recipe]")


def test_every_table_names_keys_that_there_are() -> None:
    from rlcli_port.configs import trl_keys, verl_keys

    from rlcli.config.keys import keys

    assert {key for key, _ in [*verl_keys.DIRECT.values(), *trl_keys.DIRECT.values()]} <= keys().keys()


def test_every_name_of_a_part_is_one_that_there_is() -> None:
    from rlcli_port.configs import trl_keys, verl_keys

    from rlcli.algorithms.build import build_algorithm

    for key, names in {
        "advantage": verl_keys.ADVANTAGES.values(),
        "kl_estimator": verl_keys.ESTIMATORS.values(),
        "aggregation": [*verl_keys.AGGREGATIONS, *trl_keys.AGGREGATIONS.values()],
        "correction": trl_keys.CORRECTIONS.values(),
    }.items():
        for name in names:
            assert build_algorithm(**{key: name}, trial_calls=False)
    for name in verl_keys.LOSSES.values():
        assert build_algorithm(loss=name, options={"beta": 1.0} if name == "dro" else {}, trial_calls=False)


ACTOR, OPTIM = "actor_rollout_ref.actor", "actor_rollout_ref.actor.optim"
VERL = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 data.train_batch_size=64 "
LOSS, CORRECTION = "actor_rollout_ref.actor.policy_loss", "algorithm.rollout_correction"
IS, RS = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("algorithm.norm_adv_by_std_in_grpo=False", {"algorithm.advantage": "dr_grpo"}),
        (f"{LOSS}.loss_mode=kl_cov", {"algorithm.loss": "kl_cov", "algorithm.options.cov_coef": 0.1}),
        (f"{LOSS}.loss_mode=geo_mean", {"algorithm.loss": "gmpo", "algorithm.aggregation": "seq-mean-token-mean"}),
        (f"{LOSS}.loss_mode=dro {LOSS}.dro_beta=0.5", {"algorithm.options.beta": 0.5}),
        (f"{LOSS}.loss_mode=gspo", {"algorithm.clip_low": 0.2}),
        ("actor_rollout_ref.actor.clip_ratio=0.1", {"algorithm.clip_low": 0.2}),
        (
            "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=kl",
            {"algorithm.kl_estimator": "k1+"},
        ),
        (f"{IS}=token {IS}_threshold=5", {"algorithm.correction": "token_tis"}),
        (f"{CORRECTION}.rollout_is=token", {"algorithm.options.correction_cap": 2.0}),
        (
            f"{IS}=sequence {IS}_threshold=0.5_5",
            {"algorithm.correction": "sequence_icepop"},
        ),
        (
            f"{CORRECTION}.rollout_is=sequence {RS}=seq_mean_k1 {RS}_threshold=1.25",
            {"algorithm.correction": "sequence_tis * geometric_mask", "algorithm.options.correction_low": 1 / 1.25},
        ),
        (f"{CORRECTION}.rollout_rs=seq_max_k2 {CORRECTION}.rollout_rs_threshold=1", {"algorithm.correction": "none"}),
        (f"{CORRECTION}.bypass_mode=True", {"algorithm.correction": "bypass"}),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=24", {"train.minibatches": 2}),  # 64 / 24 is not whole
        (
            "+data.apply_chat_template_kwargs.enable_thinking=False",
            {"data.chat_template_kwargs.enable_thinking": False},
        ),
        ("data.train_files=[a.parquet]", {"data.path": "a.parquet"}),
        ("data.train_files='[a.parquet, b.parquet]'", {"data.path": ["a.parquet", "b.parquet"]}),
        ("data.val_files=['a.parquet','b.parquet']", {"evaluation.data": "a.parquet"}),
        ("actor_rollout_ref.rollout.top_p=0.9", {"algorithm.correction": "token_tis"}),
        ("actor_rollout_ref.rollout.temperature=0", {"rollout.temperature": 1.0}),  # no temperature of ours
        ("+trainer.total_training_steps=50 trainer.total_training_steps=60", {"train.steps": 60}),
        (
            f"{OPTIM}.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=55",
            {"train.warmup_steps": 6},
        ),
    ],
)
def test_what_verl_says_in_another_way(words: str, expected: dict[str, Any], tmp_path: Path) -> None:
    imported = import_file(written(tmp_path, "run.sh", f"python3 -m verl.trainer.main_ppo {VERL}{words}\n"))
    resolved = values(imported, tmp_path)
    assert {key: resolved[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "loss_type: cispo\nepsilon_high: 5.0\nnum_generations: 8",
            {"algorithm.clip_low": 1.0, "algorithm.clip_high": 4.0},
        ),
        ("loss_type: dr_grpo\nnum_generations: 8", {"algorithm.aggregation": "seq-mean-token-sum-norm"}),
        ("delta: 4\nnum_generations: 8", {"algorithm.dual_clip": 4.0}),
        ("use_vllm: true\nnum_generations: 8", {"algorithm.correction": "sequence_icepop"}),
        ("num_generations: 8", {"algorithm.correction": "token_tis", "train.schedule": "linear"}),
        (
            "use_vllm: true\nnum_generations: 8\nvllm_importance_sampling_correction: false",
            {"algorithm.correction": "none"},
        ),
        ("beta: 0.1\nuse_bias_correction_kl: false\nnum_generations: 8", {"algorithm.kl_estimator": "k3"}),
        ("num_generations: 8\ngeneration_batch_size: 64", {"train.minibatches": 8, "rollout.prompts_per_step": 8}),
        ("num_generations: 8\nmulti_objective_aggregation: normalize_then_sum", {"algorithm.advantage": "gdpo"}),
        ("num_generations: 8\nwarmup_steps: 0.1\nmax_steps: 95", {"train.warmup_steps": 10}),
        (
            "num_generations: 8\nnum_train_epochs: 2\nwarmup_ratio: 0.05",
            {"train.epochs": 2, "train.warmup_fraction": 0.05},
        ),
        ("num_generations: 8\nnum_train_epochs: 2\nmax_steps: 95", {"train.steps": 95}),
        ("num_generations: 8", {"train.epochs": 3}),  # TRL's default
        ("num_generations: 8\nuse_adaptive_entropy: true", {"algorithm.entropy_target": 0.2}),
        ("num_generations: 0\nmax_steps: .nan\nlearning_rate: [1]\nepsilon: {a: 1}", {"rollout.samples_per_prompt": 8}),
    ],
)
def test_what_trl_says_in_another_way(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    imported = import_file(written(tmp_path, "trl.yaml", text))
    resolved = values(imported, tmp_path)
    assert {key: resolved[key] for key in expected} == expected


def test_a_json_of_trl(tmp_path: Path) -> None:
    text = json.dumps({"num_generations": 4, "beta": 0.01, "chat_template_kwargs": {"enable_thinking": False}})
    imported = import_file(written(tmp_path, "trl.json", text))
    expected = {"algorithm.kl_coef": 0.01, "data.chat_template_kwargs.enable_thinking": False}
    assert {key: values(imported, tmp_path)[key] for key in expected} == expected


def test_references_within_a_yaml_are_followed(tmp_path: Path) -> None:
    text = """
data: {train_batch_size: 64, max_response_length: 256}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: "${data.train_batch_size}", ppo_epochs: "${oc.select:critic.ppo_epochs,2}"}
  rollout: {n: 4, temperature: "${oc.env:HEAT}"}
algorithm: {adv_estimator: grpo}
"""
    imported = import_file(written(tmp_path, "verl.yaml", text))
    assert values(imported, tmp_path).items() >= {"train.minibatches": 1, "train.passes": 2}.items()
    assert sources(imported, "unresolved") == {"actor_rollout_ref.rollout.temperature"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.yaml", None, "is not a file"),
        ("binary.yaml", b"\x80\xff\x00", "is not UTF-8 text (byte 0)"),
        ("nul.sh", b"a=\x00", "is a binary file"),
        ("latin.yaml", "beta: é".encode("latin-1"), "is not UTF-8 text"),
        ("huge.sh", b"#" * ((1 << 20) + 1), "is larger than 1 MiB"),
        ("deep.yaml", b"a: " + b"[" * 2_000, "is not YAML: too deep"),
        ("cycle.yaml", b"trainer: &a {x: *a}", "is not YAML: found unconstructable recursive node"),
        ("nested.yaml", b"trainer: " + b"{a: " * 60 + b"1" + b"}" * 60, "tables more than 40 deep"),
        ("open.yaml", b"trainer: {x: 1", "is not YAML: while parsing a flow mapping"),
        ("list.yaml", b"- 1", "holds no table of keys and values"),
        ("other.yaml", b"lr: 1", "holds no verl or TRL configuration"),
        ("other.sh", b"echo trainer.x", "holds no verl or TRL configuration"),
        ("broken.json", b"{", "is not JSON"),
        ("none.py", b"x = 1", "holds no GRPOConfig(...)"),
        ("two.py", b"GRPOConfig()\nGRPOConfig()", "holds 2 GRPOConfig(...), in lines 1, 2"),
        ("broken.py", b"GRPOConfig(", "is not Python: '(' was never closed, line 1"),
        ("deep.py", b"GRPOConfig(beta=" + b"-" * 50_000 + b"1)", "is not Python: "),
        ("quote.sh", b"python -m verl.trainer.main_ppo data.train_files='a\n", "a quote is not closed"),
    ],
)
def test_bad_input_is_one_line(
    name: str, content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name if content is None else written(tmp_path, name, content)
    assert main(["config", "import", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error


def test_a_bomb_of_aliases_is_refused_before_it_grows(tmp_path: Path) -> None:
    layers = ["a: &a {x: 1, y: 2}"]
    for this, last in zip("bcdefghij", "abcdefghi", strict=True):
        layers.append(f"{this}: &{this} {{{', '.join(f'k{i}: *{last}' for i in range(9))}}}")
    with pytest.raises(ConfigError, match="more than 20000 values"):
        import_file(written(tmp_path, "bomb.yaml", "\n".join([*layers, "trainer: *j"])))


def test_tags_and_odd_values_of_yaml_are_texts(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"""
trainer: {{nnodes: !!python/object/apply:os.mkdir ["{mark}"], total_training_steps: 2001-99-99,
          save_freq: {"9" * 6000}}}
algorithm: {{rollout_correction: {{rollout_is: token, rollout_is_threshold: 0.5_2}}, adv_estimator: grpo}}
actor_rollout_ref: {{rollout: {{n: 4, enforce_eager: yes}}}}
"""
    imported = import_file(written(tmp_path, "odd.yaml", text))
    assert not mark.exists()
    assert imported.settings["algorithm.options.correction_high"] == 2.0
    assert imported.settings["rollout.enforce_eager"] is True
    assert "trainer.total_training_steps" in sources(imported, "missing")


def test_an_existing_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(tmp_path, "mine.toml", "mine")
    assert main(["config", "import", str(FOREIGN / "trl_grpo.yaml"), "--out", str(recipe)]) == 2
    assert "mine.toml exists; name another file" in capsys.readouterr().err
    assert recipe.read_text() == "mine"
    assert main(["config", "import", str(FOREIGN / "trl_grpo.yaml"), "--out", str(tmp_path / "mine.txt")]) == 2
    assert main(["config", "import", str(FOREIGN / "trl_grpo.yaml"), "--out", str(tmp_path / "no" / "m.toml")]) == 2


def test_control_characters_reach_neither_the_terminal_nor_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '"actor_rollout_ref": {"\\e[31mred": 1, model: {path: "a\\e[31mb\\nc"}}\ntrainer: {x: "\\e[2J"}'
    file = written(tmp_path, "ansi.yaml", text)
    assert main(["config", "import", str(file)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert "\x1b" not in import_file(file).toml


def test_here_documents_and_arrays_do_not_stop_the_reading(tmp_path: Path) -> None:
    text = """
cat <<EOF
it's a text with one apostrophe
EOF
DATA=(
    data.train_batch_size=64   # a comment
    "actor_rollout_ref.model.path=$HOME/model"
)
export N=4
python -m verl.trainer.main_ppo "${DATA[@]}" ++actor_rollout_ref.rollout.n=$N "$@"
"""
    imported = overrides(text, tmp_path)
    assert imported["data.train_batch_size"] == 64
    assert imported["actor_rollout_ref.rollout.n"] == 4
    assert import_file(written(tmp_path, "run.sh", text)).settings["rollout.samples_per_prompt"] == 4


@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet="${}()'\"\\=.+ \nab1-[]#:", max_size=80))
def test_any_shell_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        overrides(f"data.x={text}", Path("run.sh"))


@given(text=st.text(alphabet="0123456789+-*/() .ea", max_size=30))
def test_any_sum_is_a_number_or_none(text: str) -> None:
    assert isinstance(arithmetic(text), int | float | None)


@pytest.mark.parametrize(("tower_value", "frozen"), [("True", ["vision"]), ("False", [])])
def test_a_frozen_vision_encoder_of_verl_is_frozen_here(tmp_path: Path, tower_value: str, frozen: list[str]) -> None:
    text = (FOREIGN / "verl_grpo.sh").read_text().rstrip()
    override = f" \\\n    actor_rollout_ref.actor.freeze_vision_tower={tower_value}\n"
    imported = import_file(written(tmp_path, "run.sh", text.replace(" $@", "") + override))
    assert values(imported, tmp_path)["model.freeze"] == frozen
    assert "actor_rollout_ref.actor.freeze_vision_tower" not in sources(imported, "missing")


def test_a_tracker_that_is_not_installed_is_a_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "a.yaml", "num_generations: 8\nreport_to: [wandb, tensorboard]\n")
    monkeypatch.setattr(convert, "missing", lambda name: [name] * (name == "wandb"))
    imported = import_file(file)
    assert '# trackers = ["wandb", "tensorboard"]  # report_to; not installed here: wandb\n' in imported.toml
    assert values(imported, tmp_path)["tracking.trackers"] == ["tensorboard"]
    (line,) = [line for line in imported.lines if line.key == "tracking.trackers"]
    assert line.note == "a comment in the recipe: wandb is not installed here (pip install 'rlcli[wandb]')"
    monkeypatch.setattr(convert, "missing", lambda name: [])
    assert values(import_file(file), tmp_path)["tracking.trackers"] == ["wandb", "tensorboard"]


@pytest.mark.parametrize("name", FILES)
def test_every_key_that_is_given_has_a_line(name: str) -> None:
    source_values = read_file(FOREIGN / name).values
    imported = import_file(FOREIGN / name)
    reported = {line.source for line in imported.lines}
    assert {key for key in source_values if not key.endswith("._target_")} <= reported


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_generations: 4\nwarmup_ratio: null\nbeta: 0\nepsilon: 0.1\nloss_type: cispo\ndelta: 2", "grpo"),
        ("packing: true\nmax_length: 64\nlearning_rate: 1\nsome_key: 2\nlora_r: 8", "sft"),
        ("num_generations: 4\nnormalize_advantages: true\nreward_clip_range: [0, 1]\ntop_k: 5", "rloo"),
    ],
)
def test_every_key_of_each_method_has_a_line(text: str, expected: str, tmp_path: Path) -> None:
    file = written(tmp_path, "a.yaml", text)
    imported = import_file(file)
    assert imported.method == expected
    assert {line.source for line in imported.lines} >= {*read_file(file).values}


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}", ("cosine", 0.1)),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-7}", ("cosine", 0.05)),
        ("lr_scheduler_type: cosine", ("cosine", 0.0)),
        ("lr_scheduler_type: polynomial", ("constant", 0.0)),
    ],
)
def test_schedules_of_trl(text: str, schedule: tuple[str, float], tmp_path: Path) -> None:
    imported = import_file(written(tmp_path, "a.yaml", f"num_generations: 8\nlearning_rate: 2e-6\n{text}\n"))
    resolved = values(imported, tmp_path)
    assert (resolved["train.schedule"], resolved["train.min_lr_fraction"]) == pytest.approx(schedule)


@pytest.mark.parametrize(
    ("name", "text", "method"),
    [
        ("a.yaml", "model_name_or_path: m\nlearning_rate: 1e-5\nmax_length: 64\npacking: true", "sft"),
        ("sft.yaml", "model_name_or_path: m\nlearning_rate: 1e-5\noutput_dir: x", "sft"),
        ("a.yaml", "model_name_or_path: m\nlearning_rate: 1e-5\nbeta: 0.1\nmax_completion_length: 8", "grpo"),
        ("b.yaml", "data: {train_files: a}\noptim: {lr: 1e-5}\nmodel: {partial_pretrain: m}\ntrainer: {x: 1}", "sft"),
    ],
)
def test_a_table_is_recognised_for_its_method(name: str, text: str, method: str, tmp_path: Path) -> None:
    imported = import_file(written(tmp_path, name, text))
    assert imported.method == method
    assert ('base = "sft"' in imported.toml) == (method == "sft")
    assert values(imported, tmp_path)["data.response"] == ("response" if method == "sft" else "")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("dpo.yaml", "learning_rate: 1e-6\nbeta: 0.1\noutput_dir: x", "rlcli has DPO on pairs of verified samples"),
        ("a.yaml", "learning_rate: 1e-6\nteacher_model_name_or_path: m", "start from the recipe opd"),
        ("kto.yaml", "learning_rate: 1e-6\noutput_dir: x", "KTO, which has no counterpart"),
        ("a.py", "from trl import DPOConfig\nDPOConfig(beta=0.1)", "rlcli has DPO on pairs of verified samples"),
        ("a.py", "from trl import KTOConfig\nKTOConfig(beta=0.1)", "KTO, which has no counterpart"),
    ],
)
def test_methods_without_a_counterpart_are_refused(
    name: str, text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "import", str(written(tmp_path, name, text))]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error


def test_a_variable_of_another_form_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(FOREIGN / "verl_grpo.sh")
    assert main(["config", "import", file, "--variable", "1=2"]) == 2
    assert "--variable '1=2' is not NAME=VALUE" in capsys.readouterr().err
