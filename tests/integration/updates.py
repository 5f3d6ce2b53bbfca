"""Weights that change while an engine generates: log-probs compared with the models' own forward passes."""

from __future__ import annotations

import copy
from typing import Any

STEPS = 9
"""Engine steps before the weights change."""


def through_update(engine: Any, old: Any, prompts: list[Any], *, keep: bool, limit: int) -> dict[str, Any]:
    """Generate with `old`, then with other weights. Results by response: the number of tokens sampled before and after
    the change, and the largest error of a log-prob before, after, and after in responses started after the change."""
    import torch

    from rlcli.rollout.engine import GenerationRequest, Sampling
    from rlcli.rollout.in_flight import InFlight, RequestOutput

    new = copy.deepcopy(old)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    engine.load_weights((name, p.detach()) for name, p in old.named_parameters())
    flight, outputs = InFlight(engine), list[RequestOutput]()
    engine.begin(Sampling(1.0, limit))
    for key, prompt in enumerate(prompts):
        flight.add(GenerationRequest(key, prompt, seed=500 + key))
    for _ in range(STEPS):
        outputs += [flight.finished(output, 1) for output in engine.step()]
    flight.pause(1, keep=keep)
    engine.load_weights((name, p.detach()) for name, p in new.named_parameters())
    cached, _ = engine.probe(prompts[-1])
    if not keep:
        engine.begin(Sampling(1.0, limit))
    outputs += flight.resume()
    for key, prompt in enumerate(prompts, len(prompts)):
        flight.add(GenerationRequest(key, prompt, seed=500 + key))
    while engine.unfinished:
        outputs += [flight.finished(output, 2) for output in engine.step()]
    results: dict[str, Any] = {"before": {}, "after": {}, "begun_after": {}, "counts": {}, "cached": cached}
    for output in outputs:
        prompt = prompts[output.key % len(prompts)].tolist()
        ids, old_count = prompt + output.tokens.tolist(), sum(len(p.tokens) for p in output.parts if p.version == 1)
        old_part, new_part = output.log_probs[:old_count], output.log_probs[old_count:]
        results["counts"][output.key] = [old_count, len(new_part)]
        results["before"][output.key] = max_error(log_probs(old, ids, len(prompt))[:old_count], old_part)
        if output.key >= len(prompts):
            results["begun_after"][output.key] = max_error(log_probs(new, ids, len(prompt)), new_part)
        elif len(new_part):
            switch = len(prompt) + old_count - 1  # the last token sampled before is computed by the new weights
            expected = log_probs_on_old(old, new, ids, switch) if keep else log_probs(new, ids, len(prompt))[old_count:]
            results["after"][output.key] = max_error(expected, new_part)
    return results


def log_probs(model: Any, ids: list[int], start: int) -> Any:
    """Log-probs of the tokens from `start` on, each given all tokens before it: `[len(ids) - start]`."""
    import torch

    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return torch.stack([rows[position - 1, ids[position]] for position in range(start, len(ids))])


def log_probs_on_old(old: Any, new: Any, ids: list[int], switch: int) -> Any:
    """Log-probs of the tokens after `switch`, by the new weights, with keys and values that `old` computed up to it."""
    import torch

    with torch.no_grad():
        past = old(torch.tensor([ids[:switch]]), use_cache=True).past_key_values
        rows = new(torch.tensor([ids[switch:]]), past_key_values=past).logits[0].log_softmax(-1)
    return torch.stack([rows[position - 1 - switch, ids[position]] for position in range(switch + 1, len(ids))])


def max_error(expected: Any, actual: Any) -> float:
    import torch

    return float((expected - torch.tensor(actual)).abs().max()) if len(actual) else 0.0
