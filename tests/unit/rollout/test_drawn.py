"""Requests of an engine whose weights change: the tokens that are kept, and the order in which they continue."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlcli.data.trajectories import Trajectory
from rlcli.rollout.engine import Generation, GenerationRequest
from rlcli.rollout.in_flight import InFlight


class Engine:
    """Draws the numbers of steps. finished: what it has finished, and returns at the next step."""

    def __init__(self) -> None:
        self.running: dict[int, list[int]] = {}
        self.added: list[GenerationRequest] = []
        self.finished: list[Generation] = []
        self.steps = 0

    def add(self, request: GenerationRequest) -> None:
        self.added.append(request)
        self.running[request.key] = []

    def step(self, *ends: int) -> list[Generation]:
        self.steps += 1
        for tokens in self.running.values():
            tokens.append(self.steps)
        generations, self.finished = [*self.finished, *(self._of(key, "stop") for key in ends)], []
        for key in ends:
            del self.running[key]
        return generations

    def peek(self) -> list[Generation]:
        return [*self.finished, *(self._of(key, None) for key in self.running)]

    def abort(self) -> list[Generation]:
        generations = self.peek()
        self.running.clear()
        self.finished.clear()
        return generations

    def _of(self, key: int, reason: Any) -> Generation:
        tokens = np.array(self.running[key], np.int32)
        return Generation(key, tokens, -tokens.astype(np.float32), reason)


def request(key: int, prefix: list[int] | None = None) -> GenerationRequest:
    return GenerationRequest(
        key, np.zeros(2, np.int32), key, response_prefix=None if prefix is None else np.array(prefix, np.int32)
    )


def flight_of(*requests: GenerationRequest) -> tuple[InFlight, Any]:
    engine: Any = Engine()
    flight = InFlight(engine)
    for pending in requests:
        flight.add(pending)
    return flight, engine


def parts_of(response: Any) -> list[tuple[list[int], int]]:
    return [(part.tokens.tolist(), part.version) for part in response.parts]


def test_what_is_paused_goes_on_from_all_its_tokens_in_the_order_of_keys() -> None:
    flight, engine = flight_of(request(3), request(1, prefix=[70]))
    engine.step()
    flight.pause(1)
    assert engine.running == {}
    assert flight.resume() == []
    assert [(generation.key, generation.response_prefix.tolist()) for generation in engine.added[2:]] == [
        (1, [70, 1]),
        (3, [1]),
    ]
    engine.step()
    flight.pause(2)
    flight.resume()
    (generation,) = engine.step(1)
    assert parts_of(response := flight.finished(generation, 3)) == [([1], 1), ([2], 2), ([3], 3)]
    assert response.tokens.tolist() == [1, 2, 3] == (-response.log_probs).tolist()
    assert flight.tokens == 5
    assert list(flight.so_far()) == [3]


def test_what_is_kept_is_returned_once_and_counted_once() -> None:
    flight, engine = flight_of(request(0))
    for version in (1, 2):
        engine.step()
        flight.pause(version, keep=True)
        flight.pause(version, keep=True)
    assert len(engine.added) == 1
    (generation,) = engine.step(0)
    assert parts_of(flight.finished(generation, 3)) == [([1], 1), ([2], 2), ([3], 3)]
    assert flight.tokens == 3


def test_a_response_that_ended_unseen_is_not_continued() -> None:
    for keep in (True, False):
        flight, engine = flight_of(request(0), request(1))
        engine.finished = engine.step(0)
        flight.pause(1, keep=keep)
        prompt = Trajectory.of_prompt(np.zeros(2, np.int32))
        if keep:  # so a checkpoint has it
            assert flight.so_far()[0].appended_to(prompt).stop_reason == "stop"
            assert flight.so_far()[1].appended_to(prompt).stop_reason is None
            flight.pause(1)
        (ended,) = flight.resume()
        assert (ended.key, ended.finish_reason, parts_of(ended)) == (0, "stop", [([1], 1)])
        assert [generation.key for generation in engine.added[2:]] == [1]
