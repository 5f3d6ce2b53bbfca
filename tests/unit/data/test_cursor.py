from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.data.prompts.cursor import PromptCursor
from rlcli.errors import DataError

counts = st.integers(1, 30)
seeds = st.integers(0, 2**63)
takes = st.lists(st.integers(0, 40), max_size=12)


@given(count=counts, seed=seeds, shuffle=st.booleans(), sizes=takes)
def test_each_epoch_holds_each_index_once_however_batches_fall(
    count: int, seed: int, shuffle: bool, sizes: list[int]
) -> None:
    cursor = PromptCursor(count, seed, shuffle)
    batches = [cursor.take(n) for n in sizes]
    assert [len(batch) for batch in batches] == sizes
    walk = [index for batch in batches for index in batch]
    for start in range(0, len(walk), count):
        epoch = walk[start : start + count]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(count))
        if not shuffle:
            assert epoch == list(range(len(epoch)))


@given(count=counts, seed=seeds, sizes=takes, following=st.integers(1, 70))
def test_a_restored_cursor_goes_on_exactly(count: int, seed: int, sizes: list[int], following: int) -> None:
    cursor = PromptCursor(count, seed, shuffle=True)
    for n in sizes:
        cursor.take(n)
    state = json.loads(json.dumps(cursor.state()))
    assert PromptCursor(count, 0, shuffle=False).restored(state).take(following) == cursor.take(following)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    cursor = PromptCursor(50, seed=0, shuffle=True)
    first, second = cursor.take(50), cursor.take(50)
    assert first != second
    assert PromptCursor(50, seed=1, shuffle=True).take(50) != first


def test_global_random_state_is_neither_read_nor_changed() -> None:
    random.seed(1)
    np.random.seed(1)
    initial_states = random.getstate(), np.random.get_state()[1].tolist()
    first = PromptCursor(50, seed=0, shuffle=True).take(75)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == initial_states
    random.seed(2)
    np.random.seed(2)
    assert PromptCursor(50, seed=0, shuffle=True).take(75) == first


def test_another_dataset_than_the_saved_one_is_refused() -> None:
    state = PromptCursor(50, seed=0, shuffle=True).state()
    with pytest.raises(DataError, match="began on 50 prompts and the dataset now has 49"):
        PromptCursor(49, seed=0, shuffle=True).restored(state)
