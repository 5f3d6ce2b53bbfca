"""The roles of a worker, one per file: policy, critic, rollout, batch, weight sync."""
