"""A checkpoint is copied before it is written only where the machine has room for the copy."""

from __future__ import annotations

import pytest
import torch

from rlcli.support.machine.free_memory import COPY_RESERVE
from rlcli.training.worker import state_writer
from rlcli.training.worker.state_writer import room_for_copy

MIB = 1 << 20


@pytest.mark.parametrize(
    ("free_mib", "workers", "room"), [(600, 1, True), (515, 1, False), (600, 2, False), (1040, 2, True)]
)
def test_a_copy_needs_room_and_a_reserve_for_each_worker(
    free_mib: int, workers: int, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert COPY_RESERVE == 512 * MIB
    monkeypatch.setattr(state_writer, "available_memory", lambda: free_mib * MIB)
    monkeypatch.setattr(state_writer, "process_limit", lambda: float("inf"))
    state = {"weight": torch.zeros(MIB), "step": torch.zeros(())}  # 4 MiB and a little
    assert room_for_copy(state, workers) == room


def test_a_limit_of_the_process_counts_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_writer, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(state_writer, "process_limit", lambda: float(1 << 40))
    assert room_for_copy({"weight": torch.zeros(MIB)}, 1)
    monkeypatch.setattr(state_writer, "process_limit", lambda: float(COPY_RESERVE + 8 * MIB))
    assert not room_for_copy({"weight": torch.zeros(MIB)}, 1), "torch alone takes more than 4 MiB"
