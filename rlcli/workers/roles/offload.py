"""Moves a worker's tensors between the device and host memory, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlcli.workers.backend import TrainingBackend

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlcli.model.parallel.offload import Offload


class OffloadManager:
    """Names: `policy`, `reference`, `critic`, and `policy.optimizer`, `critic.optimizer`; those that do not exist, or
    that train.offload does not move, are ignored. Without roles, nothing moves."""

    def __init__(self, offload: Offload | None = None, *, on_gpu: bool = False) -> None:
        self._offload = offload
        self._on_gpu = on_gpu

    @classmethod
    def of(cls, setting: str, device: torch.device, models: Mapping[str, TrainingBackend]) -> OffloadManager:
        """For built roles. setting: train.offload; on a CPU everything is in host memory anyway. models: by name."""
        from rlcli.model.parallel.offload import KINDS, Offload

        on_gpu = device.type == "cuda"
        offload = Offload(KINDS[setting if on_gpu else "none"], device)
        for name, model in models.items():
            model.register(offload, name)
        return cls(offload, on_gpu=on_gpu)

    @property
    def moves(self) -> bool:
        return self._offload is not None and bool(self._offload.names)

    def bring(self, *names: str, ahead: bool = False) -> None:
        """Move to the device, for the next computation; ahead: only for an optimizer's next step."""
        if self._offload is not None:
            self._offload.bring(*names, ahead=ahead)

    def send(self, *names: str) -> None:
        """Move to host memory; without names, everything."""
        if self._offload is not None:
            self._offload.send(*(names or self._offload.names))

    def copied(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU, wherever the tensor is."""
        assert self._offload is not None, "nothing is built"
        return self._offload.copied(tensor)

    def engine_takes_part(self, yes: bool) -> None:
        """Whether an engine uses memory of this GPU from here on: otherwise torch allocates its memory in another way
        (see `growing_segments`)."""
        if self._on_gpu:
            from rlcli.model.parallel.offload import growing_segments

            growing_segments(not yes)
