"""verl's tools (`BaseTool`) and interactions (`BaseInteraction`)."""

from __future__ import annotations

import importlib
import json
import uuid
from typing import Any


class VerlTools:
    """Tools of verl (`BaseTool`).

    config: the yaml file of tools that verl's `multi_turn.tool_config_path` takes. The row gives what a tool is
    created with in `extra_info.tools_kwargs.NAME.create_kwargs`, as in verl; the ground truth is there by default.

    A turn's reward is what its calls of `execute` gave, and the change of `calc_reward`: their sum is all of the
    former and the last of the latter, also where a limit ends the conversation."""

    def __init__(self, config: str) -> None:
        try:
            registry = importlib.import_module("verl.tools.tool_registry")
        except ModuleNotFoundError:  # before verl 0.8
            registry = importlib.import_module("verl.tools.utils.tool_registry")
        self.tools = {tool.name: tool for tool in registry.initialize_tools_from_config(config)}
        self.session, self.reward = str(uuid.uuid4()), 0.0

    async def reset(self, row: Any, seed: int) -> Any:
        self.given = (row.get("extra_info") or {}).get("tools_kwargs") or {}
        for name, tool in self.tools.items():
            create_kwargs = {
                "ground_truth": row.get("ground_truth"),
                **self.given.get(name, {}).get("create_kwargs", {}),
            }
            await tool.create(self.session, create_kwargs=create_kwargs)
        schemas = [tool.get_openai_tool_schema() for tool in self.tools.values()]
        return list(row["messages"]), [schema.model_dump(exclude_unset=True, exclude_none=True) for schema in schemas]

    async def step(self, message: Any) -> Any:
        calls, answers, reward, failed = message.get("tool_calls") or [], [], 0.0, 0
        for call in calls:
            name = call["function"]["name"]
            try:
                execute_kwargs = self.given.get(name, {}).get("execute_kwargs", {})
                response, earned, _ = await self.tools[name].execute(
                    self.session, call["function"]["arguments"], **execute_kwargs
                )
                content, reward = _content(response), reward + float(earned or 0.0)
            except Exception as error:
                content = f"error: there is no tool {name}" if name not in self.tools else f"error: {error!r}"
                failed += 1
            answers.append({"role": "tool", "name": name, "tool_call_id": call["id"], "content": content})
        for call in message.get("invalid_tool_calls") or []:
            content = f"error: {call['error']}"
            answers.append({"role": "tool", "name": "tool", "tool_call_id": call["id"], "content": content})
        previous_reward = self.reward
        self.reward = sum([float(await tool.calc_reward(self.session) or 0.0) for tool in self.tools.values()])
        info = {"tool_calls": len(calls), "failed_calls": failed}
        return answers, reward + self.reward - previous_reward, not answers, info

    async def close(self) -> None:
        for tool in self.tools.values():
            await tool.release(self.session)


def _content(response: Any) -> Any:
    """A tool's response as a message's content: of parts if it has images."""
    text, images = getattr(response, "text", response) or "", getattr(response, "image", None) or []
    if not images:
        return text
    return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]


class VerlInteraction:
    """An interaction of verl (`BaseInteraction`).

    interaction: `module:Class`. config: its config. The row gives what it starts with in
    `extra_info.interaction_kwargs`, as in verl; the ground truth is there by default. Each turn has its own score."""

    def __init__(self, interaction: str, config: Any = None) -> None:
        module, _, name = interaction.partition(":")
        self.interaction = getattr(importlib.import_module(module), name)(config or {})
        self.session = str(uuid.uuid4())

    async def reset(self, row: Any, seed: int) -> Any:
        interaction_kwargs = (row.get("extra_info") or {}).get("interaction_kwargs") or {}
        self.given = {"ground_truth": row.get("ground_truth"), **interaction_kwargs}
        self.messages = list(row["messages"])
        await self.interaction.start_interaction(self.session, **self.given)
        return self.messages

    async def step(self, message: Any) -> Any:
        self.messages = [*self.messages, message]
        done, text, score, info = await self.interaction.generate_response(self.session, self.messages, **self.given)
        self.messages = [*self.messages, {"role": "user", "content": text}]
        return self.messages[-1:], float(score), bool(done), json.loads(json.dumps(info, default=str))

    async def close(self) -> None:
        await self.interaction.finalize_interaction(self.session)
