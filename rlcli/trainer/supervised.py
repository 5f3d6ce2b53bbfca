"""Responses that the dataset gives, in the place of sampled ones: the batches of supervised training."""

from __future__ import annotations

from typing import Any

from rlcli.data.cursor import PromptCursor
from rlcli.data.mixture import MixedCursor
from rlcli.data.prompts import TokenizedPrompts
from rlcli.data.shard import ShardBuilder
from rlcli.data.table import set_of
from rlcli.trainer.collect import Collected
from rlcli.trainer.groups import Group
from rlcli.types import Outcome, Sample, Verdict
from rlcli.workers.samples import Samples

IMITATED = Verdict(score=1.0, outcome=Outcome.OK, detail="given by the dataset")


class SupervisedSource:
    """Batches of given responses, in the form that `collect` returns: one sample a prompt, each right by definition.

    prompts: tokenized with their responses. cursor: over them; the caller keeps it in checkpoints. waiting: never
    anything.
    """

    def __init__(self, prompts: TokenizedPrompts, cursor: PromptCursor | MixedCursor, prompts_per_step: int) -> None:
        assert cursor.count == len(prompts), "a cursor over other prompts"
        self.prompts = prompts
        self.cursor = cursor
        self.prompts_per_step = prompts_per_step
        self.waiting: list[Group] = []

    def take(self, step: int) -> Collected:
        """The samples of step `step`, in the order of the cursor, which alone decides them.

        Their tokens lie in one shard in Ray's object store. No engine generated them, so the shard's log-probs are
        zeros, which nothing may compare with the policy's, and no time went into generation or verification.
        """
        import numpy as np

        builder, samples, sources = ShardBuilder(), [], []
        for position, index in enumerate(self.cursor.take(self.prompts_per_step)):
            prompt, response = self.prompts.tokens(index), self.prompts.responses(index)
            self.cursor.account(index, len(prompt) + len(response))
            sources.append(set_of(self.prompts.prompts, index))
            samples.append(
                Sample(
                    prompt=position,
                    sample=0,
                    shard=0,
                    row=builder.add(prompt, response, np.zeros(len(response), np.float32)),
                    prompt_tokens=len(prompt),
                    response_tokens=len(response),
                    finish_reason="stop",
                    verdict=IMITATED,
                    version=0,
                )
            )
        return Collected(Samples.of(samples), [_put(builder.build())], generate_s=0.0, verify_s=0.0, sources=sources)


def _put(shard: Any) -> Any:
    import ray

    return ray.put(shard)
