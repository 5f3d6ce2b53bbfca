"""Prompt lengths of a dataset, and response lengths of an earlier run, as the planner needs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlcli.data.prompts.prompt_table import images_per_prompt
from rlcli.data.prompts.tokenized_prompts import TokenizedPrompts
from rlcli.data.sample_files import sample_files
from rlcli.errors import DataError
from rlcli.support.reading import check_regular
from rlcli_planner.asynchrony.lengths import Lengths
from rlcli_planner.plan_input import ImageStats, PromptStats

STEPS = 20
"""Newest steps that are read."""


def lengths_like(run: Path) -> Lengths:
    """Response lengths of the newest steps of `run`, a folder or a name below runs/. Raises `DataError` if no samples
    can be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rlcli.evaluation.rescoring import steps_of
    from rlcli.launch.resume import find_record

    run = find_record(run)
    groups: dict[tuple[int, int], list[int]] = {}
    for step in steps_of(run / "samples")[-STEPS:]:
        for file in sample_files(run / "samples", step):
            try:
                check_regular(file)
                table = pq.read_table(file, columns=["group", "response_tokens"])
            except (OSError, pa.ArrowException):
                continue  # one that is being written, or damaged
            for group, tokens in zip(*(table[name].to_pylist() for name in table.column_names), strict=True):
                if group is not None and tokens is not None:
                    groups.setdefault((step, group), []).append(tokens)
    group_size = max((len(group) for group in groups.values()), default=0)
    complete = [group for group in groups.values() if len(group) == group_size]
    if not complete:
        raise DataError(f"{run} has no samples whose lengths could be read", "give a run with tracking.save_samples")
    return Lengths.of(np.array(complete))


def prompt_stats(prompts: TokenizedPrompts) -> PromptStats:
    """Lengths of tokenized prompts."""
    count, images = len(prompts), int(images_per_prompt(prompts.prompts).sum())
    image_stats = ImageStats(prompts.image_tokens / count, images / count if prompts.image_tokens else 0.0)
    response_tokens = len(prompts.response_flat) / count if len(prompts.response_flat) else None
    return PromptStats(
        prompt_tokens=len(prompts.flat) / count,
        image_stats=image_stats,
        longest_prompt=int(np.diff(prompts.offsets).max()),
        given_response_tokens=response_tokens,
    )
