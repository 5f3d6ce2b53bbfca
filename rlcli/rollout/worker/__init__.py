"""A worker's part in generation: requests to its engine, conversations, verdicts and pending samples."""
