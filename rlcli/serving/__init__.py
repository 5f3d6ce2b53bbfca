"""Servers of models that verifiers ask: vLLM's own server, under Ray or on this machine."""
