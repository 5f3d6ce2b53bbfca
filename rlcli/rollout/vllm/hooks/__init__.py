"""Patches of vLLM, and listeners to it, in a worker."""
