"""Where a worker's tensors are in each phase: on the device, or in host memory while others need it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlcli.model.offload import Offload


class Residence:
    """Names: `policy`, `reference`, `critic`, and `policy.optimizer`, `critic.optimizer`; those that are not there, or
    that train.offload leaves where they are, are ignored. Without roles, nothing moves."""

    def __init__(self, offload: Offload | None = None, *, on_gpu: bool = False) -> None:
        self._offload = offload
        self._on_gpu = on_gpu

    @classmethod
    def of(cls, setting: str, device: torch.device, trained: dict[str, tuple[Any, Any]], reference: Any) -> Residence:
        """Of roles that are built. setting: train.offload; on a CPU all is in host memory as it is. trained: name →
        model and optimizer. reference: the reference model, or None."""
        from rlcli.model.offload import KINDS, Offload

        on_gpu = device.type == "cuda"
        offload = Offload(KINDS[setting if on_gpu else "none"], device)
        for name, (model, optimizer) in trained.items():
            offload.add(name, model, optimizer)
        if reference is not None:
            offload.add("reference", reference)
        return cls(offload, on_gpu=on_gpu)

    @property
    def moves(self) -> bool:
        return self._offload is not None and bool(self._offload.names)

    def bring(self, *names: str, ahead: bool = False) -> None:
        """To the device, for what is computed next; ahead: for an optimizer's next step alone."""
        if self._offload is not None:
            self._offload.bring(*names, ahead=ahead)

    def send(self, *names: str) -> None:
        """To host memory; without names, everything."""
        if self._offload is not None:
            self._offload.send(*(names or self._offload.names))

    def copied(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU, wherever it is."""
        assert self._offload is not None, "nothing is built"
        return self._offload.copied(tensor)

    def engine_takes_part(self, yes: bool) -> None:
        """Whether an engine holds memory of this GPU from here on: torch takes its own in another way where none
        does (see `growing_segments`)."""
        if self._on_gpu:
            from rlcli.model.offload import growing_segments

            growing_segments(not yes)
