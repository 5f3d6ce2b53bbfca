"""The samples of one worker, as columns: stored in Ray's object store, where other workers read rows zero-copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SampleShard:
    """Rows of prompt and response tokens, flat.

    tokens: int32 `[all tokens]`, row after row, each prompt then response. offsets: int64 `[rows + 1]` into it.
    prompt_lengths: int32 `[rows]`. log_probs: float32 `[all response tokens]`, as the engine reported them.
    log_prob_offsets: int64 `[rows + 1]` into those.

    >>> import numpy as np
    >>> builder = ShardBuilder()
    >>> builder.add(np.array([1, 2], np.int32), np.array([7], np.int32), np.array([-0.5], np.float32))
    0
    >>> tokens, prompt_length, log_probs = builder.build().row(0)
    >>> tokens.tolist(), prompt_length, log_probs.tolist()
    ([1, 2, 7], 2, [-0.5])
    """

    tokens: Any
    offsets: Any
    prompt_lengths: Any
    log_probs: Any
    log_prob_offsets: Any

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def row(self, index: int) -> tuple[Any, int, Any]:
        """(tokens of prompt and response, length of the prompt, engine log-probs of the response), as views."""
        tokens = self.tokens[self.offsets[index] : self.offsets[index + 1]]
        log_probs = self.log_probs[self.log_prob_offsets[index] : self.log_prob_offsets[index + 1]]
        return tokens, int(self.prompt_lengths[index]), log_probs


@dataclass
class ShardBuilder:
    """Collects rows as they finish."""

    _tokens: list[Any] = field(default_factory=list)
    _prompt_lengths: list[int] = field(default_factory=list)
    _log_probs: list[Any] = field(default_factory=list)

    def add(self, prompt: Any, response: Any, log_probs: Any) -> int:
        """Append one response; returns its row."""
        assert len(response) == len(log_probs), "a log-prob for each response token"
        self._tokens += [prompt, response]
        self._prompt_lengths.append(len(prompt))
        self._log_probs.append(log_probs)
        return len(self._prompt_lengths) - 1

    def build(self) -> SampleShard:
        import numpy as np

        lengths = [len(a) + len(b) for a, b in zip(self._tokens[::2], self._tokens[1::2], strict=True)]
        return SampleShard(
            tokens=np.concatenate(self._tokens) if self._tokens else np.zeros(0, np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            prompt_lengths=np.asarray(self._prompt_lengths, dtype=np.int32),
            log_probs=np.concatenate(self._log_probs) if self._log_probs else np.zeros(0, np.float32),
            log_prob_offsets=np.concatenate([[0], np.cumsum([len(x) for x in self._log_probs], dtype=np.int64)]).astype(
                np.int64
            ),
        )
