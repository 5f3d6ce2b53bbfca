"""Games that take and return text: gymnasium's interface, GEM and TextArena."""

from __future__ import annotations

import contextlib
import importlib
import random
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOCK = threading.Lock()
REFUSING_EVAL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "rlcli_sandbox" / "no_eval.py"))[
    "refusing_eval"
]


class _Game:
    """Games draw from the global generators of Python and numpy: each session has its own states, so that its seed
    alone decides what happens, whatever other sessions of the process do."""

    def __init__(self, **options: Any) -> None:
        self.options, self.states = options, (random.getstate(), None)

    @contextlib.contextmanager
    def own_random(self, seed: int | None = None) -> Iterator[None]:
        with LOCK:
            numpy = sys.modules.get("numpy")
            saved = random.getstate(), numpy.random.get_state() if numpy else None
            self._set(numpy, self.states)
            if seed is not None:
                random.seed(seed)
                if numpy:
                    numpy.random.seed(seed)
            try:
                yield
            finally:
                self.states = random.getstate(), numpy.random.get_state() if numpy else None
                self._set(numpy, saved)

    @staticmethod
    def _set(numpy: Any, states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        if numpy and states[1]:
            numpy.random.set_state(states[1])


class Gymnasium(_Game):
    """A game that takes and returns text, as gymnasium's do.

    make: `module:function` or `module:Class` that makes a game; it gets the other options. The game's `reset(seed)`
    returns an observation and infos, its `step(text)` an observation, reward, terminated, truncated and infos."""

    def __init__(self, make: str, **options: Any) -> None:
        super().__init__(**options)
        module, _, name = make.partition(":")
        self.make = getattr(importlib.import_module(module), name)

    def reset(self, row: Any, seed: int) -> Any:
        with self.own_random(seed % 2**32):
            self.game = self.make(**self.options)
            observation, info = self.game.reset(seed=seed % 2**32)
        system = [message for message in row.get("messages", ()) if message["role"] == "system"]
        return [*system, _user(observation, info)]

    def step(self, message: Any) -> Any:
        with self.own_random():
            observation, reward, terminated, truncated, info = self.game.step(message["content"])
        return [_user(observation, info)], float(reward), bool(terminated or truncated)

    def close(self) -> None:
        getattr(getattr(self, "game", None), "close", lambda: None)()


class Gem(Gymnasium):
    """A game or task of GEM (gem-llm).

    options: `env_id`, such as game:GuessTheNumber-v0-easy, and those of the game. A task of reasoning_gym (rg:…) whose
    scorer evaluates the answer as Python fails."""

    def __init__(self, **options: Any) -> None:
        importlib.import_module("gem.envs")  # registers the games
        super().__init__("gem:make", **options)

    def step(self, message: Any) -> Any:
        env_id = str(self.options.get("env_id", ""))
        if not env_id.startswith("rg:"):
            return super().step(message)
        with REFUSING_EVAL(f"the scorer of {env_id}"):
            return super().step(message)


class TextArena(_Game):
    """A game of TextArena, for one player.

    options: `env_id`, such as GuessTheNumber-v0, and those of the game. Its reward
    comes with the end."""

    def reset(self, row: Any, seed: int) -> Any:
        make = importlib.import_module("textarena").make
        options = {**self.options, "env_id": self.options["env_id"].removesuffix("-raw") + "-raw"}  # no whole history
        with self.own_random(seed % 2**32):
            self.game = make(**options)
            self.game.reset(num_players=1, seed=seed % 2**32)
        system = [message for message in row.get("messages", ()) if message["role"] == "system"]
        return [*system, *self._observed()]

    def step(self, message: Any) -> Any:
        with self.own_random():
            done, _ = self.game.step(message["content"])
        if not done:
            return self._observed(), 0.0, False
        rewards, infos = self.game.close()
        return [_user(infos[0].get("reason") or "", {})], float((rewards or {}).get(0, 0.0)), True

    def _observed(self) -> list[dict[str, str]]:
        _, events = self.game.get_observation()
        return [_user("\n".join(text for _, text, kind in events if kind.name != "PLAYER_ACTION"), {})]


def _user(observation: Any, info: Any) -> dict[str, str]:
    suffix = (info or {}).get("suffix", "")
    return {"role": "user", "content": f"{observation}\n{suffix}" if suffix else str(observation)}
