"""Keeps the classes of transformers as they are while vLLM builds a model of them.

For models that vLLM does not implement itself (OLMo, SmolLM3) it takes those of transformers, and changes the decoder's
class in place for torch.compile. A trainer in the same process uses that class, too, and its model would then fail at
the first pass. So vLLM's instances get a subclass with the changes, and the class gets back what it had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class _Before(NamedTuple):
    attributes: Mapping[str, object]
    bases: tuple[type, ...]


class BorrowedClasses:
    """with recorded() as borrowed: build the model
    borrowed.restore(model)"""

    def __init__(self) -> None:
        self._before: dict[type, _Before] = {}

    def decorating(self, decorate: Callable[..., None]) -> Callable[..., None]:
        """As vLLM's method `decorate`, whose classes this records."""

        def recording(model: object, cls: type, *args: object, **kwargs: object) -> None:
            self._before.setdefault(cls, _Before(dict(vars(cls)), cls.__bases__))
            decorate(model, cls, *args, **kwargs)

        return recording

    def restore(self, model: nn.Module | None) -> None:
        """Give the modules of vLLM's `model`, if there is one, separate classes, and restore the original classes."""
        for cls, original in self._before.items():
            changes = {name: value for name, value in vars(cls).items() if original.attributes.get(name) is not value}
            added = tuple(base for base in cls.__bases__ if base not in original.bases)
            modules = [module for module in (model.modules() if model is not None else ()) if type(module) is cls]
            cls.__bases__ = original.bases
            for name in changes:
                if name in original.attributes:
                    setattr(cls, name, original.attributes[name])
                else:
                    delattr(cls, name)
            identity = {
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
            }  # by which transformers knows it
            subclass = type(cls.__name__, (cls, *added), {**changes, **identity})
            for module in modules:
                module.__class__ = subclass
        self._before.clear()


@contextlib.contextmanager
def recorded() -> Iterator[BorrowedClasses]:
    borrowed = BorrowedClasses()
    try:
        from vllm.model_executor.models.transformers.base import Base
    except ImportError:  # another release: nothing is known of its classes
        yield borrowed
        return
    decorate = getattr(Base, "_decorate_cls_for_torch_compile", None)
    if decorate is None:
        yield borrowed
        return
    Base._decorate_cls_for_torch_compile = borrowed.decorating(decorate)
    try:
        yield borrowed
    except BaseException:
        borrowed.restore(None)
        raise
    finally:
        Base._decorate_cls_for_torch_compile = decorate
