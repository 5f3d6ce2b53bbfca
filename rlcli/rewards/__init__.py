"""Verifiers: finding, combining and calling them, in processes that can be killed."""
