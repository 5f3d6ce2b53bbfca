"""Recipe → flags → --set: what wins, what is refused and how, and what is written down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlcli.config.keys import RENAMED, RenamedKey, keys, matching_keys
from rlcli.config.load import dump_toml, resolve, with_length
from rlcli.errors import ConfigError


def test_later_layers_win_and_each_value_knows_its_origin() -> None:
    run = resolve("quickstart", {"train.steps": 7, "cluster.workers": 2}, ["train.steps=11", "lora.rank=16"])

    assert run.config.train.steps == 11
    assert run.config.cluster.workers == 2
    assert run.config.lora.rank == 16
    assert run.origins["train.steps"] == "--set"
    assert run.origins["cluster.workers"] == "flag --workers"
    assert run.origins["rollout.max_response_tokens"] == "recipe quickstart"
    assert run.origins["rollout.samples_per_prompt"] == "recipe grpo"
    assert run.origins["model.dtype"] == "default"
    assert set(run.origins) == {name for name, key in keys().items() if key.kind != "object"} == set(run.values())


def test_the_last_of_two_sets_wins() -> None:
    assert resolve("grpo", {}, ["train.lr=1", "train.lr=2"]).config.train.lr == 2


def test_a_flag_that_was_not_given_leaves_the_recipe_alone() -> None:
    run = resolve("quickstart", {"train.steps": None, "model.path": Path("some/where")})
    assert run.config.train.steps == 60
    assert run.config.model.path == "some/where"
    assert run.origins["model.path"] == "flag --model"


def test_the_configuration_cannot_be_changed_afterwards() -> None:
    config = resolve("grpo").config
    with pytest.raises(ValidationError):
        config.train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.lr=2e-6", 2e-6),
        ("train.lr = 1", 1.0),
        ("train.steps=1_000", 1000),
        ("model.path=7", "7"),
        ("model.path=a=b", "a=b"),
        ('model.path="quoted"', "quoted"),
        ("model.path=true", "true"),
        ("model.path=", ""),
        ("data.shuffle=false", False),
        ("data.shuffle=False", False),
        ("rollout.kv_cache_mb=64", 64),
        ("rollout.kv_cache_mb=unset", None),
        ("tracking.trackers=wandb,tensorboard", ["wandb", "tensorboard"]),
        ('tracking.trackers=["wandb"]', ["wandb"]),
        ("tracking.trackers=[]", []),
    ],
)
def test_a_set_value_takes_the_type_of_its_key(text: str, value: object) -> None:
    key = text.partition("=")[0].strip()
    read = resolve("grpo", {}, [text]).values()[key]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rollout.temprature=1", ["'rollout.temprature'", "did you mean rollout.temperature"]),
        ("lr=1", ["'lr'", "did you mean critic.lr, train.lr?"]),
        ("trian.lr=1", ["'trian.lr'", "did you mean train.lr?"]),
        ("rollout=4", ["'rollout' is a section", "rollout.temperature"]),
        ("zzz.qqq=4", ["'zzz.qqq'", "rlcli recipes explain"]),
        ("rollout.temperature=-1", ["rollout.temperature = -1 (--set)", "a number > 0 and ≤ 10"]),
        ("rollout.temperature=nan", ["rollout.temperature = nan", "a number"]),
        ("train.lr=inf", ["train.lr = inf", "a number > 0"]),
        ("train.lr=2020-01-01", ["train.lr = 2020-01-01", "a number > 0"]),
        ("train.steps=2.5", ["train.steps = 2.5", "a whole number ≥ 1"]),
        ("train.steps=true", ["train.steps = true", "a whole number ≥ 1"]),
        ("train.steps=1\nlr=2", ["train.steps = ", "a whole number ≥ 1"]),
        ("model.freeze=tower", ['model.freeze = ["tower"]', "each one of vision, encoder, projector"]),
        ("train.betas=0.9,1.0", ["train.betas = [0.9, 1.0]", "two numbers ≥ 0 and < 1"]),
        ("data.shuffle=maybe", ['data.shuffle = "maybe"', "true or false"]),
        ("model.dtype=fp8", ['model.dtype = "fp8"', "one of auto, float32, bfloat16"]),
        ("rollout.kv_cache_mb=none", ['rollout.kv_cache_mb = "none"', "or unset"]),
        ("train.steps=unset", ['train.steps = "unset"', "a whole number"]),
        ("train.minibatches=5", ["32 / 5 = 6.4 is not whole"]),
        ("rollout.tensor_parallel=2", ["1 / 2 = 0.5 is not whole"]),
        ("train.tokens_per_microbatch=9", ["train.tokens_per_microbatch = 9", "2048", "raise"]),
        ("train.warmup_steps=101", ["train.warmup_steps = 101", "train.steps = 100", "lower"]),
        ("train.seed=4294967296", ["train.seed = 4294967296", "≥ 0 and < 4294967296"]),
        ("lora.rank=1000000000", ["lora.rank = 1000000000", "≥ 0 and ≤ 512"]),
        ("rollout.prompts_per_step=1000000000", ["8000000000 samples in a step", "1000000", "lower"]),
        ("evaluation.samples=4", ["evaluation.samples = 4", "the same response", "temperature above 0"]),
        ("train.lr", ["--set 'train.lr' is not key=value", "train.lr=2e-6"]),
        ("=3", ["--set '=3' is not key=value"]),
    ],
)
def test_a_bad_value_is_refused_in_one_line_with_its_rule_and_mend(text: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("grpo", {}, [text])
    line = str(refused.value)
    assert "\n" not in line
    assert refused.value.exit_code == 2
    for part in says:
        assert part in line


def test_every_bad_value_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("grpo", {"train.steps": 0}, ["train.lr=-1"])
    assert "train.steps = 0 (flag --steps)" in str(refused.value)
    assert "train.lr = -1 (--set)" in str(refused.value)


def test_a_typo_in_a_recipe_names_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[rolout]\ntemperature = 1.0\n")
    with pytest.raises(ConfigError, match=r"'rolout\.temperature' \(recipe mine\); did you mean rollout\.temperature"):
        resolve(str(recipe))


def test_a_recipe_can_take_back_what_its_base_set(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[algorithm]\ndual_clip = 3.0\n")
    (tmp_path / "child.toml").write_text('[recipe]\nbase = "base.toml"\n[algorithm]\ndual_clip = "unset"\n')
    assert resolve(str(tmp_path / "base.toml")).config.algorithm.dual_clip == 3.0
    assert resolve(str(tmp_path / "child.toml")).config.algorithm.dual_clip is None


def test_the_dump_says_where_each_value_came_from() -> None:
    text = dump_toml(resolve("quickstart", {"train.steps": 20}, ["lora.rank=16"]))
    assert "rank = 16  # --set\n" in text
    assert "steps = 20  # flag --steps\n" in text
    assert "max_response_tokens = 40  # recipe quickstart\n" in text
    assert 'dtype = "auto"\n' in text


VALUES = {
    "model.path": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
    "tracking.project": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
    "train.lr": st.floats(1e-12, 1e3, exclude_min=True),
    "train.seed": st.integers(0, 2**32 - 1),
    "data.shuffle": st.booleans(),
    "algorithm.dual_clip": st.one_of(st.just("unset"), st.floats(1, 100, exclude_min=True)),
    "model.dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
    "tracking.trackers": st.lists(st.sampled_from(["wandb", "mlflow", "trackio"]), max_size=3),
}


@pytest.mark.long
@settings(deadline=None)
@given(flags=st.fixed_dictionaries({}, optional=VALUES))
def test_the_dump_read_back_as_a_recipe_gives_the_same_configuration(
    flags: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = resolve("quickstart", flags)
    file = tmp_path_factory.mktemp("dump") / "config.toml"
    file.write_text(dump_toml(run), encoding="utf-8", newline="")
    reloaded = resolve(str(file))
    assert reloaded.config == run.config
    assert reloaded.recipe.header.name == "quickstart"


def test_the_section_named_like_a_python_keyword_works_like_the_others(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[recipe]\nbase = "grpo"\n[rollout]\nworkers = 1\n[async]\nstaleness = 1\n')
    resolved = resolve(str(file))
    assert resolved.config.async_.staleness == resolved.values()["async.staleness"] == 1
    assert "[async]\nstaleness = 1  # recipe own\n" in dump_toml(resolved)
    assert resolve(str(file), sets=["async.staleness=0"]).config.async_.staleness == 0
    assert [key.name for key in matching_keys("async")] == [
        *("async.staleness", "async.on_update", "async.engine_steps", "async.too_old"),
    ]
    for wrong, says in {
        "async.staleness=65": "async.staleness = 65 (--set) must be a whole number ≥ 0 and ≤ 64",
        "async.stalenes=1": "did you mean async.staleness?",
        "async=1": "'async' is a section",
    }.items():
        with pytest.raises(ConfigError) as refused:
            resolve("grpo", {}, [wrong])
        assert says in str(refused.value)


def test_every_key_is_described_and_there_are_at_most_152() -> None:
    assert 40 < len(keys()) <= 152
    for key in matching_keys():
        assert key.description.endswith(".")
        assert key.rule


def test_describe_narrows_to_a_section_or_a_key() -> None:
    assert [key.name for key in matching_keys("lora")] == ["lora.rank", "lora.alpha", "lora.targets"]
    (key,) = matching_keys("rollout.kv_cache_mb")
    assert (key.rule, key.default, key.optional) == ("a whole number ≥ 1, or unset", None, True)
    with pytest.raises(ConfigError, match=r"did you mean lora\.rank"):
        matching_keys("lora.ranc")


def test_the_numbers_of_a_function_are_keys_of_their_own() -> None:
    run = resolve("grpo", {}, ["algorithm.options.beta=0.3"])
    assert run.config.algorithm.options == {"beta": 0.3}
    assert run.origins["algorithm.options.beta"] == "--set"
    assert "options.beta = 0.3  # --set" in dump_toml(run)


@pytest.mark.parametrize(
    ("text", "says"),
    [("algorithm.options=3", "is a table"), ("algorithm.options.beta=x", "must be a number")],
)
def test_a_table_of_numbers_takes_numbers(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve("grpo", {}, [text])


def test_a_renamed_key_works_with_a_warning_in_every_layer(tmp_path: Path) -> None:
    recipe = tmp_path / "old.toml"
    recipe.write_text('[recipe]\nname = "old"\nbase = "grpo"\n\n[algorithm]\nmismatch_alarm = 0.2\n')
    with pytest.warns(RenamedKey, match=r"mismatch_alarm \(recipe old\) is now called algorithm.mismatch_warning"):
        resolved = resolve(str(recipe))
    assert resolved.config.algorithm.mismatch_warning == 0.2
    assert resolved.origins["algorithm.mismatch_warning"] == "recipe old"
    with pytest.warns(RenamedKey, match=r"mismatch_alarm \(--set\) is now called"):
        resolved = resolve(str(recipe), {}, ["algorithm.mismatch_alarm=0.3"])
    assert resolved.config.algorithm.mismatch_warning == 0.3
    assert set(RENAMED.values()) <= keys().keys()


def test_old_keys_are_parts_of_the_list_that_they_joined(tmp_path: Path) -> None:
    recipe = tmp_path / "old.toml"
    recipe.write_text('[recipe]\nname = "old"\nbase = "grpo"\n\n[train]\nbeta2 = 0.9\n')
    with pytest.warns(RenamedKey, match=r"train.beta2 \(recipe old\) is now a part of train.betas; the next release"):
        resolved = resolve(str(recipe))
    assert resolved.config.train.betas == (0.9, 0.9)
    assert resolved.origins["train.betas"] == "recipe old"
    with pytest.warns(RenamedKey):
        resolved = resolve(str(recipe), {}, ["train.beta1=0.5"])
    assert resolved.config.train.betas == (0.5, 0.9)
    with pytest.warns(RenamedKey), pytest.raises(ConfigError, match=r"train.betas = \[0.9, 1.5\]"):
        resolve("grpo", {}, ["train.beta2=1.5"])
    assert resolve("grpo", {}, ["train.betas=0.8, .95"]).config.train.betas == (0.8, 0.95)


def test_the_warning_of_a_renamed_key_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlcli.cli.main", "recipes", "show", "grpo", "--resolved"]
    done = subprocess.run([*command, "--set", "algorithm.mismatch_alarm=0.3"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == (
        "warning: the key algorithm.mismatch_alarm (--set) is now called algorithm.mismatch_warning; the next release "
        "refuses the old name\n"
    )


@pytest.mark.parametrize(
    ("recipe", "flags", "key", "warmup"),
    [
        ("sft", {"train.steps": 3}, "train.warmup_steps", 3),
        ("quickstart", {"train.steps": 6}, "train.warmup_steps", 6),
        ("vapo", {"train.steps": 50}, "critic.warmup_steps", 25),
        ("vapo", {"train.steps": 1}, "critic.warmup_steps", 0),
    ],
)
def test_fewer_steps_than_a_recipes_warmup_shorten_it(
    recipe: str, flags: dict[str, int], key: str, warmup: int
) -> None:
    resolved = resolve(recipe, flags)
    assert resolved.values()[key] == warmup
    steps = flags["train.steps"]
    assert [f"{key} = {warmup}: shortened from" in note for note in resolved.notes].count(True) == 1
    assert all(note.endswith(f"for train.steps = {steps}") for note in resolved.notes)
    assert resolved.origins[key] == "shortened for flag --steps"
    assert resolve(recipe, {}, [f"train.steps={steps}"]).values()[key] == warmup


def test_enough_steps_leave_the_warmup_alone() -> None:
    resolved = resolve("sft", {"train.steps": 10})
    assert (resolved.config.train.warmup_steps, resolved.notes) == (10, ())


def test_a_warmup_that_is_given_is_refused_and_not_shortened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.warmup_steps = 5 is more than train\.steps = 3"):
        resolve("sft", {"train.steps": 3}, ["train.warmup_steps=5"])
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[recipe]\nname = 'mine'\nbase = 'sft'\n[train]\nsteps = 3\nwarmup_steps = 5\n")
    with pytest.raises(ConfigError, match=r"train\.warmup_steps = 5 is more than train\.steps = 3"):
        resolve(str(recipe))


def test_epochs_are_counted_in_steps_of_the_data_and_kept_as_steps(tmp_path: Path) -> None:
    in_epochs = resolve("grpo", {}, ["train.epochs=2", "train.warmup_fraction=0.1"])
    counted = with_length(in_epochs, 1000)  # 32 prompts a step
    train = counted.config.train
    assert (train.steps, train.warmup_steps, train.epochs, train.warmup_fraction) == (63, 7, None, None)
    assert counted.notes[0] == "train.steps = 63: 2 epochs of 1000 prompts, 32 a step"
    assert counted.notes[1] == "train.warmup_steps = 7: train.warmup_fraction = 0.1 of 63 steps"
    stored = tmp_path / "config.toml"
    for resolved in (in_epochs, counted):
        stored.write_text(dump_toml(resolved))
        assert resolve(str(stored)).config == resolved.config
    assert with_length(resolve(str(stored)), 5000).config.train.steps == 63
    assert with_length(resolve("grpo", {}, ["train.epochs=0.001"]), 1000).config.train.steps == 1


def test_epochs_shorten_a_recipes_warmup_and_are_held_to_the_rules() -> None:
    counted = with_length(resolve("vapo", {}, ["train.epochs=1", "rollout.prompts_per_step=32"]), 128)
    assert (counted.config.train.steps, counted.config.critic.warmup_steps) == (4, 2)
    in_epochs = resolve("grpo", {}, ["train.epochs=1", "train.warmup_steps=50"])
    with pytest.raises(ConfigError, match=r"train\.warmup_steps = 50 is more than train\.steps = 32"):
        with_length(in_epochs, 1000)


def test_the_last_of_two_ways_to_give_the_length_counts(tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text("[recipe]\nbase = 'grpo'\n[train]\nepochs = 3\nwarmup_fraction = 0.5\n")
    assert resolve(str(base)).config.train.epochs == 3  # in place of the steps of grpo
    child = tmp_path / "child.toml"
    child.write_text("[recipe]\nbase = 'base.toml'\n[train]\nsteps = 10\n")
    train = resolve(str(child)).config.train
    assert (train.epochs, train.steps, train.warmup_steps) == (None, 10, 5)
    train = resolve(str(base), {"train.steps": 7}, ["train.warmup_steps=2"]).config.train
    assert (train.epochs, train.steps, train.warmup_steps, train.warmup_fraction) == (None, 7, 2, None)


def test_two_ways_to_give_the_length_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("grpo", {"train.steps": 5}, ["train.epochs=2"])
    assert str(refused.value) == (
        "train.steps = 5 (flag --steps) and train.epochs = 2 (--set) set the same; give one of them"
    )
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[recipe]\nbase = 'grpo'\n[train]\nwarmup_steps = 5\nwarmup_fraction = 0.1\n")
    with pytest.raises(ConfigError, match="set the same; give one of them"):
        resolve(str(recipe))


def test_a_shortened_warmup_is_kept_with_the_run(tmp_path: Path) -> None:
    stored = tmp_path / "config.toml"
    stored.write_text(dump_toml(resolve("sft", {"train.steps": 3})))
    reloaded = resolve(str(stored))
    assert (reloaded.config.train.warmup_steps, reloaded.notes) == (3, ())


@pytest.mark.parametrize(("text", "value"), [("False", False), ("FALSE", False), ("TRUE", True), ('"False"', "False")])
def test_a_boolean_in_a_table_may_be_written_as_in_python(text: str, value: object) -> None:
    key = "chat_template_kwargs"
    assert resolve("grpo", {}, [f"data.{key}.enable_thinking={text}"]).config.data.chat_template_kwargs == {
        "enable_thinking": value
    }
    assert resolve("grpo", {}, [f"environment.options.strict={text}"]).config.environment.options == {"strict": value}


@pytest.mark.parametrize("text", ["None", "null", "no", "Off", "YES"])
def test_a_word_in_a_table_that_may_be_no_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("grpo", {}, [f"data.chat_template_kwargs.enable_thinking={text}"])
    assert f"data.chat_template_kwargs.enable_thinking = {text} (--set) must be" in refused.value.message
    assert refused.value.hint.endswith(f"""--set 'data.chat_template_kwargs.enable_thinking="{text}"'""")


def test_a_missing_text_may_be_written_as_in_python() -> None:
    config = resolve("grpo", {"evaluation.data": "held-out"}, ["evaluation.data=None", "data.response=null"]).config
    assert (config.evaluation.data, config.data.response) == ("", "")
    assert resolve("grpo", {}, ["rollout.sleep=none"]).config.rollout.sleep == "none"
    assert resolve("grpo", {}, ["algorithm.correction=none"]).config.algorithm.correction == "none"
    for text in ("tracking.project=None", "train.steps=None", "rollout.kv_cache_mb=None"):
        with pytest.raises(ConfigError, match="must be"):
            resolve("grpo", {}, [text])


def test_the_home_folder_and_variables_are_expanded_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        '[model]\npath = "~/model"\n[data]\npath = ["~/sums", {path = "${DATA}/math", weight = 2}]\n'
        '[evaluation]\ndata = "$DATA/held"\n[data.chat_template_kwargs]\nprice = "$5"\n'
    )
    with pytest.raises(ConfigError, match="has no weight"):
        resolve(str(recipe))
    resolved = resolve(str(recipe), {}, ['data.path=["~/sums", "$DATA/math"]', "verifier.name=~/r.py:f"])
    assert resolved.config.model.path == "/home/me/model"
    assert resolved.config.data.paths == ("/home/me/sums", "/data/math")
    assert resolved.config.evaluation.data == "/data/held"
    assert resolved.config.verifier.name == "/home/me/r.py:f"
    assert resolved.config.data.chat_template_kwargs == {"price": "$5"}


def test_a_variable_that_is_not_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA", raising=False)
    with pytest.raises(ConfigError, match=r"data.path = \$DATA/x \(--set\): the variable DATA is not set") as refused:
        resolve("grpo", {}, ["data.path=$DATA/x"])
    assert "export DATA=" in refused.value.hint
    monkeypatch.chdir(tmp_path)
    for name in ("~", "$DATA"):  # a folder that is called so
        (tmp_path / name).mkdir()
        assert resolve("grpo", {}, [f"data.path={name}"]).config.data.path == name
