"""The recipes of conversations open one on a row of the data that they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcli.config import recipes
from rlcli.config.load import resolve
from rlcli.data.prompts.chat_template import stop_tokens
from rlcli.environments.environment_pool import Environments, name_of
from rlcli.launch.environment_checks import numbered_rows
from rlcli.types import Prompt
from tests.chat_templates import HERMES, tokenizer_with

NAMES = [
    name
    for name in recipes.names()
    if "environment.name" in recipes.load(name).values and not name.startswith("quickstart")
]
"""The recipes of the quickstart have a separate tokenizer and test."""
TRUTHS = {
    "countdown-feedback": json.dumps({"numbers": [3, 5, 7], "target": 36}),
    "code-repair": json.dumps({"kind": "asserts", "asserts": ["assert twice(2) == 4"]}),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(HERMES)


def test_there_is_one_of_each_built_in_environment() -> None:
    environment_names = {recipes.load(name).values["environment.name"] for name in NAMES}
    assert environment_names == {"calculator", "code_repair", "countdown", "guess_number", "python", "search"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_opens_a_conversation(name: str, tokenizer: Any, tmp_path: Path) -> None:
    """`check` lets the chat template append to it, too, as a run does before it starts."""
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "text": "Lima"}\n')
    options = [f"environment.options.corpus={tmp_path / 'corpus.jsonl'}"] if name == "search" else []
    config = resolve(name, {}, options).config
    row = Prompt("toy:0", ({"role": "user", "content": "Go."},), "toy", "", "gsm8k", TRUTHS.get(name, "4"))
    prompt = row if config.data.path else numbered_rows(config)[0]
    environment = name_of(config.environment, prompt)
    stops = stop_tokens(tokenizer, str(tmp_path), ())
    with Environments(config, [environment], tokenizer, stops) as environments:
        environments.check({environment: prompt})


@pytest.mark.parametrize("name", NAMES)
def test_the_limits_of_a_recipe_fit_together(name: str) -> None:
    """All turns have room for their tokens, and a turn for what it asks the environment to do."""
    config = resolve(name).config
    section = config.environment
    assert section.turn_tokens is not None
    assert section.turn_tokens < config.rollout.max_response_tokens <= section.turns * section.turn_tokens
    assert config.max_length <= config.train.tokens_per_microbatch
    scores_itself = section.name in ("guess_number", "countdown", "code_repair")
    assert config.verifier.name == ("environment" if scores_itself and config.data.path else "auto")
