"""The catalogue: packaged recipes, files, bases, and other people's packages."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from rlcli.config import recipes
from rlcli.config.load import resolve
from rlcli.errors import ConfigError, RlcliError, UnknownName
from rlcli.registry import Registry

ROOT = Path(__file__).parents[2]


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
def fresh_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "PACKAGES", Registry("recipe package", "rlcli.recipes"))


@pytest.mark.parametrize("name", recipes.names())
def test_a_packaged_recipe_resolves_and_says_everything_of_itself(name: str) -> None:
    run = resolve(name)
    header = run.recipe.header
    assert header.name == name
    empty = [field.name for field in fields(header) if field.name != "base" and not getattr(header, field.name)]
    assert not empty
    assert len(header.summary) < 120
    assert f"`{name}`" in (ROOT / "recipes" / "README.md").read_text()


def test_grpo_and_quickstart_are_there() -> None:
    assert {"grpo", "quickstart"} <= set(recipes.names())


def test_quickstart_is_grpo_with_the_settings_that_a_tiny_model_learns_with() -> None:
    config = resolve("quickstart").config
    train, rollout, algorithm = config.train, config.rollout, config.algorithm
    assert (train.steps, rollout.prompts_per_step, rollout.samples_per_prompt) == (60, 32, 8)
    assert (train.lr, train.beta1, train.beta2) == (2e-4, 0.9, 0.99)
    assert (train.warmup_steps, train.schedule, train.min_lr_fraction) == (10, "linear", 0.1)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef) == (0.2, 0.28, 0.0)
    assert (algorithm.aggregation, rollout.temperature) == ("token-mean", 1.0)


def test_bases_chain_and_the_nearest_wins(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", '[recipe]\nbase = "grpo"\n[train]\nlr = 1e-3\nsteps = 3\n')
    write(tmp_path / "deep", "b.toml", '[recipe]\nbase = "../a.toml"\n[train]\nsteps = 4\n')
    recipe = recipes.load(str(tmp_path / "deep" / "b.toml"))
    assert (recipe.values["train.lr"], recipe.values["train.steps"]) == (1e-3, 4)
    assert recipe.values["rollout.samples_per_prompt"] == 8
    assert (recipe.origins["train.lr"], recipe.origins["train.steps"]) == ("a", "b")
    assert recipe.origins["rollout.samples_per_prompt"] == "grpo"


def test_bases_that_go_in_a_circle_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path, "a.toml", '[recipe]\nbase = "b.toml"\n')
    write(tmp_path, "b.toml", '[recipe]\nbase = "a.toml"\n')
    with pytest.raises(ConfigError, match=r"circle: .*a\.toml → .*b\.toml → .*a\.toml"):
        recipes.load(first)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train\n", "is not TOML"),
        ('[recipe]\nsumary = "x"\n', "did you mean summary?"),
        ("[recipe]\nname = 3\n", "name = 3 is not text"),
        ("recipe = 3\n", "recipe = 3 is not a table"),
        ('[recipe]\nbase = "gropo"\n', "did you mean grpo?"),
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
    with pytest.raises(UnknownName, match=r"'quikstart'; did you mean quickstart\?"):
        recipes.load("quikstart")


@pytest.mark.usefixtures("fresh_catalogue")
def test_a_package_adds_recipes_that_build_on_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, "plugged_recipes", {"wild.toml": '[recipe]\nname = "wild"\nbase = "grpo"\n[train]\nlr = 0.5\n'})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"grpo", "wild"} <= set(recipes.names())
    recipe = recipes.load("wild")
    assert recipe.source == "plugged_recipes/wild.toml"
    assert recipe.values["train.lr"] == 0.5


@pytest.mark.usefixtures("fresh_catalogue")
def test_two_packages_cannot_publish_the_same_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, "copycat_recipes", {"grpo.toml": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="'grpo' is published twice"):
        recipes.names()
