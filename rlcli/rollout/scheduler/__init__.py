"""Where a step's samples come from: prompts, groups, dispatch to engines and prefetching."""
