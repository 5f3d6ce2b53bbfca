"""Files of a step next to its samples: the advantages of all samples, and the tokens of some.

A sample's row in `rank-R.parquet` and its rows here have the same (saved_step, group, sample): `saved_step` is the
step of the folder that holds the row. It is earlier than `step`, the step that trained on the sample, if the
sample was carried over (`dynamic_sampling`, `rollout.oversample`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from jaxtyping import Bool, Float32, Float64, Int32, Int64

    from rlcli.data.trajectories import Trajectory

ADVANTAGES = "advantages.parquet"
TOKENS = "tokens-{rank}.parquet"


@dataclass(frozen=True)
class RecordedSample:
    """A sample whose tokens are recorded; with the key of its saved row."""

    index: int
    """Index among the step's selected samples."""
    prompt_id: str
    """Id of its prompt."""
    saved_step: int
    """Step in whose files its row is saved."""
    group: int
    """Number of its group in these files."""
    sample: int
    """Index within the group."""
    forwarded: bool
    """True if the step computes anything for its tokens; not if its advantage is 0 and the loss has no other term."""


@dataclass(frozen=True)
class Recording:
    """Settings of the recording of tokens in one step."""

    step: int
    """Number of the step."""
    path: str
    """Path of the token files, with `{rank}` in it."""
    tokenizer: str
    """Folder or hub id of the tokenizer that decodes the tokens."""
    samples: Sequence[RecordedSample]
    """Samples whose tokens are recorded."""


@dataclass(frozen=True)
class TokenValues:
    """Values of a sample's R response tokens, in their order; None where not computed."""

    trainer_log_probs: Float32[np.ndarray, " R"] | None = None
    """Log-probs by the trainer before the update, in nats."""
    entropy: Float32[np.ndarray, " R"] | None = None
    """Entropy of the trainer's distribution, in nats."""
    advantages: Float32[np.ndarray, " R"] | None = None
    """Advantages that the loss used."""


@dataclass(frozen=True)
class TokensRow:
    """A row of `tokens-RANK.parquet`, whose columns are these fields: one sample's T tokens. NaN where a token has no
    value."""

    step: int
    """Step that trained on the sample."""
    prompt_id: str
    """Id of its prompt."""
    saved_step: int
    """Step in whose files its row is saved."""
    group: int
    """Number of its group in these files."""
    sample: int
    """Index within the group."""
    ids: Int32[np.ndarray, " T"]
    """Token ids."""
    text: Sequence[str]
    """Text of each token."""
    drawn: Bool[np.ndarray, " T"]
    """True if the policy generated the token."""
    engine_log_prob: Float32[np.ndarray, " T"]
    """Log-prob by the engine, in nats."""
    trainer_log_prob: Float32[np.ndarray, " T"]
    """Log-prob by the trainer before the update, in nats."""
    entropy: Float32[np.ndarray, " T"]
    """Entropy of the trainer's distribution, in nats."""
    advantage: Float32[np.ndarray, " T"]
    """Advantage that the loss used."""
    version: Float64[np.ndarray, " T"]
    """Policy version that generated the token."""


@cache
def advantages_schema() -> pa.Schema:
    """The columns of `advantages.parquet`."""
    import pyarrow as pa

    integer, number = pa.int64(), pa.float64()
    return pa.schema(
        [
            ("step", integer),
            ("prompt_id", pa.string()),
            ("saved_step", integer),
            ("group", integer),
            ("sample", integer),
            ("advantage", number),
            ("reward", number),
            ("left_out", pa.string()),
        ]
    )


@cache
def tokens_schema() -> pa.Schema:
    """The columns of `tokens-RANK.parquet`."""
    import pyarrow as pa

    integer, number = pa.int64(), pa.list_(pa.float32())
    return pa.schema(
        [
            ("step", integer),
            ("prompt_id", pa.string()),
            ("saved_step", integer),
            ("group", integer),
            ("sample", integer),
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
    saved_steps: Int64[np.ndarray, " S"],
    groups: Int64[np.ndarray, " S"],
    samples: Int64[np.ndarray, " S"],
    advantages: Float64[np.ndarray, " S"],
    rewards: Float64[np.ndarray, " S"],
    left_out: Sequence[str | None],
) -> pa.Table:
    """The table with a row for each sample of the step's batch. advantages, rewards: NaN where there is none."""
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
    step: int, sample: RecordedSample, trajectory: Trajectory, text: Sequence[str], values: TokenValues
) -> TokensRow:
    """The row of one sample. text: the text of each token."""
    import numpy as np

    mask = trajectory.response_mask
    versions = np.full(len(mask), np.nan)
    for span in trajectory.spans:
        if span.speaker == "policy" and span.version is not None:
            versions[span.start : span.end] = span.version

    def spread(response_values: Float32[np.ndarray, " R"] | None) -> Float32[np.ndarray, " T"]:
        column: np.ndarray = np.full(len(mask), np.nan, np.float32)
        if response_values is not None:
            column[mask] = response_values
        return column

    return TokensRow(
        step=step,
        prompt_id=sample.prompt_id,
        saved_step=sample.saved_step,
        group=sample.group,
        sample=sample.sample,
        ids=trajectory.tokens,
        text=text,
        drawn=mask,
        engine_log_prob=spread(trajectory.log_probs),
        trainer_log_prob=spread(values.trainer_log_probs),
        entropy=spread(values.entropy),
        advantage=spread(values.advantages),
        version=versions,
    )


def tokens_table(rows: Sequence[TokensRow]) -> pa.Table:
    """The table of rows from `tokens_row`."""
    import numpy as np
    import pyarrow as pa

    def column(name: str, kind: pa.DataType) -> pa.Array:
        values = [getattr(row, name) for row in rows]
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
