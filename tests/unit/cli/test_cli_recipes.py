"""`rlcli recipes`, and the console that all commands print with."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlcli.cli import console
from rlcli.cli.main import main
from rlcli.cli.recipes import algorithm_choices
from rlcli.config import recipes
from rlcli.config.keys import keys
from rlcli.config.load import resolve


def printed_json(capsys: pytest.CaptureFixture[str]) -> object:
    return json.loads(capsys.readouterr().out)


def test_list_shows_each_recipe_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list"]) == 0
    printed = capsys.readouterr().out
    algorithms, tasks = printed.split("\n task ")
    assert "Group-relative policy" in algorithms
    assert "grpo-code-7b" in tasks
    assert "quickstart" in tasks
    (row,) = [line for line in algorithms.splitlines() if line.startswith(" vapo ")]
    assert row.split()[1] == "ppo"
    assert row.split()[-1] == "no"
    (row,) = [line for line in tasks.splitlines() if line.startswith(" quickstart ")]
    assert row.split()[-1] == "yes"


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list", "--json"]) == 0
    listed = printed_json(capsys)
    assert isinstance(listed, list)
    by_name = {recipe["name"]: recipe for recipe in listed}
    assert by_name["sppo"]["base"] == "dpo"
    assert by_name["quickstart"]["reproduced"].startswith("yes: ")
    assert by_name["dapo-math-7b"]["task"].startswith("Qwen2.5-Math-7B")
    assert by_name["dapo"]["task"] == ""


def test_list_tells_of_a_recipe_that_is_broken_and_shows_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "odd.toml").write_text("[recipe\n")
    catalog, errors = recipes._catalog()
    catalog |= {"odd": (tmp_path / "odd.toml", "odd_recipes/odd.toml")}
    monkeypatch.setattr(recipes, "_catalog", lambda: (catalog, errors))
    assert main(["recipes", "list"]) == 0
    printed = capsys.readouterr()
    assert "note: odd_recipes/odd.toml is not TOML" in printed.err
    assert "reinforce_pp_baseline" in printed.out


def test_show_prints_the_file_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "quickstart"]) == 0
    printed = capsys.readouterr().out
    assert 'base = "grpo"' in printed
    assert "# One token is one character" in printed


def test_show_resolved_is_a_recipe_with_every_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["recipes", "show", "quickstart", "--resolved", "--set", "lora.rank=8"]) == 0
    printed = capsys.readouterr().out
    sections = {name: table for name, table in tomllib.loads(printed).items() if name != "recipe"}
    assert {f"{section}.{key}" for section, table in sections.items() for key in table} == {
        name for name, key in keys().items() if key.kind != "object"
    }
    (tmp_path / "again.toml").write_text(printed)
    assert resolve(str(tmp_path / "again.toml")).config == resolve("quickstart", sets=["lora.rank=8"]).config


def test_show_as_json_gives_values_and_origins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "grpo", "--set", "train.lr=1e-5", "--json"]) == 0
    shown = printed_json(capsys)
    assert isinstance(shown, dict)
    assert shown["values"]["train.lr"] == 1e-5
    assert shown["origins"]["train.lr"] == "--set"
    assert shown["recipe"]["paper"].endswith("2402.03300")


def test_show_refuses_a_recipe_that_does_not_hold_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nlr = -1\n")
    assert main(["recipes", "show", str(tmp_path / "bad.toml")]) == 2
    assert "train.lr = -1 (recipe bad) must be a number > 0" in capsys.readouterr().err


def test_diff_prints_what_differs_and_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "diff", "grpo", "dapo"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["algorithm.clip_high"].split()[1:] == ['"unset"', "(default)", "0.28", "(recipe", "dapo)"]
    assert lines["train.warmup_steps"].split()[1:3] == ["0", "(default)"]
    assert "algorithm.clip_low" not in lines


def test_diff_as_json_holds_exactly_the_keys_that_differ(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('[recipe]\nbase = "dro"\n[algorithm.options]\nbeta = 2.0\n[algorithm]\nkl_coef = 0.0\n')
    assert main(["recipes", "diff", "grpo", str(mine), "--json"]) == 0
    shown = printed_json(capsys)
    assert isinstance(shown, dict)
    assert (shown["a"], shown["b"]) == ("grpo", str(mine))
    differences = {difference["key"]: (difference["a"], difference["b"]) for difference in shown["differences"]}
    assert differences["algorithm.options.beta"] == (None, {"value": 2.0, "origin": "recipe mine"})
    assert differences["algorithm.loss"] == (
        {"value": "ppo", "origin": "recipe grpo"},
        {"value": "dro", "origin": "recipe dro"},
    )
    a, b = resolve("grpo").values(), resolve(str(mine)).values()
    assert list(differences) == [key for key in b if key not in a or a[key] != b[key]]
    assert main(["recipes", "diff", str(mine), "grpo", "--json"]) == 0
    reversed_diff = printed_json(capsys)
    assert isinstance(reversed_diff, dict)
    assert {
        difference["key"]: (difference["b"], difference["a"]) for difference in reversed_diff["differences"]
    } == differences


def test_diff_of_equals_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "diff", "grpo", "grpo"]) == 0
    assert capsys.readouterr().out == "no key differs between grpo and grpo\n"
    assert main(["recipes", "diff", "grpo", "grpo", "--json"]) == 0
    assert printed_json(capsys) == {"a": "grpo", "b": "grpo", "differences": []}


@pytest.mark.parametrize("arguments", [["diff", "grpo", "dappo"], ["copy", "dappo"], ["show", "dappo"]])
def test_a_name_that_nobody_bears_is_one_line_with_those_near(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no recipe is called 'dappo'; did you mean dapo")


@pytest.mark.parametrize("name", ["vapo", "dapo-math-32b", "quickstart"])
def test_copy_writes_a_file_that_is_the_recipe(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", name]) == 0
    assert capsys.readouterr().out == f"wrote {name}.toml; train with it: rlcli train {name}.toml\n"
    assert [file.name for file in tmp_path.iterdir()] == [f"{name}.toml"]
    assert (tmp_path / f"{name}.toml").read_text() == resolve(name).recipe.text
    assert resolve(f"{name}.toml").config == resolve(name).config


def test_copy_gives_the_file_the_name_that_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"
    assert main(["recipes", "copy", "dapo", "--out", str(target), "--json"]) == 0
    assert printed_json(capsys) == {"recipe": "dapo", "file": str(target)}
    assert resolve(str(target)).recipe.header.name == "mine"
    assert main(["recipes", "diff", "dapo", str(target), "--json"]) == 0
    differences = printed_json(capsys)
    assert isinstance(differences, dict)
    assert differences["differences"] == []


def test_copy_of_a_file_that_starts_from_another_works_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.toml").write_text('[recipe]\nbase = "ppo"\n[train]\nlr = 1e-3\n')
    (tmp_path / "deep" / "b.toml").write_text('[recipe]\nbase = "../a.toml"\n[train]\nsteps = 3\n')
    assert main(["recipes", "copy", str(tmp_path / "deep" / "b.toml"), "--out", str(tmp_path / "c.toml")]) == 0
    config = resolve(str(tmp_path / "c.toml")).config
    assert (config.train.lr, config.train.steps, config.algorithm.advantage) == (1e-3, 3, "gae")


def test_copy_overwrites_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("# mine\n")
    (tmp_path / "link.toml").symlink_to("nowhere")
    (tmp_path / "folder.toml").mkdir()
    for name in ("mine.toml", "link.toml", "folder.toml"):
        assert main(["recipes", "copy", "dapo", "--out", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == f"error: {tmp_path / name} exists; name another file with --out\n"
    assert (tmp_path / "mine.toml").read_text() == "# mine\n"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("mine", "a recipe's file name must end in .toml; give"),
        ("absent/mine.toml", "cannot be written: No such file or directory; name another"),
    ],
)
def test_copy_refuses_a_place_in_one_line(
    target: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["recipes", "copy", "dapo", "--out", str(tmp_path / target)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not list(tmp_path.iterdir())


def test_explain_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "explain", "rollout.kv_cache_mb"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith('rollout.kv_cache_mb = "unset"  (a whole number ≥ 1, or unset)\n    KV cache of one')


def test_explain_everything_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "explain", "--json"]) == 0
    explained = printed_json(capsys)
    assert isinstance(explained, list)
    assert [key["name"] for key in explained] == list(keys())


@pytest.mark.parametrize(
    ("key", "some"),
    [
        ("algorithm.advantage", {"gae", "grpo", "win_rate"}),
        ("algorithm.loss", {"ppo", "gspo", "dpo"}),
        ("algorithm.aggregation", {"token-mean", "group-mean-token-mean"}),
        ("algorithm.kl_estimator", {"k1", "k3+"}),
        ("algorithm.correction", {"none", "token_tis"}),
        ("algorithm.select", {"all", "pairs", "right"}),
    ],
)
def test_explain_lists_the_functions_that_a_key_can_name(
    key: str, some: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "explain", key, "--json"]) == 0
    explained = printed_json(capsys)
    assert isinstance(explained, list)
    (shown,) = explained
    assert shown["name"] == key
    assert some <= {choice["name"] for choice in shown["choices"]}
    assert all(choice["text"] for choice in shown["choices"])
    assert main(["recipes", "explain", key]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{key} = ")
    assert [line.split()[0] for line in lines[2:]] == [choice["name"] for choice in shown["choices"]]


def test_explain_tells_which_functions_take_which_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "explain", "algorithm.options", "--json"]) == 0
    explained = printed_json(capsys)
    assert isinstance(explained, list)
    by_name = {choice["name"]: choice["options"] for choice in explained[0]["choices"]}
    assert by_name["loss = dro"] == {"beta": None}
    assert by_name["loss = sapo"] == {"tau_positive": 1.0, "tau_negative": 1.05}
    assert by_name["loss = kl_cov"] == {"cov_coef": 1.0, "cov_share": 2e-4}
    assert not {"loss = ppo", "advantage = gae", "advantage = grpo"} & set(by_name)
    assert not {"clip_low", "gamma", "lam", "scale"} & {name for options in by_name.values() for name in options}


def test_explain_one_number_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "explain", "algorithm.options.beta"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "algorithm.options.beta  (a number)"
    assert [row.split() for row in rows] == [
        ["advantage", "=", "prime", "beta", "=", "0.05"],
        ["loss", "=", "dpo", "beta", "=", "0.1"],
        ["loss", "=", "dro", "beta", "must", "be", "given"],
    ]
    assert main(["recipes", "explain", "algorithm.options.betta"]) == 2
    assert capsys.readouterr().err == "error: no function takes the number 'betta'; did you mean beta, eta?\n"


def test_explain_does_without_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm_choices, "missing", lambda *modules: list(modules))
    for key in ("algorithm.loss", "algorithm.options", "algorithm.options.beta"):
        assert main(["recipes", "explain", key]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2


@dataclass
class Result:
    score: float
    where: Path


def test_json_takes_dataclasses_and_paths_and_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    console.emit_json({"a": Result(float("nan"), Path("x/y")), "b": (1, float("inf")), "ü": "√"})
    text = capsys.readouterr().out
    assert "√" in text
    assert json.loads(text) == {"a": {"score": None, "where": "x/y"}, "b": [1, None], "ü": "√"}


def test_a_table_shows_markup_as_it_is_and_never_shortens_its_first_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "a-rather-long-name-of-a-thing"
    console.show(console.table(["name", "text"], [(name, "[bold]" + "word " * 40)]))
    printed = capsys.readouterr().out
    assert name in printed
    assert "[bold]word" in printed
