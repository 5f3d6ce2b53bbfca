"""SkyRL's text environments (skyrl-gym)."""

from __future__ import annotations

import importlib
from typing import Any


class SkyRLGym:
    """A text environment of SkyRL (skyrl-gym).

    env_id: of skyrl_gym's registry, such as gsm8k_multi_turn. config: its `env_config`. extras: further fields of
    its `extras`, beside those of the row (`reward_spec`, `data_source`, `extra_info`)."""

    def __init__(self, env_id: str, config: Any = None, extras: Any = None) -> None:
        self.env_id, self.config, self.extras = env_id, config or {}, extras or {}

    def reset(self, row: Any, seed: int) -> Any:
        extra_info = row.get("extra_info") or {}
        spec = {"method": "rule", "ground_truth": row.get("ground_truth", "")}
        extras = {
            "reward_spec": spec,
            "data_source": row.get("data_source", ""),
            "extra_info": extra_info,
            **self.extras,
        }
        make = importlib.import_module("skyrl_gym").make
        self.environment = make(self.env_id, env_config=self.config, extras=extras)
        messages, _ = self.environment.init(list(row["messages"]))
        return messages

    def step(self, message: Any) -> Any:
        output = self.environment.step(message["content"])
        return output["observations"], float(output["reward"] or 0.0), output["done"], self.environment.get_metrics()

    def close(self) -> None:
        self.environment.close()
