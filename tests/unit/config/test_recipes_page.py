"""The overrides that scripts/bench/quickstart_recipes.py prints are accepted by each recipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlcli.config.load import resolve

ROOT = Path(__file__).parents[3]


def settings() -> str:
    script = ROOT / "scripts" / "bench" / "quickstart_recipes.py"
    return subprocess.run(
        [sys.executable, str(script), "--settings"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def test_each_recipe_takes_the_overrides_of_the_benchmark() -> None:
    (_, for_all), *rows = [line.strip("| ").split(" | ") for line in settings().splitlines()[2:]]
    assert len(rows) > 15
    for recipe, overrides in rows:
        sets = [text.strip("`") for text in f"{for_all}, {overrides}".split("`, `")]
        config = resolve(recipe.strip("`"), {"train.steps": 60}, sets).config
        samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        assert samples == 256 or recipe == "`sft`"
        assert samples % (2 * config.train.minibatches) == 0
