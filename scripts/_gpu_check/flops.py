"""Operations of a step, for model FLOPs utilisation (MFU): those that the model needs, not those that were run.

Let a step have groups g of samples s that share a prompt of p_g tokens, with responses of r_gs tokens, and the model L
layers of weight matrices with M elements in all, query heads of width Q together, and a head of V × H. One forward
pass over the step takes

    F = 2 M T  +  2 V H R  +  4 L Q A

    T = Σ_g (p_g + Σ_s r_gs)                                   tokens: a prompt is needed once for its samples
    R = Σ_gs r_gs                                              predicted tokens: the head is needed for them alone
    A = Σ_g (p_g (p_g + 1) / 2 + Σ_s (r_gs p_g + r_gs (r_gs + 1) / 2))     (query, key) pairs under a causal mask

2 operations (a product and a sum) for each element of a matrix and token: Kaplan et al. 2020 (arXiv:2001.08361, §2.1).
Attention takes 2 Q for a pair's score and 2 Q for its value, in each layer: Dao 2023 (arXiv:2307.08691, §4.1), whose
half for causality is A here. A backward pass is twice a forward pass, so an **update is 3 F**. Generation is one
forward pass over the same tokens, so a **step is 4 F**. MFU is that over seconds and the device's peak of dense
bfloat16 operations: Chowdhery et al. 2022 (arXiv:2204.02311, appendix B).

Not counted, so that it lowers the figure: what is worked out again (logits in the backward pass, activation
checkpointing, attention in its backward pass), norms, activations, softmax, embedding look-ups, the optimizer, and a
prompt that is forwarded again for another of its samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlcli_planner.model_shape import ModelShape

UPDATE, STEP = 3, 4
"""Forward passes that an update and a whole step are worth."""


def forward_flops(shape: ModelShape, prompt: int, responses: Sequence[Sequence[int]]) -> float:
    """F: operations of one forward pass. prompt: tokens of every prompt; responses: `[prompts][samples]`, tokens."""
    groups, predicted = len(responses), sum(map(sum, responses))
    tokens = groups * prompt + predicted
    pairs = groups * prompt * (prompt + 1) / 2 + sum(r * prompt + r * (r + 1) / 2 for group in responses for r in group)
    matrices = 2 * shape.matrix_parameters * tokens + 2 * shape.embedding_parameters * predicted
    return matrices + 4 * shape.layers * shape.query * pairs


def utilisation(flops: float, seconds: float, peak: float) -> float:
    """The share of `peak` operations a second that `flops` in `seconds` are."""
    return flops / seconds / peak
