"""The catalog: packaged recipes, files, bases, and other people's packages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlcli.config import recipes
from rlcli.config.load import resolve
from rlcli.errors import ConfigError, RlcliError, UnknownName
from rlcli.registry import Registry

ROOT = Path(__file__).parents[3]


def write(folder: Path, name: str, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return str(folder / name)


def publish(folder: Path, package: str, files: dict[str, str]) -> None:
    """A real distribution on the path: a package and the metadata that an installer would leave."""
    write(folder / package, "__init__.py", "")
    for name, text in files.items():
        write(folder / package, name, text)
    info = folder / f"{package}-1.0.dist-info"
    write(info, "METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    write(info, "entry_points.txt", f"[rlcli.recipes]\n{package} = {package}\n")


@pytest.fixture
def fresh_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "PACKAGES", Registry("recipe package", "rlcli.recipes"))


ALGORITHMS = (
    *("sft", "rft", "dpo", "sppo", "grpo", "dr_grpo", "dapo", "ppo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
    *("remax", "gspo", "cispo", "sapo", "gmpo", "clip_cov", "kl_cov", "opo", "gpg", "maxrl", "vapo", "prime", "pf_ppo"),
    *("gdpo", "grpo_passk", "dro", "dppo_tv", "turn_rloo", "gigpo", "opd"),
)
TASKS = (
    *(
        "quickstart",
        "quickstart-tools",
        "quickstart-guess",
        "quickstart-shapes",
        "quickstart-words",
        "grpo-gsm8k-0.5b",
        "grpo-lora-gsm8k-1.5b",
        "ppo-gsm8k-0.5b",
    ),
    *("dapo-math-7b", "dapo-math-32b", "grpo-code-7b"),
)
CONVERSATIONS = ("guess-number", "countdown-feedback", "code-repair", "tools-calculator", "tools-python", "search")
PACKAGED = ALGORITHMS + TASKS + CONVERSATIONS


@cache
def values_of(name: str) -> Mapping[str, Any]:
    """Every key of the schema, and the numbers of `algorithm.options`."""
    return resolve(name).values()


def test_the_catalog_holds_every_algorithm_and_every_task() -> None:
    assert set(PACKAGED) <= set(recipes.names())


@pytest.mark.parametrize("name", recipes.names())
def test_a_packaged_recipe_resolves_and_says_everything_of_itself(name: str) -> None:
    header = resolve(name).recipe.header
    assert header.name == name
    optional = {"base", "task"}
    assert not [
        field.name for field in fields(header) if field.name not in optional and not getattr(header, field.name)
    ]
    assert bool(header.task) == (name in TASKS + CONVERSATIONS)
    assert len(header.summary) < 120
    assert all("\n" not in text for text in vars(header).values())
    assert re.match(r"no$|yes: ", header.reproduced)
    assert re.search(r"arXiv \d{4}\.\d{5}|github\.com/", header.paper)


@pytest.mark.parametrize("name", [name for name in recipes.names() if name != "grpo"])
def test_a_recipe_names_only_what_it_changes(name: str) -> None:
    """All but `grpo`, the root, which a reader looks the usual values up in."""
    recipe = recipes.load(name)
    assert recipe.header.base
    inherited, own_keys = values_of(recipe.header.base), [key for key, by in recipe.origins.items() if by == name]
    idle = [key for key in own_keys if key in inherited and inherited[key] == values_of(name)[key]]
    assert not idle
    assert 1 <= len(own_keys) <= 20


@pytest.mark.parametrize("name", recipes.names())
def test_the_functions_of_a_recipe_exist_and_take_its_numbers(name: str) -> None:
    from rlcli.algorithms.build import build_algorithm

    build_algorithm(**resolve(name).config.algorithm.model_dump())


@pytest.mark.parametrize("name", recipes.names())
def test_the_clips_of_a_recipe_are_what_its_loss_takes(name: str) -> None:
    """A clip that the loss ignores would mislead, and is refused."""
    from rlcli.algorithms import losses
    from rlcli.algorithms.function_registry import options_of

    algorithm = resolve(name).config.algorithm
    loss_options = options_of(losses.get(algorithm.loss))
    for clip in ("clip_low", "clip_high", "dual_clip"):
        assert getattr(algorithm, clip) is None or clip in loss_options


@pytest.mark.parametrize("name", TASKS)
def test_a_task_recipe_needs_no_more_than_its_name_to_run(name: str) -> None:
    config = resolve(name).config
    if name.startswith("quickstart"):  # which the command of that name gives its model and data
        return
    assert config.model.path
    assert config.data.path.startswith("data/")
    assert config.evaluation.data.startswith("data/") or name == "grpo-code-7b"


def linked(paper: str) -> str:
    paper = re.sub(r"arXiv (\d{4}\.\d{5})", r"[\g<0>](https://arxiv.org/abs/\1)", paper)
    return re.sub(r"github\.com/\S+(?=;)", r"[\g<0>](https://\g<0>)", paper)


def readme_rows(names: tuple[str, ...]) -> list[str]:
    headers = [recipes.load(name).header for name in sorted(names)]
    return [
        f"| `{h.name}` | {h.task or h.summary} | {h.base and f'`{h.base}`'} | {linked(h.paper)} | {h.hardware} | "
        f"{h.reproduced} |"
        for h in headers
    ]


@pytest.mark.parametrize("names", [ALGORITHMS, TASKS, CONVERSATIONS], ids=["algorithms", "tasks", "conversations"])
def test_the_readme_lists_them_as_their_headers_say(names: tuple[str, ...]) -> None:
    lines = (ROOT / "recipes" / "README.md").read_text().splitlines()
    expected = readme_rows(names)
    start = lines.index(expected[0])
    assert lines[start : start + len(expected) + 1] == [*expected, ""]


def test_what_makes_an_algorithm_what_it_is() -> None:
    """The settings that its paper is known by."""
    known: dict[str, dict[str, Any]] = {
        "dapo": {"algorithm.clip_high": 0.28, "algorithm.dual_clip": 10.0, "dynamic_sampling.keep": "unequal"},
        "dapo-math-32b": {
            "rollout.prompts_per_step": 512,
            "rollout.samples_per_prompt": 16,
            "rollout.max_response_tokens": 20480,
            "shaping.overlong_buffer": 4096,
            "algorithm.kl_coef": 0.0,
            "algorithm.aggregation": "token-mean",
            "train.minibatches": 16,
            "train.warmup_steps": 10,
            "train.weight_decay": 0.1,
        },
        "ppo": {"algorithm.gamma": 1.0, "algorithm.lam": 1.0, "critic.lr": 1e-5, "critic.clip": 0.5},
        "gspo": {"algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4},
        "vapo": {"algorithm.nll_coef": 0.1, "algorithm.clip_high": 0.28, "critic.warmup_steps": 50},
        "prime": {"critic.lr": 1e-6, "dynamic_sampling.low": 0.2, "dynamic_sampling.high": 0.8},
        "dr_grpo": {"algorithm.aggregation": "seq-mean-token-sum-norm"},
        "reinforce_pp": {"algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1"},
        "sft": {"data.response": "response", "rollout.samples_per_prompt": 1},
    }
    for name, settings in known.items():
        values = values_of(name)
        assert {key: values[key] for key in settings} == settings, name


def test_quickstart_is_grpo_with_settings_for_a_tiny_model() -> None:
    config = resolve("quickstart").config
    train, rollout, algorithm = config.train, config.rollout, config.algorithm
    assert (train.steps, rollout.prompts_per_step, rollout.samples_per_prompt) == (60, 32, 8)
    assert (train.lr, train.betas) == (2e-4, (0.9, 0.99))
    assert (train.warmup_steps, train.schedule, train.min_lr_fraction) == (10, "linear", 0.1)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef) == (None, None, 0.0)  # no ratio to clip
    assert (algorithm.aggregation, rollout.temperature) == ("token-mean", 1.0)


def test_bases_chain_and_the_nearest_wins(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", '[recipe]\nbase = "grpo"\n[train]\nlr = 1e-3\nsteps = 3\n')
    write(tmp_path / "deep", "b.toml", '[recipe]\nbase = "../a.toml"\n[train]\nsteps = 4\n')
    recipe = recipes.load(str(tmp_path / "deep" / "b.toml"))
    assert (recipe.values["train.lr"], recipe.values["train.steps"]) == (1e-3, 4)
    assert recipe.values["rollout.samples_per_prompt"] == 8
    assert (recipe.origins["train.lr"], recipe.origins["train.steps"]) == ("a", "b")
    assert recipe.origins["rollout.samples_per_prompt"] == "grpo"


@pytest.mark.long
def test_the_bases_of_the_catalog_lead_to_grpo() -> None:
    for name in PACKAGED:
        chain = [name]
        while base := recipes.load(chain[-1]).header.base:
            chain.append(base)
        assert chain[-1] == "grpo"
        for recipe, below in pairwise(chain):
            assert recipes.load(below).values.keys() <= recipes.load(recipe).values.keys()


@pytest.mark.parametrize("name", recipes.names())
def test_a_copy_is_the_file_itself_and_resolves_to_the_same(name: str, tmp_path: Path) -> None:
    text = recipes.copy_text(name, name)
    assert text == recipes.load(name).text
    renamed = write(tmp_path, "mine.toml", recipes.copy_text(name, "mine"))
    assert resolve(renamed).config == resolve(name).config
    assert resolve(renamed).recipe.header.name == "mine"
    assert [line for line in Path(renamed).read_text().splitlines() if line.startswith("#")] == [
        line for line in text.splitlines() if line.startswith("#")
    ]


def test_a_copy_finds_a_base_that_was_a_path(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", '[recipe]\nbase = "grpo"\n[train]\nlr = 1e-3\n')
    text = """# Mine.
  [recipe]  # says base = "x"
# base = "none"
summary = 'one'
base = '../a.toml' # over there

[verifier]
name = "math"
"""
    below = write(tmp_path / "deep", "b.toml", text)
    copied = write(tmp_path / "far" / "away", "c.toml", recipes.copy_text(below, "c"))
    recipe = recipes.load(copied)
    assert recipe.values == recipes.load(below).values
    assert recipe.header.name == "c"
    expected = text.replace("'../a.toml'", f'"{tmp_path / "a.toml"}"')
    assert recipe.text == expected


def test_a_header_that_cannot_be_rewritten_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", "")
    below = write(tmp_path, "b.toml", 'recipe = { base = "a.toml" }\n')
    with pytest.raises(ConfigError, match=r"b\.toml: cannot change base in its header; write a \[recipe\] section"):
        recipes.copy_text(below, "b")


def test_bases_that_go_in_a_circle_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path, "a.toml", '[recipe]\nbase = "b.toml"\n')
    write(tmp_path, "b.toml", '[recipe]\nbase = "a.toml"\n')
    with pytest.raises(ConfigError, match=r"circular: .*a\.toml → .*b\.toml → .*a\.toml"):
        recipes.load(first)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train\n", "is not TOML"),
        ('[recipe]\nsumary = "x"\n', "did you mean summary?"),
        ("[recipe]\nname = 3\n", "name = 3 is not text"),
        ("recipe = 3\n", "recipe = 3 is not a table"),
        ('[recipe]\nbase = "gropo"\n', "mine.toml: no recipe is called 'gropo'; did you mean grpo"),
        ('[recipe]\nbase = "absent.toml"\n', "absent.toml cannot be read: No such file"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RlcliError) as refused:
        recipes.load(write(tmp_path, "mine.toml", text))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"x = '\xff'\n")
    with pytest.raises(ConfigError, match=r"mine\.toml is not TOML"):
        recipes.load(str(tmp_path / "mine.toml"))


def test_an_unknown_name_lists_the_near_ones() -> None:
    with pytest.raises(UnknownName, match=r"'quikstart'; did you mean quickstart, "):
        recipes.load("quikstart")


@pytest.mark.usefixtures("fresh_catalog")
def test_a_package_adds_recipes_that_build_on_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, "plugged_recipes", {"wild.toml": '[recipe]\nname = "wild"\nbase = "grpo"\n[train]\nlr = 0.5\n'})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"grpo", "wild"} <= set(recipes.names())
    recipe = recipes.load("wild")
    assert recipe.source == "plugged_recipes/wild.toml"
    assert recipe.values["train.lr"] == 0.5


@pytest.mark.usefixtures("fresh_catalog")
def test_two_packages_cannot_publish_the_same_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, "copycat_recipes", {"grpo.toml": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="'grpo' is published twice"):
        recipes.names()
