"""Routes: the experts that an engine chose for tokens, `[tokens, layers, experts per token]` uint8 or uint16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcli.errors import RunFailed

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import UInt

    Routes = UInt[np.ndarray, "tokens layers k"]


def route_type(experts: int) -> type[np.unsignedinteger]:
    """The dtype of routes over this many experts: its largest value stands for an unknown one.

    >>> route_type(128), route_type(256)
    (<class 'numpy.uint8'>, <class 'numpy.uint16'>)
    """
    import numpy as np

    return np.uint8 if experts <= np.iinfo(np.uint8).max else np.uint16


def check_routes(routes: np.ndarray, layers: int, experts_per_token: int, experts: int) -> None:
    """Raise `RunFailed` unless the routes have the model's layers, experts per token and experts: others would be
    replayed in part, or through other experts."""
    import numpy as np

    others = routes[routes != np.iinfo(routes.dtype).max] if routes.ndim == 3 else routes
    if routes.shape[1:] != (layers, experts_per_token) or (others >= experts).any():
        largest = f", up to expert {others.max()}" if others.size else ""
        raise RunFailed(
            f"the engine recorded routes [tokens, {', '.join(map(str, routes.shape[1:]))}]{largest}: the model has "
            f"{layers} layers of {experts} experts, and {experts_per_token} of them for a token",
            "leave rollout.replay_routes out, or use a release of vLLM that rlcli supports (rlcli doctor)",
        )


def unknown(tokens: int, like: Routes) -> Routes:
    """Routes of `tokens` tokens whose experts are unknown, with the shape and dtype of `like`."""
    import numpy as np

    routes: np.ndarray = np.full((tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)
    return routes


def padded(routes: Routes, tokens: int) -> Routes:
    """Routes of the first `tokens` tokens, with unknown ones appended if there are fewer."""
    import numpy as np

    padded_routes: np.ndarray = np.concatenate([routes[:tokens], unknown(max(0, tokens - len(routes)), routes)])
    return padded_routes


def continued(earlier: Routes | None, continuation: Routes | None) -> Routes | None:
    """Merge routes of a sequence with routes of its continuation. Where `earlier` knows a token's experts, they are
    kept: they generated it.

    >>> import numpy as np
    >>> earlier, later = np.array([[[1]], [[255]]], np.uint8), np.array([[[7]], [[2]], [[3]]], np.uint8)
    >>> continued(earlier, later).ravel().tolist()
    [1, 2, 3]
    """
    import numpy as np

    if earlier is None or continuation is None:
        return continuation if earlier is None else earlier
    tokens = max(len(earlier), len(continuation))
    first, second = padded(earlier, tokens), padded(continuation, tokens)
    known = (first != np.iinfo(first.dtype).max).any(axis=(1, 2), keepdims=True)
    routes: np.ndarray = np.where(known, first, second)
    return routes
