"""vLLM as an engine, in the worker's own process."""
