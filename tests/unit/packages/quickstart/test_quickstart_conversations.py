from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rlcli_quickstart.conversation_lessons import Conversations, demonstrations, tokenizer_of
from rlcli_quickstart.conversation_tasks import Calculating, Guessing, products
from rlcli_quickstart.warm_start import warm_start

from rlcli.config.load import resolve
from rlcli.environments.template_contract import Agreement, check
from rlcli.launch.environment_checks import numbered_rows
from rlcli.types import Prompt

TOOLS = resolve("quickstart-tools").config
GUESS = resolve("quickstart-guess").config


def rows_of_products(count: int) -> list[Prompt]:
    return [replace(prompt, id=f"product:{i}") for i, prompt in enumerate(products(0)["train"][:count])]


def played(calls: float, uses: float) -> list[tuple[str, str]]:
    """Conversations of the player with the calculator: the whole text, and what the policy wrote of it."""
    rows, player, rng = rows_of_products(12), Calculating(calls, uses), random.Random(0)
    tokenizer = tokenizer_of(TOOLS, rows, player, rng)
    conversations = demonstrations(TOOLS, tokenizer, rows, player, rng)
    return [
        (tokenizer.decode(ids), tokenizer.decode([i for i in labels if i != -100])) for ids, labels in conversations
    ]


def test_products_have_six_digits_and_the_splits_no_pair_in_common() -> None:
    splits = products(3)
    pairs = {
        name: [tuple(map(int, p.messages[0]["content"].removesuffix("=").split("*"))) for p in rows]
        for name, rows in splits.items()
    }
    assert (len(pairs["train"]), len(pairs["test"])) == (4096, 256)
    assert {len(prompt.ground_truth) for rows in splits.values() for prompt in rows} == {6}
    assert all(int(p.ground_truth) == a * b for p, (a, b) in zip(splits["test"], pairs["test"], strict=True))
    assert not {frozenset(pair) for pair in pairs["train"]} & {frozenset(pair) for pair in pairs["test"]}
    assert products(3) == splits
    assert products(4) != splits


def test_who_calls_gets_the_product_and_is_trained_on_its_own_tokens_alone() -> None:
    form = re.compile(
        r"<\|system\|>calculate\(expression\)<\|user\|>(\d+)\*(\d+)=<\|assistant\|>"
        r'(<tool_call>{"name": "calculate", "arguments": {"expression": "\1\*\2"}}</tool_call><eos>)'
        r"<\|tool\|>(\d{6})<\|assistant\|>(#### (\d+)<eos>)"
    )
    for uses in (1.0, 0.0):
        for text, generated in played(1.0, uses):
            match = form.fullmatch(text)
            assert match
            assert int(match[4]) == int(match[1]) * int(match[2])
            assert generated == match[3] + match[5]
            assert (match[6] == match[4]) == bool(uses)


def test_who_does_not_call_is_wrong_but_near() -> None:
    for text, generated in played(0.0, 1.0):
        a, b, estimate = map(int, re.findall(r"\d+", text))
        assert generated == f"#### {estimate}<eos>"
        assert 0.5 * a * b < estimate < a * b


def test_words_are_tokens_digits_stay_single_and_the_template_appends() -> None:
    tokenizer = tokenizer_of(TOOLS, rows_of_products(12), Calculating(1.0, 1.0), random.Random(0))
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "693*422"}}</tool_call>'
    tokens = tokenizer.tokenize(call)
    assert len(tokens) < 30
    assert {"calculate", "arguments", "expression"} <= set(tokens)
    assert [token for token in tokens if token.isdigit()] == list("693422")
    assert {boundary.agreement for boundary in check(tokenizer, [tokenizer.eos_token_id])} == {Agreement.EXACT}


@pytest.mark.parametrize("halves", [0.0, 0.5, 1.0])
def test_a_guesser_keeps_to_what_it_was_answered(halves: float) -> None:
    rows, player, rng = numbered_rows(GUESS)[:24], Guessing(1, 16, halves), random.Random(0)
    tokenizer = tokenizer_of(GUESS, rows[:12], player, rng)
    won = 0
    for ids, labels in demonstrations(GUESS, tokenizer, rows, player, rng):
        generated = tokenizer.decode([i for i in labels if i != -100])
        guesses = [int(guess) for guess in generated.split("<eos>")[:-1]]
        answers = re.findall(r"Higher\.|Lower\.", tokenizer.decode(ids))
        assert 1 <= len(guesses) <= 5
        for index, (guess, answer) in enumerate(zip(guesses, answers, strict=False)):
            assert all((next_guess > guess) == (answer == "Higher.") for next_guess in guesses[index + 1 :])
        won += len(answers) < len(guesses) and len(guesses) <= 5
        if not halves:
            assert guesses == list(range(1, len(guesses) + 1))
    if halves == 1.0:
        assert won == len(rows)


@pytest.mark.long
def test_the_warm_start_of_a_task_is_kept_and_depends_on_the_player(tmp_path: Path) -> None:
    rows = rows_of_products(8)

    def made(player: Calculating, seed: int = 0) -> str:
        return warm_start(tmp_path, Conversations(TOOLS, rows, player), seed, steps=1).path.name

    first = made(Calculating())
    assert made(Calculating()) == first
    assert len({first, made(Calculating(calls=0.9)), made(Calculating(), seed=1)}) == 3
