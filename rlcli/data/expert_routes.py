"""Routes: the experts that an engine chose for tokens, `[tokens, layers, chosen]` uint8 or uint16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcli.errors import RunFailed

if TYPE_CHECKING:
    import numpy as np


def route_type(experts: int) -> Any:
    """The dtype of routes over so many experts: its largest value stands for an unknown one.

    >>> route_type(128), route_type(256)
    (<class 'numpy.uint8'>, <class 'numpy.uint16'>)
    """
    import numpy as np

    return np.uint8 if experts <= np.iinfo(np.uint8).max else np.uint16


def check_routes(routes: np.ndarray, layers: int, chosen: int, experts: int) -> None:
    """Raise `RunFailed` unless these are routes through so many layers, of so many experts each, of which so many are
    chosen for a token: others would be replayed in part, or through other experts."""
    import numpy as np

    others = routes[routes != np.iinfo(routes.dtype).max] if routes.ndim == 3 else routes
    if routes.shape[1:] != (layers, chosen) or (others >= experts).any():
        largest = f", up to expert {others.max()}" if others.size else ""
        raise RunFailed(
            f"the engine recorded routes [tokens, {', '.join(map(str, routes.shape[1:]))}]{largest}: the model has "
            f"{layers} layers of {experts} experts, and {chosen} of them for a token",
            "leave rollout.replay_routes out, or use a release of vLLM that rlcli supports (rlcli doctor)",
        )


def unknown(tokens: int, like: np.ndarray) -> np.ndarray:
    """Routes of so many tokens that nothing is known of."""
    import numpy as np

    routes: np.ndarray = np.full((tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)
    return routes


def padded(routes: np.ndarray, tokens: int) -> np.ndarray:
    """Routes of so many tokens: the first ones, or with unknown ones at the end."""
    import numpy as np

    whole: np.ndarray = np.concatenate([routes[:tokens], unknown(max(0, tokens - len(routes)), routes)])
    return whole


def continued(before: np.ndarray | None, after: np.ndarray | None) -> np.ndarray | None:
    """Routes of the same tokens and others that follow: a token of which `before` knows them was drawn with them.

    >>> import numpy as np
    >>> before, after = np.array([[[1]], [[255]]], np.uint8), np.array([[[7]], [[2]], [[3]]], np.uint8)
    >>> continued(before, after).ravel().tolist()
    [1, 2, 3]
    """
    import numpy as np

    if before is None or after is None:
        return after if before is None else before
    tokens = max(len(before), len(after))
    first, second = padded(before, tokens), padded(after, tokens)
    known = (first != np.iinfo(first.dtype).max).any(axis=(1, 2), keepdims=True)
    routes: np.ndarray = np.where(known, first, second)
    return routes
