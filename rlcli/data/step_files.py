"""What a step's folder holds beside its samples: their advantages, and the tokens of some of them.

A sample's row in `rank-R.parquet` and its rows here have the same (saved_step, group, sample): `saved_step` is the
step of the folder that holds the row. It is an earlier one than `step`, the step that trained on the sample, if the
sample waited for it (`dynamic_sampling`, `rollout.oversample`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from rlcli.data.trajectories import Trajectory

ADVANTAGES = "advantages.parquet"
TOKENS = "tokens-{rank}.parquet"


@dataclass(frozen=True)
class RecordedSample:
    """A sample whose tokens are recorded. place: among the step's selected samples. prompt_id, saved_step, group,
    sample: of its saved row. forwarded: whether the step computes anything for its tokens; no if its advantage is 0 and
    the loss has no other term."""

    place: int
    prompt_id: str
    saved_step: int
    group: int
    sample: int
    forwarded: bool


@dataclass(frozen=True)
class Recording:
    """What the workers record of step `step`. path: of their tokens' files, with `{rank}` in it. tokenizer: folder or
    hub id of what gives the tokens' texts. samples: those whose tokens are recorded."""

    step: int
    path: str
    tokenizer: str
    samples: Sequence[RecordedSample]


@dataclass(frozen=True)
class TokenValues:
    """Values of the D drawn tokens of a sample, in their order: float32 `[D]`, or None if not computed."""

    trainer_log_probs: np.ndarray | None = None
    entropy: np.ndarray | None = None
    advantages: np.ndarray | None = None


@cache
def advantages_schema() -> Any:
    import pyarrow as pa

    whole, number = pa.int64(), pa.float64()
    return pa.schema(
        [
            ("step", whole),
            ("prompt_id", pa.string()),
            ("saved_step", whole),
            ("group", whole),
            ("sample", whole),
            ("advantage", number),
            ("reward", number),
            ("left_out", pa.string()),
        ]
    )


@cache
def tokens_schema() -> Any:
    import pyarrow as pa

    whole, number = pa.int64(), pa.list_(pa.float32())
    return pa.schema(
        [
            ("step", whole),
            ("prompt_id", pa.string()),
            ("saved_step", whole),
            ("group", whole),
            ("sample", whole),
            ("ids", pa.list_(pa.int32())),
            ("text", pa.list_(pa.string())),
            ("drawn", pa.list_(pa.bool_())),
            ("engine_log_prob", number),
            ("trainer_log_prob", number),
            ("entropy", number),
            ("advantage", number),
            ("version", pa.list_(pa.int32())),
        ]
    )


def advantages_table(
    step: int,
    prompt_ids: Sequence[str],
    saved_steps: np.ndarray,
    groups: np.ndarray,
    samples: np.ndarray,
    advantages: np.ndarray,
    rewards: np.ndarray,
    left_out: Sequence[str | None],
) -> Any:
    """A row for each sample of the step's batch. advantages, rewards: float64, NaN where there is none."""
    import numpy as np
    import pyarrow as pa

    columns = [
        np.full(len(prompt_ids), step),
        list(prompt_ids),
        saved_steps,
        groups,
        samples,
        pa.array(advantages, from_pandas=True),
        pa.array(rewards, from_pandas=True),
        list(left_out),
    ]
    schema = advantages_schema()
    return pa.table([pa.array(c, type=t) for c, t in zip(columns, schema.types, strict=True)], schema=schema)


def tokens_row(
    step: int, sample: RecordedSample, whole: Trajectory, text: Sequence[str], values: TokenValues
) -> dict[str, Any]:
    """The row of one sample. text: of each of its tokens."""
    import numpy as np

    drawn = whole.drawn
    versions = np.full(len(drawn), np.nan)
    for span in whole.spans:
        if span.speaker == "policy" and span.version is not None:
            versions[span.start : span.end] = span.version

    def spread(own: np.ndarray | None) -> np.ndarray:
        column: np.ndarray = np.full(len(drawn), np.nan, np.float32)
        if own is not None:
            column[drawn] = own
        return column

    return {
        "step": step,
        "prompt_id": sample.prompt_id,
        "saved_step": sample.saved_step,
        "group": sample.group,
        "sample": sample.sample,
        "ids": whole.tokens,
        "text": text,
        "drawn": drawn,
        "engine_log_prob": spread(whole.log_probs),
        "trainer_log_prob": spread(values.trainer_log_probs),
        "entropy": spread(values.entropy),
        "advantage": spread(values.advantages),
        "version": versions,
    }


def tokens_table(rows: Sequence[dict[str, Any]]) -> Any:
    """The table of rows from `tokens_row`."""
    import numpy as np
    import pyarrow as pa

    def column(name: str, kind: Any) -> Any:
        values = [row[name] for row in rows]
        if not pa.types.is_list(kind):
            return pa.array(values, type=kind)
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
        flat = [text for row in values for text in row] if name == "text" else np.concatenate(values)
        return pa.ListArray.from_arrays(offsets, pa.array(flat, type=kind.value_type, from_pandas=name != "text"))

    schema = tokens_schema()
    return pa.table([column(name, kind) for name, kind in zip(schema.names, schema.types, strict=True)], schema=schema)


def tokens_path(folder: Path, step: int) -> str:
    """`…/step-000001/tokens-{rank}.parquet`, for the rank to fill in."""
    return str(folder / f"step-{step:06d}" / TOKENS)
