"""Scheduling of rollouts: prompts, groups, dispatch to engines and prefetching."""
