"""Weights that change while an engine generates: what each token was drawn with, by the models' own forward passes."""

from __future__ import annotations

import copy
from typing import Any

STEPS = 9
"""Of the engine before its weights change."""


def through_update(engine: Any, old: Any, prompts: list[Any], *, keep: bool, limit: int) -> dict[str, Any]:
    """Generate with `old`, then with other weights: of each response how many tokens were drawn before, and the largest
    difference of a log-prob from what it should be, before and after; and that of responses that were begun after."""
    import torch

    from rlcli.rollout.engine import GenerationRequest, Sampling
    from rlcli.rollout.in_flight import InFlight, PolicyResponse

    new = copy.deepcopy(old)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    engine.load_weights((name, p.detach()) for name, p in old.named_parameters())
    flight, drawn = InFlight(engine), list[PolicyResponse]()
    engine.begin(Sampling(1.0, limit))
    for key, prompt in enumerate(prompts):
        flight.add(GenerationRequest(key, prompt, seed=500 + key))
    for _ in range(STEPS):
        drawn += [flight.finished(one, 1) for one in engine.step()]
    flight.pause(1, keep=keep)
    engine.load_weights((name, p.detach()) for name, p in new.named_parameters())
    cached, _ = engine.probe(prompts[-1])
    if not keep:
        engine.begin(Sampling(1.0, limit))
    drawn += flight.resume()
    for key, prompt in enumerate(prompts, len(prompts)):
        flight.add(GenerationRequest(key, prompt, seed=500 + key))
    while engine.unfinished:
        drawn += [flight.finished(one, 2) for one in engine.step()]
    found: dict[str, Any] = {"before": {}, "after": {}, "begun_after": {}, "counts": {}, "cached": cached}
    for one in drawn:
        prompt = prompts[one.key % len(prompts)].tolist()
        ids, at = prompt + one.tokens.tolist(), sum(len(p.tokens) for p in one.parts if p.version == 1)
        first, rest = one.log_probs[:at], one.log_probs[at:]
        found["counts"][one.key] = [at, len(rest)]
        found["before"][one.key] = differs(log_probs(old, ids, len(prompt))[:at], first)
        if one.key >= len(prompts):
            found["begun_after"][one.key] = differs(log_probs(new, ids, len(prompt)), rest)
        elif len(rest):
            switch = len(prompt) + at - 1  # the last token drawn before is computed by the new weights
            made = log_probs_on_old(old, new, ids, switch) if keep else log_probs(new, ids, len(prompt))[at:]
            found["after"][one.key] = differs(made, rest)
    return found


def log_probs(model: Any, ids: list[int], start: int) -> Any:
    """Of the tokens from `start` on, each after all before it: `[len(ids) - start]`."""
    import torch

    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return torch.stack([rows[place - 1, ids[place]] for place in range(start, len(ids))])


def log_probs_on_old(old: Any, new: Any, ids: list[int], switch: int) -> Any:
    """Of the tokens behind `switch`, by the new weights on keys and values that the old ones computed before it."""
    import torch

    with torch.no_grad():
        past = old(torch.tensor([ids[:switch]]), use_cache=True).past_key_values
        rows = new(torch.tensor([ids[switch:]]), past_key_values=past).logits[0].log_softmax(-1)
    return torch.stack([rows[place - 1 - switch, ids[place]] for place in range(switch + 1, len(ids))])


def differs(made: Any, found: Any) -> float:
    import torch

    return float((made - torch.tensor(found)).abs().max()) if len(found) else 0.0
