"""Copies between host and device: many tensors in one, pinned memory, and nothing else on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcli.model.device_copies import download, upload
from rlcli.model.parallel import host_memory
from rlcli.model.parallel.host_memory import HostMemory
from rlcli.model.parallel.offload import KINDS, Offload
from rlcli.model.parallel.weight_delta import LastSent, WeightCopy
from rlcli.training.worker.weight_sync.weight_transfer import packed, unpacked
from tests.pretend_gpu import DEVICE, OnGpu, PretendGpu

CPU = torch.device("cpu")


def tensors() -> list[torch.Tensor]:
    """Of several types and odd sizes; one is empty."""
    return [
        torch.arange(7),
        torch.rand(3, 5),
        torch.tensor([True, False, True]),
        torch.zeros(0),
        torch.rand(5).to(torch.bfloat16),
        torch.arange(12, dtype=torch.int16).view(3, 4).t(),
    ]


def test_many_tensors_go_to_a_gpu_in_one_copy_without_a_wait() -> None:
    sources = tensors()
    with PretendGpu() as gpu:
        uploaded = upload(sources, DEVICE)
        assert not gpu.waits
        back = download(uploaded)
        assert [wait.kind for wait in gpu.waits] == ["download"]
    for on_gpu, downloaded, expected in zip(uploaded, back, sources, strict=True):
        assert isinstance(on_gpu, OnGpu)
        assert torch.equal(on_gpu.host, expected)
        assert torch.equal(downloaded, expected)
        assert downloaded.dtype == expected.dtype


def test_more_than_fits_into_one_copy_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcli.model.device_copies.STAGED_BYTES", 40)
    sources = tensors()
    with PretendGpu() as gpu:
        uploaded = upload(sources, DEVICE)
        assert not gpu.waits
    for on_gpu, expected in zip(uploaded, sources, strict=True):
        assert isinstance(on_gpu, OnGpu)
        assert torch.equal(on_gpu.host, expected)


def test_on_a_cpu_nothing_is_copied() -> None:
    sources = tensors()
    assert all(tensor is other for tensor, other in zip(upload(sources, CPU), sources, strict=True))
    assert all(tensor is other for tensor, other in zip(download(sources), sources, strict=True))


def test_blocks_are_used_again_and_never_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 4096)
    memory = HostMemory(pinned=False)
    for _ in range(2):
        blocks = [memory.take_whole(size) for size in (100, 3000, 1500, 9000, 0, 700)] + memory.take(6000)
        for number, block in enumerate(blocks):
            block.fill_(number)
        assert [len(block) for block in blocks[:6]] == [100, 3000, 1500, 9000, 0, 700]
        assert sum(len(block) for block in blocks[6:]) == 6000
        assert all(bool((block == number).all()) for number, block in enumerate(blocks))
        addresses = [block.data_ptr() for block in blocks]
        memory.reuse()
    reused = [memory.take_whole(size) for size in (100, 3000, 1500, 9000, 0, 700)] + memory.take(6000)
    assert [block.data_ptr() for block in reused] == addresses


def test_a_checkpoints_copy_is_in_pinned_memory_that_stays() -> None:
    with PretendGpu() as gpu:
        offload = Offload(KINDS["none"], DEVICE)
        weights = [torch.rand(3, 5, device=DEVICE), torch.arange(4, device=DEVICE)]
        addresses = []
        for _ in range(2):
            offload.forget_copies()
            copies = [offload.copied(weight) for weight in weights]
            assert all(map(gpu.is_pinned, copies))
            addresses.append([tensor.data_ptr() for tensor in copies])
            for copy, weight in zip(copies, weights, strict=True):
                assert isinstance(weight, OnGpu)
                assert torch.equal(copy, weight.host)
                weight.add_(1)
        assert addresses[0] == addresses[1]


def test_copies_for_a_sync_of_changes_are_in_pinned_memory() -> None:
    with PretendGpu() as gpu:
        last, copy = LastSent(), WeightCopy()
        weights = [("a", torch.rand(40, 5, device=DEVICE)), ("b", torch.rand(3, device=DEVICE))]
        for changed in (200, 1, 200):
            for bucket in last.changes(weights, torch.float32):
                copy.take(bucket)
            assert last.changed == changed + 3 * (changed > 1)
            assert not copy.differences(last.sent())
            received = dict(copy.named())
            for name, weight in weights:
                assert isinstance(weight, OnGpu)
                assert torch.equal(received[name], weight.host)
            assert all(map(gpu.is_pinned, [*last._parts.values(), *received.values()]))
            with torch.no_grad():
                if changed == 200:
                    weights[0][1][7, 3] += 1
                else:
                    [weight.add_(1) for _, weight in weights]


def test_a_bucket_for_the_object_store_passes_through_pinned_memory(tmp_path: Path) -> None:
    with PretendGpu() as gpu:
        memory = HostMemory()
        bucket = [("a", torch.rand(5, 3, device=DEVICE)), ("b", torch.arange(3, device=DEVICE))]
        header, values = packed(bucket, CPU, memory)
        assert gpu.is_pinned(values)
        for (name, received), (expected, tensor) in zip(unpacked(header, values), bucket, strict=True):
            assert name == expected
            assert isinstance(tensor, OnGpu)
            assert torch.equal(received, tensor.host)
        assert packed(bucket, CPU, memory)[1].data_ptr() == values.data_ptr()
