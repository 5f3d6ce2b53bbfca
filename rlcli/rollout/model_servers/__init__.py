"""Servers of the models that verifiers and teachers ask."""
