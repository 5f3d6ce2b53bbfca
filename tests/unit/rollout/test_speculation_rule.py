"""Acceptance of drafts: a request gets the sampled tokens, up to the first that differs from its draft."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlcli.errors import SetupError
from rlcli.rollout.sampling import SEED, draw_keys, draw_keys_of, gumbel_argmax
from rlcli.rollout.vllm.hooks import speculation
from rlcli.rollout.vllm.hooks.speculation import accepted, install, settings

DRAWS = 40_000


def by_loops(samples: list[int], drafts: list[int], rows: list[int]) -> list[list[int]]:
    expected, row, draft = [], 0, 0
    for count in rows:
        tokens: list[int] = []
        for offset in range(count):
            tokens.append(samples[row + offset])
            if offset == count - 1 or samples[row + offset] != drafts[draft + offset]:
                break
        expected.append(tokens + [-1] * (max(rows) - len(tokens)))
        row, draft = row + count, draft + count - 1
    return expected


def test_a_request_gets_what_was_drawn_up_to_the_first_wrong_draft() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        rows = random.integers(1, 7, random.integers(1, 6)).tolist()
        samples = random.integers(0, 3, sum(rows))
        drafts = random.integers(0, 3, sum(rows) - len(rows))
        tokens, positions = accepted(torch.from_numpy(samples), torch.from_numpy(drafts.astype(np.int32)), rows)
        assert tokens.tolist() == by_loops(samples.tolist(), drafts.tolist(), rows)
        assert torch.from_numpy(samples)[positions][tokens >= 0].equal(tokens[tokens >= 0])


@pytest.mark.parametrize("draft", [0, 3])
def test_pairs_of_tokens_follow_the_distribution_whatever_is_drafted(draft: int) -> None:
    """χ² of both tokens of requests whose first one is drafted. The second one's logits are those after the draft, and
    count only if it is kept."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.5, 0.0, 1.5, 1.0]])
    seeds = np.arange(DRAWS).repeat(2)
    keys = torch.from_numpy(draw_keys(seeds, np.tile([7, 8], DRAWS)))
    samples = gumbel_argmax(logits.repeat(DRAWS, 1), keys)
    tokens, _ = accepted(samples, torch.full((DRAWS,), draft), [2] * DRAWS)
    first, second = logits.double().softmax(-1)
    counts, expected = tokens[:, 0].bincount(minlength=4).double(), first * DRAWS
    assert float(((counts - expected) ** 2 / expected).sum()) < 3 + 5 * 6**0.5
    accepted_draft = tokens[:, 0] == draft
    assert (tokens[~accepted_draft, 1] == -1).all()
    counts, expected = tokens[accepted_draft, 1].bincount(minlength=4).double(), second * float(accepted_draft.sum())
    assert float(((counts - expected) ** 2 / expected).sum()) < 3 + 5 * 6**0.5


def test_each_draft_has_the_key_of_its_position() -> None:
    def request(seed: int | None) -> SimpleNamespace:
        return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None if seed is None else {SEED: seed}))

    batch = SimpleNamespace(req_ids=["a", "b", "c"], num_tokens_no_spec=np.array([10, 20, 30, 99]))
    runner = SimpleNamespace(input_batch=batch, requests={"a": request(1), "b": request(None), "c": request(3)})
    keys = draw_keys_of(runner, 3, [3, 1, 2])
    expected = draw_keys(np.array([1, 1, 1, 0, 3, 3]), np.array([10, 11, 12, 20, 30, 31]))
    assert keys is not None
    assert keys.tolist() == expected.tolist()
    assert draw_keys_of(runner, 2) is None


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(3)["speculative_config"]["num_speculative_tokens"] == 3
    assert not install(SimpleNamespace())
    monkeypatch.setattr(speculation, "SUPPORTED", ((0, 1), (0, 2)))
    with pytest.raises(SetupError, match=r"rollout.speculate = 3: .* is installed"):
        settings(3)
