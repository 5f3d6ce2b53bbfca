"""The decode batch of the engine `transformers`: how many responses sample their next token at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rlcli.rollout import decode_batch
from rlcli.rollout.decode_batch import DecodeBatch, Row

VOCABULARY = 1 << 20


@pytest.mark.parametrize(("device", "draws"), [("cpu", [4, 4, 2]), ("cuda", [10])])
def test_a_gpu_draws_for_more_responses_at_once(device: str, draws: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def drawn(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        counted.append(len(logits))
        return torch.arange(len(logits)) + 100 * len(counted), torch.zeros(len(logits))

    monkeypatch.setattr(decode_batch, "_sampled_tokens", drawn)
    rows = [Row(key, [1], seed=0, temperature=1.0, top_p=1.0, max_tokens=1) for key in range(10)]
    DecodeBatch(None, torch.device(device))._sample(torch.zeros(1, 1).expand(10, VOCABULARY), rows)
    assert counted == draws
    assert [row.tokens for row in rows] == [[100 * (part + 1) + i] for part, n in enumerate(draws) for i in range(n)]
