"""Measures the rates of this machine in one process, in about two seconds, and prints them as JSON.

    python -P -m rlcli_planner.machine.measure_rates cpu bfloat16

Each figure is the fastest of several calls, since other work only makes calls slower.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from rlcli_planner.machine.machine_rates import Rates

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

WIDTHS = {"cpu": (128, 384, 768, 1536), "cuda": (512, 1536, 4096)}
ROWS = (1, 8, 32, 128, 512)
TOKENS = {"cpu": (1024, 1024, 512, 256), "cuda": (8192, 8192, 8192)}
"""Tokens of the pass through a layer, for each width."""
LENGTH = 64
"""Tokens of a sample in it."""
CALLS, PIECE_S = 5, 0.15
"""Calls of a piece at most, after one that warms up, and seconds after which no further one begins: on a busy machine
each takes many times as long."""
CHAIN = 50
"""Small operations of a call."""


class Clock:
    """Times calls on a device."""

    def __init__(self, device: str) -> None:
        import torch

        self.wait: Callable[[], None] = torch.accelerator.synchronize if device == "cuda" else lambda: None
        self.alone = device == "cpu" and torch.get_num_threads() == 1

    def fastest(self, work: Callable[[], object]) -> float:
        """Seconds of the fastest of a few calls."""
        seconds: list[float] = []
        work()
        until = time.perf_counter() + PIECE_S
        while len(seconds) < CALLS and (not seconds or time.perf_counter() < until):
            self.wait()
            began, used = time.perf_counter(), time.process_time()
            work()
            self.wait()
            elapsed, busy = time.perf_counter() - began, time.process_time() - used
            # One thread's CPU time is what it takes on a machine that nothing else uses.
            seconds.append(min(elapsed, busy) if self.alone else elapsed)
        return min(seconds)


class Layer:
    """A decoder layer of a Llama as the trainer computes it: norms in float32, rotation, attention, a gated unit."""

    def __init__(self, width: int, tokens: int, dtype: torch.dtype, device: str) -> None:
        import torch

        self.tokens, self.dtype, self.head = tokens, dtype, 32 if width < 256 else 64
        inner = width * 8 // 3 // 64 * 64
        shapes = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]
        self.weights = [torch.randn(shape, dtype=dtype, device=device).mul_(0.02).requires_grad_() for shape in shapes]
        self.scales = [torch.ones(width, dtype=dtype, device=device).requires_grad_() for _ in range(2)]
        self.angles = torch.randn(tokens, 1, self.head, dtype=dtype, device=device)
        self.input = torch.randn(tokens, width, dtype=dtype, device=device).requires_grad_()
        self.gradient = torch.randn(tokens, width, dtype=dtype, device=device)
        self.operations = 2 * tokens * sum(weight.numel() for weight in self.weights)
        """Of a forward pass."""

    def forward(self) -> Float[Tensor, "T H"]:
        import torch
        import torch.nn.functional as F

        query, key, value, output, gate, up, down = self.weights
        normed = self._norm(self.input, self.scales[0])
        heads = [F.linear(normed, weight).view(self.tokens, -1, self.head) for weight in (query, key, value)]
        heads = [self._rotated(heads[0]), self._rotated(heads[1]), heads[2]]
        queries, keys, values = (part.view(-1, LENGTH, *part.shape[1:]).transpose(1, 2) for part in heads)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2)
        residual = self.input + F.linear(attended.reshape(self.tokens, -1), output)
        normed = self._norm(residual, self.scales[1])
        result = residual + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)
        assert isinstance(result, torch.Tensor)
        return result

    def forward_backward(self) -> None:
        """Forward and backward pass."""
        self.forward().backward(self.gradient)
        for tensor in (*self.weights, *self.scales, self.input):
            tensor.grad = None

    def _norm(self, hidden: Float[Tensor, "T H"], scale: Float[Tensor, " H"]) -> Float[Tensor, "T H"]:
        import torch

        exact = hidden.float()
        return scale * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)).to(self.dtype)

    def _rotated(self, heads: Float[Tensor, "T heads head_dim"]) -> Float[Tensor, "T heads head_dim"]:
        import torch

        half = self.head // 2
        return heads * self.angles + torch.cat((-heads[..., half:], heads[..., :half]), -1) * self.angles


def measure(device: str, dtype: str) -> Rates:
    """The rates of this process's device. device: `cpu` or `cuda`."""
    import torch

    clock, torch_dtype = Clock(device), getattr(torch, dtype)
    widths = WIDTHS[device]
    training, forward = [], []
    for width, tokens in zip(widths, TOKENS[device], strict=True):
        layer = Layer(width, tokens, torch_dtype, device)
        training.append(3 * layer.operations / clock.fastest(layer.forward_backward))
        with torch.no_grad():
            forward.append(layer.operations / clock.fastest(layer.forward))
    products = [_products(clock, width, torch_dtype, device) for width in widths]
    return Rates(
        widths=widths,
        training=tuple(training),
        forward=tuple(forward),
        rows=ROWS,
        products=tuple(products),
        read_rate=_read_rate(clock, device),
        update_rate=_update_rate(clock, device),
        operation_s=_operation(clock, device),
        draw_s=_draw(clock),
        softmax_s=_softmax(clock, device),
        python_s=_python(clock),
        measured=time.time(),
    )


def _products(clock: Clock, width: int, dtype: torch.dtype, device: str) -> tuple[float, ...]:
    import torch
    from torch.nn.functional import linear

    weight = torch.randn(width * 8 // 3, width, dtype=dtype, device=device)
    rates = []
    with torch.no_grad():
        for rows in ROWS:
            inputs = torch.randn(rows, width, dtype=dtype, device=device)
            rates.append(2 * rows * weight.numel() / clock.fastest(lambda inputs=inputs: linear(inputs, weight)))  # type: ignore[misc]
    return tuple(rates)


def _read_rate(clock: Clock, device: str) -> float:
    import torch

    size = (32 << 20) if device == "cpu" else (1 << 30)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / clock.fastest(lambda: target.copy_(source))


def _update_rate(clock: Clock, device: str) -> float:
    import torch

    parameter = torch.randn((4 << 20) if device == "cpu" else (64 << 20), device=device)
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    return float(parameter.numel()) / clock.fastest(optimizer.step)


def _operation(clock: Clock, device: str) -> float:
    import torch

    weight, value = torch.eye(128, device=device), torch.ones(16, 128, device=device)

    def work() -> None:
        result = value
        for _ in range(CHAIN):
            result = torch.nn.functional.linear(result, weight)

    with torch.no_grad():
        return clock.fastest(work) / CHAIN


def _draw(clock: Clock) -> float:
    import torch

    from rlcli.rollout.sampling import gumbel_argmax

    logits, keys = torch.randn(8, 16384), torch.arange(8)

    def work() -> None:
        log_probs = logits.log_softmax(-1)
        tokens = gumbel_argmax(logits, keys)[:, None]
        (log_probs >= log_probs.gather(-1, tokens)).sum(-1)

    return clock.fastest(work) / float(logits.numel())


def _softmax(clock: Clock, device: str) -> float:
    import torch

    logits = torch.randn((512, 4096) if device == "cpu" else (2048, 32768), device=device)
    buffer = torch.empty_like(logits)

    def work() -> None:
        buffer.copy_(logits).sub_(buffer.amax(-1, keepdim=True)).exp_().sum(-1)
        buffer.copy_(logits).sub_(1.0).exp_().mul_(0.5)

    return clock.fastest(work) / float(logits.numel())


def _python(clock: Clock) -> float:
    def work() -> None:
        counts: dict[int, int] = {}
        for number in range(1000):
            counts[number % 97] = counts.get(number % 89, 0) + number

    return clock.fastest(work)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(*sys.argv[1:3]))))
