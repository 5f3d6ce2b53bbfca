"""Clients of OpenEnv servers (openenv)."""

from __future__ import annotations

import importlib
import json
from typing import Any


class OpenEnv:
    """A running server of OpenEnv.

    base_url: of a running server. action: the field of its action that takes the policy's text. observation: the
    field of its observation that is shown; without one, all of them as JSON. tools: the server's tools (MCP) are the
    policy's, and a turn without a call ends the conversation. reset: further arguments of the server's `reset`."""

    def __init__(
        self, base_url: str, action: str = "message", observation: str = "", tools: bool = False, reset: Any = None
    ) -> None:
        self.client = importlib.import_module("openenv.core").GenericEnvClient(base_url=base_url)
        self.action, self.observation, self.tools, self.given = action, observation, tools, reset or {}

    async def reset(self, row: Any, seed: int) -> Any:
        await self.client.connect()
        shown = self._shown(await self.client.reset(seed=seed % 2**31, **self.given))
        messages = list(row.get("messages") or ())
        if not self.tools:
            system = [message for message in messages if message["role"] == "system"]
            return [*system, {"role": "user", "content": shown}]
        listed = (await self.client.step({"type": "list_tools"})).observation["tools"]
        return messages or [{"role": "user", "content": shown}], [_schema(tool) for tool in listed]

    async def step(self, message: Any) -> Any:
        if not self.tools:
            result = await self.client.step({self.action: message["content"]})
            return [{"role": "user", "content": self._shown(result)}], float(result.reward or 0.0), bool(result.done)
        calls, answers, reward, done, failed = message.get("tool_calls") or [], [], 0.0, False, 0
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            result = await self.client.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
            reward, done = reward + float(result.reward or 0.0), done or bool(result.done)
            error, value = result.observation.get("error"), result.observation.get("result")
            failed += bool(error)
            value = value.get("data", value) if isinstance(value, dict) else value
            text = f"error: {error['message']}" if error else value if isinstance(value, str) else json.dumps(value)
            answers.append({"role": "tool", "name": name, "tool_call_id": call["id"], "content": text})
        return answers, reward, done or not calls, {"tool_calls": len(calls), "failed_calls": failed}

    async def close(self) -> None:
        await self.client.close()

    def _shown(self, result: Any) -> str:
        observation = result.observation
        observation = observation[self.observation] if self.observation else observation
        return observation if isinstance(observation, str) else json.dumps(observation)


def _schema(tool: Any) -> dict[str, Any]:
    described = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": described}
