"""Changes by vLLM to a class that the trainer uses, too, affect vLLM's instances alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlcli.rollout.vllm.hooks.borrowed_classes import BorrowedClasses


class Compiled:
    compiled = "by the engine"


def decorate(model: Any, cls: type, *, is_encoder: bool) -> None:
    """As vLLM's decorator: another base, another `__init__` and `__call__`, a mark."""
    if Compiled in cls.__bases__:
        return
    old = cls.__init__  # type: ignore[misc]

    def __init__(self: Any, config: str = "vLLM's") -> None:
        assert config, "no configuration is set"
        old(self)
        self.config = config

    def __call__(self: Any, x: int) -> int:
        return int(self.forward(x)) + len(self.config)

    cls.__bases__ += (Compiled,)
    cls.__init__, cls.__call__, cls.mark = __init__, __call__, is_encoder  # type: ignore[misc, attr-defined, method-assign]


def test_the_trainers_instances_keep_what_they_had() -> None:
    class Layers(nn.Module):
        def forward(self, x: int) -> int:
            return x + 1

    initial, mine = dict(vars(Layers)), Layers()
    borrowed = BorrowedClasses()
    noting = borrowed.decorating(decorate)
    noting(object(), cls=Layers, is_encoder=True)
    noting(object(), cls=Layers, is_encoder=True)
    theirs = Layers()
    borrowed.restore(nn.Sequential(theirs))

    assert dict(vars(Layers)) == initial
    assert Layers.__bases__ == (nn.Module,)
    assert mine(1) == Layers()(1) == 2
    assert not hasattr(mine, "mark")
    assert isinstance(theirs, Layers)
    assert isinstance(theirs, Compiled)
    assert theirs(1) == 2 + len("vLLM's")
    assert type(theirs).__name__ == "Layers"
    assert theirs.mark is True


def test_nothing_happens_where_no_class_is_borrowed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    BorrowedClasses().restore(model)
    assert type(model[0]) is nn.Linear
