"""Servers of models: those that verifiers ask, and those that generate for a run."""
