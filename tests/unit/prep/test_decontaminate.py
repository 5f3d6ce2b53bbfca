from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.prep.decontaminate import EvaluationSet, Match, Tokens, tokens_of
from tests.shared_data import shared_data

WORDS = ["apple", "bread", "candle", "door", "engine", "flower", "garden", "house", "island", "jacket", "kettle"]
INSTRUCTION = "Reason step by step, and end with the answer as a plain number after the four signs, like this: #### 42"


def texts(count: int, words: int, seed: int, instruction: str = INSTRUCTION) -> list[str]:
    rng = random.Random(seed)
    return [f"{' '.join(rng.choices(WORDS, k=words))} {rng.randrange(10**6)}\n\n{instruction}" for _ in range(count)]


def found(evaluation: list[str], trained: list[str], n: int = 13) -> list[Match | None]:
    evaluation_set = EvaluationSet(evaluation, n)
    return [evaluation_set.match(tokens) for tokens in tokens_of(trained)]


def test_an_instruction_in_common_makes_no_two_prompts_near() -> None:
    assert found(texts(5, 20, seed=0), texts(50, 20, seed=1)) == [None] * 50


def test_a_copy_is_found_under_another_instruction_case_and_spacing() -> None:
    evaluation = texts(5, 20, seed=0)
    copies = [text.replace(INSTRUCTION, "Think. Use \\boxed{}.").upper().replace(" ", "  ") for text in evaluation]
    matches = found(evaluation, [*copies, *texts(9, 20, 1, "THINK. USE \\BOXED{}.")])
    assert matches == [*(Match(i, 1.0) for i in range(5)), *[None] * 9]


def test_a_part_counts_as_the_share_of_the_evaluation_prompt_s_n_grams() -> None:
    words = [f"w{i}" for i in range(40)]
    evaluation = [" ".join(words), "something else entirely"]
    # The first 26 words hold 14 of its 28 n-grams of 13; twelve words hold none.
    trained = [" ".join(words[:26]) + " x", " ".join(words[:12]) + " x", "or nothing"]
    assert found(evaluation, trained) == [Match(0, 0.5), None, None]
    assert found(evaluation, trained, n=12)[1] == Match(0, 1 / 29)


def test_short_prompts_are_compared_whole_signs_included() -> None:
    evaluation = ["What is 2+2?", "Compute 3*4"]
    assert found(evaluation, ["What is 2-2?", "What is 2+2?", "What is 2+2+1?"]) == [None, Match(0, 1.0), None]


def test_prompts_that_are_a_prefix_of_all_others_are_not_equal() -> None:
    assert found(["What is 2", "What is 2 times 3"], ["Add", "Add 3 and 4"]) == [None, None]


def test_a_form_that_many_evaluation_prompts_share_is_no_question() -> None:
    form = "Using each of the following numbers at most once find an expression with the value that is asked for:"
    evaluation = [f"{i}. {form} {i} {i + 1} {i + 2}, never mind {i}" for i in range(20)]
    trained = [f"Do: {form} {i} {i + 1}, now" for i in range(100, 110)] + ["Another."]
    assert not any(found(evaluation, trained))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet="ab+ .", max_size=12), min_size=1, max_size=6))
def test_what_is_left_of_each_text_is_what_is_not_in_common(some: list[str]) -> None:
    every = tokens_of(some)
    assert [tokens.all for tokens in every] == [tokens_of([text])[0].all for text in some]
    distinct = {tokens.distinct for tokens in every}
    for tokens in every:
        start = tokens.all.index(tokens.distinct[0]) if tokens.distinct else 0
        assert len(tokens.distinct) <= len(tokens.all)
        assert start >= 0
    if len({tokens.all for tokens in every}) > 1:
        assert len(distinct) == len({tokens.all for tokens in every})  # no two become one
        assert len({key[:1] for key in distinct}) > 1
        assert len({key[-1:] for key in distinct}) > 1
    assert all(isinstance(tokens, Tokens) for tokens in every)


def test_of_gsm8k_as_published_two_train_rows_are_near_to_test_rows() -> None:
    import gzip
    import json

    rows = {
        split: [
            json.loads(line)["question"]
            for line in gzip.decompress((shared_data("gsm8k") / f"{split}.jsonl.gz").read_bytes()).splitlines()
        ]
        for split in ("train", "test")
    }
    near = [match for match in found(rows["test"], rows["train"]) if match and match.share >= 0.5]
    assert len(near) == 2
    assert not any(match.share == 1.0 for match in near)
