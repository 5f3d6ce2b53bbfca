"""Turns a configuration into a running trainer: preflight checks, the derived plan, resuming, worker start."""
