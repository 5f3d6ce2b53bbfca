"""Controllers: coefficients that are adjusted to a measurement at each step.

`coef` is the value to apply now. `update` takes the measurement of the step; `state` and `restore` save a controller in
a checkpoint. Without a target the coefficient is the configured one: neither measurements nor checkpoints change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class KlController:
    """Keeps the KL to the reference near `target`, in the units of the measurement. Ziegler et al., arXiv 1909.08593.

    coef ← coef · (1 + clip(kl / target − 1, −0.2, 0.2) · samples / horizon), where samples / horizon is capped at 1, so
    that no batch, however large, flips the sign.

    >>> controller = KlController(coef=0.1, target=2.0, horizon=100)
    >>> controller.update(3.0, samples=50)  # 1.5 times the target, clipped to +0.2, times 50 / 100
    >>> f"{controller.coef:.2f}"
    '0.11'
    """

    coef: float
    """β, the coefficient to apply now."""
    target: float | None = None
    """Target KL; None: the coefficient is fixed."""
    horizon: float = 10_000
    """Responses over which the coefficient adapts."""

    def update(self, measured: float, samples: int) -> None:
        """After a step of `samples` responses whose mean KL was `measured`."""
        if self.target is not None:
            error = min(max(measured / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * min(samples / self.horizon, 1.0)

    def state(self) -> dict[str, float]:
        """For `restore`, in a checkpoint."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from `state`; does nothing without a target."""
        if self.target is not None:
            self.coef = state["coef"]


def kl_controller(coef: float, target: float | None, *, kl_horizon: float = 10_000) -> KlController:
    """`KlController` with horizon = kl_horizon responses: the smaller, the faster the coefficient moves.

    >>> kl_controller(0.1, 2.0, kl_horizon=100).horizon
    100
    """
    return KlController(coef, target, kl_horizon)


@dataclass
class EntropyController:
    """Raises the entropy to `target` (nats a token) with an entropy bonus. Skywork-OR1, arXiv 2505.22312.

    A level c starts at `coef` and moves by `step`: up while the entropy is below the target, down while it is above,
    never below 0. The coefficient is c while the entropy is at most the target, else 0. (The paper starts at c = 0 and
    holds an entropy of 0.2 with steps of 0.005.)

    >>> controller = EntropyController(coef=0.0, target=0.2)
    >>> for entropy in (0.1, 0.15, 0.3, 0.2):
    ...     controller.update(entropy, samples=64)
    ...     print(controller.coef)
    0.005
    0.01
    0.0
    0.005
    """

    coef: float
    """The coefficient to apply now."""
    target: float | None = None
    """Target entropy in nats a token; None: the coefficient is fixed."""
    step: float = 0.005
    """Change of the level in each step."""
    level: float = field(init=False)
    """c, the coefficient while the entropy is at most the target."""

    def __post_init__(self) -> None:
        self.level = self.coef

    def update(self, measured: float, samples: int) -> None:
        """After a step of `samples` responses (any number counts the same) whose mean entropy was `measured`."""
        if self.target is None:
            return
        if measured < self.target:
            self.level += self.step
        elif measured > self.target:
            self.level = max(self.level - self.step, 0.0)
        self.coef = self.level if measured <= self.target else 0.0

    def state(self) -> dict[str, float]:
        """For `restore`, in a checkpoint."""
        return {"coef": self.coef, "level": self.level}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from `state`; does nothing without a target."""
        if self.target is not None:
            self.coef, self.level = state["coef"], state["level"]
