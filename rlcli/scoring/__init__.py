"""Verifiers: finding, combining and calling them."""
